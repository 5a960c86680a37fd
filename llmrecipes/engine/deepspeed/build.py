"""Construction: the model, partitioned while it is built for stage 3, and the optimizer that ZeRO wraps."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch

from llmrecipes.engine.base import Platform, Slice, WeightSource
from llmrecipes.engine.core.checkpoint.slices import ShardedParameter, flat_slices
from llmrecipes.engine.core.model import gpt
from llmrecipes.engine.core.model.config import hidden_group, is_hidden
from llmrecipes.engine.core.model.groups import group_of, group_options, names_of, require_matches
from llmrecipes.engine.core.model.init import buffers, draw, fill, initialise, parameter_slices, slice_of
from llmrecipes.engine.core.refusal import accepted
from llmrecipes.engine.deepspeed.configuration import deepspeed_config
from llmrecipes.engine.deepspeed.experts import EXPERTS, is_expert
from llmrecipes.engine.deepspeed.partition import (
    drop_second_copy,
    full_shape,
    other_state,
    own_partition,
    sharded_parameters,
)
from llmrecipes.engine.deepspeed.runtime import mpu
from llmrecipes.plan.derive import Plan
from llmrecipes.recipe.derived.shape import mup
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.zero import Zero


def build(
    plan: Plan, platform: Platform, weights: WeightSource | None = None
) -> tuple[gpt.BuiltModel, list[ShardedParameter]]:
    """`construct`, with initial values, or those of `weights`."""
    built, parameters = construct(plan, platform)
    whole = zero(plan.recipe).stage < 3
    if weights is not None:
        # Each rank reads what it keeps: of stage 3, its part of each parameter.
        wanted = parameter_slices(built.module.sharded_state()) if whole else _all_own_slices(parameters)
        fill(chain(wanted, buffers(other_state(built.module))), weights)
    elif whole:
        initialise(built.module.sharded_state(), plan.recipe.model, plan.recipe.train.seed)
    else:
        draw(_all_own_slices(parameters), plan.recipe.model, plan.recipe.train.seed)
    if not whole:
        for sharded in parameters:
            drop_second_copy(sharded.parameter)
    return built, parameters


def construct(plan: Plan, platform: Platform) -> tuple[gpt.BuiltModel, list[ShardedParameter]]:
    """The model of this rank, without defined values; stage 3 only ever has its part of a parameter's memory."""
    load_operators(zero(plan.recipe))
    with _partitioned(plan) if zero(plan.recipe).stage == 3 else nullcontext():
        built = gpt.construct(plan, platform)
    return built, sharded_parameters(built.module)


def zero(recipe: Recipe) -> Zero:
    """The recipe's `zero` section, which the rules require for this engine."""
    if recipe.layout.zero is None:
        raise ValueError("engine deepspeed without a zero section")
    return recipe.layout.zero


def accepted_by_deepspeed(plan: Plan) -> AbstractContextManager[None]:
    """A block in which DeepSpeed reads the configuration: see `accepted`."""
    from deepspeed.runtime.config import DeepSpeedConfigError

    rule = "extra must have keys of DeepSpeed's configuration, with values of the documented types"
    errors = (AssertionError, AttributeError, LookupError, TypeError, ValueError, DeepSpeedConfigError)
    return accepted("DeepSpeed", "layout.zero.extra", zero(plan.recipe).extra, rule, errors)


def optimizer(recipe: Recipe, model: torch.nn.Module, sharded: Sequence[ShardedParameter]) -> torch.optim.Optimizer:
    """AdamW; norms and biases, the parameters of one dimension, have no weight decay, as in megatron-core.

    With the maximal-update parametrisation hidden matrices have a group of their own. The learning rate is set by the
    scheduler before each step.
    """
    settings = recipe.optimizer
    trained = [pair for pair in model.named_parameters() if pair[1].requires_grad]
    groups = _groups(recipe, trained, names_of(sharded) if settings.groups else {})
    options: dict[str, Any] = {
        "lr": 0.0,
        "betas": (settings.adam_beta1, settings.adam_beta2),
        "eps": settings.adam_eps,
        "weight_decay": settings.weight_decay,
    }
    if zero(recipe).offload_optimizer == "none":
        return torch.optim.AdamW(groups, **options, fused=True)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(groups, **options, adamw_mode=True)


def _groups(
    recipe: Recipe, parameters: list[tuple[str, torch.nn.Parameter]], names: Mapping[int, str]
) -> list[dict[str, Any]]:
    factors = mup(recipe.model)
    by_settings: dict[tuple[bool, bool, bool, int | None], list[torch.nn.Parameter]] = {}
    require_matches(names.values(), recipe.optimizer)
    for name, parameter in parameters:
        dimensions = len(full_shape(parameter))
        hidden = factors is not None and is_hidden(name, dimensions)
        number = group_of(names.get(id(parameter), ""), recipe.optimizer)
        by_settings.setdefault((dimensions > 1, hidden, is_expert(parameter), number), []).append(parameter)
    return [
        {
            "params": grouped,
            "wd_mult": float(decays) * (1.0 if number is None else recipe.optimizer.groups[number].wd_mult),
            **(hidden_group(recipe.optimizer, factors) if factors and hidden else {}),
            **(EXPERTS if experts else {}),
            **({} if number is None else group_options(recipe.optimizer, number)),
        }
        for (decays, hidden, experts, number), grouped in by_settings.items()
    ]


@contextmanager
def _partitioned(plan: Plan) -> Iterator[None]:
    import deepspeed

    group = mpu().get_data_parallel_group()
    # The precision is in the configuration: an explicit `dtype` is replaced by bf16 on a CPU.
    with accepted_by_deepspeed(plan):
        partitioning = deepspeed.zero.Init(
            data_parallel_group=group, config_dict_or_path=deepspeed_config(plan), mpu=mpu()
        )
    with partitioning:
        yield


def _all_own_slices(parameters: list[ShardedParameter]) -> Iterator[Slice]:
    """This rank's part of each parameter."""
    return (part for sharded in parameters for part in _own_slices(sharded))


def _own_slices(sharded: ShardedParameter) -> Iterator[Slice]:
    partition = own_partition(sharded.parameter)
    for part in sharded.slices:
        inside = range(max(partition.start, part.start), min(partition.stop, part.start + part.numel))
        for flat in flat_slices(part.shard.local_shape, inside.start - part.start, inside.stop - part.start):
            first = part.start + flat.start - partition.start
            whole = slice_of(part.shard, partition.values[first : first + prod(flat.shape)].view(flat.shape))
            yield whole._replace(offset=tuple(a + b for a, b in zip(whole.offset, flat.offset, strict=True)))


def load_operators(zero: Zero) -> None:
    """Load the operators that offload needs; whichever rank of a node comes first compiles them.

    torch guards a compilation with a file that stays when the process is killed, and every later process would wait for
    its end. The kernel releases this lock, so whoever holds it may remove such a file.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder
    from deepspeed.ops.op_builder.pin_memory import PinMemoryBuilder

    builders: list[Any] = [CPUAdamBuilder()] if zero.offload_optimizer != "none" else []
    # The second one loads the first itself, without this lock.
    builders += [PinMemoryBuilder(), AsyncIOBuilder()] if zero.offload_optimizer == "nvme" else []
    for builder in builders:
        _load_operator(builder)


def _load_operator(builder: Any) -> None:
    from torch.utils.cpp_extension import _get_build_directory

    folder = Path(_get_build_directory(builder.name, False))
    with folder.with_name(f"{folder.name}.flock").open("w") as mutex:
        fcntl.flock(mutex, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        builder.load()
