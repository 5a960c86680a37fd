"""Whether the gradients of a start's first step are what every layout should have, without a second training.

- **Norm.** The norm that clips equals the norm over each element of each weight once. megatron-core decides by marks of
  a parameter (`tensor_model_parallel`, `shared`, `allreduce`) on which rank it counts; the sharded state dict, which
  checkpoints are written by, knows the copies without them.
- **Copies.** All copies of a weight (on tensor-parallel ranks, of tied embeddings on stages, on data-parallel ranks
  without a sharded optimizer) have the same gradient after the reduction.

Neither needs a reference, so they hold in any precision and with any layers. A gradient is represented by its sum over
random signs. Sums of parts add up, so what the distributed optimizer cuts differently on two stages can be compared;
and sums of two gradients differ by about the norm of their difference. Ranks exchange their sums in one table with a
fixed number of places, in which a weight's place follows from its name: it is as large for two ranks as for 16,384.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from llmrecipes.engine.core.checkpoint.slices import ShardedParameter
from llmrecipes.engine.core.masters import OwnGradient
from llmrecipes.engine.core.model.init import EMBEDDINGS, global_name, whole_name
from llmrecipes.engine.meters import GradientFault
from llmrecipes.engine.parts.base import Agreed, Part, Step

PLACES = 1 << 16
"""Of the table: 2.5 MiB. Two weights in the same place are seen, and not compared."""
CHUNK = 1 << 22
"""Elements of a gradient that are summed at a time; the signs repeat after as many."""
NORM_TOLERANCE = 1e-5
"""Relative, of squared norms: both are sums of the same fp32 numbers."""
LIBRARY_NORM_TOLERANCE = 1e-3
"""The same, of a norm that DeepSpeed computes: it adds up squares of whole tensors in fp32, with errors of 1e-4 for an
embedding."""
COPY_TOLERANCE, COPY_FLOOR = 1e-2, 1e-6
"""Parts of the gradient's norm, and of the global norm, by which copies may differ: atomic additions on a GPU are not
in order. A missing reduction makes them differ by as much as their norm."""
MOST_NAMED = 64
"""Weights that a rank names."""


class GradientCheck(Part):
    """Compares the gradients of the first finite step of a start, before its update."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._sharded = step.sharded
        self._parameters = step.trained
        self._device = step.platform.device
        self.due = step.plan.recipe.faults.gradient_check_action != "none"
        """Whether the next step's are compared."""
        self._fault: GradientFault | None = None
        # Of the step that was measured, until it is judged.
        self._differing = torch.zeros(0)
        self._squares = torch.zeros(0)

    def after_norm(self, square: torch.Tensor | None) -> torch.Tensor | None:
        if not self.due:
            return None
        measured = self.measure(self._step.gradients(), square)
        measured[0] /= self._step.loss_scale() ** 2
        return measured

    def read(self, own: list[float], local: list[float], agreed: Agreed) -> None:
        if local:
            counted = None if self._step.counted is None else self._step.counted()
            self.see(agreed.norm, local, self._step.gradients(), counted)

    @torch.no_grad()
    def measure(self, owned: Iterable[OwnGradient], square: torch.Tensor | None = None) -> torch.Tensor:
        """[3] on the device in fp64, the same on all ranks: the squared norm over every weight once, copies that
        differ, and ranks whose norm is another one.

        Three collectives of all ranks, and with a sharded optimizer two of the data-parallel ranks; no wait.

        Args:
            owned: all gradients that this rank updates with.
            square: of the norm that clips, on the device; None: it is not known yet.
        """
        count = len(self._parameters)
        place_of = {each.parameter: place for place, each in enumerate(self._parameters)}
        sums = torch.zeros(2, count, dtype=torch.float64, device=self._device)
        signs = _signs(self._device)
        for own in owned:
            place = place_of[own.parameter]
            sums[0, place] += _signed_sum(own, signs)
            sums[1, place] += torch._foreach_norm([own.values], dtype=torch.float32)[0].double().square()
        if self._sharded:
            self._add_parts(sums)
        main = self._on_device([float(_is_main(each)) for each in self._parameters], torch.float64)
        unique = (sums[1] * main).sum()
        dist.all_reduce(unique)
        self._squares, self._differing = sums[1], self._compared(sums, unique)
        wrong = torch.zeros_like(unique)
        if square is not None:
            wrong = ((square - unique).abs() > NORM_TOLERANCE * unique).double()
        counts = torch.stack([self._differing.sum().double(), wrong])
        dist.all_reduce(counts)
        return torch.cat([unique[None], counts])

    def _add_parts(self, sums: torch.Tensor) -> None:
        dense = [getattr(each.parameter, "allreduce", True) for each in self._parameters]
        for kind, group in (
            (True, parallel_state.get_data_parallel_group(with_context_parallel=True)),
            (False, parallel_state.get_expert_data_parallel_group()),
        ):
            # Empty on a rank without experts, as on all ranks of its group.
            places = self._on_device([place for place, each in enumerate(dense) if each is kind], torch.int64)
            of_kind = sums[:, places].contiguous()
            dist.all_reduce(of_kind, group=group)
            sums[:, places] = of_kind

    def _compared(self, sums: torch.Tensor, unique: torch.Tensor) -> torch.Tensor:
        """[parameters] whether copies of this rank's parameter have other gradients."""
        keys = [_key(each) if self._may_have_copies(each) else None for each in self._parameters]
        here = self._on_device([place for place, key in enumerate(keys) if key is not None], torch.int64)
        known = [key for key in keys if key is not None]
        index = self._on_device([key % PLACES for key in known], torch.int64)
        names = self._on_device([float(key >> 16) for key in known], torch.float64)
        values = torch.stack([sums[0, here], -sums[0, here], names, -names, sums[1, here]])
        table = torch.full((len(values), PLACES), -math.inf, dtype=torch.float64, device=self._device)
        table.scatter_reduce_(1, index.expand_as(values), values, "amax")
        dist.all_reduce(table, dist.ReduceOp.MAX)
        highest, lowest, name, other, largest = table[:, index]
        far = highest + lowest > COPY_TOLERANCE * largest.sqrt() + COPY_FLOOR * unique.sqrt()
        differing = torch.zeros(len(keys), dtype=torch.bool, device=self._device)
        differing[here] = far & (name == -other)
        return differing

    def _may_have_copies(self, sharded: ShardedParameter) -> bool:
        """Those that certainly have none would fill the table: a mixture has more experts than all else."""
        dense = getattr(sharded.parameter, "allreduce", True)
        if dense:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            split = parallel_state.get_tensor_model_parallel_world_size()
        else:
            group = parallel_state.get_expert_data_parallel_group()
            split = parallel_state.get_expert_tensor_parallel_world_size()
        if not self._sharded and group.size() > 1:
            return True
        shard = sharded.slices[0].shard
        if shard.key.endswith(EMBEDDINGS) and parallel_state.get_pipeline_model_parallel_world_size() > 1:
            return True
        depth = shard.prepend_axis_num
        return split > 1 and tuple(shard.local_shape) == tuple(shard.global_shape[depth:])

    def see(
        self,
        norm: float,
        measured: Sequence[float],
        owned: Iterable[OwnGradient] = (),
        counted: Iterable[torch.Tensor] | None = None,
    ) -> None:
        """Judge a step; a collective of all ranks if something is wrong. `fault` has the answer.

        Args:
            norm: that clips. If it is not finite, the next step is measured.
            measured: what `measure` returned.
            owned: as `measure`; read only if the norm is wrong.
            counted: of these gradients, those that this rank adds to the norm; None: unknown, and `measure` did not
                know the norm.
        """
        unique, differing, ranks = measured
        if math.isfinite(norm) and math.isfinite(unique):
            self.due = False
            wrong = bool(ranks) or (counted is None and abs(norm**2 - unique) > LIBRARY_NORM_TOLERANCE * unique)
            weights = self._miscounted(owned, counted) if wrong and counted is not None else ()
            copies = self._apart() if differing else ()
            if wrong or differing:
                self._fault = GradientFault(norm, math.sqrt(unique), wrong, weights, copies)
        self._squares = self._differing = torch.zeros(0)

    def fault(self) -> GradientFault | None:
        fault = self._fault
        self._fault = None
        return fault

    def _miscounted(self, owned: Iterable[OwnGradient], counted: Iterable[torch.Tensor]) -> tuple[str, ...]:
        """Weights whose part of the squared norm is not that of all their elements once, the largest error first."""
        known = {each.data_ptr() for each in counted if each.numel()}
        by_parameter = {each.parameter: each for each in self._parameters}
        mine: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for own in owned:
            sharded = by_parameter[own.parameter]
            square = float(torch._foreach_norm([own.values], dtype=torch.float32)[0].double().square())
            # Data-parallel ranks have either different parts, or each its own norm.
            weight = own.values.data_ptr() in known, _is_main(sharded, of_all=False)
            if weight[0] != weight[1]:
                sums = mine[_name(sharded)]
                sums[0] += square * weight[0]
                sums[1] += square * weight[1]
        largest = sorted(mine.items(), key=lambda item: -abs(item[1][0] - item[1][1]))
        total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for name, (one, other) in _everyones(largest[:MOST_NAMED]):
            total[name][0] += one
            total[name][1] += other
        wrong = {
            name: one - other for name, (one, other) in total.items() if not math.isclose(one, other, rel_tol=1e-4)
        }
        return tuple(
            f"{name} ({'too often' if wrong[name] > 0 else 'left out'}, {abs(wrong[name]) ** 0.5:.3g})"
            for name in sorted(wrong, key=lambda name: -abs(wrong[name]))
        )

    def _apart(self) -> tuple[str, ...]:
        """Weights whose copies have other gradients, in model order, with the least and the largest norm."""
        mine = [
            (_name(sharded), square**0.5)
            for sharded, differs, square in zip(
                self._parameters, self._differing.tolist(), self._squares.tolist(), strict=True
            )
            if differs
        ]
        norms: dict[str, list[float]] = defaultdict(list)
        for name, norm in _everyones(mine[:MOST_NAMED]):
            norms[name].append(norm)
        return tuple(f"{name} ({min(each):.3g} to {max(each):.3g})" for name, each in norms.items())

    def _on_device(self, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(self._device, non_blocking=True)


def _everyones(mine: Sequence[Any]) -> list[Any]:
    everyones: list[Sequence[Any]] = [()] * dist.get_world_size()
    dist.all_gather_object(everyones, list(mine))
    return [each for one in everyones for each in one]


def _is_main(sharded: ShardedParameter, *, of_all: bool = True) -> bool:
    """Whether this rank has the first copy of a parameter; without `of_all`, among ranks of the same replica."""
    replica = sharded.slices[0].shard.replica_id
    numbers = list(replica) if isinstance(replica, tuple) else [replica]
    return not any(numbers if of_all else numbers[:-1])


def _name(sharded: ShardedParameter) -> str:
    return whole_name(global_name(sharded.slices[0].shard))


def _key(sharded: ShardedParameter) -> int:
    """The same number for all copies of a parameter."""
    shard = sharded.slices[0].shard
    text = f"{global_name(shard)} {shard.global_offset[shard.prepend_axis_num :]} {sharded.shape}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _signs(device: torch.device) -> torch.Tensor:
    drawn = torch.randint(2, (CHUNK,), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    return drawn.to(device, non_blocking=True).float() * 2 - 1


def _signed_sum(own: OwnGradient, signs: torch.Tensor) -> torch.Tensor:
    flat = own.values.detach().view(-1)
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    done = 0
    while done < flat.numel():
        place = (own.start + done) % CHUNK
        part = flat[done : done + CHUNK - place]
        total += torch.dot(part.float(), signs[place : place + part.numel()]).double()
        done += part.numel()
    return total
