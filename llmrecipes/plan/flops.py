"""Model FLOPs of training, the numerator of MFU."""

from __future__ import annotations

from llmrecipes.plan import adapters
from llmrecipes.recipe.lora import Lora
from llmrecipes.recipe.schema import Model
from llmrecipes.recipe.shape import Shape


def flops_per_token(model: Model, s: Shape, *, causal: bool, lora: Lora | None = None) -> float:
    """FLOPs of one forward and one backward pass for one token, matrix products only (a multiply-add is two).

    The backward pass costs twice the forward pass; recomputation is not counted. Of the experts, those that a token is
    routed to count; multi-token prediction counts, including its output layer. For the classic GPT shape with
    `causal=False` this is 72 l h² (1 + s / 6h + V / 12lh), equation 3 of Narayanan et al. 2021 (arXiv 2104.04473)
    without its recomputed forward pass. `causal=True` halves the two attention products, as a causal kernel does.
    With `lora` the frozen matrices have no gradient of their own, which is half of their backward pass.
    """
    h, depth = s.hidden_size, s.mtp_num_layers
    with_experts = s.moe_layers(0, s.num_layers) + s.mtp_moe_layers
    layers = s.num_layers + depth
    attention = float(s.seq_length * (s.query_size + s.context_size))  # scores and weighted values, over all positions
    if causal:
        attention /= 2
    products = 3 if model.gated_linear_unit else 2
    experts = h * (s.num_moe_experts + products * model.moe_router_topk * s.moe_ffn_hidden_size)
    experts += h * products * s.moe_shared_ffn_hidden_size
    forward = layers * _projections(model, s)
    forward += with_experts * experts + (layers - with_experts) * products * h * s.ffn_hidden_size
    forward += depth * 2 * h * h + (1 + depth) * h * s.vocab_size
    passes = 3.0 if lora is None else 2.0
    _, trained = adapters.count(lora, model, s)
    return 2.0 * (passes * forward + 3.0 * (layers * attention + trained))


def _projections(model: Model, s: Shape) -> int:
    """Multiply-adds of the products into and out of attention."""
    h, output = s.hidden_size, s.context_size * s.hidden_size
    if not model.multi_latent_attention:
        return h * (s.query_size + s.key_size + s.value_size) + output
    rank = model.kv_lora_rank
    keys = h * (rank + model.qk_pos_emb_head_dim) + rank * s.num_attention_heads * (
        model.qk_head_dim + model.v_head_dim
    )
    query = h * model.q_lora_rank + model.q_lora_rank * s.query_size if model.q_lora_rank else h * s.query_size
    return keys + query + output
