"""Ten tiny models: their losses, gradients and weights in a few figures, compared with those of a CPU."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypedDict

import torch

from llmrecipes.bench.measure import random_tokens
from llmrecipes.engine.backends import backend
from llmrecipes.engine.base import Slice
from llmrecipes.hardware.cluster import detect
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.schema import Recipe

STEPS = 3
GOLDENS = Path(__file__).with_name("goldens.json")
LIMITS = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 1e-2}
"""Largest relative difference between devices. A GPU sums in another order; in bf16 it also rounds in other places."""

_BASE: dict[str, dict[str, Any]] = {
    "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "vocab_size": 512},
    "train": {"train_iters": STEPS, "global_batch_size": 4, "precision": "fp32"},
    # With a small epsilon Adam makes a full step of a gradient that is nothing but rounding.
    "optimizer": {"lr": 1e-2, "adam_eps": 1e-2},
    "scheduler": {"lr_decay_style": "constant"},
    "layout": {"micro_batch_size": 2},
}
_LLAMA = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "activation_func": "silu",
    "gated_linear_unit": True, "ffn_hidden_size": 96, "add_bias_linear": False, "num_query_groups": 2,
    "share_embeddings_and_output_weights": False,
}  # fmt: skip
_QWEN = {**_LLAMA, "qk_layernorm": True, "add_qkv_bias": True}
_MOE = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64, "add_bias_linear": False}
_MLA = {
    "multi_latent_attention": True, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16, "qk_layernorm": True, "position_embedding_type": "rope", "normalization": "RMSNorm",
    "add_bias_linear": False,
}  # fmt: skip
_DEEPSEEK = {
    **_LLAMA, **_MOE, **_MLA, "num_query_groups": None, "moe_layer_freq": [0, 1],
    "moe_shared_expert_intermediate_size": 64, "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "none", "moe_router_enable_expert_bias": True,
}  # fmt: skip

# Without multi-token prediction, whose gradients changed with megatron-core 0.19 (by 1.6 %).
MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "gpt": {},
    "gpt bf16": {"train": {"precision": "bf16"}},
    "llama": {"model": _LLAMA},
    "llama bf16": {"model": _LLAMA, "train": {"precision": "bf16"}},
    "qwen": {"model": _QWEN},
    "llama lora": {"model": _LLAMA, "lora": {"rank": 4, "alpha": 16.0}},
    "mixtral": {"model": {**_LLAMA, **_MOE, "moe_aux_loss_coeff": 0.1}},
    "mla": {"model": _MLA},
    "deepseek": {"model": _DEEPSEEK},
    "gpt mup": {"model": {"use_mup": True, "mup_base_hidden_size": 16, "mup_base_head_dim": 4.0}},
}


class Figures(TypedDict):
    """A training in figures. Of a tensor: its norm, and its projection on a fixed direction of norm 1."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, tuple[float, float]]
    """Of the first step; in fp32 only."""
    weights: dict[str, tuple[float, float]]
    """After the last step."""


def recipe_of(name: str) -> Recipe:
    """Recipe of one of `MODELS`."""
    overrides = MODELS[name]
    merged = {key: {**_BASE.get(key, {}), **overrides.get(key, {})} for key in _BASE.keys() | overrides.keys()}
    return Recipe.model_validate({"name": name.replace(" ", "-"), **merged})


def train(recipe: Recipe) -> Figures:
    """Train on the device of this process, in a world of one."""
    engines = backend(recipe)
    platform = engines.platform()
    seen: list[list[Slice]] = []
    with engines.join(recipe, platform) as world:
        engine = engines.build(derive(recipe, world.size, detect()), platform)
        if recipe.train.precision == "fp32":  # others have no slices of gradients
            engine.watch_gradients(lambda _weights, gradients: seen.append(gradients) if not seen else None)
        batches = random_tokens(recipe, 0)
        steps = [engine.train_step(batches) for _ in range(STEPS)]
        with engine.params_synced():
            weights = figures(engine.weights())
        engine.close()
    return {
        "losses": [step.loss for step in steps],
        "norms": [math.nan if step.grad_norm is None else step.grad_norm for step in steps],
        "gradients": figures(seen[0]) if seen else {},
        "weights": weights,
    }


def figures(slices: Iterable[Slice]) -> dict[str, tuple[float, float]]:
    """Norm and projection of each tensor by name, and by offset where a process holds several parts."""
    return {
        part.name if not any(part.offset) else f"{part.name} {part.offset}": _figure(part.tensor) for part in slices
    }


def _figure(tensor: torch.Tensor) -> tuple[float, float]:
    flat = tensor.detach().double().cpu().flatten()
    # As cheap as a random direction, and the same with every version of torch.
    direction = torch.cos(torch.arange(1, flat.numel() + 1, dtype=torch.float64) ** 2 % 1009.0)
    return float(flat.norm()), float(flat @ (direction / direction.norm()))


def difference(got: Figures, golden: Figures) -> tuple[float, str]:
    """The largest relative difference, and where it is."""
    pairs: list[tuple[float, str]] = []
    for key in ("losses", "norms"):
        for number, (value, expected) in enumerate(zip(got[key], golden[key], strict=True), start=1):
            pairs.append((abs(value - expected) / abs(expected), f"{key[:-1]} of step {number}"))
    for key in ("gradients", "weights"):
        ours, theirs = got[key], golden[key]  # type: ignore[literal-required]
        if ours.keys() != theirs.keys():
            return math.inf, f"{key}: different tensors, {', '.join(sorted(ours.keys() ^ theirs.keys())[:4])}"
        # A gradient that is zero but for rounding is compared with the largest.
        scale = 1e-3 * max((norm for norm, _ in theirs.values()), default=0.0)
        for name, (norm, projection) in theirs.items():
            apart = max(abs(ours[name][0] - norm), abs(ours[name][1] - projection)) / max(norm, scale)
            pairs.append((apart, f"{key[:-1]} of {name}"))
    return max((math.inf if math.isnan(size) else size, where) for size, where in pairs)


def goldens() -> dict[str, Figures]:
    """The figures that a CPU has computed."""
    stored: dict[str, Figures] = json.loads(GOLDENS.read_text("utf-8"))
    return stored


def write_goldens() -> None:
    """Compute the goldens anew; on a CPU. `python -m lab.gpu_report.parity`."""
    lines = [f"{json.dumps(name)}: {json.dumps(_rounded(train(recipe_of(name))))}" for name in MODELS]
    GOLDENS.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(item) for item in value]


if __name__ == "__main__":
    write_goldens()
