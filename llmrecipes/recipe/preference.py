"""Preference tuning: the section `dpo`, and `data.chat.preference`, the columns of pairs of answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmrecipes.recipe.section import PosFloat, Section


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
    pairs, of what the log-probabilities of both answers have gained on those of a frozen reference model."""

    beta: PosFloat = 0.1
    """Strength of the reference: the factor of the gains, which makes them rewards. With `ipo` its τ."""
    loss_type: LossType = "sigmoid"
    """Loss of a pair, as TRL's `loss_type`: `sigmoid` is DPO's, `ipo` that of arXiv 2310.12036, per token, `hinge` of
    SLiC (2305.10425), `robust` of 2403.00409, `exo_pair` of 2402.00856, `nca_pair` of 2402.05369, `bco_pair` of
    2404.04656, `sppo_hard` of 2405.00675, `apo_zero` and `apo_down` of 2408.06266, `sigmoid_norm` of 2405.14734."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Probability that a pair is labelled the wrong way round; with `robust` and `exo_pair`."""
    reference: str | None = None
    """A run (`RUN` or `RUN@STEP`), a folder with a Hugging Face model or its name on the Hub, of the same model and
    tokens. Unset: the weights that the run starts from, with adapters the model without them."""
    reference_free: bool = False
    """Compare the log-probabilities with nothing: no reference model."""
    reference_log_probs: Annotated[str, Field(min_length=1)] | None = None
    """Folder that `llmrecipes precompute` writes and training reads: the reference's log-probabilities of all pairs, in
    place of the reference. Unset: the reference is in memory, and passes every micro-batch."""
