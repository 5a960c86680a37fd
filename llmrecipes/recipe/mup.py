"""Maximal-update parametrisation (arXiv 2203.03466): the factors that follow from a model's keys, and their rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.schema import Model, Recipe
from llmrecipes.recipe.shape import shape


@dataclass(frozen=True)
class Mup:
    """Factors of a model, as megatron-core 0.19 computes them.

    With m = `width_mult`, hidden matrices start with a standard deviation of `init_method_std` / √m, and their learning
    rate and Adam's epsilon are divided by m. Embeddings, output layer, norms and biases keep theirs.
    """

    width_mult: float
    """`hidden_size` / `mup_base_hidden_size`."""
    embedding_mult: float
    """Factor of the embedding's output."""
    output_mult: float
    """Factor of the logits."""
    softmax_scale: float
    """Factor of attention scores."""


def mup(model: Model) -> Mup | None:
    """The factors of a model with `use_mup`; None without it."""
    if not model.use_mup:
        return None
    width = model.hidden_size / (model.mup_base_hidden_size or model.hidden_size)
    # megatron-core replaces the default, and only the default.
    output = 1.0 / width if model.mup_output_mult == 1.0 else model.mup_output_mult
    base = 1.0 if model.mup_base_head_dim is None else model.mup_base_head_dim**0.5
    return Mup(width, model.mup_embedding_mult, output, base / shape(model).kv_channels ** model.mup_attn_scale_power)


def rules(recipe: Recipe) -> Iterator[Problem]:
    """Keys of the parametrisation need it, and it needs what megatron-core can scale."""
    model = recipe.model
    if not model.use_mup:
        for name, field in Model.model_fields.items():
            if name.startswith("mup_") and getattr(model, name) != field.default:
                yield Problem(
                    f"model.{name}",
                    "set without use_mup",
                    f"{name} belongs to the maximal-update parametrisation",
                    f"model.use_mup true, or leave {name} out",
                )
        return
    if model.init_method != "normal":
        yield Problem(
            "model.init_method",
            f"{model.init_method} with use_mup",
            "the maximal-update parametrisation scales a standard deviation that is given at the base width",
            "init_method normal with init_method_std",
        )
    if model.multi_latent_attention:
        yield Problem(
            "model.use_mup",
            "true with multi_latent_attention",
            "megatron-core does not scale the scores of latent attention",
            "use_mup false, or multi_latent_attention false",
        )
