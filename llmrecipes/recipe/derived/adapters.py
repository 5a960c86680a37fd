"""Which matrices of a model have adapters, with their sizes, and the rules of the section `lora`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmrecipes.recipe.derived.shape import Shape, shape
from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.engines import DEEPSPEED, engine_name
from llmrecipes.recipe.schema import Lora, Model, Recipe

EXPERTS = "experts."
"""In front of the names of matrices of routed experts."""


@dataclass(frozen=True)
class Matrix:
    """A weight matrix of a layer.

    `width` is that of its input, `height` that of its output; `by_columns` says whether tensor-parallel ranks share its
    output, or else its input.
    """

    name: str
    width: int
    height: int
    by_columns: bool

    @property
    def of_experts(self) -> bool:
        """Whether each routed expert has one."""
        return self.name.startswith(EXPERTS)


def matrices(model: Model, s: Shape, *, experts: bool) -> Iterator[Matrix]:
    """Matrices of a layer that can have adapters."""
    h = s.hidden_size
    if model.multi_latent_attention:
        latent = model.kv_lora_rank
        heads = s.num_attention_heads
        if model.q_lora_rank:
            yield Matrix("linear_q_down_proj", h, model.q_lora_rank, True)
            yield Matrix("linear_q_up_proj", model.q_lora_rank, s.query_size, True)
        else:
            yield Matrix("linear_q_proj", h, s.query_size, True)
        yield Matrix("linear_kv_down_proj", h, latent + model.qk_pos_emb_head_dim, True)
        yield Matrix("linear_kv_up_proj", latent, heads * (model.qk_head_dim + model.v_head_dim), True)
    else:
        yield Matrix("linear_qkv", h, s.query_size + s.key_size + s.value_size, True)
    yield Matrix("linear_proj", s.context_size, h, False)
    halves = 2 if model.gated_linear_unit else 1
    if not experts:
        yield from _mlp("", h, s.ffn_hidden_size, halves)
        return
    if s.moe_shared_ffn_hidden_size:
        yield from _mlp("", h, s.moe_shared_ffn_hidden_size, halves)
    yield from _mlp(EXPERTS, h, s.moe_ffn_hidden_size, halves)


def _mlp(prefix: str, h: int, width: int, halves: int) -> Iterator[Matrix]:
    yield Matrix(f"{prefix}linear_fc1", h, halves * width, True)
    yield Matrix(f"{prefix}linear_fc2", width, h, False)


def adapted(lora: Lora, model: Model, s: Shape, *, experts: bool) -> list[Matrix]:
    """Matrices of a layer that have adapters."""
    return [matrix for matrix in matrices(model, s, experts=experts) if is_target(lora, matrix.name)]


def is_target(lora: Lora, name: str) -> bool:
    """Whether the matrices of a name have adapters."""
    if lora.target_modules is None:
        return not name.startswith(EXPERTS)
    return name in lora.target_modules


def needs_local_layers(recipe: Recipe) -> str | None:
    """Why adapters are inserted into megatron-core's own layers; None if TransformerEngine's can have them.

    Those have the matrices of all experts in one module, and latent attention's down-projections whole on each rank.
    """
    lora, model = recipe.lora, recipe.model
    if lora is None:
        return None
    if model.multi_latent_attention:
        return "adapters of latent attention need megatron-core's own layers"
    if any(name.startswith(EXPERTS) for name in lora.target_modules or ()):
        return "adapters of routed experts need megatron-core's own layers"
    return None


def rules(recipe: Recipe) -> Iterator[Problem]:
    """What adapters go with."""
    lora = recipe.lora
    if lora is None:
        return
    yield from _targets(lora, recipe.model)
    yield from _combinations(recipe)


def _targets(lora: Lora, model: Model) -> Iterator[Problem]:
    s = shape(model)
    kinds = {s.moe_layers(number, number + 1) > 0 for number in range(s.num_layers)}
    known = {matrix.name: matrix for experts in kinds for matrix in matrices(model, s, experts=experts)}
    for index, name in enumerate(lora.target_modules or ()):
        if name not in known:
            yield Problem(
                f"lora.target_modules.{index}",
                f"{name} is not a matrix of this model",
                "adapters must target matrices of the model",
                f"one of {', '.join(known)}",
            )
        elif name in (lora.target_modules or ())[:index]:
            yield Problem(
                f"lora.target_modules.{index}",
                f"{name} appears twice",
                "a matrix can have only one adapter",
                "remove one of them",
            )
    sides = {
        min(matrix.width, matrix.height): matrix.name
        for experts in kinds
        for matrix in matrices(model, s, experts=experts)
        if is_target(lora, matrix.name)
    }
    if sides and lora.rank > (least := min(sides)):
        yield Problem(
            "lora.rank",
            f"{lora.rank} for {sides[least]}, whose shorter side is {least}",
            "rank must be at most the shorter side of every adapted matrix: beyond it, A and B have more parameters "
            "than the "
            "matrix",
            f"lora.rank {least} or less, or target_modules without {sides[least]}",
        )


def _combinations(recipe: Recipe) -> Iterator[Problem]:
    model = recipe.model
    obstacles = {
        "layout.engine": (
            engine_name(recipe) == DEEPSPEED,
            "deepspeed with lora",
            "adapters need the engine megatron: frozen weights have no gradients and no optimizer state for ZeRO "
            "to shard",
            "engine megatron without layout.zero.stage 2, 3 and offload",
        ),
        "model.mtp_num_layers": (
            model.mtp_num_layers is not None,
            f"{model.mtp_num_layers} with lora",
            "only the decoder's layers have adapters; frozen multi-token prediction layers would not adapt to them",
            "model.mtp_num_layers null",
        ),
        "train.keep_zeros": (
            recipe.train.keep_zeros,
            "true with lora",
            "keep_zeros would keep the adapters at zero, and the weights below them are frozen",
            "train.keep_zeros false",
        ),
        "model.use_mup": (
            model.use_mup,
            "true with lora",
            "the maximal-update parametrisation does not define learning rates for adapters",
            "model.use_mup false",
        ),
        "model.transformer_impl": (
            model.transformer_impl == "transformer_engine" and needs_local_layers(recipe) is not None,
            "transformer_engine with lora",
            f"{needs_local_layers(recipe)}",
            "model.transformer_impl auto or local",
        ),
    }
    for key, (wrong, what, rule, fix) in obstacles.items():
        if wrong:
            yield Problem(key, what, rule, fix)
