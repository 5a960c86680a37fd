"""QK-clip scales the queries and keys of heads whose logits were too large, as its paper says, and nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from llmrecipes.engine.parts.qk_clip import scale_rows
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Recipe
from tests.helpers import LLAMA, engine_of, random_batches, steps, tiny
from tests.refusals import refused

MLA = {
    "position_embedding_type": "rope", "multi_latent_attention": True, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16, "normalization": "RMSNorm",
    "add_bias_linear": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {"heads": {}, "groups": {**LLAMA, "add_qkv_bias": True}, "latent": MLA}
ALPHA, THRESHOLD = 0.3, 0.4
UPDATES = ["distributed", "adam", "muon"]


def recipe(
    model: str, *, clips: bool, update: str = "distributed", precision: str = "fp32", lr: float = 1e-2
) -> Recipe:
    sharded = update == "distributed"
    clip = {"qk_clip": True, "qk_clip_alpha": ALPHA, "qk_clip_threshold": THRESHOLD} if clips else {}
    return tiny(
        model={**MODELS[model], "init_method_std": 0.1},
        optimizer={"lr": lr, "optimizer": "adam" if sharded else update, **clip},
        scheduler={"lr_decay_style": "constant"},
        layout={"use_distributed_optimizer": sharded},
        train={"precision": precision, "global_batch_size": 4},
    )


def logits_of(engine: Any) -> list[torch.Tensor]:
    """Receives the largest logit of each head of each layer, over the passes that follow."""
    found = [torch.full((4,), -math.inf) for _ in engine.modules[0].decoder.layers]

    def see(number: int, inputs: Any) -> None:
        query, key = (tensor.detach().float() for tensor in inputs[:2])
        key = key.repeat_interleave(query.size(2) // key.size(2), dim=2)
        scores = torch.einsum("qbhc,kbhc->bhqk", query, key) / math.sqrt(query.size(-1))
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        found[number] = torch.maximum(found[number], scores.masked_fill(~seen, -math.inf).amax((0, 2, 3)))

    for number, layer in enumerate(engine.modules[0].decoder.layers):
        layer.self_attention.core_attention.register_forward_pre_hook(lambda _, inputs, n=number: see(n, inputs))
    return found


def by_hand(model: str, name: str, weight: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """A weight or bias of attention after the scaling of its rows."""
    made = weight.clone()
    eta = (THRESHOLD / logits).clamp(max=1.0)
    if model == "latent":
        for head, factor in enumerate(eta.tolist()):
            if "linear_q_up_proj" in name:
                made[24 * head : 24 * head + 16] *= factor**ALPHA
                made[24 * head + 16 : 24 * head + 24] *= factor
            elif "linear_kv_up_proj" in name:
                made[32 * head : 32 * head + 16] *= factor ** (1 - ALPHA)
        return made
    if "linear_qkv" not in name or "layer_norm" in name:
        return made
    shared = 2 if model == "groups" else 1
    for group, factor in enumerate(eta.view(-1, shared).amin(1).tolist()):
        start = group * 16 * (shared + 2)
        made[start : start + 16 * shared] *= factor**ALPHA
        made[start + 16 * shared : start + 16 * (shared + 1)] *= factor ** (1 - ALPHA)
    return made


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("model", MODELS)
def test_weights_after_an_update_are_scaled_as_the_paper_says(model: str, update: str) -> None:
    plain, clipping = (recipe(model, clips=clips, update=update) for clips in (False, True))
    updated, clipped = engine_of(plain), engine_of(clipping)
    logits = logits_of(updated)
    steps(updated, 1, random_batches(plain))
    steps(clipped, 1, random_batches(clipping))
    assert all((logit > THRESHOLD).any() for logit in logits)
    changed = 0
    expected = dict(updated.modules[0].named_parameters())
    for name, found in clipped.modules[0].named_parameters():
        layer = name.removeprefix("decoder.layers.").partition(".")[0]
        weight = expected[name].detach()
        if "self_attention" in name:
            weight = by_hand(model, name, weight, logits[int(layer)])
        changed += not torch.equal(weight, expected[name])
        torch.testing.assert_close(found.detach(), weight, rtol=1e-5, atol=1e-7, msg=name)
    assert changed == {"heads": 4, "groups": 4, "latent": 4}[model]
    updated.close()
    clipped.close()


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_tokens_then_have_the_threshold_as_their_largest_logit(precision: str) -> None:
    chosen = recipe("heads", clips=True, precision=precision, lr=1e-12)
    engine = engine_of(chosen)
    batches = list(random_batches(chosen))[: chosen.train.global_batch_size // 2]
    logits = logits_of(engine)
    steps(engine, 1, iter(batches))
    first = logits[0].clone()
    logits[0].fill_(-math.inf)
    steps(engine, 1, iter(batches))
    expected = first.clamp(max=THRESHOLD)  # what the first layer attends to does not depend on attention
    assert (first > THRESHOLD).any()
    torch.testing.assert_close(logits[0], expected, rtol=1e-5 if precision == "fp32" else 2e-2, atol=1e-6)
    engine.close()


@pytest.mark.parametrize("begin", range(9))
@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 12])
def test_a_range_of_a_matrix_has_the_factors_of_its_rows(begin: int, length: int) -> None:
    matrix, factors = torch.arange(1.0, 25.0).view(6, 4), torch.arange(2.0, 8.0)
    flat = matrix.flatten()[begin : begin + length].clone()
    scale_rows(flat, factors, 4, begin)
    assert torch.equal(flat, (matrix * factors[:, None]).flatten()[begin : begin + length])


@pytest.mark.parametrize(
    ("key", "keys"),
    [
        ("optimizer.qk_clip_threshold", ["optimizer.qk_clip_threshold=50"]),
        ("optimizer.qk_clip_alpha", ["optimizer.qk_clip=true", "optimizer.qk_clip_alpha=1.5"]),
        ("optimizer.qk_clip", ["optimizer.qk_clip=true", "layout.engine=deepspeed", "layout.zero={stage: 1}"]),
        ("lora", ["optimizer.qk_clip=true", "lora={rank: 4, alpha: 8}"]),
        ("model.qk_layernorm", ["optimizer.qk_clip=true", "model.qk_layernorm=true"]),
        ("layout.torch_compile", ["optimizer.qk_clip=true", "layout.torch_compile=true"]),
    ],
)
def test_what_it_does_not_go_with_is_refused(key: str, keys: list[str]) -> None:
    with refused(key):
        load("gpt-tiny", keys)
