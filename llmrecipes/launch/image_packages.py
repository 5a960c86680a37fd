"""Whether the environment of a job has the optional packages of its recipe, before it waits for nodes to find out."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterator
from functools import lru_cache

from llmrecipes import __version__
from llmrecipes.errors import UserError
from llmrecipes.launch import programs
from llmrecipes.launch.base import LauncherOptions, Submission
from llmrecipes.packages import find_spec
from llmrecipes.recipe.derived import extras
from llmrecipes.recipe.derived.extras import Need

Needs = frozenset[Need]

IN_IMAGES = frozenset({"corpora", "energy", "eval", "gpu", "prometheus", "search", "server", "wandb", "zero"})
"""Extras that images of `make image` have by default, which is what recipes can need; tags call them `all`."""
OTHERS = frozenset({"quantize", "ray", "runtimes", "serve"})
"""Extras that they have where `--extras` of `make image` names them."""
HOW = "docs/cluster/containers.md#extras says how to add packages"
LABEL = "llmrecipes.extras"
SECONDS = 60.0
_TAG = re.compile(r"[:+_]\d+\.[\w.]+-(cpu|cuda)(?:-efa)?-([a-z]+(?:\.[a-z]+)*?)(?:-[0-9a-f]{12})?(?:\.sqsh|\.sif)?$")
"""The extras in it, also in the names of the files that enroot and Apptainer make."""
_INSTALLED = re.compile(r"/(?:site|dist)-packages/(\w+)(?:/__init__)?\.\w+(?:\.so)?$")
_CODE = (
    "import sys, importlib.util as u; "
    "print('missing:', *(n for n in sys.argv[1:] if not ((s := u.find_spec(n)) and s.origin)))"
)


def warnings(submission: Submission, given: LauncherOptions, *, python: bool) -> tuple[str, ...]:
    """What the image may lack, or this Python where it starts the ranks.

    Args:
        python: the launcher has an option for the Python that starts the ranks.

    Raises:
        UserError: the image lacks packages, by its tag or because this machine can look into it.
    """
    needs = frozenset(_needs(submission, given))
    image = given.get("image")
    if image is None:
        same = python and given.get("python") is None
        lacking = [need for need in needs if same and find_spec(need.package) is None]
        return (f"this Python, which also starts the ranks, lacks {_listed(lacking)}",) if lacking else ()
    has = extras_in_tag(image)
    by_tag = frozenset(need for need in needs if has is not None and need.extra is not None)
    if has is not None and (absent := [need for need in by_tag if need.extra not in has]):
        raise _refusal(absent, image, f"has the extras {', '.join(sorted(has)) or 'none'} by its tag")
    unsaid = needs - by_tag
    looked = missing(image, unsaid) if unsaid else unsaid
    if looked is None:
        return (f"the image must have {_listed(unsaid)}; {HOW}",)
    if looked:
        raise _refusal(looked, image, "was looked into on this machine")
    return ()


def _refusal(needs: Collection[Need], image: str, why: str) -> UserError:
    others = sorted({need.extra for need in needs if need.extra is not None} - IN_IMAGES)
    kind, fabric = "cpu" if "-cpu-" in image else "cuda", "-efa" if "-efa-" in image else ""
    built = f"{__version__}-{kind}{fabric}-{'.'.join(['all', *others])}"
    options = f"--extras {','.join(['all', *others])}{' --fabric efa' if fabric else ''}"
    return UserError(
        f"needs {_listed(needs)}, and the image does not have it",
        where=min(need.key for need in needs),
        rule=f"{image} {why}",
        fix=f"a tag such as {built}: make image IMAGE={kind} ARGS='{options}'"
        if all(need.extra for need in needs)
        else f"{HOW}; or remove the key",
    )


def _needs(submission: Submission, given: LauncherOptions) -> Iterator[Need]:
    prepares = not submission.prepared and not given.get("prepared")
    yield from extras.of_recipe(submission.planned.recipe, prepares=prepares)
    if prepares and (given.get("prepare-nodes") or 1) > 1:
        yield Need("--prepare-nodes", "ray", "ray")


def _listed(needs: Collection[Need]) -> str:
    return ", ".join(sorted(map(str, needs)))


def extras_in_tag(image: str) -> frozenset[str] | None:
    """Extras that a tag of `make image` names; None: it is another image, or a tag that does not."""
    match = _TAG.search(_name(image).partition("@")[0])
    words = frozenset(match[2].split(".")) if match else frozenset()
    if not match or words - IN_IMAGES - OTHERS - {"all", "none"}:
        return None
    every = IN_IMAGES - {"gpu"} if match[1] == "cpu" else IN_IMAGES
    return words - {"all", "none"} | (every if "all" in words else frozenset())


@lru_cache
def missing(image: str, needs: Needs) -> Needs | None:
    """Those that an image lacks; None: this machine cannot look into it."""
    return _of_squashfs(image, needs) if image.endswith(".sqsh") else _of_container(image, needs)


def _of_squashfs(image: str, needs: Needs) -> Needs | None:
    """By the files of an image of enroot."""
    listed = _output("unsquashfs", "-l", image)
    if listed is None or "/site-packages/" not in listed:
        return None
    packages = {match[1] for line in listed.splitlines() if (match := _INSTALLED.search(line))}
    return frozenset(need for need in needs if need.package not in packages)


def _of_container(image: str, needs: Needs) -> Needs | None:
    """By its label or its Python, in an Apptainer file or an image that docker or podman has here."""
    if image.endswith(".sif"):
        commands: list[tuple[str, ...]] = [
            (program, "exec", "--cleanenv", image, "python") for program in ("apptainer", "singularity")
        ]
    else:
        options = ("run", "--rm", "--pull=never", "--network=none", "--entrypoint=python", "--")
        commands = []
        for program in ("docker", "podman"):
            labels = _output(program, "image", "inspect", "--format={{json .Config.Labels}}", "--", _name(image))
            # An image that was made from it may have more than the label says.
            if labels is not None and needs <= {need for need in needs if need.extra in _labelled(labels)}:
                return frozenset()
            commands += [(program, *options, _name(image))] if labels is not None else []
    for command in commands:
        lines = (_output(*command, "-c", _CODE, *sorted(need.package for need in needs)) or "").splitlines()
        if lines and lines[-1].startswith("missing:"):
            absent = lines[-1].split()[1:]
            return frozenset(need for need in needs if need.package in absent)
    return None


def _labelled(labels: str) -> list[str]:
    try:
        extras_of_image: list[str] = (json.loads(labels) or {}).get(LABEL, "").split()
    except (ValueError, AttributeError):
        return []
    return extras_of_image


def _name(image: str) -> str:
    """As docker writes it; pyxis has `REGISTRY#NAME`."""
    return image.removeprefix("docker://").replace("#", "/")


def _output(*command: str) -> str | None:
    """What a program prints; None: it is not here, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        code, answer, _ = programs.run(command, seconds=SECONDS)
    except (UserError, OSError):
        return None
    return None if code else answer
