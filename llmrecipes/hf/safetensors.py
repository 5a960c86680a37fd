"""A folder of safetensors as Hugging Face has it: read one tensor at a time, written one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from llmrecipes.errors import UserError

INDEX_NAME, SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""Element types by their names in a safetensors header."""


class SafetensorsFolder:
    """The weights in a folder; see `TensorSource`. Headers are read when it is opened, values when asked for.

    Args:
        folder: with `model.safetensors`, or shards and their index.

    Raises:
        UserError: there are none, one is missing or damaged, or they are not those of the index.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, str] = {}
        self._heads: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for file, names in _files(folder).items():
            self._open(file, names)

    def names(self) -> Sequence[str]:
        """See `TensorSource`."""
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource`."""
        return self._heads[name][0]

    def dtype(self, name: str) -> torch.dtype:
        """See `TensorSource`."""
        return self._heads[name][1]

    def read(self, name: str) -> torch.Tensor:
        """See `TensorSource`."""
        from safetensors import safe_open

        path = self.folder / self._files[name]
        try:
            # Opened for each tensor: pages of a file that stays mapped count as memory of this process.
            with safe_open(path, framework="pt", device="cpu") as file:
                found: torch.Tensor = file.get_tensor(name)
                return found.clone()
        except Exception as problem:
            raise _damaged(path, problem) from problem

    def _open(self, file: str, names: set[str] | None) -> None:
        from safetensors import safe_open

        path = self.folder / file
        try:
            with safe_open(path, framework="pt", device="cpu") as opened:
                here = list(opened.keys())
                heads = {name: opened.get_slice(name) for name in here}
                found = {name: (tuple(head.get_shape()), head.get_dtype()) for name, head in heads.items()}
        except FileNotFoundError as problem:
            raise UserError(
                "this shard is missing",
                where=str(path),
                rule=f"every file that {INDEX_NAME} names is there",
                fix="copy the folder again",
            ) from problem
        except Exception as problem:
            raise _damaged(path, problem) from problem
        if names is not None and names - set(here):
            lacking = sorted(names - set(here))[0]
            raise UserError(
                f"{lacking} is not in this shard", where=str(path), rule=f"a shard has what {INDEX_NAME} says"
            )
        for name in here if names is None else (each for each in here if each in names):
            shape, dtype = found[name]
            if dtype not in DTYPES:
                raise UserError(f"{name} has type {dtype}", where=str(path), rule=f"one of {', '.join(DTYPES)}")
            self._files[name], self._heads[name] = file, (shape, DTYPES[dtype])


def _files(folder: Path) -> dict[str, set[str] | None]:
    """Names of the shards, and of the tensors in each; None: all of a file."""
    index = folder / INDEX_NAME
    if not index.exists():
        if (folder / SINGLE_NAME).exists():
            return {SINGLE_NAME: None}
        raise UserError(
            f"neither {SINGLE_NAME} nor {INDEX_NAME}", where=str(folder), rule="weights are read from safetensors alone"
        )
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        found: dict[str, set[str]] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ValueError(f"{file!r} is not the name of a file in this folder")
            found.setdefault(file, set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise UserError(
            f"not an index of weights: {problem}", where=str(index), fix="copy the folder again"
        ) from problem
    return {**found}


def _damaged(path: Path, problem: Exception) -> UserError:
    return UserError(f"this file is not readable as safetensors: {problem}", where=str(path), fix="copy it again")
