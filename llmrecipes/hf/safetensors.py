"""Weights in safetensors, as Hugging Face has them: read one tensor at a time, written one tensor at a time.

A shard is written tensor by tensor: its header, which has all sizes, is known before the first value is read. So
memory holds one tensor, not a shard, whatever the size of the model.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, Protocol, Self, runtime_checkable

import torch

from llmrecipes.errors import UserError
from llmrecipes.hf.reading import INDEX, open_folder
from llmrecipes.io import sync
from llmrecipes.tracking.progress import Counted


class TensorSource(Protocol):
    """Whole global tensors by name. One is in memory at a time: no process holds the model."""

    def names(self) -> Sequence[str]:
        """Names, in the order of the model."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor's elements, without reading it."""

    def read(self, name: str) -> torch.Tensor:
        """A complete tensor on the CPU, in memory that nothing else uses.

        Raises:
            UserError: it is corrupt or missing.
        """


@runtime_checkable
class PiecewiseSource(TensorSource, Protocol):
    """A source of tensors that need not be in memory as a whole."""

    def pieces(self, name: str, elements: int) -> Iterator[torch.Tensor]:
        """The rows of a tensor in order, in pieces of about so many elements; a row is not divided.

        Raises:
            UserError: as `read`.
        """


DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""Element types by their names in a safetensors header."""


class SafetensorsFolder:
    """The weights in a folder; see `PiecewiseSource`. Headers are read when it is opened, values when asked for.

    Args:
        path: the folder, which is untrusted: see `open_folder`.

    Raises:
        UserError: as `open_folder`; or a tensor has an element type that torch does not have.
    """

    def __init__(self, path: Path) -> None:
        folder = open_folder(path)
        self.config = folder.config
        self._held = folder.tensors
        for name, held in folder.tensors.items():
            if held.scales is not None:
                raise UserError(
                    f"{name} is quantised",
                    where=str(held.file),
                    rule="only an import and train.pretrained read them",
                    fix="llmrecipes import, then llmrecipes export --to hf",
                )
            if held.dtype not in DTYPES:
                raise UserError(
                    f"{name} has type {held.dtype}", where=str(held.file), rule=f"one of {', '.join(DTYPES)}"
                )

    def names(self) -> Sequence[str]:
        """See `TensorSource`."""
        return list(self._held)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource`."""
        return self._held[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """See `TensorSource`."""
        return DTYPES[self._held[name].dtype]

    def read(self, name: str) -> torch.Tensor:
        """See `TensorSource`."""
        return self._read(name, slice(None))

    def pieces(self, name: str, elements: int) -> Iterator[torch.Tensor]:
        """See `PiecewiseSource`."""
        shape = self.shape(name)
        if not shape:
            yield self.read(name)
            return
        step = max(1, elements // max(1, prod(shape[1:])))
        for start in range(0, shape[0], step):
            yield self._read(name, slice(start, start + step))

    def _read(self, name: str, rows: slice) -> torch.Tensor:
        from safetensors import SafetensorError, safe_open

        path = self._held[name].file
        try:
            # Opened each time: pages of a file that stays mapped count as memory of this process.
            with safe_open(path, framework="pt", device="cpu") as file:
                tensor: torch.Tensor = file.get_slice(name)[rows] if self.shape(name) else file.get_tensor(name)
                return tensor.clone()
        except (OSError, SafetensorError) as problem:
            raise UserError(f"{name} cannot be read: {problem}", where=str(path), fix="copy it again") from problem


SHARD_BYTES = 5 * 10**9
"""Largest shard, as `save_pretrained` of transformers has had it for years."""
PATTERN = "model{suffix}.safetensors"
"""Names of the files: a suffix only if there are several."""
ELEMENT_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KEPT = "e_score_correction_bias"
"""End of the names of tensors that stay as they are: a small difference would change which experts are selected."""

_NAMES = {kind: name for name, kind in DTYPES.items()}
_CHUNK = 1 << 24
"""Bytes that are converted and written at once."""
_PENDING = 2
"""Pieces of that size that wait to be written."""


@dataclass(frozen=True)
class WrittenWeights:
    """What was written.

    Attributes:
        shards: files of weights.
        tensors: number of tensors.
        parameters: elements of all tensors.
        bytes: size in bytes of all tensors.
        largest_shard: bytes of the largest file of weights.
    """

    shards: tuple[str, ...]
    tensors: int
    parameters: int
    bytes: int
    largest_shard: int


def write(
    source: TensorSource,
    config: Mapping[str, Any],
    folder: Path,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Counted | None = None,
) -> WrittenWeights:
    """Write weights, split and named as on the Hub, and config.json into a folder that no other process reads yet.

    Args:
        source: weights by the names of transformers.
        config: config.json, without the element type.
        folder: an empty folder (see `models.create.published`).
        dtype: fp32, bf16 or fp16; None: element types stay.
        shard_bytes: largest file; a larger tensor has a separate file.
        progress: shows how many tensors are written.

    Raises:
        UserError: a value is too large for fp16.
        OSError: a disk error.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    kinds = {name: _kind(name, source.dtype(name), dtype) for name in source.names()}
    sizes = {name: prod(source.shape(name)) * kind.itemsize for name, kind in kinds.items()}
    # It needs sizes only. A tensor larger than a shard goes before the shard that is being filled.
    split = split_state_dict_into_shards_factory(
        sizes, get_storage_size=int, filename_pattern=PATTERN, max_shard_size=shard_bytes
    )
    if progress is not None:
        progress.begin("tensors", len(kinds))
    for file, names in split.filename_to_tensors.items():
        _write_shard(folder / file, source, {name: kinds[name] for name in names}, progress)
    if progress is not None:
        progress.close()
    if split.is_sharded:
        write_json(folder / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})
    # That of most bytes: a bias of an expert may be of another.
    kind = max(
        set(kinds.values()), key=lambda candidate: sum(size for name, size in sizes.items() if kinds[name] == candidate)
    )
    write_json(folder / "config.json", {**config, "dtype": str(kind).removeprefix("torch.")})
    return WrittenWeights(
        tuple(split.filename_to_tensors),
        len(kinds),
        sum(prod(source.shape(name)) for name in kinds),
        sum(sizes.values()),
        max((folder / file).stat().st_size for file in split.filename_to_tensors),
    )


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file as transformers does: indented."""
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def _kind(name: str, stored: torch.dtype, dtype: str | None) -> torch.dtype:
    if dtype is None or not stored.is_floating_point or name.endswith(KEPT):
        return stored
    return ELEMENT_TYPES[dtype]


def _write_shard(path: Path, source: TensorSource, kinds: Mapping[str, torch.dtype], progress: Counted | None) -> None:
    """One file: 8 bytes with the size of the header, the header, the values in its order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, kind in kinds.items():
        shape = source.shape(name)
        start = end
        end = end + prod(shape) * kind.itemsize
        header[name] = {"dtype": _NAMES[kind], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # values begin at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        with _Behind(file) as behind:
            for name, kind in kinds.items():
                _write_tensor(behind, source, name, kind)
                if progress is not None:
                    progress.add(1)
    sync(path)


class _Behind:
    """Writes to a file in a thread, while the next values are read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._thread = ThreadPoolExecutor(1)
        self._pending: deque[Future[None]] = deque()

    def write(self, values: torch.Tensor) -> None:
        """Write a tensor that nothing changes any more; waits if others are pending.

        Raises:
            OSError: one could not be written.
        """
        if len(self._pending) == _PENDING:
            self._pending.popleft().result()
        self._pending.append(self._thread.submit(self._write, values))

    def _write(self, values: torch.Tensor) -> None:
        self._file.write(values.view(torch.uint8).numpy().data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._thread:
            while kind is None and self._pending:
                self._pending.popleft().result()


def _write_tensor(file: _Behind, source: TensorSource, name: str, kind: torch.dtype) -> None:
    shape = source.shape(name)
    elements = _CHUNK // max(kind.itemsize, source.dtype(name).itemsize)
    written = 0
    for part in source.pieces(name, elements) if isinstance(source, PiecewiseSource) else [source.read(name)]:
        if tuple(part.shape[1:]) != tuple(shape[1:]):
            raise RuntimeError(f"{name} has the shape {tuple(part.shape)}, and its header says {tuple(shape)}")
        # A row may be longer than a piece.
        for piece in part.contiguous().view(-1).split(elements):
            file.write(_converted(name, piece, kind))
        written += part.numel()
    if written != prod(shape):
        raise RuntimeError(f"{name} has {written} elements, and its header says {tuple(shape)}")


def _converted(name: str, piece: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """In pieces: a second copy of the largest tensor would be most of the memory."""
    converted = piece.to(kind)
    if kind.itemsize < piece.element_size() and not torch.equal(converted.isfinite(), piece.isfinite()):
        element = next(name for name, candidate in ELEMENT_TYPES.items() if candidate == kind)
        raise UserError(
            f"{name} has values too large for {element}", where="--dtype",
            rule=f"{element} holds numbers up to {torch.finfo(kind).max:g}",
            fix="--dtype bf16" if kind == torch.float16 else "--dtype fp32",
        )  # fmt: skip
    return converted
