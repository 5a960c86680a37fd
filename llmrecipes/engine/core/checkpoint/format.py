"""megatron-core sharded state dicts in torch.distributed.checkpoint files: a snapshot in host memory, one file of each
rank with what torch.save writes, one index of all.

torch's own index, `.metadata`, is written too, for torch's and megatron-core's tools; it is not read here.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    apply_factories,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from llmrecipes.checkpoint.manifest import FileRecord
from llmrecipes.checkpoint.saver import os_error
from llmrecipes.checkpoint.state_format import StateDict, Written
from llmrecipes.engine.core.checkpoint.hashed_file import HashedFile
from llmrecipes.engine.core.checkpoint.index import (
    DTYPES,
    INDEX_NAME,
    OPTIMIZER_STATE,
    ObjectRecord,
    Table,
    covered,
    decode,
    encode,
    make_table,
    merge_tables,
    slices_of,
)
from llmrecipes.io import sync, write_synced
from llmrecipes.nested import leaves
from llmrecipes.units import GIB, MIB

BACKEND = "torch_dist"


@dataclass(frozen=True)
class RankFiles:
    """What a rank writes."""

    tensors: list[ShardedTensor]
    objects: dict[str, list[Any]]
    """By name; a rank may have several of one name."""


class ShardedFormat:
    """One saver's format: sharded state dicts, whose other leaves are plain data (numbers, strings, lists, tensors).

    Ranks write their files, and the index of each, without asking each other: torch's and megatron-core's own writers
    plan on one rank what all of them write.

    Args:
        written_by: what the manifest says of the engine besides versions.
        pinned: whether snapshots are copied from a GPU, to pinned memory.
    """

    def __init__(
        self, written_by: Mapping[str, str] | None = None, *, pinned: bool = False, frozen: Sequence[str] = ()
    ) -> None:
        self._frozen = frozen
        self._written_by = dict(written_by or {})
        self._staging = PinnedStaging() if pinned else Staging()
        self._checked = False

    @property
    def held_bytes(self) -> int:
        """Host memory that this rank keeps for saving: the tensors that it writes, and with pinned memory some more."""
        return self._staging.nbytes

    def reserve(self, state: StateDict) -> Callable[[], None] | None:
        """Factories of the state are applied in place."""
        return self._staging.reserve(state)

    def snapshot(self, state: StateDict) -> StateDict:
        """Factories of the state are applied in place."""
        taken = self._staging.take(state)
        if not self._checked:
            # The structure does not change within a run, so one check of it is enough.
            require_plain(taken)
            self._checked = True
        return taken

    def prepare(self, taken: StateDict, directory: Path, rank: int) -> RankFiles:
        if rank == 0:
            directory.mkdir(parents=True)
        strategy = _Translation()
        # The first rank writes here what is not sharded. No rank knows what the others write:
        # `finish` checks that it is every element once.
        options: dict[str, Any] = {"validate_access_integrity": False, "async_sharded_save": True}
        try:
            dist_checkpointing.save(taken, str(directory), sharded_strategy=strategy, **options)
        except RuntimeError as error:
            # torch writes a file that it opens itself in C++, and does not tell why it could not.
            if rank == 0 and (cause := disk_error(directory)) is not None:
                raise cause from error
            raise
        if rank == 0:
            save_config(CheckpointingConfig(BACKEND, 1), str(directory))
        tensors: list[ShardedTensor] = []
        objects: dict[str, list[Any]] = {}
        for shard in strategy.shards:
            if isinstance(shard, ShardedTensor):
                tensors.append(shard)
            else:
                objects.setdefault(shard.unique_key, []).append(shard.data)
        return RankFiles(tensors, objects)

    def planned_bytes(self, prepared: RankFiles) -> int:
        return sum(shard.data.nbytes for shard in prepared.tensors if shard.data is not None)

    def write(self, prepared: RankFiles, directory: Path, rank: int) -> Written:
        if not prepared.tensors and not prepared.objects:
            return Written({}, b"")
        name = f"__{rank}_0.distcp"
        record, index = write_file(directory / name, prepared.tensors, prepared.objects)
        return Written({name: record}, encode(index))

    def finish(self, directory: Path, indexes: list[bytes]) -> None:
        index = merge_tables([decode(index) for index in indexes if index])
        require_whole(index, frozen=bool(self._frozen))
        write_synced(directory / INDEX_NAME, encode(index))
        if len(index.columns[0]) <= MOST_PARTS:
            write_synced(directory / METADATA_NAME, pickled_metadata(index))

    def versions(self) -> dict[str, str]:
        return {"megatron-core": version("megatron-core"), "torch": version("torch"), **self._written_by}


def disk_error(directory: Path) -> OSError | None:
    """Why a file of a MiB cannot be written to a directory; None if it can."""
    probe = directory / ".probe"
    try:
        with probe.open("wb") as file:
            file.write(bytes(_BUFFER))
        sync(probe)
    except OSError as error:
        return error
    finally:
        probe.unlink(missing_ok=True)
    return None


class _Translation(TorchDistSaveShardedStrategy):
    """A save strategy that only keeps what this rank has to write."""

    def __init__(self) -> None:
        super().__init__(BACKEND, 1)
        self.shards: list[ShardedTensor | ShardedObject] = []

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "mcore") -> AsyncRequest:
        self.shards = [shard for shard in nested_values(sharded_state_dict) if is_main_replica(shard.replica_id)]
        return AsyncRequest(None, (), [])


def require_plain(state: dict[str, Any]) -> None:
    """Check before the first save that it can be loaded again.

    Raises:
        TypeError: with the entry that is not plain data.
    """
    for key, value in _saved(state):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        try:
            torch.load(buffer, weights_only=True)
        except pickle.UnpicklingError as problem:
            raise TypeError(f"{key} of the state dict is not plain data: {problem}") from problem


def _saved(state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in leaves(state, enter=lambda _: True):
        if isinstance(value, ShardedObject):
            yield value.key, value.data
        elif not isinstance(value, ShardedTensor | LocalNonpersistentObject):
            yield key, value


_STATE = OPTIMIZER_STATE.partition("{")[0]


def require_whole(index: Table, *, frozen: bool = False) -> None:
    """Every element of every tensor was written once.

    Args:
        frozen: some weights have no optimizer state; of every weight all kinds of state have as many elements.

    Raises:
        RuntimeError: it was not: a bug in who writes what.
    """
    elements: dict[str, dict[str, int]] = {}
    for tensor, rows in zip(index.tensors, index.rows, strict=True):
        offsets, sizes = slices_of([column[rows] for column in index.columns], len(tensor.shape))
        if frozen and tensor.name.startswith(_STATE):
            kind, _, weight = tensor.name.removeprefix(_STATE).partition(".")
            elements.setdefault(weight, {})[kind] = int(sizes.prod(1).sum())
            continue
        if not covered(tensor.shape, offsets, sizes):
            raise RuntimeError(f"{tensor.name}, {tensor.shape}: some elements were not written, or were written twice")
    for weight, kinds in elements.items():
        if len(set(kinds.values())) > 1:
            raise RuntimeError(f"{weight}: elements of its state are {kinds}")


class Staging:
    """Host buffers for the tensors that this rank writes, reused by all saves.

    Reused, because page faults of new memory cost more than the copy itself. The price is this rank's share of the
    state in host memory.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[object, ...], torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def take(self, state: StateDict) -> StateDict:
        """Copy a state dict.

        Args:
            state: megatron-core sharded state dict; its factories are applied in place.

        Returns:
            The same structure with tensors in host buffers (valid until the next call) and deep copies of everything
            else. Replicas that another rank writes are not copied.
        """
        apply_factories(state)
        self._make_room(state)
        taken: StateDict = dict_list_map_outplace(self._take_one, state)
        if torch.cuda.is_available():
            # Copies into pinned memory are asynchronous; the next optimizer step must not overtake them.
            torch.cuda.current_stream().synchronize()
        return taken

    def reserve(self, state: StateDict) -> Callable[[], None] | None:
        """Ordinary memory is allocated by the first snapshot."""
        return None

    def _make_room(self, state: StateDict) -> None: ...

    def _take_one(self, value: Any) -> Any:
        if isinstance(value, ShardedTensor):
            return self._take_tensor(value)
        if isinstance(value, ShardedObject):
            return replace(value, data=copy.deepcopy(value.data)) if is_main_replica(value.replica_id) else value
        if isinstance(value, LocalNonpersistentObject):
            return value
        return copy.deepcopy(value)

    def _take_tensor(self, shard: Any) -> Any:
        if not is_main_replica(shard.replica_id):
            return shard
        source = shard.data.detach()
        key = _identity(shard)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            buffer = torch.empty(source.shape, dtype=source.dtype)
            self._buffers[key] = buffer
        buffer.copy_(source, non_blocking=True)
        return replace(shard, data=buffer)


def _identity(shard: Any) -> tuple[object, ...]:
    return shard.key, shard.global_offset, str(shard.flattened_range)


SLAB = GIB
"""Largest pinned buffer that several tensors share, in bytes."""
_LEAST_SLAB, _ALIGNMENT = MIB, 512


@dataclass(frozen=True)
class Slabs:
    """Places of tensors in a few large buffers."""

    sizes: tuple[int, ...]
    """Bytes of the buffers, powers of two: torch's allocator of pinned memory rounds up to them."""
    places: dict[tuple[object, ...], tuple[int, int]]
    """Buffer, and offset in it in bytes, of each tensor."""


def slabs(needed: Mapping[tuple[object, ...], int]) -> Slabs:
    """Distribute tensors over buffers: the largest first, each where it fits.

    Args:
        needed: bytes of each tensor.
    """
    rounded = {key: -(-size // _ALIGNMENT) * _ALIGNMENT for key, size in needed.items()}
    left = sum(rounded.values())
    sizes: list[int] = []
    free: list[int] = []
    places = {}
    for key, size in sorted(rounded.items(), key=lambda item: -item[1]):
        index = next((number for number, room in enumerate(free) if room >= size), len(free))
        if index == len(free):
            share = min(SLAB, 1 << left.bit_length() - 1) if left else 0
            sizes.append(max(share, 1 << (size - 1).bit_length() if size else 0, _LEAST_SLAB))
            free.append(sizes[-1])
        places[key] = index, sizes[index] - free[index]
        free[index] -= size
        left -= size
    return Slabs(tuple(sizes), places)


class PinnedStaging(Staging):
    """Staging in pinned memory: a few large slabs, which another thread can allocate before the first snapshot.

    One buffer for each tensor would be rounded up to a power of two, and pinned in the training loop.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sizes: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(self._sizes)

    def reserve(self, state: StateDict) -> Callable[[], None] | None:
        """What allocates the slabs for snapshots of states like this one; it may run in another thread."""
        apply_factories(state)
        return self._allocation(state)

    def _make_room(self, state: StateDict) -> None:
        if (allocate := self._allocation(state)) is not None:
            allocate()

    def _allocation(self, state: StateDict) -> Callable[[], None] | None:
        shapes = {
            _identity(shard): (shard.data.shape, shard.data.dtype, shard.data.nbytes)
            for shard in nested_values(state)
            if isinstance(shard, ShardedTensor) and is_main_replica(shard.replica_id)
        }
        known = {key: (buffer.shape, buffer.dtype, buffer.nbytes) for key, buffer in self._buffers.items()}
        return None if shapes == known else partial(self._allocate, shapes)

    def _allocate(self, shapes: Mapping[tuple[object, ...], tuple[Any, torch.dtype, int]]) -> None:
        self._buffers = {}
        plan = slabs({key: size for key, (_, _, size) in shapes.items()})
        pin = torch.cuda.is_available()
        memory = [torch.empty(size, dtype=torch.uint8, pin_memory=pin) for size in plan.sizes]
        self._sizes = plan.sizes
        for key, (shape, dtype, size) in shapes.items():
            slab, offset = plan.places[key]
            part = memory[slab][offset : offset + size]
            if not part.is_meta:
                # A tensor's own storage, because torch.save writes the whole storage of a view.
                part = torch.from_numpy(part.numpy())
            self._buffers[key] = part.view(dtype).view(shape)


_BUFFER = 1 << 20


def write_file(path: Path, tensors: Iterable[ShardedTensor], objects: Mapping[str, Any]) -> tuple[FileRecord, Table]:
    """Write and sync a file.

    It is hashed while it is written, so that it is not read again.

    Args:
        path: the file.
        tensors: parts of tensors, in memory of their own.
        objects: plain values by name.

    Returns:
        Its record for the manifest, and its index.

    Raises:
        OSError: a disk error.
    """
    parts: dict[str, tuple[str, tuple[int, ...], list[list[int]]]] = {}
    records = []
    try:
        with path.open("wb", buffering=_BUFFER) as file:
            stream = HashedFile(file)
            for shard in tensors:
                shape = (*(1 for _ in range(shard.prepend_axis_num)), *shard.local_shape)
                dtype = str(shard.data.dtype).removeprefix("torch.")
                place = stream.store(shard.data.view(shape))
                extent = chain.from_iterable(zip(shard.global_offset, shape, strict=True))
                parts.setdefault(shard.key, (dtype, shard.global_shape, []))[2].append([0, *place, *extent])
            for name, value in objects.items():
                records.append(ObjectRecord(name=name, place=[0, *stream.store(value)]))
    except RuntimeError as error:
        # torch's zip code raises one about positions for a failed write; the OSError is only in its context.
        if (cause := os_error(error)) is not None:
            raise cause from error
        raise
    sync(path)
    return stream.record(), make_table([path.name], records, ((name, *of) for name, of in parts.items()))


METADATA_NAME = ".metadata"
MOST_PARTS = 100_000
"""Most parts with which it is written: pickling stops the training loop, which needs the same lock, 10 µs for each."""


def pickled_metadata(index: Table) -> bytes:
    """`.metadata` of the same content as an index."""
    described: dict[str, BytesStorageMetadata | TensorStorageMetadata] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for record in index.objects:
        described[record.name] = BytesStorageMetadata()
        stored[MetadataIndex(record.name)] = _info(index, record.place)
    for tensor, rows in zip(index.tensors, index.rows, strict=True):
        parts = []
        for number, row in enumerate(np.stack([column[rows] for column in index.columns], 1).tolist()):
            end = 3 + 2 * len(tensor.shape)
            offset, size = torch.Size(row[3:end:2]), torch.Size(row[4:end:2])
            parts.append(ChunkStorageMetadata(offset, size))
            stored[MetadataIndex(tensor.name, offset, number)] = _info(index, row[:3])
        properties = TensorProperties(dtype=DTYPES[tensor.dtype])
        described[tensor.name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), parts)
    metadata = Metadata(described, storage_data=stored, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION)
    return pickle.dumps(metadata)


def _info(index: Table, place: list[int]) -> _StorageInfo:
    number, start, length = place
    return _StorageInfo(index.files[number], start, length)
