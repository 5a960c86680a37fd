"""Preference tuning: the section `dpo`, and `data.chat.preference`, the columns of pairs of answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmrecipes.recipe.sections.section import EXECUTION, PosFloat, Section


class Preference(Section):
    """Rows are pairs: two answers to the prompt in `data.chat.prompt_key`, of which one is better. Prompt and answers
    are texts, or lists of messages, which the chat template turns into text."""

    chosen_key: str = "chosen"
    """Column of the better answer."""
    rejected_key: str = "rejected"
    """Column of the worse answer."""


LossType = Literal[
    "sigmoid", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
    "sigmoid_norm",
]  # fmt: skip
SMOOTHED = ("robust", "exo_pair")
"""Losses with `label_smoothing`."""


class Dpo(Section):
    """Direct preference optimization (arXiv 2305.18290) on the pairs of `data.chat.preference`. The loss is a mean over
    pairs, computed from how much the log-probabilities of both answers have gained over those of a frozen reference
    model."""

    beta: PosFloat = 0.1
    """Factor of these gains, which makes them rewards: the strength of the reference. With `ipo`, its τ."""
    loss_type: LossType = "sigmoid"
    """Loss of a pair, named as TRL's `loss_type`: `sigmoid` (the DPO paper), `ipo` (arXiv 2310.12036, per token),
    `hinge` (2305.10425), `robust` (2403.00409), `exo_pair` (2402.00856), `nca_pair` (2402.05369), `bco_pair`
    (2404.04656), `sppo_hard` (2405.00675), `apo_zero` and `apo_down` (2408.06266), `sigmoid_norm` (2405.14734)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Probability that a pair is labelled the wrong way round; only with `robust` and `exo_pair`."""
    reference: str | None = None
    """Reference model of the same architecture and tokens: a run (`RUN` or `RUN@STEP`), or a Hugging Face model as a
    folder or by name. Unset: the weights that the run starts from, or with adapters the model without them."""
    reference_free: bool = False
    """Compute the loss without a reference model."""
    reference_log_probs: Annotated[Annotated[str, Field(min_length=1)] | None, EXECUTION] = None
    """Folder with the reference's log-probabilities of all pairs, written by `llmrecipes precompute`. Unset: the
    reference is in memory and computes every micro-batch."""
