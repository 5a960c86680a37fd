"""The state in a checkpoint, as a megatron-core sharded state dict.

Weights and optimizer state are stored by global name, shape and offset, so that any layout can read them. Random
states are byte tensors and progress is plain numbers: nothing in a checkpoint needs unpickling.

The optimizer's state is stored by parameter, in the same form for every layout and either optimizer. A rank saves the
ranges that the distributed optimizer gave it; what data-parallel ranks have in common is cut evenly among them. Nothing
is gathered, and every element is written once, the weights of a range by the rank that writes its state. With the
distributed optimizer it loads no weights but makes those of its ranges from the master weights, and gathers the others
as after every update: nothing is read more than once for the data-parallel ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from llmrecipes.checkpoint.store import Entry
from llmrecipes.engine.base import Progress
from llmrecipes.engine.core import ema
from llmrecipes.engine.core.checkpoint.index import Index
from llmrecipes.engine.core.checkpoint.loader import load, rehearse
from llmrecipes.engine.core.checkpoint.reading import has_average, read_index
from llmrecipes.engine.core.checkpoint.slices import (
    MASTER,
    OptimizerSlice,
    ShardedParameter,
    other_state,
    sharded_parameters,
)
from llmrecipes.engine.core.masters import main_parameters, own_ranges
from llmrecipes.engine.core.model.init import global_name, whole_name
from llmrecipes.engine.core.random_states import load_random_states, same_random_states, sharded_random_states
from llmrecipes.engine.core.rank_weights import saved_states
from llmrecipes.engine.core.update import load_schedule
from llmrecipes.recipe.derived.freezing import is_frozen, patterns_of

if TYPE_CHECKING:
    from llmrecipes.engine.megatron.engine import MegatronEngine


logger = logging.getLogger(__name__)


def sharded_state(engine: MegatronEngine, progress: Progress) -> dict[str, Any]:
    """The state to save; the engine's tensors are referenced, not copied, and there is no communication.

    Weights that another rank updates may be those before the update (`overlap_param_gather`): they are not saved here.

    Args:
        engine: the engine.
        progress: of the run.
    """
    model = saved_states(engine.modules)
    parameters = _sharded_parameters(model)
    owned = saved_state(engine.optimizer, [parameter for parameter in parameters if parameter.parameter.requires_grad])
    weights = [each.weight_shards(exclusive=True) for part in owned.values() for each in part]
    weights += [each.weight_shards(exclusive=True) for each in saved_frozen(parameters)]
    return _state(engine, model, weights, owned, progress, exclusive=True, random=True)


def needed_by_rank(engine: MegatronEngine, progress: Progress) -> dict[str, Any]:
    """What `load_state` reads on this rank, whatever other ranks have; as `sharded_state`."""
    return _wanted(engine, random=True, averaged=True, progress=progress)


def load_state(engine: MegatronEngine, entry: Entry) -> Progress:
    """Load a checkpoint into the engine and the random generators; a collective of all ranks.

    Without random states, which only the layout that saved them can use, dropout is reseeded for this step. Without an
    average of the weights, one that the recipe wants begins with the loaded weights.

    Returns:
        Progress of the run.
    """
    index = read_index(entry)
    random = same_random_states(engine.recipe, entry, index)
    averaged = has_average(index)
    wanted = _wanted(engine, random=random, averaged=averaged, missing=Missing(entry, index))
    progress = _restore(engine, load(entry, wanted, index))
    if engine.recipe.optimizer.ema_decay is not None and not averaged:
        ema.start(engine.optimizer)
        if dist.get_rank() == 0:
            logger.info("%s has no average of the weights: optimizer.ema_decay begins with them", entry.path)
    return progress


def rehearse_load(engine: MegatronEngine) -> list[int]:
    """`load_state` without reading; returns the bytes of each part that this rank would read."""
    loaded, sizes = rehearse(_wanted(engine, random=False, averaged=True))
    _restore(engine, loaded)
    return sizes


def _wanted(
    engine: MegatronEngine,
    *,
    random: bool,
    averaged: bool,
    progress: Progress | None = None,
    missing: Missing | None = None,
) -> dict[str, Any]:
    """What this rank needs of a checkpoint; it is read into the engine's tensors.

    Args:
        missing: state that the checkpoint may be without; None: it has all.
    """
    distributed = engine.recipe.layout.use_distributed_optimizer
    model = saved_states(engine.modules)
    parameters = _sharded_parameters(model)
    needed = needed_state(engine.optimizer, parameters)
    if not averaged:
        needed = {number: ema.left_out(part) for number, part in needed.items()}
    weights = [] if distributed else [each.weight_shards(exclusive=False) for part in needed.values() for each in part]
    weights += [each.weight_shards(exclusive=False) for each in _frozen(parameters)]
    if missing is not None:
        needed = {number: [missing.without(each) for each in part] for number, part in needed.items()}
    return _state(engine, model, weights, needed, progress or Progress(), exclusive=distributed, random=random)


def _restore(engine: MegatronEngine, loaded: dict[str, Any]) -> Progress:
    """Set what is not read in place."""
    engine.updates = loaded["optimizer"]["step"]
    finish_load(engine.optimizer, engine.updates, loaded["optimizer"]["grad_scaler"])
    if engine.recipe.layout.use_distributed_optimizer:
        for chunk in engine.chunks:
            chunk.start_param_sync(force_sync=True)
    progress = Progress(**loaded["progress"])
    load_schedule(engine.scheduler, loaded["scheduler"], engine.recipe, progress.step)
    load_random_states(loaded.get("random"), engine.recipe.train.seed + progress.step)
    return progress


def _sharded_parameters(states: Sequence[dict[str, Any]]) -> list[ShardedParameter]:
    return [sharded for state in states for sharded in sharded_parameters(state)]


def _state(
    engine: MegatronEngine,
    model: Sequence[dict[str, Any]],
    weights: list[list[Any]],
    owned: Mapping[int, Sequence[OptimizerSlice]],
    progress: Progress,
    *,
    exclusive: bool,
    random: bool,
) -> dict[str, Any]:
    state = {
        "model": {"parameters": weights, "others": [other_state(module) for module in model]},
        "optimizer": {
            "param_state": {
                number: {index: each.optimizer_shards(exclusive=exclusive) for index, each in enumerate(part)}
                for number, part in owned.items()
            },
            "step": engine.updates,
            "grad_scaler": scaler_state(engine.optimizer),
        },
        "scheduler": engine.scheduler.state_dict(),
        "progress": asdict(progress),
    }
    if random:
        state["random"] = sharded_random_states()
    return state


LEAST_PIECE = 1 << 16
"""Elements below which a parameter is not cut among replicas: each piece costs an entry in the index."""


def saved_state(optimizer: Any, parameters: list[ShardedParameter]) -> dict[int, list[OptimizerSlice]]:
    """State that this rank writes, by optimizer; together the data-parallel ranks write every element once.

    With expert parallelism there are two optimizers, one of them only for experts; without it, there is one.

    Args:
        optimizer: megatron-core optimizer.
        parameters: of the model.

    Returns:
        State that shares memory with the optimizer: take a snapshot before the next step.
    """
    by_parameter = {sharded.parameter: sharded for sharded in parameters}
    parts = _parts(optimizer)
    known = {parameter for part in parts for parameter in _parameters(part)}
    if missing := [sharded.slices[0].shard.key for sharded in parameters if sharded.parameter not in known]:
        raise RuntimeError(f"no optimizer has {', '.join(missing)}")
    balancer = _ReplicaBalancer()
    return {
        number: [
            each
            for whole in _optimizer_slices(part, by_parameter)
            for each in ([whole] if isinstance(part, DistributedOptimizer) else balancer.own(whole))
        ]
        for number, part in enumerate(parts)
    }


def saved_frozen(parameters: Sequence[ShardedParameter]) -> list[OptimizerSlice]:
    """Frozen weights that this rank writes, as `param` of a state; together data-parallel ranks write all once."""
    balancer = _ReplicaBalancer()
    return [each for whole in _frozen(parameters) for each in balancer.own(whole)]


def _frozen(parameters: Sequence[ShardedParameter]) -> list[OptimizerSlice]:
    return [
        OptimizerSlice(parameter, 0, {"param": parameter.parameter.detach().view(-1)})
        for parameter in parameters
        if not parameter.parameter.requires_grad
    ]


class Missing:
    """State that a checkpoint does not have, because its weights were frozen when it was saved.

    Their moments begin with 0, and master weights with the weights.

    Args:
        entry: the checkpoint; its recipe says what may have been frozen.
        index: of the checkpoint.
    """

    def __init__(self, entry: Entry, index: Index) -> None:
        self._index, self._patterns = index, patterns_of(entry.manifest.recipe)

    def without(self, needed: OptimizerSlice) -> OptimizerSlice:
        """What is to be read of a state."""
        name = whole_name(global_name(needed.sharded.slices[0].shard))
        if not is_frozen(name, self._patterns) or self._has(needed):
            return needed
        for kind, tensor in needed.tensors.items():
            if kind != "param":
                tensor.zero_()
        return WeightOnly(needed.sharded, needed.start, {"param": needed.tensors["param"]})

    def _has(self, needed: OptimizerSlice) -> bool:
        for shard in chain(*needed.optimizer_shards(exclusive=False).values()):
            stored = self._index.tensors.get(shard.key)
            if stored is None:
                return False
            try:
                stored.slices(shard.global_offset, shard.local_shape)
            except ValueError:
                return False
        return True


class WeightOnly(OptimizerSlice):
    """State whose master weights are read from the weights."""

    def optimizer_shards(self, *, exclusive: bool) -> dict[str, list[ShardedTensor]]:
        """See `OptimizerSlice`."""
        return {"param": self.sharded.shards("", self.start, self.tensors["param"], exclusive=exclusive)}


def needed_state(optimizer: Any, parameters: list[ShardedParameter]) -> dict[int, list[OptimizerSlice]]:
    """State that this rank has, and needs from a checkpoint; arguments and result as `saved_state`."""
    by_parameter = {sharded.parameter: sharded for sharded in parameters}
    return {number: list(_optimizer_slices(part, by_parameter)) for number, part in enumerate(_parts(optimizer))}


def scaler_state(optimizer: Any) -> dict[str, Any] | None:
    """State of the loss scale; all optimizers have the same."""
    scalers = [scaler.state_dict() for scaler in _scalers(optimizer)]
    return scalers[0] if scalers else None


def finish_load(optimizer: Any, updates: int, scaler: dict[str, Any] | None) -> None:
    """Set what is not a tensor of a parameter, after the state was loaded in place.

    Parameter groups are the current ones, because those of the layout that saved may differ; their learning rate and
    weight decay come from the schedule.

    With the distributed optimizer, the ranges of the weights that this rank owns are made from its master weights:
    gather the others next.
    """
    for part in _parts(optimizer):
        _set_updates(part.optimizer, updates)
        if isinstance(part, DistributedOptimizer):
            part._copy_main_params_to_model_params()
            _copy_own_masters(part)
    for each in _scalers(optimizer):
        each.load_state_dict(scaler)


@torch.no_grad()
def _copy_own_masters(part: DistributedOptimizer) -> None:
    """As `_copy_main_params_to_model_params`, which does nothing where the optimizer's kernel does it in an update."""
    for weight, state in part.optimizer.state.items():
        if MASTER in state:
            weight.copy_(state[MASTER])


def _parts(optimizer: Any) -> list[Any]:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if part.optimizer is not None]  # a stage may have no parameters of a kind


def _scalers(optimizer: Any) -> list[Any]:
    scalers = [getattr(part, "grad_scaler", None) for part in _parts(optimizer)]
    return [scaler for scaler in scalers if scaler is not None]


def _parameters(part: Any) -> Iterator[torch.nn.Parameter]:
    """All parameters of an optimizer, of which this rank may have no state."""
    if isinstance(part, DistributedOptimizer):
        yield from (parameter for buffer in part.buffers for parameter in buffer.param_index_map)
    else:
        yield from (parameter for parameter, _ in main_parameters(part))


def _optimizer_slices(part: Any, by_parameter: dict[torch.nn.Parameter, ShardedParameter]) -> Iterator[OptimizerSlice]:
    """State that this rank has."""
    if isinstance(part, DistributedOptimizer):
        for parameter, start in own_ranges(part):
            yield OptimizerSlice(by_parameter[parameter], start, _flat(_of_range(part, parameter)))
        return
    for parameter, main in main_parameters(part):
        yield OptimizerSlice(by_parameter[parameter], 0, _flat({"param": main, **part.optimizer.state[main]}))


def _of_range(part: DistributedOptimizer, parameter: torch.nn.Parameter) -> dict[str, Any]:
    """Master weights and moments of this rank's range of a parameter.

    What megatron-core returns for it are copies where the moments are not in fp32: a load into them would be lost.
    """
    group, place = part.model_param_group_index_map[parameter]
    master = part.optimizer.param_groups[group]["params"][place]
    state = dict(part.optimizer.state[master])
    return {"param": state.pop(MASTER, master), **state}


def trained_parameters(modules: Sequence[Any]) -> list[ShardedParameter]:
    """Parameters of this rank's chunks that have gradients, in model order."""
    return [each for each in _sharded_parameters(saved_states(modules)) if each.parameter.requires_grad]


def _flat(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().view(-1) for name, tensor in tensors.items() if name != "step"}


class _ReplicaBalancer:
    """Spreads what data-parallel ranks have in common evenly over them, in the same way on each."""

    def __init__(self) -> None:
        self._assigned: dict[bool, list[int]] = {}

    def own(self, whole: OptimizerSlice) -> Iterator[OptimizerSlice]:
        """The range of a parameter's state that this rank writes, if any."""
        parameter = whole.sharded.parameter
        dense = getattr(parameter, "allreduce", True)
        rank, ranks = _replicas(dense)
        assigned = self._assigned.setdefault(dense, [0] * ranks)
        pieces = max(1, min(ranks, parameter.numel() // LEAST_PIECE))
        # Those who have least so far; a parameter is not cut where this makes the shares even.
        for piece, chosen in enumerate(sorted(range(ranks), key=assigned.__getitem__)[:pieces]):
            start, stop = _cut(parameter, piece, pieces)
            assigned[chosen] += stop - start
            if chosen == rank:
                tensors = {name: values[start:stop] for name, values in whole.tensors.items()}
                yield OptimizerSlice(whole.sharded, start, tensors)


def _cut(parameter: torch.Tensor, piece: int, pieces: int) -> tuple[int, int]:
    """First and last element of a piece of a flattened parameter; of whole rows, which are one slice, if possible."""
    row = parameter.numel() // parameter.shape[0] if parameter.dim() and parameter.shape[0] >= pieces else 1
    rows = parameter.numel() // row
    return row * (rows * piece // pieces), row * (rows * (piece + 1) // pieces)


def _replicas(dense: bool) -> tuple[int, int]:
    """This rank's number among the data-parallel ranks with the same dense or expert parameters, and their count."""
    if dense:
        return (
            parallel_state.get_data_parallel_rank(with_context_parallel=True),
            parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        )
    return parallel_state.get_expert_data_parallel_rank(), parallel_state.get_expert_data_parallel_world_size()


def _set_updates(inner: torch.optim.Optimizer, updates: int) -> None:
    counts = [state["step"] for state in inner.state.values() if "step" in state]
    for count in counts:
        count.fill_(updates)
    # Only AdamW counts: a count in a group of momenta would stay where it is, and be read for AdamW's.
    if not counts and all("exp_avg_sq" in state for state in inner.state.values()):
        for group in inner.param_groups:
            group["step"] = updates
