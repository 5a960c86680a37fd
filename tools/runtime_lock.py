"""Print the part of a lock file that some packages need, hashes included: what goes into an image.

    python tools/runtime_lock.py requirements/lock.txt
    python tools/runtime_lock.py requirements/lock.txt --without torch
    python tools/runtime_lock.py requirements/lock.txt --without-cuda
    python tools/runtime_lock.py requirements/torch-cpu.txt --only torch
    python tools/runtime_lock.py requirements/lock.txt --extra 'search zero' --except deepspeed

The lock files hold development tools too. uv writes below each package who needs it (`# via`), which gives the graph.
Needs nothing but Python: it runs while an image is built.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Entry:
    """One package of a lock file: its lines for pip, and the packages that need it."""

    text: str
    needed_by: frozenset[str]


def entries(lock: str) -> dict[str, Entry]:
    """The packages of a lock file by their normal names, in its order."""
    found = {}
    for block in re.split(r"^(?=[a-z0-9])", lock, flags=re.MULTILINE)[1:]:
        lines = block.splitlines()
        pins = [line for line in lines if line and not line.lstrip().startswith("#")]
        comment = " ".join(line.lstrip("# ") for line in lines if line.lstrip().startswith("#"))
        vias = re.findall(r"[A-Za-z0-9][\w.-]*", re.sub(r"\(.*?\)|\bvia\b", "", comment))
        found[normal(re.match(r"[\w.-]+", block)[0])] = Entry(  # type: ignore[index]
            "\n".join(pins) + "\n", frozenset(map(normal, vias))
        )
    return found


def needed(lock: dict[str, Entry], roots: Collection[str], without: Collection[str] = ()) -> list[str]:
    """Names of the roots and of all that they need, in the lock's order; `without` and what only they need left out.

    Raises:
        KeyError: a root that the lock does not have.
    """
    missing = [name for name in roots if name not in lock]
    if missing:
        raise KeyError(", ".join(missing))
    kept: set[str] = set()
    waiting = [name for name in roots if name not in without]
    while waiting:
        name = waiting.pop()
        if name not in kept:
            kept.add(name)
            waiting += [other for other, entry in lock.items() if name in entry.needed_by and other not in without]
    return [name for name in lock if name in kept]


def without_cuda(lock: str) -> str:
    """A lock file without torch and the packages of CUDA that only its build for GPUs needs."""
    cuda = re.compile(r"torch|triton|cuda-.*|nvidia-(?!ml-py$).*")
    return "".join(entry.text for name, entry in entries(lock).items() if not cuda.fullmatch(name))


def declared(pyproject: str, extras: Collection[str]) -> list[str]:
    """Normal names of the project's dependencies with those of the extras."""
    project = tomllib.loads(pyproject)["project"]
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    return [normal(re.match(r"[\w.-]+", line)[0]) for line in lines]  # type: ignore[index]


def normal(name: str) -> str:
    """A package name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the part of a lock file that goes into an image.")
    parser.add_argument("lock", type=Path)
    parser.add_argument("--extra", action="append", default=[], help="extras of pyproject.toml, beside the project")
    parser.add_argument("--only", action="append", default=[], help="this package alone, without what it needs")
    parser.add_argument("--without", action="append", default=[], help="leave out, with what nothing else needs")
    parser.add_argument("--except", action="append", default=[], dest="but", help="leave out, but not what it needs")
    parser.add_argument("--without-cuda", action="store_true", help="leave out torch and its packages of CUDA")
    options = parser.parse_args()
    text = options.lock.read_text("utf-8")
    lock = entries(text)
    # ray has a lock file of its own.
    extras = [name for name in " ".join(options.extra).split() if not options.lock.with_name(f"{name}.txt").exists()]
    try:
        roots = options.only or declared((ROOT / "pyproject.toml").read_text("utf-8"), extras)
    except KeyError as error:
        sys.exit(f"pyproject.toml has no extra {error.args[0]}")
    try:
        names = needed(lock, [normal(name) for name in roots], [normal(name) for name in options.without])
    except KeyError as error:
        sys.exit(f"{options.lock} has no {error.args[0]}: make lock")
    if options.only:
        names = [name for name in names if name in map(normal, options.only)]
    names = [name for name in names if name not in map(normal, options.but)]
    if options.without_cuda:
        kept = entries(without_cuda(text))
        names = [name for name in names if name in kept]
    sys.stdout.write("".join(lock[name].text for name in names))


if __name__ == "__main__":
    main()
