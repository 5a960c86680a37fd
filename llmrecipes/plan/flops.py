"""Model FLOPs of training, the numerator of MFU."""

from __future__ import annotations

from llmrecipes.plan.shape import shape
from llmrecipes.recipe.schema import Model


def flops_per_token(model: Model, *, causal: bool) -> float:
    """FLOPs of one forward and one backward pass for one token, matrix products only (a multiply-add is two).

    The backward pass costs twice the forward pass; recomputation is not counted. For the classic GPT shape with
    `causal=False` this is 72 l h² (1 + s / 6h + V / 12lh), equation 3 of Narayanan et al. 2021 (arXiv 2104.04473)
    without its recomputed forward pass. `causal=True` halves the two attention products, as a causal kernel does.
    """
    s = shape(model)
    h, ffn, query, key = s.hidden_size, s.ffn_hidden_size, s.query_size, s.key_size
    projections = h * (query + 2 * key) + query * h
    mlp = h * ffn * (3 if model.gated_linear_unit else 2)
    attention = 2.0 * s.seq_length * query  # scores and weighted values, over all positions
    if causal:
        attention /= 2
    forward = 2 * (s.num_layers * (projections + mlp + attention) + h * s.vocab_size)
    return 3.0 * forward
