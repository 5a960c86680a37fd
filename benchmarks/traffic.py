"""Collectives of a step: counted where torch hands them to the process group, and what the layout says they should be
(`llmrecipes.plan.traffic`, which has the conventions).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmrecipes.plan.derive import Plan
from llmrecipes.plan.traffic import SMALL, Call, calls

__all__ = ["SMALL", "Call", "Recorder", "expected"]

# Operators of torch.distributed, with the argument that is the payload.
OPERATORS = {
    "allreduce_": ("all-reduce", 0),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "_allgather_base_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "allreduce_coalesced_": ("all-reduce", 0),
    "allgather_into_tensor_coalesced_": ("all-gather", 0),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "alltoall_base_": ("all-to-all", 1),
    "send": ("message", 0),
}
IGNORED = {"recv_", "barrier"}


class Recorder(TorchDispatchMode):
    """Records every call inside the block, of the forward and the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        name = name.partition(".")[0]
        if namespace == "c10d" and name not in IGNORED:
            if name not in OPERATORS:
                raise NotImplementedError(f"c10d::{name} is not counted yet")
            self._record(name, func, args)
        return func(*args, **(kwargs or {}))

    def _record(self, name: str, func: Any, args: Any) -> None:
        kind, position = OPERATORS[name]
        names = [argument.name for argument in func._schema.arguments]
        group = torch.distributed.ProcessGroup.unbox(args[names.index("process_group")])
        tensors = args[position]
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if group.size() > 1:
            self.calls.append(Call(kind, group.size(), sum(tensor.nbytes for tensor in tensors)))


def expected(plan: Plan) -> Counter[Call]:
    """Every rank's calls of one step, without bookkeeping, summed over all ranks."""
    layout = plan.layout
    replicas = layout.tensor_model_parallel_size * layout.context_parallel_size * layout.data_parallel_size
    found: Counter[Call] = Counter()
    for stage in range(layout.pipeline_model_parallel_size):
        for call in calls(plan, stage):
            found[call] += replicas
    return found
