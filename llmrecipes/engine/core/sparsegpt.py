"""SparseGPT (arXiv 2301.00774): weights of a model are removed so that the products of its matrices stay, in one
process.

Layers are pruned one after another, with the states that those before them, already pruned, have made of the text. Of
states and Hessians those of one layer are held.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from llmrecipes.engine.core.hessians import BLOCK, add_inputs, first_states, inverse_factor
from llmrecipes.engine.core.importance import LINEAR
from llmrecipes.engine.core.model.gpt import RecipeModel
from llmrecipes.engine.meters import Sparsified
from llmrecipes.recipe.variants.pruned_models import PATTERNS, PruneOptions
from llmrecipes.tracking.progress import Counted


@torch.no_grad()
def sparsify(
    module: RecipeModel,
    batches: Sequence[torch.Tensor],
    options: PruneOptions,
    device: torch.device,
    progress: Counted | None = None,
) -> Sparsified:
    """Prune the matrices of a model's layers in place.

    Args:
        module: a whole model, of megatron-core's local layers.
        batches: [b, s] of token ids.
        options: share, or pattern.
        device: of the model.
        progress: shows how many layers are done.
    """
    module.eval()

    def run(batch: torch.Tensor) -> None:
        tokens = batch.to(device)
        module(tokens, torch.arange(tokens.size(1), device=device)[None].expand_as(tokens), None)

    made = Sparsified(tokens=sum(batch.numel() for batch in batches))
    layers = list(module.decoder.layers)
    states, arguments = first_states(run, layers, batches)
    if progress is not None:
        progress.begin("layers", len(layers))
    for number, layer in enumerate(layers):
        prefix = f"decoder.layers.{number}."
        matrices = {
            prefix + name: linear
            for name, linear in layer.named_modules()
            if LINEAR.fullmatch(prefix + name) and getattr(linear, "weight", None) is not None
        }
        hessians: dict[str, torch.Tensor] = {}
        hooks = [each.register_forward_pre_hook(partial(_see, hessians, name)) for name, each in matrices.items()]
        for state in states:
            layer(hidden_states=state, **arguments[number])
        for hook in hooks:
            hook.remove()
        for name, linear in matrices.items():
            # An expert that no token was routed to has no inputs: its weights are compared by their size.
            hessian = hessians.pop(name, None)
            if hessian is None:
                hessian = torch.eye(linear.weight.size(1), device=device)
            linear.weight.copy_(sparsegpt(linear.weight.float(), hessian, options))
            made.weights[f"{name}.weight"] = linear.weight.detach()
        states = [layer(hidden_states=state, **arguments[number])[0] for state in states]
        if progress is not None:
            progress.add(1)
    if progress is not None:
        progress.close()
    return made


def _see(hessians: dict[str, torch.Tensor], name: str, _linear: Any, inputs: Any) -> None:
    if inputs[0].numel():  # an expert may be called without tokens
        add_inputs(hessians, name, inputs[0].reshape(-1, inputs[0].size(-1)))


def sparsegpt(weight: torch.Tensor, hessian: torch.Tensor, options: PruneOptions) -> torch.Tensor:
    """A matrix with zeros, whose other weights make up for those that are gone (arXiv 2301.00774, algorithm 1).

    Weights of a block of columns are compared when those before it are done: w² over the square of the inverse
    Hessian's factor, over the whole block or with a pattern over neighbours in a row.

    Args:
        weight: [out, in], fp32; unchanged.
        hessian: [in, in] sum of the outer products of the inputs; it is overwritten.
        options: share, or pattern.
    """
    weight = weight.clone()
    factor = inverse_factor(hessian, weight)
    most = factor.diagonal().square()
    zeros, size = PATTERNS[options.pattern] if options.pattern is not None else (0, 1)
    columns = weight.size(1)
    for start in range(0, columns, BLOCK):
        end = min(start + BLOCK, columns)
        removed = torch.zeros_like(weight[:, start:end], dtype=torch.bool)
        if options.pattern is None:
            scores = weight[:, start:end].square() / most[start:end]
            removed = smallest(scores.reshape(1, -1), round((options.ratio or 0) * scores.numel())).view_as(scores)
        errors = torch.zeros_like(weight[:, start:end])
        for column in range(start, end):
            place = column - start
            if options.pattern is not None and column % size == 0:
                # With what the columns before have moved here in this block too.
                scores = weight[:, column : column + size].square() / most[column : column + size]
                removed[:, place : place + size] = smallest(scores, zeros)
            error = weight[:, column] * removed[:, place] / factor[column, column]
            weight[:, column:end] -= error[:, None] * factor[column, column:end]
            weight[removed[:, place], column] = 0  # exactly
            errors[:, place] = error
        weight[:, end:] -= errors @ factor[start:end, end:]
    return weight


def smallest(scores: torch.Tensor, number: int) -> torch.Tensor:
    """A mask of the `number` smallest of each row of scores; of equal ones the first."""
    order = scores.argsort(dim=-1, stable=True)[..., :number]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, value=True)
