"""Loading a checkpoint never runs code: files are JSON, or read by torch.load with `weights_only`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import IO, Any, cast

import torch

from llmrecipes.errors import UserError
from llmrecipes.untrusted import open_file

_ADVICE = "Weights only load failed"
"""Start of torch's advice on how to load the file anyway."""


def open_inside(directory: Path, name: str) -> io.BufferedReader:
    """Open a file of a checkpoint.

    Raises:
        UserError: it is not a regular file, or a link out of the checkpoint.
        OSError: it cannot be opened.
    """
    return open_file(directory / name, root=directory)


def load_plain(stream: io.IOBase, path: Path) -> Any:
    """Read what torch.save wrote, if it is tensors, numbers, strings, lists and dicts.

    Args:
        stream: the bytes.
        path: their file, for the message.

    Raises:
        UserError: it contains anything else, or is damaged.
    """
    try:
        return torch.load(cast(IO[bytes], stream), map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as problem:  # torch and its parsers raise many kinds of exceptions for malformed bytes
        raise unsafe(path, str(problem)) from problem


def unsafe(path: Path, why: str) -> UserError:
    """The error for an unsafe file."""
    lines = [line for line in why.splitlines() if line.strip() and not line.startswith(_ADVICE)]
    detail = lines[0].rpartition("WeightsUnpickler error: ")[2] if lines else "it is damaged"
    return UserError(
        f"this checkpoint file is not plain data: {detail}",
        where=str(path),
        rule="checkpoints hold tensors, numbers, strings, lists and dicts; anything else could run code on loading",
        fix="use a checkpoint that this program wrote",
    )
