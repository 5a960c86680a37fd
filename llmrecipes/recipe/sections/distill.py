"""The section `distill`: a teacher whose predictions a run learns from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmrecipes.recipe.sections.only_with import OnlyWith
from llmrecipes.recipe.sections.section import EXECUTION, JsonObject, PosFloat, PosInt, Section

LayerPair = Annotated[tuple[PosInt, PosInt], Field(strict=False)]
"""Numbers of a layer of the student and of one of the teacher, from 1."""


class Distill(Section):
    """Knowledge distillation (arXiv 1503.02531): the loss is (1 - `alpha`) × cross entropy + `alpha` × the distance to
    the predictions of a frozen teacher, plus, with `layers`, a distance to its hidden states. The same ranks compute
    the teacher in the same layout. Validation losses include neither distance."""

    teacher: str
    """Teacher: a run (`RUN` or `RUN@STEP`), or a Hugging Face model as a folder or by its name on the Hub, with the
    same tokens."""
    model: JsonObject = Field(default_factory=dict)
    """Keys of `model` in which the teacher differs from this recipe."""
    alpha: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Weight of the distance to the teacher; cross entropy has the weight 1 - `alpha`."""
    loss: Literal["kl", "mse"] = "kl"
    """Distance to the teacher: `kl`, the Kullback-Leibler divergence from it, times `temperature`²; or `mse`, the
    mean squared difference of the logits."""
    temperature: PosFloat = 1.0
    """Divide the logits of both models by this before the softmax; with `loss: kl`."""
    top_k: PosInt | None = None
    """Use only this many of the teacher's most probable tokens, scaled to sum to one; with `loss: kl`. Unset: all
    tokens."""
    logits: Annotated[str | None, EXECUTION] = None
    """Folder with the teacher's `top_k` largest logits for each token, written by `llmrecipes precompute`. Unset:
    the teacher is in memory and computes every micro-batch."""
    layers: Annotated[tuple[LayerPair, ...], Field(strict=False)] = ()
    """Pairs of a student layer and a teacher layer, counted from 1, whose outputs are compared too (arXiv
    1909.10351): of the same `hidden_size` and pipeline stage."""
    layers_loss: Annotated[Literal["mse", "cosine"], OnlyWith("layers")] = "mse"
    """Distance of hidden states: `mse`, the mean squared difference (TinyBERT, arXiv 1909.10351), or `cosine`, 1 -
    cosine (DistilBERT, arXiv 1910.01108)."""
    layers_weight: Annotated[PosFloat, OnlyWith("layers")] = 1.0
    """Weight of the distance of hidden states, averaged over pairs and tokens, in the loss."""
