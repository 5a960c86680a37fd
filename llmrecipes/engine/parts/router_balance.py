"""Load balance of experts, counted in the routers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_utils import get_moe_metrics_tracker
from megatron.core.transformer.moe.router import TopKRouter

from llmrecipes.engine.core.model.gpt import RecipeModel
from llmrecipes.engine.meters import Balance
from llmrecipes.engine.parts.base import Part, Step
from llmrecipes.tracking.events import LayerBalance, is_measured

PREDICTION_LAYER = re.compile(r"mtp\.layers\.(\d+)\.")
COLUMNS_BESIDE_EXPERTS = 3  # tokens, summed entropy, summed z-loss


class RouterBalance(Part):
    """Hooks into the routers of this rank's layers; counts between `start` and `collect`, and else costs nothing."""

    def __init__(self, step: Step) -> None:
        plan = step.plan
        modules = step.modules
        device = step.platform.device
        self._recipe = plan.recipe
        model = plan.recipe.model
        self._topk = model.moe_router_topk
        self._has_aux_loss = model.moe_aux_loss_coeff > 0
        self.micro_batches = plan.num_microbatches
        """Of the step that is counted."""
        # megatron-core already sums the global loss over all ranks of a stage, the others over those of a sequence.
        over_all = model.moe_router_load_balancing_type == "global_aux_loss"
        self._copies_of_loss = 1 if over_all else plan.layout.data_parallel_size
        layers = model.num_layers + (model.mtp_num_layers or 0)
        # A row for each layer of the full model, so that the ranks' counts can be added; the last is for the loss.
        shape = layers + 1, (model.num_moe_experts or 0) + COLUMNS_BESIDE_EXPERTS
        self._sums = torch.zeros(shape, dtype=torch.float64, device=device)
        self.counting = False
        for number, router in _routers(modules, model.num_layers):
            router.register_forward_hook(partial(self._hook, number - 1))

    def start(self) -> None:
        """Start counting."""
        self._sums.zero_()
        get_moe_metrics_tracker().metrics.clear()
        self.counting = True

    def counts(self, step: int) -> bool:
        return is_measured(step, self._recipe)

    def before_passes(self, step: int, micro_batches: int) -> None:
        self.micro_batches = micro_batches

    def fields(self, before: Any) -> dict[str, Any]:
        if not self.counting:
            return {}
        routed = self.collect()
        return {"moe_aux_loss": routed.aux_loss, "experts": routed.layers}

    def collect(self) -> Balance:
        """Stop counting, and sum the counts over ranks; a collective of all ranks."""
        self.counting = False
        losses = [
            entry.values.sum()
            for name, entry in get_moe_metrics_tracker().metrics.items()
            if name.endswith("balancing_loss")
        ]
        for loss in losses:
            self._sums[-1, 0] += loss
        dist.all_reduce(self._sums)
        rows = self._sums.tolist()
        layers = tuple(self._layer(number, row) for number, row in enumerate(rows[:-1], start=1) if row[-3])
        aux_loss = rows[-1][0] / (len(layers) * self.micro_batches * self._copies_of_loss)
        return Balance(layers, aux_loss if self._has_aux_loss else None)

    def _layer(self, number: int, row: list[float]) -> LayerBalance:
        *counts, tokens, entropy, z_loss = row
        processed = sum(counts)
        return LayerBalance(
            layer=number,
            tokens_per_expert=tuple(int(count) for count in counts),
            imbalance=max(counts) * len(counts) / processed,
            dropped=int(tokens * self._topk - processed),
            entropy=entropy / tokens,
            z_loss=z_loss / tokens,
        )

    def _hook(self, row: int, router: TopKRouter, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        # Full recomputation runs a layer twice in a training step, the first time without gradients.
        if self.counting and router.training and torch.is_grad_enabled():
            with torch.no_grad():
                self._count(self._sums[row], router, inputs[0], *output)

    @staticmethod
    def _count(
        sums: torch.Tensor, router: TopKRouter, hidden: torch.Tensor, probs: torch.Tensor, chosen: torch.Tensor
    ) -> None:
        # An expert that is padded to its capacity gets tokens that did not choose it, with probability 0.
        padded = router.config.moe_pad_expert_input_to_capacity
        processed = chosen & (probs > 0) if padded else chosen
        # Without the input jitter: the router's own probabilities.
        logits = F.linear(hidden.float(), router.weight.float()).flatten(0, -2)
        scores = logits.softmax(-1) if router.score_function == "softmax" else logits.sigmoid()
        distribution = scores / scores.sum(-1, keepdim=True)
        sums[:-COLUMNS_BESIDE_EXPERTS] += processed.sum(0)
        sums[-3] += len(logits)
        sums[-2] += torch.special.entr(distribution).sum()
        sums[-1] += logits.logsumexp(-1).square().sum()


def _routers(modules: Sequence[RecipeModel], num_layers: int) -> Iterator[tuple[int, TopKRouter]]:
    """Routers with the index of their layer in the full model."""
    for module in modules:
        for name, router in module.named_modules():
            if not isinstance(router, TopKRouter):
                continue
            # Routers of prediction layers are numbered differently in each version of megatron-core.
            predicting = PREDICTION_LAYER.match(name)
            if predicting is None:
                yield router.layer_number, router
            else:
                yield num_layers + module.mtp.layers[int(predicting[1])].layer_number, router
