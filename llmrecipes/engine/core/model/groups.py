"""Parameter groups by patterns of names (`optimizer.groups`): who belongs to which, the same in every layout."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import ParamKey
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate

from llmrecipes.engine.core.checkpoint.slices import ShardedParameter, sharded_parameters
from llmrecipes.engine.core.model.init import global_name, whole_name
from llmrecipes.errors import UserError
from llmrecipes.recipe.schema import Optimizer


def group_of(name: str, optimizer: Optimizer) -> int | None:
    """Number of the first group whose pattern matches a parameter of the whole model; None: the recipe's own values."""
    numbered = enumerate(optimizer.groups)
    return next((number for number, each in numbered if fnmatchcase(name, each.pattern)), None)


def group_options(optimizer: Optimizer, number: int) -> dict[str, float]:
    """Options of a group without weight decay, by megatron-core's names; its scheduler reads `max_lr` and `min_lr`."""
    factor = optimizer.groups[number].lr_mult
    return {"max_lr": optimizer.lr * factor, "min_lr": optimizer.min_lr * factor, "lr_mult": factor}


def decays(name: str, dimensions: int) -> bool:
    """Whether megatron-core decays a parameter: not norms and biases."""
    return dimensions > 1 and not name.endswith(".bias")


def names_of(parameters: Iterable[ShardedParameter]) -> dict[int, str]:
    """Names by `id` of parameters, as in a model that one process holds, of megatron-core's local layers."""
    return {id(parameter.parameter): whole_name(global_name(parameter.slices[0].shard)) for parameter in parameters}


def overrides(modules: Iterable[Any], optimizer: Optimizer) -> dict[ParamKey, Any]:
    """megatron-core's overrides for the groups of a recipe; a collective of all ranks if it has some.

    Args:
        modules: this rank's chunks.
        optimizer: section of the recipe.

    Raises:
        UserError: on every rank: a pattern matches no parameter of the model.
    """
    if not optimizer.groups:
        return {}
    names = names_of(
        sharded_parameter for module in modules for sharded_parameter in sharded_parameters(module.sharded_state())
    )
    require_matches(names.values(), optimizer)
    numbers = {place: group_of(name, optimizer) for place, name in names.items()}
    by_key: dict[ParamKey, Any] = {}
    for number, group in enumerate(optimizer.groups):
        options = group_options(optimizer, number)
        for is_decayed in (True, False):
            key = ParamWithNamePredicate(
                f"group_{number}_{is_decayed}",
                lambda parameter, name, number=number, is_decayed=is_decayed: (
                    numbers.get(id(parameter)) == number and decays(name, parameter.dim()) == is_decayed
                ),
            )
            by_key[ParamKey(with_name_predicate=key)] = {
                **options,
                **({"wd_mult": group.wd_mult} if is_decayed else {}),
            }
    return by_key


def require_matches(names: Iterable[str], optimizer: Optimizer) -> None:
    """Refuse a pattern that no parameter of any rank belongs to; a collective of all ranks.

    Args:
        names: of this rank's parameters in the whole model.
        optimizer: section of the recipe.

    Raises:
        UserError: on every rank.
    """
    known = sorted(set(names))
    mine = {group_of(name, optimizer) for name in known}
    used = torch.tensor([number in mine for number in range(len(optimizer.groups))], dtype=torch.int32)
    if dist.is_initialized() and dist.get_world_size() > 1:
        device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
        used = used.to(device)
        dist.all_reduce(used, dist.ReduceOp.MAX)
    for number, is_used in enumerate(used.tolist()):
        if not is_used:
            raise UserError(
                f"no parameter belongs to {optimizer.groups[number].pattern!r}",
                where=f"optimizer.groups.{number}.pattern",
                rule="a pattern matches a parameter that no earlier pattern matches",
                fix=f"names of this rank are such as {', '.join(known[:: max(1, len(known) // 4)])}",
            )
