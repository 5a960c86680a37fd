"""Build an image of docker/ with docker, podman or buildah, and write its bill of materials.

    python tools/build_image.py cpu
    python tools/build_image.py cuda --fabric efa --builder podman
    python tools/build_image.py cuda --extras "zero wandb" --repository ghcr.io/me/llmrecipes --push

The tag holds the version, the extras, and a hash of everything the image is made of, so that one tag is never two
images. Run by `make image`; needs nothing but Python.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SBOM = "/opt/llmrecipes/sbom.cdx.json"
HOST_PIP = "/run/host-pip"
# The same as in .dockerignore.
INPUTS = (
    "LICENSE",
    "README.md",
    "pyproject.toml",
    "docker/inventory.py",
    "docker/smoke_import.py",
    "llmrecipes",
    "recipes",
    "requirements",
    "tools/not_locked.txt",
    "tools/runtime_lock.py",
)
BASES = {"cpu": "DEBIAN_IMAGE", "cuda": "NGC_IMAGE"}
ALL, NONE = "all", "none"
"""Words for the extras that the Dockerfile has by default, and for an image without any."""
BUILDERS = ("docker", "podman", "buildah")


class BuildError(Exception):
    """What stopped a build; the message is all the user needs."""


@dataclass(frozen=True)
class Image:
    """What is to be built: `arguments` are build arguments, `tags` full names, the one with the content hash last."""

    dockerfile: str
    arguments: Mapping[str, str]
    tags: tuple[str, ...]

    def command(self, builder: str, more: Sequence[str]) -> list[str]:
        """The builder's command line, to be run in the checkout."""
        command = [builder, "build", "--file", self.dockerfile]
        if Path(builder).name != "docker":
            command += ["--format", "docker"]  # as docker does it; OCI's has no place for some of it
        for name, value in self.arguments.items():
            command += ["--build-arg", f"{name}={value}"]
        for tag in self.tags:
            command += ["--tag", tag]
        return [*command, *more, "."]


def versions(text: str) -> dict[str, str]:
    """The values of versions.env."""
    lines = (line.strip() for line in text.splitlines())
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def chosen_extras(given: str, dockerfile: str) -> tuple[list[str], str]:
    """Extras of an image, and how its tag names them.

    Args:
        given: names by spaces or commas, where `all` is what the Dockerfile has by default.
        dockerfile: its text.

    Raises:
        BuildError: pyproject.toml has no such extra.
    """
    default = re.search(r'^ARG EXTRAS="(.*)"$', dockerfile, re.MULTILINE)[1].split()  # type: ignore[index]
    words = set(re.split(r"[\s,]+", given.strip())) - {"", NONE}
    known = set(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"])
    known.discard("dev")
    if wrong := sorted(words - known - {ALL}):
        raise BuildError(f"no extra {', '.join(wrong)}\n  rule: {ALL}, {NONE}, or of {', '.join(sorted(known))}")
    extras = words - {ALL} | (set(default) if ALL in words else set())
    named = [ALL, *sorted(extras - set(default))] if extras >= set(default) else sorted(extras)
    return sorted(extras), ".".join(named) or NONE


def content_hash(root: Path, dockerfile: str, arguments: Mapping[str, str]) -> str:
    """SHA-256 over the names and bytes of everything that goes into an image, and over its arguments."""
    digest = hashlib.sha256(json.dumps(arguments, sort_keys=True).encode())
    for path in sorted({root / dockerfile, *input_files(root)}):
        digest.update(f"\0{path.relative_to(root).as_posix()}\0{path.stat().st_mode & 0o100:o}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def input_files(root: Path) -> Iterator[Path]:
    """The files of the build context, as .dockerignore leaves them."""
    for name in INPUTS:
        start = root / name
        for path in [start] if start.is_file() else start.rglob("*"):
            parts = path.relative_to(root).parts
            hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
            if path.is_file() and not hidden and path.suffix != ".pyc":
                yield path


def image(
    kind: str, fabric: str, base: str | None, torch_index: str | None, repository: str, extras: str = ALL
) -> Image:
    """What to build.

    Args:
        kind: `cpu` or `cuda`.
        fabric: `rdma` or `efa`; the CPU image has none.
        base: another base image than that of versions.env.
        torch_index: where torch's CPU wheel is; empty for pip's own configuration, `pypi` for torch with CUDA, None for
            PyTorch's.
        repository: name in front of the tag.
        extras: as `chosen_extras` takes them.

    Raises:
        BuildError: an extra that does not exist.
    """
    values = versions((ROOT / "docker" / "versions.env").read_text("utf-8"))
    base = base or values[BASES[kind]]
    dockerfile = f"docker/Dockerfile.{kind}"
    names, words = chosen_extras(extras, (ROOT / dockerfile).read_text("utf-8"))
    arguments = {"BASE_IMAGE": base, "EXTRAS": " ".join(names)}
    if kind == "cuda":
        arguments |= {"FABRIC": fabric, **{name: values[name] for name in ("EFA_VERSION", "EFA_SHA256")}}
    content = content_hash(ROOT, dockerfile, arguments)
    version = re.search(r'__version__ = "(.+)"', (ROOT / "llmrecipes" / "__init__.py").read_text("utf-8"))[1]  # type: ignore[index]
    name, _, digest = base.partition("@")
    arguments |= {"VERSION": version, "REVISION": revision(), "CONTENT": content}
    arguments |= {"BASE_NAME": name, "BASE_DIGEST": digest}
    if kind == "cpu" and torch_index is not None:
        arguments["TORCH_INDEX"] = torch_index
    tag = f"{repository}:{version}-{kind}" + ("-efa" if kind == "cuda" and fabric == "efa" else "")
    tags = (f"{tag}-{words}", f"{tag}-{words}-{content[:12]}")
    return Image(dockerfile, arguments, (tag, *tags) if words == ALL else tags)


def revision() -> str:
    """The checkout's commit, with `-dirty` where files differ from it; empty outside git."""
    git = ["git", "-C", str(ROOT)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit + ("-dirty" if changed.strip() else "")


def find_builder() -> str:
    """The first builder that works here.

    Raises:
        BuildError: none does.
    """
    for name in BUILDERS:
        if shutil.which(name) and not subprocess.run([name, "info"], capture_output=True, check=False).returncode:
            return name
    raise BuildError(
        f"no builder works here ({', '.join(BUILDERS)})\n"
        "  fix: apt-get install podman, or start the docker daemon, or --builder PROGRAM"
    )


def host_pip(listing: str, folder: Path) -> list[str]:
    """Options that let a build use this machine's pip configuration, local folders and certificates.

    They are mounted, so that nothing of them comes into a layer. podman and buildah only: docker mounts no folders.

    Args:
        listing: output of `pip config list`.
        folder: where the configuration for the build is written.
    """
    options: list[str] = []
    mounted: dict[str, str] = {}
    for path in re.findall(r"/[\w./+-]+", re.sub(r"https?://\S+", "", listing)):
        if path not in mounted and Path(path).exists():
            mounted[path] = f"{HOST_PIP}/{len(mounted)}"
            options.append(f"--volume={path}:{mounted[path]}:ro")
    settings: dict[str, list[str]] = {}
    for line in listing.splitlines():
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2]
        if key.startswith((":env:", "global.", "install.")) and name not in ("config-file", "progress-bar"):
            words = [_moved(word, mounted) for word in value.strip("'\"").replace("\\n", " ").split()]
            settings[name] = [*settings.get(name, []), *(word for word in words if word not in settings.get(name, []))]
    lines = (f"{name} = {_lines(values)}" for name, values in settings.items())
    (folder / "pip.conf").write_text("\n".join(["[global]", *lines]) + "\n")
    options.append(f"--volume={folder / 'pip.conf'}:{HOST_PIP}/pip.conf:ro")
    return [*options, "--build-arg", f"PIP_CONFIG_FILE={HOST_PIP}/pip.conf"]


def _moved(word: str, mounted: Mapping[str, str]) -> str:
    scheme, path = ("file://", word[7:]) if word.startswith("file://") else ("", word)
    return scheme + mounted.get(path, path)


def _lines(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else "".join(f"\n  {value}" for value in values)


def run(command: Sequence[str], *, keep: bool = False) -> str:
    """Run a builder; its output goes to the terminal, or is returned.

    Raises:
        BuildError: it failed, and has said why.
    """
    done = subprocess.run(command, cwd=ROOT, text=True, check=False, stdout=subprocess.PIPE if keep else None)
    if done.returncode:
        raise BuildError(f"{' '.join(command[:2])} failed with code {done.returncode}; its words are above")
    return done.stdout if keep else ""


def read_file(builder: str, tag: str, path: str) -> str:
    """A file of an image, without running the image."""
    if Path(builder).name == "buildah":
        container = run([builder, "from", "--pull-never", tag], keep=True).strip()
        try:
            return run([builder, "run", "--isolation=chroot", container, "cat", path], keep=True)
        finally:
            run([builder, "rm", container], keep=True)
    container = run([builder, "create", tag], keep=True).strip()
    try:
        with tempfile.TemporaryDirectory() as folder:
            run([builder, "cp", f"{container}:{path}", f"{folder}/file"], keep=True)
            return (Path(folder) / "file").read_text("utf-8")
    finally:
        run([builder, "rm", container], keep=True)


def push(builder: str, tags: Sequence[str]) -> str:
    """Push all tags of an image to its registry; the name with the digest, as `llmrecipes submit --image` takes it."""
    repository = tags[-1].rpartition(":")[0]
    if Path(builder).name == "docker":
        for tag in tags:
            run([builder, "push", tag])
        listed = json.loads(
            run([builder, "image", "inspect", "--format", "{{json .RepoDigests}}", tags[-1]], keep=True)
        )
        digest = next(name.partition("@")[2] for name in listed if name.startswith(f"{repository}@"))
    else:
        with tempfile.TemporaryDirectory() as folder:
            for tag in tags:
                run([builder, "push", "--digestfile", f"{folder}/digest", tag])
            digest = (Path(folder) / "digest").read_text("utf-8").strip()
    return f"{tags[-1]}@{digest}"


def build(options: argparse.Namespace) -> None:
    """Build, and write the bill of materials beside it."""
    wanted = image(options.kind, options.fabric, options.base, options.torch_index, options.repository, options.extras)
    if options.print_tag:
        print(wanted.tags[-1])
        return
    builder = options.builder or find_builder()
    with tempfile.TemporaryDirectory() as folder:
        more = list(options.builder_arg)
        if options.host_pip:
            listing = subprocess.run(
                [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
            )
            more += host_pip(listing.stdout, Path(folder))
        run(wanted.command(builder, more))
    tag = wanted.tags[-1]
    sbom = options.sbom or ROOT / "build" / f"{tag.rpartition('/')[2].replace(':', '-')}.cdx.json"
    sbom.parent.mkdir(parents=True, exist_ok=True)
    sbom.write_text(read_file(builder, tag, SBOM), "utf-8")
    if options.push:
        print(f"pushed: {push(builder, wanted.tags)}")
    print(f"{tag}\nbill of materials: {sbom}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Build an image of docker/.")
    parser.add_argument("kind", choices=sorted(BASES), nargs="?", default="cpu")
    parser.add_argument("--builder", help="docker, podman, buildah or a path; default: the first that works")
    parser.add_argument("--builder-arg", action="append", default=[], help="more for the builder, once for each word")
    parser.add_argument("--fabric", choices=("rdma", "efa"), default="rdma", help="network of the CUDA image")
    parser.add_argument(
        "--extras", default=ALL, help="extras of pyproject.toml by commas; all: those that recipes can need; none"
    )
    parser.add_argument("--base", help="another base image")
    parser.add_argument(
        "--torch-index", help="where torch's CPU wheel is; '' for pip's own configuration; pypi for torch with CUDA"
    )
    parser.add_argument("--host-pip", action="store_true", help="build with this machine's pip configuration")
    parser.add_argument("--repository", default="llmrecipes", help="name in front of the tag")
    parser.add_argument("--sbom", type=Path, help="where the bill of materials goes; default: build/")
    parser.add_argument(
        "--push", action="store_true", help="push to the registry of --repository, and print the digest"
    )
    parser.add_argument("--print-tag", action="store_true", help="print the tag and build nothing")
    try:
        build(parser.parse_args())
    except (BuildError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
