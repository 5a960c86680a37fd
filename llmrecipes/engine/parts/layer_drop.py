"""Stochastic depth (arXiv 1603.09382): a micro-batch leaves out layers at random, in training only.

Whether it leaves out a layer is a function of the seed, the step, the layer and the micro-batch's place in the global
batch: ranks that share the micro-batch, or hold the layer, decide alike without a message, and so does a resumed run.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state

from llmrecipes.engine.parts.base import Part, Step


def rate(last: float, layer: int, layers: int) -> float:
    """Probability that a layer, counted from 1, is left out: it grows linearly up to that of the last."""
    return last * layer / layers


def keeps(seed: int, step: int, layer: int, micro_batch: int, rate: float) -> bool:
    """Whether a micro-batch of a step, both counted over the run and the global batch, has a layer."""
    digest = hashlib.sha256(f"{seed}:layer_drop:{step}:{layer}:{micro_batch}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >= rate * 2**64


class LayerDrop(Part):
    """Leaves layers out of training passes.

    What a layer that is there adds is divided by its probability to be there, as dropout does, so that the whole model
    is the expectation. A dry run has all layers, as the plan.
    """

    def __init__(self, step: Step) -> None:
        plan, modules = step.plan, step.modules
        self._plan = plan
        self._step = 0
        self._number = plan.num_microbatches
        self._seen = [0] * len(modules)
        self._waiting: list[deque[bool]] = []
        model = plan.recipe.model
        for chunk, module in enumerate(modules):
            module.register_forward_pre_hook(partial(self._counted, chunk))
            for layer in module.decoder.layers:
                self._waiting.append(deque())
                probability = rate(model.layer_drop, layer.layer_number, model.num_layers)
                layer.forward = partial(self._pass, layer, layer.forward, chunk, probability, self._waiting[-1])

    def before_passes(self, step: int, micro_batches: int) -> None:
        self._step = step
        self._number = micro_batches
        self._seen = [0] * len(self._seen)
        for decisions in self._waiting:
            decisions.clear()

    def _counted(self, chunk: int, module: torch.nn.Module, _inputs: Any) -> None:
        if module.training:
            self._seen[chunk] += 1

    def _pass(
        self, layer: Any, forward: Callable[..., Any], chunk: int, rate: float, waiting: deque[bool], **inputs: Any
    ) -> Any:
        """In place of a layer's `forward`, which megatron-core calls by keywords."""
        if not layer.training:
            return forward(**inputs)
        if torch.is_grad_enabled() and waiting:  # computed again, in the order of the first passes
            kept = waiting.popleft()
        else:
            # Several passes of a step (`train.adversarial`) leave the same layers out.
            number = (self._seen[chunk] - 1) % self._number
            replica = parallel_state.get_data_parallel_rank()
            place = number * self._plan.layout.data_parallel_size + replica
            kept = keeps(self._plan.recipe.train.seed, self._step, layer.layer_number, place, rate)
            if not torch.is_grad_enabled():  # the first pass of a layer that is recomputed
                waiting.append(kept)
        hidden = inputs["hidden_states"]
        if not kept:
            return hidden.clone(), inputs.get("context")  # a stage frees what it has sent
        output, context = forward(**inputs)
        return torch.lerp(hidden, output, 1 / (1 - rate)), context
