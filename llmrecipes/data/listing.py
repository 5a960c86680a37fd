"""The listing of a folder of sample indices, and checks of the folder against it.

megatron-core would read its arrays with `allow_pickle`, which can run code. Here every file of the folder must be
listed, and an array is opened only if its header declares plain integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError

from llmrecipes import untrusted
from llmrecipes.data.manifest import File
from llmrecipes.errors import UserError

NAME = "index.json"
_RULE = "a folder of sample indices is what `prepare` wrote"

_HASHED = TypeAdapter(dict[str, File])
_SIZES = TypeAdapter(dict[str, int])  # the format before hashes were added


def text(files: dict[str, File]) -> str:
    """A listing in its file format."""
    return _HASHED.dump_json(files, indent=1).decode() + "\n"


def read(folder: Path) -> tuple[dict[str, int], dict[str, File] | None]:
    """Sizes of the listed files, and their hashes; no hashes in a folder of an earlier version.

    Raises:
        OSError: there is no listing.
        UserError: it is damaged.
    """
    content = untrusted.read(folder / NAME, root=folder)
    try:
        files = _HASHED.validate_json(content)
        return {name: file.bytes for name, file in files.items()}, files
    except ValidationError as error:
        try:
            return _SIZES.validate_json(content), None
        except ValidationError:
            raise UserError(
                "is not a file listing", where=str(folder / NAME), rule=_RULE, fix=_again(folder)
            ) from error


def every(prepared: Path) -> Iterator[tuple[Path, dict[str, File]]]:
    """All folders of sample indices in a prepared folder that have hashes, checked by `require_listed`."""
    for mark in sorted(prepared.glob(f"index/*/{NAME}")):
        sizes, files = read(mark.parent)
        require_listed(mark.parent, sizes)
        if files is not None:
            yield mark.parent, files


def require_listed(folder: Path, sizes: dict[str, int]) -> None:
    """Every listed file has its size, arrays have a header of plain integers, and there is no other file.

    Raises:
        UserError: the first that is missing, truncated, not such an array or not listed.
    """
    # NFS renames a deleted file that is still open elsewhere to such a name.
    there = {entry.name for entry in folder.iterdir() if not entry.name.startswith(".nfs")} - {NAME}
    if foreign := sorted(there - set(sizes)):
        raise UserError(f"is not listed in {NAME}", where=str(folder / foreign[0]), rule=_RULE, fix=_again(folder))
    for name, size in sizes.items():
        file = folder / name
        found = file.stat().st_size if name in there and file.is_file() else None
        if found != size:
            what = f"is missing, expected {size} bytes" if found is None else f"has {found} bytes, expected {size}"
            raise UserError(what, where=str(file), rule=_RULE, fix=_again(folder))
        if file.suffix != ".txt":
            array(file)


def array(file: Path) -> np.memmap:
    """A memory-mapped array of an index; only its header is read.

    Raises:
        UserError: not a complete `.npy` file of plain integers.
    """
    try:
        # It supports neither archives nor pickles.
        opened = np.lib.format.open_memmap(untrusted.real(file), mode="r")
        if opened.dtype.kind not in "iu" or opened.offset + opened.nbytes != file.stat().st_size:
            raise ValueError(f"{opened.nbytes} bytes of {opened.dtype} in {file.stat().st_size}")
    except Exception as error:  # of any kind: the header is the source of a Python literal
        reason = next(iter(str(error).splitlines()), type(error).__name__)[:200]
        fix = _again(file.parent)
        raise UserError(
            f"no index: {reason}", where=str(file), rule="an index is a .npy file of integers", fix=fix
        ) from error
    return opened


def _again(folder: Path) -> str:
    return f"delete {folder} and prepare again"
