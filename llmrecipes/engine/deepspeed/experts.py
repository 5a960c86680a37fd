"""megatron-core's experts in DeepSpeed's terms, so that stages 1 and 2 reduce and shard them over their own ranks.

DeepSpeed looks for layers of its own class `MoE`, lets them name the groups of ranks, and finds a parameter's group by
its `group_name`. Both libraries mark parameters of experts with `allreduce = False`. The arithmetic is the same: each
gradient is divided by the number of data-parallel ranks and summed over the ranks that hold the same expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

GROUP = "experts"
"""DeepSpeed's name of the groups."""

EXPERTS = {"moe": True, "name": GROUP}
"""What marks an optimizer's group of such parameters."""


def is_expert(parameter: torch.nn.Parameter) -> bool:
    """Whether data-parallel ranks have different experts in this parameter."""
    return not getattr(parameter, "allreduce", True)


@contextmanager
def expert_groups(module: torch.nn.Module, expert_parallel_size: int) -> Iterator[None]:
    """A block in which DeepSpeed wraps a model and sees its experts, if these are spread over ranks."""
    if expert_parallel_size == 1:
        yield
        return
    for parameter in filter(is_expert, module.parameters()):
        parameter.group_name = GROUP  # type: ignore[attr-defined]
    module.add_module(GROUP, _experts())
    try:
        yield
    finally:
        delattr(module, GROUP)


def _experts() -> torch.nn.Module:
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups

    class Experts(MoE):
        """Stands for all expert layers of the model, and has no parameters."""

        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.num_experts = parallel_state.get_expert_model_parallel_world_size()

        def set_deepspeed_parallelism(self, *_: Any, **__: Any) -> None:
            """Called by DeepSpeed before it asks for the groups."""
            parallel = parallel_state.get_expert_model_parallel_group()
            data = parallel_state.get_expert_data_parallel_group()
            groups._EXPERT_PARALLEL_GROUP[GROUP] = parallel
            groups._EXPERT_PARALLEL_GROUP_RANKS[GROUP] = dist.get_process_group_ranks(parallel)
            groups._EXPERT_DATA_PARALLEL_GROUP[GROUP] = data
            groups._EXPERT_DATA_PARALLEL_GROUP_RANKS[GROUP] = dist.get_process_group_ranks(data)

    return Experts()
