"""The files that a folder or a pattern on this machine stands for, and what of it is left out."""

from __future__ import annotations

import glob
import os
from collections import defaultdict
from pathlib import Path

from llmrecipes.errors import UserError

LeftOut = dict[str, list[str]]
"""Names of what is not read, by the reason."""
_ENDINGS = "files with other endings"
_HIDDEN = "hidden"
_BROKEN = "broken links"
_SPECIAL = "neither files nor folders"
_FOLDERS = "folders"
_AGAIN = "links to what is read already"
_ABOVE = "links to a folder above the source"


def in_folder(root: Path, suffixes: tuple[str, ...]) -> tuple[list[Path], LeftOut]:
    """The files below a folder, sorted, and what is left out.

    Links to folders are followed, behind all folders that are not links: a folder is read once, so cycles end.

    Args:
        root: the folder.
        suffixes: of the names of files to read; an empty one takes all.

    Raises:
        UserError: a folder cannot be listed.
    """
    files: list[Path] = []
    left: LeftOut = defaultdict(list)
    real_root = Path(os.path.realpath(root))
    above = frozenset(real_root.parents)
    read = {real_root}
    folders = [(root, real_root)]
    links = list[Path]()
    while folders or links:
        if folders:
            folder, real = folders.pop()
        else:
            folder = links.pop()
            real = Path(os.path.realpath(folder))
            if real in above or real in read:
                left[_ABOVE if real in above else _AGAIN].append(folder.name)
                continue
            read.add(real)
        found: list[Path] = []
        for entry in _entries(folder):
            path = Path(entry.path)
            if entry.name.startswith("."):
                left[_HIDDEN].append(entry.name)
            elif entry.is_dir(follow_symlinks=False):
                if (inner := real / entry.name) in read:
                    left[_AGAIN].append(entry.name)
                else:
                    read.add(inner)
                    folders.append((path, inner))
            elif entry.is_dir():
                found.append(path)
            elif not entry.is_file():
                left[_BROKEN if entry.is_symlink() else _SPECIAL].append(entry.name)
            elif entry.name.endswith(suffixes):
                files.append(path)
            else:
                left[_ENDINGS].append(entry.name)
        links = sorted([*links, *found], reverse=True)
    return sorted(files), left


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(
            f"cannot list the folder: {error.strerror or error}",
            where=str(folder),
            rule="all folders of a source must be readable",
            fix="change its permissions, or name the files by a pattern",
        ) from error


def of_pattern(pattern: Path) -> tuple[list[Path], LeftOut]:
    """The files that a pattern matches, sorted, each once whatever links lead to it, and what is left out."""
    left: LeftOut = defaultdict(list)
    files: dict[str, Path] = {}
    names = glob.glob(str(pattern), recursive=True)  # noqa: PTH207 (Path.glob takes no absolute pattern)
    for path in sorted(map(Path, names), key=lambda path: (len(path.parts), path)):
        if path.is_file():
            kept = files.setdefault(os.path.realpath(path), path)
            if kept != path:
                left[_AGAIN].append(path.name)
        elif not path.is_dir():
            left[_SPECIAL if path.exists() else _BROKEN].append(path.name)
        elif pattern.name != "**" and "**" not in pattern.parts:
            left[_FOLDERS].append(path.name)
    return sorted(files.values()), left


def described(left: LeftOut) -> str:
    """What is left out, by number and an example; empty if nothing is."""
    return ", ".join(f"{reason}: {len(names):,} ({names[0]})" for reason, names in sorted(left.items()))


def other_endings(names: list[str]) -> LeftOut:
    """Files of a store's folder that have other endings."""
    return {_ENDINGS: names} if names else {}
