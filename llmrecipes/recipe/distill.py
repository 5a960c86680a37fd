"""The section `distill`: a teacher whose predictions a run learns from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmrecipes.recipe.section import JsonObject, PosFloat, PosInt, Section

LayerPair = Annotated[tuple[PosInt, PosInt], Field(strict=False)]
"""Numbers of a layer of the student and of one of the teacher, from 1."""


class Distill(Section):
    """Knowledge distillation (arXiv 1503.02531): the loss is (1 - `alpha`) × cross entropy + `alpha` × the distance to
    the predictions of a frozen teacher, which the same ranks compute in the same layout, and with `layers` a distance
    to its hidden states. Validation losses are without both."""

    teacher: str
    """A run (`RUN` or `RUN@STEP`), a folder with a Hugging Face model or its name on the Hub, with the same tokens."""
    model: JsonObject = Field(default_factory=dict)
    """Keys of `model` in which the teacher differs from this recipe."""
    alpha: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Weight of the distance to the teacher; the rest is that of the data's next token."""
    loss: Literal["kl", "mse"] = "kl"
    """Distance: `kl`, the Kullback-Leibler divergence of the student's probabilities from the teacher's, times
    `temperature`²; or `mse`, the mean squared difference of the logits."""
    temperature: PosFloat = 1.0
    """The logits of both are divided by it before the softmax; with `loss: kl`."""
    top_k: PosInt | None = None
    """Tokens of the teacher's distribution that count, those of the largest probability, which is scaled to sum to one;
    with `loss: kl`. Unset: all."""
    logits: str | None = None
    """Folder that `llmrecipes precompute` writes and training reads: the `top_k` largest logits of the teacher for each
    token, in place of the teacher. Unset: the teacher is in memory, and passes every micro-batch."""
    layers: Annotated[tuple[LayerPair, ...], Field(strict=False)] = ()
    """Pairs of a layer of the student and one of the teacher, counted from 1, whose outputs are compared too
    (arXiv 1909.10351); both models have the same `hidden_size`, and a pipeline stage has both layers."""
    layers_loss: Literal["mse", "cosine"] = "mse"
    """Distance of a token's hidden states: `mse`, the mean squared difference (TinyBERT, arXiv 1909.10351), or
    `cosine`, 1 - cosine of the two vectors (DistilBERT, arXiv 1910.01108)."""
    layers_weight: PosFloat = 1.0
    """The loss has this times the mean distance over pairs and tokens besides."""
