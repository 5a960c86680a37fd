"""What the kernels of a device keep for the backward pass, and what of it a recipe recomputes there."""

from __future__ import annotations

from llmrecipes.hardware.cluster import Cluster
from llmrecipes.plan.layout import Layout, expected_layers
from llmrecipes.plan.machine_features import expected
from llmrecipes.recipe.derived.shape import Shape
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.speedups.features import value_of


def own_layers(recipe: Recipe, device: str) -> bool:
    """Whether layers are megatron-core's own, with our attention: on a CPU, and with some adapters everywhere."""
    return device == "cpu" or (recipe.lora is not None and not expected_layers(recipe, device)[0])


def keeps_scores(recipe: Recipe, s: Shape, device: str) -> bool:
    """Whether core attention keeps the score matrix of each head, so that recomputing it saves memory.

    Fused kernels (torch's, TransformerEngine's) keep the log-sum-exp of each row and recompute the scores themselves.
    On a CPU torch has none with dropout or sinks, or if keys and values differ in width; TransformerEngine's are not
    used with `layout.attention_backend: unfused`.
    """
    if device == "cuda":
        return recipe.layout.attention_backend == "unfused" and not own_layers(recipe, device)
    if recipe.model.softmax_type != "vanilla":
        return True
    return recipe.model.attention_dropout > 0 or s.query_channels != s.value_channels


_SOFTMAX_KEYS = range(17, 16384)
"""Keys of a row for which TransformerEngine 2.20 has a kernel of the softmax in 16 bits (`FusedScaleMaskSoftmax`)."""


def kept_of_a_row(recipe: Recipe, s: Shape, layout: Layout, device: str) -> float:
    """Bytes that attention on a GPU keeps of each row of each head's scores: the log-sum-exp of a fused kernel in fp32,
    or of all keys the softmax, which is an input of the product with the values too.

    Where that has no kernel in 16 bits, the softmax is in fp32, and the product has a copy of it. Dropout keeps a mask
    of one byte, and its result.
    """
    if not keeps_scores(recipe, s, device):
        return 4.0
    element = 4 if recipe.train.precision == "fp32" else 2
    keys = recipe.model.seq_length
    matrices = recipe.layout.micro_batch_size * s.num_attention_heads // layout.tensor_model_parallel_size
    in_kernel = element == 2 and keys in _SOFTMAX_KEYS and keys % 8 == 0 and matrices % 4 == 0
    kept = element if in_kernel or element == 4 else 4 + element
    return float(keys * (kept + (1 + element if recipe.model.attention_dropout else 0)))


WIDEST_HEAD, STEP_OF_HEADS = 256, 8
"""Channels up to which FlashAttention has kernels, and what their number is a multiple of."""


def attends_by_boundaries(recipe: Recipe, s: Shape, device: str) -> bool:
    """Whether packed conversations are attended to one by one, by where each begins; else a mask keeps them apart.

    On a GPU by torch's attention of variable length: FlashAttention, without dropout. On a CPU each by itself, for
    which compiled layers would have to be compiled again and again.
    """
    if device == "cpu":
        return not recipe.layout.torch_compile
    return (
        recipe.train.precision != "fp32"
        and not recipe.model.attention_dropout
        and s.query_channels == s.value_channels <= WIDEST_HEAD
        and s.query_channels % STEP_OF_HEADS == 0
    )


def mask_per_token(recipe: Recipe, s: Shape, device: str) -> int:
    """Bytes per token of the mask that keeps packed conversations apart, which all layers share: one for each token of
    the sequence. 0 where there is none."""
    chat = recipe.data.chat
    packed = chat is not None and chat.packing
    return recipe.model.seq_length if packed and not attends_by_boundaries(recipe, s, device) else 0


def copies_keys(recipe: Recipe, s: Shape, device: str) -> bool:
    """Whether keys and values of groups are copied for each query: with such a mask, and by unfused attention."""
    copied = mask_per_token(recipe, s, device) > 0 or (device == "cuda" and keeps_scores(recipe, s, device))
    return copied and s.num_query_groups < s.num_attention_heads


def keeps_gathered(recipe: Recipe, device: str) -> bool:
    """Whether shared experts keep the tokens of all tensor-parallel ranks, which beside the all-to-all they gather
    apart from their product, instead of gathering them once more."""
    return bool(value_of("moe_shared_expert_overlap", recipe, expected(recipe, device)))


def modules(recipe: Recipe, s: Shape, device: str) -> tuple[str, ...]:
    """Modules of each layer that are recomputed: those of the recipe that have an effect on a device.

    Core attention only where its kernel keeps scores. TransformerEngine has a norm of its own before latent attention
    and before experts only, and only it has an activation of experts by itself.
    """
    if recipe.layout.recompute_granularity != "selective":
        return ()
    layers = own_layers(recipe, device)
    without = {
        "core_attn": not keeps_scores(recipe, s, device),
        "layernorm": not layers and not recipe.model.multi_latent_attention and not s.num_moe_experts,
        "moe_act": layers,
    }
    return tuple(name for name in recipe.layout.recompute_modules or ("core_attn",) if not without.get(name, False))


def recompute_granularity(recipe: Recipe, s: Shape, device: str) -> str | None:
    """What is recomputed: as in the recipe, but nothing if no module of `selective` has an effect."""
    wanted = recipe.layout.recompute_granularity
    return None if wanted == "selective" and not modules(recipe, s, device) else wanted


def recomputed_layers(recipe: Recipe, layers: int) -> int:
    """Layers of a chunk whose whole forward pass is repeated in the backward pass: its first ones."""
    if recipe.layout.recompute_granularity != "full" or not recipe.layout.recompute_num_layers:
        return 0
    return layers if recipe.layout.recompute_method == "uniform" else min(recipe.layout.recompute_num_layers, layers)


def emulated_bf16(recipe: Recipe, cluster: Cluster) -> tuple[str, ...]:
    """A warning if the run would multiply in bf16 on a CPU that only emulates it."""
    if cluster.device != "cpu" or cluster.cpu_has_bf16:
        return ()
    optimizer = recipe.optimizer
    cpu = "on this CPU, which has no bf16 instructions"
    if recipe.train.precision == "bf16":
        return (f"train.precision bf16 is several times slower than fp32 {cpu}",)
    if optimizer.optimizer == "muon" and optimizer.muon_fp32_matmul_prec == "medium":
        return (f"optimizer.muon_fp32_matmul_prec medium is several times slower than highest {cpu}",)
    return ()


def idle_modules(recipe: Recipe, recomputed: tuple[str, ...]) -> tuple[str, ...]:
    """A warning if the recipe recomputes modules for which this has no effect.

    Args:
        recomputed: those of the recipe that have an effect, see `modules`.
    """
    if recipe.layout.recompute_granularity != "selective":
        return ()
    reasons = {
        "core_attn": "the attention kernel stores no scores and recomputes them itself",
        "layernorm": "norms are fused with the next GEMM",
        "moe_act": "only TransformerEngine's layers compute the activation of experts separately",
    }
    wanted = recipe.layout.recompute_modules or ("core_attn",)
    idle = [f"{name} ({reasons[name]})" for name in wanted if name not in recomputed]
    return (f"layout.recompute_modules has no effect for {', '.join(idle)}",) if idle else ()
