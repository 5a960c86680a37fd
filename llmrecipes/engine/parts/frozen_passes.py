"""A frozen model whose passes come before those of the model that is trained, on the same ranks in the same layout."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from llmrecipes.checkpoint.store import Entry
from llmrecipes.engine.base import Batch, Platform, WeightSource
from llmrecipes.engine.core.backend import loaded
from llmrecipes.engine.core.model.attention import apart, own_chunks
from llmrecipes.engine.core.model.gpt import RecipeModel, build, construct
from llmrecipes.plan.derive import Plan

Within = Callable[[], AbstractContextManager[None]]


class FrozenModel:
    """Forward passes, of which the last stage keeps the result of each micro-batch until the trained model's loss needs
    it.

    Without pipeline stages the model passes one micro-batch at a time; with stages all of a step, because its stages
    wait for each other too.

    Args:
        plan: of these passes.
        platform: of the ranks.
        keys: tensors of a batch that the model takes.
    """

    def __init__(self, plan: Plan, platform: Platform, keys: tuple[str, ...]) -> None:
        self.plan = plan
        self._platform = platform
        self._keys = keys
        self._forward = get_forward_backward_func()
        self.kept: deque[Any] = deque()
        """Results of passes, in the order of their micro-batches; on the last stage."""
        self.modules: tuple[RecipeModel, ...] = ()
        """This rank's chunks of the model, once its weights are there."""

    def load(self, weights: Entry | WeightSource | None = None) -> None:
        """Build the model; a collective of all ranks.

        Args:
            weights: a checkpoint of its run, or other weights; None: those that the plan's seed draws.
        """
        plan, platform = self.plan, self._platform
        if platform.device.type == "meta":
            built = construct(plan, platform)
        elif isinstance(weights, Entry):
            built = loaded(plan, platform, weights)
        else:
            built = build(plan, platform, weights)
        self.use(built.modules, built.implementation)
        for module in self.modules:
            module.requires_grad_(False)
            module.eval()

    def use(self, modules: tuple[RecipeModel, ...], implementation: str) -> None:
        """Take a model that exists."""
        self._apart = apart(self.plan.recipe, self._platform.device, implementation)
        self.modules = modules

    def ahead(self, batches: Iterator[Batch], number: int, within: Within = nullcontext) -> Iterator[Batch]:
        """The micro-batches of a step, each after the model's pass over it; `number` of them.

        Args:
            within: makes the block in which the passes are computed.
        """
        if not self.modules:
            self.load()
        if self.plan.layout.pipeline_model_parallel_size == 1:
            return self._one_by_one(batches, within)
        step = list(islice(batches, number))
        self.forget()
        with within():
            self.passes(step)
        return iter(step)

    def _one_by_one(self, batches: Iterator[Batch], within: Within) -> Iterator[Batch]:
        for batch in batches:
            self.forget()
            with within():
                self.passes([batch])
            yield batch

    def forget(self) -> None:
        """Drop what is left of earlier passes."""
        self.kept.clear()

    @torch.no_grad()
    def passes(self, batches: Sequence[Batch]) -> None:
        """One over each of these micro-batches."""
        model = self.plan.recipe.model
        reports = self._forward(
            forward_step_func=self._forward_step,
            data_iterator=[iter(batches) for _ in self.modules] if len(self.modules) > 1 else iter(batches),
            model=list(self.modules),
            num_microbatches=len(batches),
            seq_length=model.seq_length,
            micro_batch_size=self.plan.recipe.layout.micro_batch_size,
            decoder_seq_length=model.seq_length,
            forward_only=True,
        )
        self.kept.extend(report["kept"] for report in reports)

    def _forward_step(self, batches: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        in_host = next(batches)
        conversations = self._apart(in_host["position_ids"])
        batch = {name: in_host[name].to(self._platform.device, non_blocking=True) for name in self._keys}
        parts = parallel_state.get_context_parallel_world_size()
        number = parallel_state.get_context_parallel_rank()
        batch = own_chunks(batch, parts, number)
        more = {name: batch[name] for name in self._keys if name not in ("tokens", "position_ids")}
        return model(batch["tokens"], batch["position_ids"], **conversations, **more), self._report

    def _report(self, result: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """In the form that megatron-core's schedules ask of a loss function."""
        nothing = torch.zeros((), device=result.device)
        return nothing, nothing.int(), {"kept": self.kept_of(result)}

    def kept_of(self, result: torch.Tensor) -> Any:
        """What is kept of the result of a pass; on the last stage."""
        return result
