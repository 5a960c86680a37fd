"""Norms of gradients, weights and updates by layer and kind of parameter, histograms by kind, the size of the layers'
outputs, and their largest attention logits.

A rank adds up squares of what its optimizer updates, in a table with a place for every layer of the whole model. The
tables are summed like the global gradient norm, so that a parameter counts once, whatever the layout. The host reads
them a step later, together with that step's loss.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.optimizer import MegatronOptimizer

from llmrecipes.engine.core.masters import updated
from llmrecipes.engine.core.model.attention import tokens_before
from llmrecipes.engine.core.model.attention_logits import largest_logit, softmax_scale
from llmrecipes.engine.core.model.gpt import RecipeModel
from llmrecipes.engine.core.update import gradient, parts
from llmrecipes.engine.meters import LayerMeasurements
from llmrecipes.engine.parts.base import Agreed, Part, Step
from llmrecipes.engine.parts.gradient_histograms import BINS, count, histogram
from llmrecipes.tracking.events import is_sampled

KINDS = {
    "norm": r"layer_?norm|[qk]_norm",
    "attention_proj": r"attention\.linear_proj",
    "attention_qkv": r"attention\.",
    "router": r"\.router\.",
    "shared_experts": r"\.shared_experts\.",
    "experts_fc1": r"\.experts\..*(linear_fc1|weight1)",
    "experts_fc2": r"\.experts\..*(linear_fc2|weight2)",
    "mlp_fc1": r"\.linear_fc1",
    "mlp_fc2": r"\.linear_fc2",
    "other": "",
}
"""Of a layer's parameters: the first whose pattern is in the name."""
OUTSIDE = {"embedding": r"^embedding\.", "output": r"^output_layer\.", "final_norm": r"norm", "outside": ""}
"""Of parameters that are in no layer."""
LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.")
MEASURES = ("grad_norm", "weight_norm", "update_norm")
COUNTED = ("gradient", "weight")
"""With a histogram of each kind."""
_ROWS = (*KINDS, *OUTSIDE)


class _Owned(NamedTuple):
    place: int
    """In the flattened table."""
    gradient: torch.Tensor
    weight: torch.Tensor


class _NormTable:
    """Sums of one optimizer, in one tensor."""

    def __init__(self, places: int, device: torch.device) -> None:
        squares = len(MEASURES) * places
        counts = len(COUNTED) * len(_ROWS) * BINS
        self.whole = torch.zeros(squares + counts, dtype=torch.float64, device=device)
        self.squares = self.whole[:squares].view(len(MEASURES), places)
        self.counts = self.whole[squares:].view(len(COUNTED), len(_ROWS), BINS)


class _Kept(NamedTuple):
    """What is kept of an optimizer between `before_update` and `after_update`."""

    group: Any
    """Over whose ranks its sums are added."""
    table: _NormTable
    places: list[int]
    gradients: list[torch.Tensor]
    weights: list[torch.Tensor]
    copies: list[torch.Tensor] = []  # noqa: RUF012 - never changed in place


class LayerNorms(Part):
    """Measures a step after `start`; no cost otherwise. A later step reports it."""

    def __init__(self, step: Step) -> None:
        self._recipe, self._optimizer, self._taken = step.plan.recipe, step.optimizer, dict[str, Any]()
        recipe = step.plan.recipe
        modules = step.modules
        device = step.platform.device
        model = recipe.model
        self._layers = model.num_layers + (model.mtp_num_layers or 0)
        self._places = {
            parameter: _place(name, module, model.num_layers, self._layers)
            for module in modules
            for name, parameter in module.named_parameters()
        }
        # The row behind the layers is for what is in none of them.
        self._device = device
        self._sums = self._table()
        self._outputs = torch.zeros(2, self._layers, dtype=torch.float64, device=device)
        self._logits = torch.full((self._layers,), -math.inf, dtype=torch.float64, device=device)
        size = self._sums.whole.numel() + self._outputs.numel() + self._logits.numel()
        self._read = torch.zeros(size, dtype=torch.float64, pin_memory=device.type == "cuda")
        self._values = self._read.numpy()  # of the same memory
        self._kept: list[_Kept] = []
        self.counting = self._pending = False
        # A hook would break the graph of a compiled layer, and TransformerEngine does not record a module with hooks.
        hooked = not recipe.layout.torch_compile and recipe.layout.cuda_graph_impl is None
        for module in modules if hooked else ():
            for layer in module.decoder.layers:
                layer.register_forward_hook(partial(self._see, layer.layer_number - 1))
                attention = layer.self_attention
                seen = partial(self._attend, layer.layer_number - 1, attention)
                attention.core_attention.register_forward_pre_hook(seen, with_kwargs=True)

    def start(self) -> None:
        """Measure the next step."""
        self._outputs.zero_()
        self._logits.fill_(-math.inf)
        self.counting = True

    def counts(self, step: int) -> bool:
        return is_sampled(step, self._recipe)

    def read(self, own: list[float], local: list[float], agreed: Agreed) -> None:
        if (measured := self.take()) is not None:
            self._taken = measured._asdict()

    def fields(self, before: Any) -> dict[str, Any]:
        taken, self._taken = self._taken, {}
        return taken

    def _table(self) -> _NormTable:
        return _NormTable((self._layers + 1) * len(KINDS), self._device)

    def _attend(self, row: int, attention: Any, core: torch.nn.Module, inputs: Any, options: Any) -> None:
        query, key, _, mask = inputs[:4]
        if not self._sees(core) or query.dim() != 4:  # packed sequences of TransformerEngine have no rows
            return
        scale = softmax_scale(attention, query.size(-1))
        group = None
        if attention.config.context_parallel_size > 1:
            group = parallel_state.get_context_parallel_group()
        most = largest_logit(
            query.detach(), key.detach(), scale, mask, group, tokens_before(attention.config, attention.layer_number)
        )
        self._logits[row] = torch.maximum(self._logits[row], most.double())

    def _sees(self, module: torch.nn.Module) -> bool:
        # Full recomputation runs a layer twice in a training step, the first time without gradients.
        return self.counting and module.training and torch.is_grad_enabled()

    def _see(self, row: int, layer: torch.nn.Module, inputs: Any, output: Any) -> None:
        if self._sees(layer):
            hidden = (output[0] if isinstance(output, tuple) else output).detach()
            self._outputs[0, row] += torch.linalg.vector_norm(hidden, dtype=torch.float32).double().square()
            self._outputs[1, row] += hidden.numel()

    @torch.no_grad()
    def before_update(self) -> None:
        """Measure gradients and weights, of which copies are kept until `after_update`."""
        if not self.counting:
            return
        self._kept = []
        for group, owned in self._owned(self._optimizer):
            kept = _Kept(group, self._table(), *map(list, zip(*owned, strict=True)) if owned else ([], [], []))
            for number, tensors in enumerate((kept.gradients, kept.weights)):
                _add(kept.table.squares[number], kept.places, tensors)
                for place, tensor in zip(kept.places, tensors, strict=True):
                    count(kept.table.counts[number, self._kind(place)], tensor)
            self._kept.append(kept._replace(gradients=[], copies=[weight.clone() for weight in kept.weights]))

    @torch.no_grad()
    def after_update(self) -> None:
        """Measure the update that was made, and sum over ranks; a collective of all ranks."""
        if not self.counting:
            return
        self._sums.whole.zero_()
        for group, table, places, _, weights, copies in self._kept:
            if copies:
                torch._foreach_sub_(copies, weights)
            _add(table.squares[2], places, copies)
            dist.all_reduce(table.whole, group=group)
            self._sums.whole += table.whole
        self._kept = []
        # Ranks with the same tokens have the same sums, of squares and of elements.
        dist.all_reduce(self._outputs)
        dist.all_reduce(self._logits, dist.ReduceOp.MAX)
        self._read.copy_(torch.cat([self._sums.whole, self._outputs.flatten(), self._logits]), non_blocking=True)
        self.counting, self._pending = False, True

    def take(self) -> LayerMeasurements | None:
        """What the last measured step had, once the host has waited for the device since; None if it is not new."""
        if not self._pending:
            return None
        self._pending = False
        squares, counts, outputs, logits = np.split(self._values.copy(), self._ends())
        tables = squares.reshape(len(MEASURES), self._layers + 1, len(KINDS))
        present: Any = (tables > 0).any(0).tolist()
        measured: dict[str, Any] = {
            measure: _norms(table, present) for measure, table in zip(MEASURES, tables.tolist(), strict=True)
        }
        total, numbers = outputs.reshape(2, self._layers).tolist()
        if any(numbers):
            rms = [_rounded(math.sqrt(a / n)) if n else None for a, n in zip(total, numbers, strict=True)]
            measured["activation_rms"] = {"output": rms}
        if np.isfinite(logits).any():
            measured["attention_logit"] = {
                "max": [_rounded(logit) if math.isfinite(logit) else None for logit in logits]
            }
        rows = counts.reshape(len(COUNTED), len(_ROWS), BINS).tolist()
        histograms = {
            name: {kind: each for kind, row in zip(_ROWS, of_kinds, strict=True) if (each := histogram(row))}
            for name, of_kinds in zip(COUNTED, rows, strict=True)
        }
        return LayerMeasurements(measured, histograms)

    def _ends(self) -> list[int]:
        """Where the parts of what is read end."""
        sizes = self._sums.squares.numel(), self._sums.counts.numel(), self._outputs.numel()
        return np.cumsum(sizes).tolist()

    def _kind(self, place: int) -> int:
        """Row of the histogram of a place in the flattened table."""
        layer, kind = divmod(place, len(KINDS))
        return len(KINDS) + kind if layer == self._layers else kind

    def _owned(self, optimizer: MegatronOptimizer) -> Iterator[tuple[Any, list[_Owned]]]:
        """The group of each optimizer, and what it updates that no other rank of the group counts."""
        for part in parts(optimizer):
            # They are kept, so that no other tensor has their identity.
            counted = part.get_grads_for_grad_norm()
            identities = {id(each) for each in counted}
            owned = [
                _Owned(self._places[parameter], slope, weight)
                for parameter, master, weight in updated(part)
                if (slope := gradient(master)) is not None and id(slope) in identities
            ]
            yield part.get_grad_stats_parallel_group(), owned


def _add(row: torch.Tensor, places: list[int], tensors: list[torch.Tensor]) -> None:
    """Add the squares of tensors to their places in a row."""
    if tensors:
        squares = torch.stack(torch._foreach_norm(tensors, dtype=torch.float32)).double().square()
        row.index_add_(0, torch.tensor(places).to(row.device, non_blocking=True), squares)


def _norms(table: list[list[float]], present: list[list[bool]]) -> dict[str, Any]:
    """Norms by kind from squares [layers + 1, kinds]; a norm of 0 is one where there are parameters."""
    measured: dict[str, Any] = {}
    for number, kind in enumerate(KINDS):
        rows = zip(table[:-1], present[:-1], strict=True)
        values = [_rounded(math.sqrt(row[number])) if known[number] else None for row, known in rows]
        if any(value is not None for value in values):
            measured[kind] = values
    for number, kind in enumerate(OUTSIDE):
        if present[-1][number]:
            measured[kind] = _rounded(math.sqrt(table[-1][number]))
    return measured


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _place(name: str, module: RecipeModel, decoder_layers: int, layers: int) -> int:
    """Place of a parameter in the flattened table of layers and kinds."""
    match = LAYER.search(name)
    if match is None:
        return layers * len(KINDS) + next(n for n, pattern in enumerate(OUTSIDE.values()) if re.search(pattern, name))
    number = int(match[2])
    row = decoder_layers + number if match[1] == "mtp" else module.decoder.layers[number].layer_number - 1
    return row * len(KINDS) + next(n for n, pattern in enumerate(KINDS.values()) if re.search(pattern, name))
