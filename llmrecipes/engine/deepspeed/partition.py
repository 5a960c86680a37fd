"""What this rank has of each parameter's master weights, moments and gradients, at every stage.

ZeRO 1 and 2 cut the concatenation of all parameters into equal ranges, so a rank has a range of some parameters and
nothing of the others. ZeRO 3 cuts every parameter, and empties it. Without ZeRO a rank has everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from llmrecipes.engine.core.checkpoint import slices as stored
from llmrecipes.engine.core.checkpoint.slices import OptimizerSlice, ShardedParameter
from llmrecipes.engine.core.model.gpt import RecipeModel

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Range:
    """A range of a flattened parameter, or of state of its shape."""

    start: int
    values: torch.Tensor
    """[n] a view; writing to it changes the state."""

    @property
    def stop(self) -> int:
        return self.start + self.values.numel()


def own_partition(parameter: Any) -> Range:
    """This rank's part of the weights of a parameter that stage 3 has partitioned, without padding."""
    size = parameter.ds_tensor.ds_numel
    start = min(parameter.ds_zero_partition_rank * size, parameter.ds_numel)
    return Range(start, parameter.ds_tensor.data.view(-1)[: min(size, parameter.ds_numel - start)])


def drop_second_copy(parameter: Any) -> None:
    """Make hpZ copy a parameter again when it is next gathered; until then it would gather the values before a change.

    DeepSpeed does so only after its own updates.
    """
    parameter.ds_secondary_tensor = None


class Partition:
    """State of this rank in DeepSpeed's optimizer.

    Args:
        optimizer: DeepSpeed's optimizer, or without ZeRO and mixed precision the plain one.
        parameters: all of the model's.
    """

    def __init__(self, optimizer: Any, parameters: list[ShardedParameter]) -> None:
        self._optimizer = optimizer
        self.base: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        self._parameters = parameters
        for group, master in enumerate(self._masters()):
            with self._in_memory(group):
                _allocate_moments(self.base, master)

    def owned(self) -> Iterator[OptimizerSlice]:
        """State of every parameter that this rank has a part of; copies where it is on a disk."""
        for group in range(len(self._masters())):
            with self._in_memory(group) as from_disk:
                yield from (each.copy() if from_disk else each for each in self._of_group(group))

    def write_back(self, changed: list[OptimizerSlice]) -> None:
        """Write changed copies of `owned` to the disk; there is nothing to do for what is in memory."""
        by_parameter = {id(each.sharded.parameter): each for each in changed}
        for group in range(len(self._masters())):
            with self._in_memory(group) as from_disk:
                for each in self._of_group(group) if from_disk else ():
                    for name, tensor in each.tensors.items():
                        tensor.copy_(by_parameter[id(each.sharded.parameter)].tensors[name])

    def _of_group(self, group: int) -> Iterator[OptimizerSlice]:
        """State of the parameters of one group, which is in memory."""
        master = self._masters()[group]
        for sharded in self._parameters:
            parameter: Any = sharded.parameter
            if hasattr(parameter, "ds_id"):
                of, first, _ = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
                if of == group:
                    partition = own_partition(parameter)
                    yield self._range(sharded, partition.start, master, first, partition.values.numel())
            elif hasattr(parameter, "_hp_mapping"):
                mapping = parameter._hp_mapping
                if mapping is not None and mapping.param_group_index == group:
                    low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
                    yield self._range(sharded, low.start, master, high.start, high.numel)
            elif parameter is master:
                yield self._range(sharded, 0, parameter, 0, parameter.numel())

    @contextmanager
    def _in_memory(self, group: int) -> Iterator[bool]:
        """A block in which a group's state is in memory; yields whether it was on a disk."""
        optimizer = self._optimizer
        on_disk = getattr(optimizer, "swap_optimizer", False) and optimizer._swappable_optimizer_subgroup(group)
        if on_disk:
            optimizer._optimizer_states_and_gradient_swap_in(group)
        try:
            yield on_disk
        finally:
            if on_disk:
                optimizer._optimizer_states_and_gradient_swap_out(group)

    @property
    def updates(self) -> int:
        """Updates so far."""
        return int(next((state["step"] for state in self.base.state.values()), 0))

    @updates.setter
    def updates(self, count: int) -> None:
        for state in self.base.state.values():
            if isinstance(state["step"], torch.Tensor):
                state["step"].fill_(count)
            else:
                state["step"] = count

    def states(self) -> Iterator[torch.Tensor]:
        """Master weights and moments of this rank, in memory."""
        for master in self._masters():
            yield master.detach()
            yield from (tensor for tensor in self.base.state[master].values() if torch.is_tensor(tensor))

    def _masters(self) -> list[torch.Tensor]:
        # Stage 3 shows its optimizer one group at a time, so its parameter groups are empty.
        partitioned = getattr(self._optimizer, "fp32_partitioned_groups_flat", None)
        return partitioned or [parameter for group in self.base.param_groups for parameter in group["params"]]

    def _range(
        self, sharded: ShardedParameter, start: int, master: torch.Tensor, first: int, size: int
    ) -> OptimizerSlice:
        state = self.base.state[master]
        tensors = {"param": master, **{name: state[name] for name in MOMENTS}}
        return OptimizerSlice(
            sharded, start, {name: each.detach().view(-1)[first : first + size] for name, each in tensors.items()}
        )


def _allocate_moments(base: torch.optim.Optimizer, master: torch.Tensor) -> None:
    """Create the state that the optimizer would create at its first step: a checkpoint may be loaded before it."""
    if not base.state[master]:
        on_host = hasattr(base, "ds_opt_adam")
        counter: Any = 0 if on_host else torch.zeros((), dtype=torch.float32, device=master.device)
        base.state[master] = {"step": counter, **{name: torch.zeros_like(master) for name in MOMENTS}}


def sharded_parameters(module: RecipeModel) -> list[ShardedParameter]:
    """All parameters of a module, in model order.

    megatron-core's sharded state dict tells the place of each, but asks the tensors for their shapes.
    """
    with _with_shapes(module):
        return stored.sharded_parameters(module.sharded_state())


def other_state(module: RecipeModel) -> list[ShardedTensor | ShardedObject]:
    """What a module's sharded state dict has besides parameters: buffers that training changes, layers' own objects."""
    with _with_shapes(module):
        return stored.other_state(module.sharded_state())


def full_shape(parameter: torch.nn.Parameter) -> torch.Size:
    """Shape of a parameter on this rank if ZeRO had not partitioned it."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


@contextmanager
def _with_shapes(module: torch.nn.Module) -> Iterator[None]:
    """A block in which partitioned parameters have their shapes, without memory for their values."""
    partitioned = [parameter for parameter in module.parameters() if parameter.shape != full_shape(parameter)]
    kept = [partition.data for partition in partitioned]
    for partition in partitioned:
        partition.data = partition.data.new_zeros(1).expand(full_shape(partition))
    try:
        yield
    finally:
        for each, data in zip(partitioned, kept, strict=True):
            each.data = data
