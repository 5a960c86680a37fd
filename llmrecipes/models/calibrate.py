"""GPTQ, AWQ and SmoothQuant: what text through a model says about how its matrices should be rounded.

A model is in memory, and its decoder layers are calibrated one after another, with the states that the layers before
them (already quantised, for GPTQ) have made of the text: of inputs and statistics, those of one layer are held.

SmoothQuant and AWQ scale channels between a norm and the linear layers that read it. Which these are is seen in a pass,
not known by names; matrices whose input is not a norm's output are rounded as they are.

GPTQ rounds experts too: each by the tokens of the text that its router sends to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from llmrecipes.engine.core import integers
from llmrecipes.engine.core.hessians import BLOCK, add_inputs, first_states, inverse_factor
from llmrecipes.errors import UserError
from llmrecipes.models.quantized_weights import Changed, Scheme
from llmrecipes.tracking.progress import Counted

ALPHA = 0.5
"""Of SmoothQuant (arXiv 2211.10438, section 4): how much of the range goes from activations to weights."""
SEARCHED = 20
"""Exponents that AWQ tries (arXiv 2306.00978, section 3.2)."""
KEPT_TOKENS = 512
"""Inputs of a layer on which AWQ compares its results, at most."""
LEAST = 1e-5
"""Of a channel's largest value: smaller ones would be infinite scales."""


@dataclass(frozen=True)
class ExpertMatrix:
    """Where a matrix of one expert in a file is in a model of transformers.

    Attributes:
        parameter: name of the tensor [experts, out, in] that has it.
        expert: number of the expert.
        first: its first row there: gate and up are one matrix.
        rows: rows of the matrix.
    """

    parameter: str
    expert: int
    first: int
    rows: int

    @property
    def inputs(self) -> str:
        """What `_LayerPass.see_inputs` calls its inputs."""
        return f"{self.parameter}.{self.expert}"


@dataclass(frozen=True)
class CalibrationData:
    """What a calibration is made of.

    Attributes:
        model: transformers model, in eval mode; its weights change.
        rows: token ids [rows, length].
        scheme: scheme of the matrices.
        linears: names of the matrices in the model, with `.weight`.
        dtype: dtype of the scales in the file; None: that of the model.
        progress: shows how many layers are done.
        experts: matrices of experts by their names in the file; with `gptq` only.
    """

    model: nn.Module
    rows: torch.Tensor
    scheme: Scheme
    linears: frozenset[str]
    dtype: torch.dtype | None = None
    progress: Counted | None = None
    experts: Mapping[str, ExpertMatrix] = field(default_factory=dict)


@torch.no_grad()
def calibrate(method: str, work: CalibrationData) -> dict[str, Changed]:
    """The tensors that a method changes, by their names in the model, and those of experts by their names in the file.

    Args:
        method: `gptq`, `awq` or `smoothquant`.
        work: model, text and scheme.

    Raises:
        UserError: the text is too short for the model, the model has no norm before a linear layer, or its experts
            are not gated.
    """
    changed: dict[str, Changed] = {}
    steps = {"gptq": _gptq, "awq": _awq, "smoothquant": _smoothquant}
    layers = _layers(work.model)
    run = partial(work.model, use_cache=False)
    states, arguments = first_states(run, [layer for _, layer in layers], work.rows.split(1))
    if work.progress is not None:
        work.progress.begin("layers", len(layers))
    for number, (prefix, layer) in enumerate(layers):
        inputs = {
            f"{prefix}.{name}.weight": module
            for name, module in layer.named_modules()
            if isinstance(module, nn.Linear) and f"{prefix}.{name}.weight" in work.linears
        }
        experts = {name: place for name, place in work.experts.items() if place.parameter.startswith(f"{prefix}.")}
        layer_pass = _LayerPass(layer, prefix, inputs, experts, states, arguments[number])
        changed |= steps[method](layer_pass, work)
        states = layer_pass.outputs()
        if work.progress is not None:
            work.progress.add(1)
    if work.progress is not None:
        work.progress.close()
    if not changed:
        raise UserError(
            "no linear layer of this model reads the output of a norm",
            where="--method",
            rule=f"{method} moves scales from linear layers into the norm before them",
            fix="--method gptq or rtn",
        )
    return changed


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Decoder layers with their names."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    name, layers = max(lists, key=lambda each: sum(p.numel() for p in each[1].parameters()))
    return [(f"{name}.{number}", layer) for number, layer in enumerate(layers)]


class _LayerPass:
    """One decoder layer and the states before it."""

    def __init__(
        self,
        layer: nn.Module,
        prefix: str,
        linears: Mapping[str, nn.Linear],
        experts: Mapping[str, ExpertMatrix],
        states: list[torch.Tensor],
        arguments: dict[str, Any],
    ) -> None:
        self.layer = layer
        self.prefix = prefix
        self.linears = linears
        self.experts = experts
        self._states = states
        self._arguments = arguments

    def outputs(self) -> list[torch.Tensor]:
        """The states after it."""
        results = (self.layer(state, **self._arguments) for state in self._states)
        return [each[0] if isinstance(each, tuple) else each for each in results]

    def see_inputs(self, see: Callable[[str, torch.Tensor], None]) -> None:
        """Pass all states, and call `see(name, input [tokens, in])` for each linear layer and expert.

        The name is that of the linear layer's matrix, or `ExpertMatrix.inputs`.
        """
        names = {place.parameter.rpartition(".")[0] for place in self.experts.values()}
        blocks = {name: self.module(name) for name in names}
        for name, block in blocks.items():
            _require_gated(name, block)
            block.forward = partial(_routed, block, name, see)
        try:
            with self._hooked(lambda name, given: see(name, given.flatten(0, -2).float())):
                for state in self._states:
                    self.layer(state, **self._arguments)
        finally:
            for block in blocks.values():
                del block.forward  # that of its class is behind it

    def norms(self) -> dict[str, list[str]]:
        """Names of norms, with those of the linear layers that read their output; of one pass."""
        by_input: dict[int, tuple[str, torch.Tensor]] = {}
        readers: dict[str, list[str]] = {}

        def wrote(name: str) -> Callable[..., None]:
            def hook(_module: nn.Module, _given: Any, output: Any) -> None:
                if isinstance(output, torch.Tensor):
                    by_input[id(output)] = name, output  # kept, so that no other tensor gets its id

            return hook

        def read(name: str, given: torch.Tensor) -> None:
            if id(given) in by_input:
                readers.setdefault(by_input[id(given)][0], []).append(name)

        hooks = [
            module.register_forward_hook(wrote(f"{self.prefix}.{name}"))
            for name, module in self.layer.named_modules()
            if isinstance(getattr(module, "weight", None), nn.Parameter) and module.weight.dim() == 1
        ]
        with self._hooked(read):
            self.layer(self._states[0], **self._arguments)
        for hook in hooks:
            hook.remove()
        return readers

    def module(self, name: str) -> Any:
        """A module by its name in the model."""
        return self.layer.get_submodule(name.removeprefix(f"{self.prefix}."))

    @contextmanager
    def _hooked(self, see: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
        def hook(name: str) -> Callable[..., None]:
            return lambda _module, given: see(name, given[0])

        hooks = [module.register_forward_pre_hook(hook(name)) for name, module in self.linears.items()]
        try:
            yield
        finally:
            for handle in hooks:
                handle.remove()


def _require_gated(name: str, block: Any) -> None:
    """Refuse experts that `_routed` does not compute.

    Raises:
        UserError: they are not gate, up and down without biases.
    """
    others = ("is_transposed", "has_bias", "has_post_expert_norm")
    if not getattr(block, "has_gate", False) or any(getattr(block, key, False) for key in others):
        raise UserError(
            f"{name} has the type {type(block).__name__}",
            where="--method",
            rule="gptq supports experts of gate, up and down projections without biases",
            fix="--method rtn",
        )


def _routed(
    block: Any,
    name: str,
    see: Callable[[str, torch.Tensor], None],
    states: torch.Tensor,
    chosen: torch.Tensor,
    scores: torch.Tensor,
) -> torch.Tensor:
    """The experts of a layer as transformers computes them (`use_experts_implementation`), seen one by one.

    Args:
        block: the module with the experts.
        name: name of the module.
        see: called with the inputs of an expert's matrices.
        states: [tokens, hidden].
        chosen: [tokens, k] numbers of experts.
        scores: [tokens, k].
    """
    made = torch.zeros_like(states)
    for expert in range(block.gate_up_proj.size(0)):
        tokens, places = torch.where(chosen == expert)
        if not len(tokens):
            continue
        given = states[tokens]
        see(f"{name}.gate_up_proj.{expert}", given.float())
        inner = block._apply_gate(F.linear(given, block.gate_up_proj[expert]))
        see(f"{name}.down_proj.{expert}", inner.float())
        outputs = F.linear(inner, block.down_proj[expert]) * scores[tokens, places, None]
        made.index_add_(0, tokens, outputs.to(made.dtype))
    return made


def _smoothquant(layer: _LayerPass, _work: CalibrationData) -> dict[str, Changed]:
    """Divide the inputs of matrices by s and multiply their columns: s = max|x|^α / max|w|^(1-α), for each channel."""
    largest: dict[str, torch.Tensor] = {}

    def see(name: str, given: torch.Tensor) -> None:
        most = given.abs().amax(0)
        largest[name] = torch.maximum(largest[name], most) if name in largest else most

    layer.see_inputs(see)
    changed: dict[str, Changed] = {}
    for norm, readers in layer.norms().items():
        weights = torch.stack([layer.linears[name].weight.abs().amax(0) for name in readers]).amax(0).float()
        scale = largest[readers[0]].clamp_min(LEAST) ** ALPHA / weights.clamp_min(LEAST) ** (1 - ALPHA)
        changed |= _moved(layer, norm, readers, scale)
    return changed


def _awq(layer: _LayerPass, work: CalibrationData) -> dict[str, Changed]:
    """Scale channels by s = mean|x|^α, with the α of least error of the layer's own products after rounding."""
    sums: dict[str, torch.Tensor] = {}
    inputs: dict[str, torch.Tensor] = {}

    def see(name: str, given: torch.Tensor) -> None:
        sums[name] = sums.get(name, torch.zeros(given.size(-1))) + given.abs().sum(0)
        if name not in inputs or inputs[name].size(0) < KEPT_TOKENS:
            inputs[name] = torch.cat([inputs[name], given])[:KEPT_TOKENS] if name in inputs else given[:KEPT_TOKENS]

    layer.see_inputs(see)
    changed: dict[str, Changed] = {}
    for norm, readers in layer.norms().items():
        mean = sums[readers[0]].clamp_min(LEAST)
        mean = mean / (mean.max() * mean.min()).sqrt()
        weights = [layer.linears[name].weight.float() for name in readers]
        given = inputs[readers[0]]
        wanted = [given @ weight.t() for weight in weights]
        least = float("inf")
        best = torch.ones_like(mean)
        for step in range(SEARCHED):
            scale = mean ** (step / SEARCHED)
            error = sum(
                float((((given / scale) @ work.scheme.rounded(weight * scale).t()) - product).square().sum())
                for weight, product in zip(weights, wanted, strict=True)
            )
            if error < least:
                least, best = error, scale
        changed |= _moved(layer, norm, readers, best)
    return changed


def _moved(layer: _LayerPass, norm: str, readers: Sequence[str], scale: torch.Tensor) -> dict[str, Changed]:
    """Divide a norm's output by a scale [channels], and multiply the columns of the matrices that read it.

    Raises:
        UserError: the norm does not multiply its result by its weight, nor by one more than it.
    """
    module = layer.module(norm)
    sample = torch.randn(4, scale.numel(), generator=torch.Generator().manual_seed(0)).to(module.weight.dtype)
    before = module(sample).float()
    weight = module.weight.float()
    bias = getattr(module, "bias", None)
    offset = None if bias is None else bias.float() / scale
    for value in (weight / scale, (1 + weight) / scale - 1):  # the latter in Gemma's norms
        module.weight.copy_(value)
        if bias is not None:
            bias.copy_(offset)
        after = module(sample).float() * scale
        if float((after - before).abs().max()) <= 0.02 * float(before.abs().max()):
            break
    else:
        raise UserError(
            f"{norm} has the type {type(module).__name__}",
            where="--method",
            rule="scales can only be moved into a norm that multiplies its output by a weight",
            fix="--method gptq",
        )
    changed = {f"{norm}.weight": Changed(module.weight.detach().clone())}
    if bias is not None:
        changed[f"{norm}.bias"] = Changed(bias.detach().clone())
    for name in readers:
        matrix = layer.linears[name].weight
        matrix.copy_((matrix.float() * scale).to(matrix.dtype))
        changed[name] = Changed(matrix.detach())
    return changed


def _gptq(layer: _LayerPass, work: CalibrationData) -> dict[str, Changed]:
    """Round a column at a time, and change those behind it so that the products with the inputs stay.

    Linear layers with the same input share their Hessian in the mathematics, not in memory: one layer's are held. An
    expert that no token visits is not changed.
    """
    hessians: dict[str, torch.Tensor] = {}
    layer.see_inputs(partial(add_inputs, hessians))
    changed: dict[str, Changed] = {}
    for name, linear in layer.linears.items():
        if name not in hessians:
            continue
        weight, scale = gptq(linear.weight.float(), hessians.pop(name), work.scheme, work.dtype or linear.weight.dtype)
        linear.weight.copy_(weight.to(linear.weight.dtype))
        changed[name] = Changed(weight.to(linear.weight.dtype), scale)
    for name, place in layer.experts.items():
        if place.inputs not in hessians:
            continue
        block, _, last = place.parameter.rpartition(".")
        matrix = getattr(layer.module(block), last)[place.expert, place.first : place.first + place.rows]
        # Copied: gate and up have one, and it is overwritten.
        weight, scale = gptq(matrix.float(), hessians[place.inputs].clone(), work.scheme, work.dtype or matrix.dtype)
        matrix.copy_(weight.to(matrix.dtype))
        changed[name] = Changed(weight.to(matrix.dtype), scale)
    return changed


def gptq(
    weight: torch.Tensor, hessian: torch.Tensor, scheme: Scheme, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a matrix so that its products with the inputs change little (arXiv 2210.17323, algorithm 1).

    Args:
        weight: [out, in], fp32; unchanged.
        hessian: [in, in] sum of the outer products of the inputs; it is overwritten.
        scheme: scheme of integers.
        dtype: that scales have in the file.

    Returns:
        The rounded matrix [out, in] and its scales [out, groups].
    """
    weight = weight.clone()
    lowest, highest = integers.bounds(scheme.kind.bits)
    columns = weight.size(1)
    group = scheme.group or columns
    inverse = inverse_factor(hessian, weight)
    rounded = torch.empty_like(weight)

    def scale_of(values: torch.Tensor) -> torch.Tensor:
        return scheme.scale(values).to(dtype).float()

    scales = [scale_of(weight)] if scheme.group is None else []
    for start in range(0, columns, BLOCK):
        end = min(start + BLOCK, columns)
        errors = torch.zeros(weight.size(0), end - start)
        for column in range(start, end):
            if scheme.group is not None and column % group == 0:
                # With what the columns before have moved here in this block too.
                scales.append(scale_of(weight[:, column : column + group]))
            scale = scales[-1][:, 0]
            value = (weight[:, column] / scale).round().clamp(lowest, highest) * scale
            rounded[:, column] = value
            error = (weight[:, column] - value) / inverse[column, column]
            weight[:, column:end] -= error[:, None] * inverse[column, column:end]
            errors[:, column - start] = error
        weight[:, end:] -= errors @ inverse[start:end, end:]
    return rounded, torch.cat(scales, dim=1)
