"""A copy of a sharded state dict that is independent of training."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    apply_factories,
    is_main_replica,
)

StateDict = dict[str, Any]


class Staging:
    """Host buffers for the tensors that this rank writes, reused by all saves.

    Reused, because page faults of new memory cost more than the copy itself, and pinned memory for copies from a GPU
    is even slower to allocate. The price is this rank's share of the state in host memory.
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
        taken: StateDict = dict_list_map_outplace(self._take_one, state)
        if torch.cuda.is_available():
            # Copies into pinned memory are asynchronous; the next optimizer step must not overtake them.
            torch.cuda.current_stream().synchronize()
        return taken

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
        key = (shard.key, shard.global_offset, str(shard.flattened_range))
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            self._buffers[key] = buffer
        buffer.copy_(source, non_blocking=True)
        return replace(shard, data=buffer)
