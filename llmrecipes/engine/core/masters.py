"""What this rank's optimizer updates: master weights and gradients, with the parameters that they are of."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from llmrecipes.engine.core.checkpoint.slices import MASTER
from llmrecipes.engine.core.update import gradient, parts


class OwnGradient(NamedTuple):
    """What this rank has of a parameter's reduced gradient."""

    parameter: torch.nn.Parameter
    start: int
    """Index of its first element in the flattened parameter."""
    values: torch.Tensor


def updated(part: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, torch.Tensor]]:
    """Parameters of which this rank updates a range: the parameter, what has the range's gradient, master weights."""
    if part.optimizer is None:  # a stage may have no parameters of a kind
        return
    if not isinstance(part, DistributedOptimizer):
        yield from ((parameter, main, main) for parameter, main in main_parameters(part))
        return
    for parameter, _ in own_ranges(part):
        group, place = part.model_param_group_index_map[parameter]
        master = part.optimizer.param_groups[group]["params"][place]
        yield parameter, master, part.optimizer.state[master].get(MASTER, master)


def own_gradients(optimizer: Any) -> Iterator[OwnGradient]:
    """What this rank updates with, after `prepare_grads`."""
    for part in (part for part in parts(optimizer) if part.optimizer is not None):
        starts = dict(own_ranges(part)) if isinstance(part, DistributedOptimizer) else {}
        for parameter, main, _ in updated(part):
            values = gradient(main)
            if values is not None:
                yield OwnGradient(parameter, starts.get(parameter, 0), values)


def own_ranges(part: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, int]]:
    """Parameters of which this rank has a range, and where it starts in the flattened parameter."""
    for buckets in (buckets for ranges in part.gbuf_ranges for buckets in ranges.values()):
        for bucket in buckets:
            for parameter, ranges in bucket["param_map"].items():
                yield parameter, ranges["param"].start


def main_parameters(part: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """All parameters of an optimizer without ranges, with their master weights."""
    if not isinstance(part, Float16OptimizerWithFloat16Params):
        yield from ((parameter, parameter) for parameter in part.get_parameters())
        return
    halves = chain(*part.float16_groups)
    wholes = chain(*part.fp32_from_float16_groups)
    yield from zip(halves, wholes, strict=True)
    yield from ((parameter, parameter) for parameter in chain(*part.fp32_from_fp32_groups))
