"""How much layers, neurons, heads, channels and experts of a model contribute on some text, in one process.

A forward pass with hooks; sums are kept in fp32 or wider, one number for each part, and no activations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from llmrecipes.engine.core.model.gpt import RecipeModel
from llmrecipes.engine.meters import Importance
from llmrecipes.recipe.derived.shape import Shape

LINEAR = re.compile(r"decoder\.layers\.\d+\..*\blinear_\w+")
"""Names of the matrices whose weights can be removed one by one, in a model that one process holds."""
MLP = ".linear_fc2"


@torch.no_grad()
def measure(module: RecipeModel, rows: Iterable[torch.Tensor], sizes: Shape, device: torch.device) -> Importance:
    """The importance of a model's parts on some text.

    Args:
        module: a whole model, of megatron-core's local layers.
        rows: batches [b, s] of token ids.
        sizes: of the model.
        device: of the model.

    Returns:
        Sums on the CPU.
    """
    importance = Importance(
        layers=torch.zeros(sizes.num_layers, dtype=torch.float64, device=device),
        hidden=torch.zeros(sizes.hidden_size, device=device),
    )
    training = module.training
    module.eval()
    try:
        with _watched(module, importance, sizes):
            for row in rows:
                tokens = row.to(device)
                places = torch.arange(tokens.size(1), device=device)[None].expand_as(tokens)
                module(tokens, places, None)
                importance.tokens += tokens.numel()
    finally:
        module.train(training)
    for sums in (importance.groups, importance.neurons, importance.experts, importance.inputs):
        for key, value in sums.items():
            sums[key] = value.cpu()  # type: ignore[index]
    importance.layers, importance.hidden = importance.layers.cpu(), importance.hidden.cpu()
    return importance


@contextmanager
def _watched(module: RecipeModel, importance: Importance, sizes: Shape) -> Iterator[None]:
    hooks = []
    norms = [module.decoder.final_layernorm]
    for number, layer in enumerate(module.decoder.layers):
        norms += [layer.input_layernorm, layer.pre_mlp_layernorm]
        hooks.append(layer.register_forward_hook(partial(_see_layer, importance, number), with_kwargs=True))
        projection = layer.self_attention.linear_proj
        hooks.append(
            projection.register_forward_pre_hook(partial(_see_heads, importance, number, sizes.num_query_groups))
        )
        if hasattr(layer.mlp, "router"):
            hooks.append(layer.mlp.router.register_forward_hook(partial(_see_router, importance, number)))
    hooks += [norm.register_forward_hook(partial(_see_norm, importance)) for norm in norms]
    for name, submodule in module.named_modules():
        if LINEAR.fullmatch(name) and getattr(submodule, "weight", None) is not None:
            hooks.append(submodule.register_forward_pre_hook(partial(_see_input, importance, name)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _see_layer(importance: Importance, number: int, _layer: Any, inputs: Any, options: Any, output: Any) -> None:
    before = inputs[0] if inputs else options["hidden_states"]
    after = output[0] if isinstance(output, tuple) else output
    importance.layers[number] += (1 - F.cosine_similarity(before.float(), after.float(), dim=-1)).double().sum()


def _see_heads(importance: Importance, number: int, groups: int, _layer: Any, inputs: Any) -> None:
    heads = inputs[0].reshape(-1, groups, inputs[0].size(-1) // groups).float()
    _add(importance.groups, number, heads.norm(dim=-1).sum(0))


def _see_router(importance: Importance, number: int, _router: Any, _inputs: Any, output: Any) -> None:
    probabilities = output[0]
    chosen = output[1]
    _add(importance.experts, number, (probabilities * chosen).float().reshape(-1, chosen.size(-1)).sum(0))


def _see_norm(importance: Importance, _norm: Any, _inputs: Any, output: torch.Tensor) -> None:
    importance.hidden += output.reshape(-1, output.size(-1)).float().abs().sum(0)


def _see_input(importance: Importance, name: str, _linear: Any, inputs: Any) -> None:
    rows = inputs[0].reshape(-1, inputs[0].size(-1)).float()
    _add(importance.inputs, name, rows.square().sum(0))
    if name.endswith(MLP):
        _add(importance.neurons, name.removesuffix(MLP), rows.abs().sum(0))


def _add(sums: dict[Any, torch.Tensor], key: Any, value: torch.Tensor) -> None:
    sums[key] = sums[key] + value if key in sums else value
