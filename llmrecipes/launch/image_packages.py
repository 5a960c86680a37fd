"""Whether the environment of a job has the optional packages of its recipe, before it waits for nodes to find out."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

from llmrecipes.errors import UserError
from llmrecipes.launch import programs
from llmrecipes.launch.base import LauncherOptions, Submission
from llmrecipes.packages import find_spec
from llmrecipes.recipe.derived import extras
from llmrecipes.recipe.derived.extras import Need

Packages = frozenset[str]

IN_IMAGES = frozenset({"gpu", "search", "server", "zero"})
"""Extras that images of `make image` have."""
DISTRIBUTIONS = {"fasttext": "fasttext-predict"}
"""Of imported packages with another name."""
HOW = "docs/cluster/containers.md#extras says how to add extras to an image"
BILLS = Path("build")
"""Where `make image` writes bills of materials, in the checkout."""
SECONDS = 60.0
_BUILT = re.compile(r"[\w.-]+:[\w.-]+-[0-9a-f]{12}")
"""Name and tag that `make image` gives: the hash is that of the contents."""
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
        UserError: this machine can look into the image, and it lacks packages.
    """
    needs = list(_needs(submission, given))
    image = given.get("image")
    if image is None:
        same = python and given.get("python") is None
        lacking = [need for need in needs if same and find_spec(need.package) is None]
        return (f"this Python, which also starts the ranks, lacks {_listed(lacking)}",) if lacking else ()
    absent = missing(image, frozenset(need.package for need in needs)) if needs else frozenset()
    if absent is None:
        unusual = [need for need in needs if need.extra not in IN_IMAGES]
        return (f"the image must have {_listed(unusual)}; {HOW}",) if unusual else ()
    if lacking := [need for need in needs if need.package in absent]:
        raise UserError(
            f"needs {_listed(lacking)}, and the image does not have it",
            where=lacking[0].key,
            rule=f"images of make image have the extras {', '.join(sorted(IN_IMAGES))}, others may have more: {image}",
            fix=f"{HOW}; or remove the key",
        )
    return ()


def _needs(submission: Submission, given: LauncherOptions) -> Iterator[Need]:
    prepares = not submission.prepared and not given.get("prepared")
    yield from extras.of_recipe(submission.planned.recipe, prepares=prepares)
    if prepares and (given.get("prepare-nodes") or 1) > 1:
        yield Need("--prepare-nodes", "ray", "ray")


def _listed(needs: list[Need]) -> str:
    return ", ".join(map(str, needs))


@lru_cache
def missing(image: str, packages: Packages) -> Packages | None:
    """Those of some packages that an image lacks; None: this machine cannot look into it."""
    ways: tuple[Callable[[str, Packages], Packages | None], ...] = (_of_bill, _of_squashfs, _of_container)
    return next((found for way in ways if (found := way(image, packages)) is not None), None)


def _of_bill(image: str, packages: Packages) -> Packages | None:
    """By the bill of materials that `make image` wrote in this folder."""
    name = _name(image).partition("@")[0].rpartition("/")[2]
    try:
        text = (BILLS / f"{name.replace(':', '-')}.cdx.json").read_text("utf-8") if _BUILT.fullmatch(name) else ""
        has = {component["name"] for component in json.loads(text)["components"]}
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return frozenset(name for name in packages if DISTRIBUTIONS.get(name, name.replace("_", "-")) not in has)


def _of_squashfs(image: str, packages: Packages) -> Packages | None:
    """By the files of an image of enroot."""
    if not image.endswith(".sqsh"):
        return None
    listed = _output("unsquashfs", "-l", image)
    if listed is None or "/site-packages/" not in listed:
        return None
    return packages - {match[1] for line in listed.splitlines() if (match := _INSTALLED.search(line))}


def _of_container(image: str, packages: Packages) -> Packages | None:
    """By the image's Python, in an Apptainer file or an image that docker or podman has here."""
    if image.endswith(".sif"):
        commands: list[tuple[str, ...]] = [
            (program, "exec", "--cleanenv", image, "python") for program in ("apptainer", "singularity")
        ]
    else:
        options = ("run", "--rm", "--pull=never", "--network=none", "--entrypoint=python", "--")
        commands = [
            (program, *options, _name(image))
            for program in ("docker", "podman")
            if _output(program, "image", "inspect", "--", _name(image)) is not None
        ]
    for command in commands:
        lines = (_output(*command, "-c", _CODE, *sorted(packages)) or "").splitlines()
        if lines and lines[-1].startswith("missing:"):
            return frozenset(lines[-1].split()[1:])
    return None


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
