"""CUDA graphs (`layout.cuda_graph_impl`): what they need of a recipe and of a machine, and what of a layer they cover.

TransformerEngine records the kernels of each layer once, after some steps, and the GPU starts them without the host.
What is recorded keeps its place in memory and its shape. Everything outside of layers (embedding, loss, gradients'
reduction, update) and every evaluation runs as without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.engines import MEGATRON, engine_name
from llmrecipes.recipe.schema import Recipe

if TYPE_CHECKING:
    from llmrecipes.recipe.speedups.features import Default, SpeedTarget

VERSION = (2, 7)
"""Of TransformerEngine: the first that lets graphs of a stage share the buffers between them, which the plan counts."""
WARMUP_STEPS = 3
"""megatron-core's steps without graphs."""


@dataclass(frozen=True)
class GraphKey:
    """A key of `speed` that belongs to CUDA graphs; attributes as in `features.Feature`."""

    field: str
    gain: str
    recipe: Callable[[Recipe], str | None]
    default: Callable[[Recipe, SpeedTarget], Default]


def covered(recipe: Recipe) -> frozenset[str]:
    """Parts of layers that graphs have: `attn`, `mlp` (of layers without experts)."""
    if recipe.layout.cuda_graph_impl is None:
        return frozenset()
    unset = ("attn",) if recipe.model.num_moe_experts else ("attn", "mlp")
    return frozenset(recipe.layout.cuda_graph_modules or unset)


def not_recomputed(recipe: Recipe) -> frozenset[str]:
    """Modules of `layout.recompute_modules` that graphs rule out.

    megatron-core recomputes them by checkpoints, which run a forward pass inside the backward pass, and refuse
    `torch.autograd.grad`, with which versions of TransformerEngine record; no GPU has recorded one. The others only
    discard their outputs.
    """
    parts = covered(recipe)
    return frozenset(name for name, part in {"core_attn": "attn", "mlp": "mlp"}.items() if part in parts)


_OTHERS = {
    "local": "its captured graphs also run in evaluation, as in training and for a single sequence length only",
    "full_iteration": "it captures all passes of a step at once, but these copy every micro-batch from host memory",
}


def _implementation(recipe: Recipe) -> str | None:
    layout, train = recipe.layout, recipe.train
    if engine_name(recipe) != MEGATRON:
        return "needs the engine megatron"
    if (other := _OTHERS.get(layout.cuda_graph_impl or "")) is not None:
        return other
    if train.precision == "fp32":
        return "TransformerEngine's layers need bf16 or fp16 (precision)"
    if recipe.layout.recompute_granularity == "full":
        return "layers that are recomputed as a whole cannot be captured (recompute_granularity full)"
    if again := not_recomputed(recipe) & set(recipe.layout.recompute_modules or ()):
        return f"a captured part of a layer cannot be recomputed (recompute_modules {', '.join(sorted(again))})"
    if recipe.layout.torch_compile:
        return "compiled layers cannot be captured (torch_compile)"
    if recipe.lora is not None:
        return "layers with adapters cannot be captured (lora)"
    if recipe.train.freeze:
        return "layers with frozen weights cannot be captured (train.freeze)"
    if recipe.data.chat is not None and recipe.data.chat.packing:
        return (
            "packed conversations have different boundaries in every micro-batch, but a graph has one shape (data.chat)"
        )
    if layout.overlap_moe_expert_parallel_comm:
        return "overlap_moe_expert_parallel_comm runs the parts of a layer in a different order"
    return None


def _modules(recipe: Recipe) -> str | None:
    layout = recipe.layout
    s = shape(recipe.model)
    if layout.cuda_graph_impl is None:
        return "only used with cuda_graph_impl"
    if routed := sorted(name for name in layout.cuda_graph_modules or () if name.startswith("moe")):
        return (
            f"{', '.join(routed)}: the number of tokens per expert varies, and the balance of experts is "
            "counted in the router's Python code, which a graph skips"
        )
    if "mlp" in (layout.cuda_graph_modules or ()) and s.moe_layers(0, s.num_layers) == s.num_layers:
        return "mlp captures dense layers only, but all layers have experts"
    return None


def _steps(recipe: Recipe) -> str | None:
    return "only used with cuda_graph_impl" if recipe.layout.cuda_graph_impl is None else None


def _by_name(_recipe: Recipe, _target: SpeedTarget) -> Default:
    return None, "off unless set: untested on GPUs, and every layer keeps its buffers between steps"


def _whole(recipe: Recipe, _target: SpeedTarget) -> Default:
    if recipe.model.num_moe_experts:
        return ("attn",), "the number of tokens per expert varies"
    return None, "whole layers"


def _few(_recipe: Recipe, _target: SpeedTarget) -> Default:
    return WARMUP_STEPS, "megatron-core's"


GRAPHS: Mapping[str, GraphKey] = {
    "cuda_graph_impl": GraphKey(
        "TransformerConfig.cuda_graph_impl",
        "hides kernel launch time: most with small layers, nothing where the GPU is the bottleneck "
        "anyway",
        _implementation, _by_name,
    ),
    "cuda_graph_modules": GraphKey(
        "TransformerConfig.cuda_graph_modules", "less memory than capturing whole layers", _modules, _whole,
    ),
    "cuda_graph_warmup_steps": GraphKey(
        "TransformerConfig.cuda_graph_warmup_steps", "no gain: steps before graphs are captured", _steps, _few,
    ),
}  # fmt: skip
"""Keys of `speed` by name."""
