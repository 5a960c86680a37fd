"""Published sets of two answers with a judgement instead of a chosen and a rejected one.

Only what says which of exactly two answers is better is read. How to make pairs of scores of several answers, or of
two judgements that may differ, is not in such a set: it is refused, with what to decide.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmrecipes.errors import UserError

MARK = "<extra_id_1>"
"""Begins a turn in texts of NVIDIA's sets."""


@dataclass(frozen=True)
class Form:
    """Columns of a set.

    Args:
        name: a set that has them.
        prompt: column of the prompt; None: the answers are whole conversations.
        answers: columns of the two answers.
        judgement: column that says which of them is better.
        better: by its values the number of the better answer; None: neither.
    """

    name: str
    prompt: str | None
    answers: tuple[str, str]
    judgement: str
    better: Mapping[Any, int | None]

    @property
    def columns(self) -> list[str]:
        """All of them."""
        return [*([] if self.prompt is None else [self.prompt]), *self.answers, self.judgement]

    def chosen_and_rejected(self, row: Mapping[str, Any], where: str) -> tuple[str, str] | None:
        """Columns of the better and the worse answer of a row; None if neither is better.

        Raises:
            UserError: the judgement has another value.
        """
        value = row[self.judgement]
        if not isinstance(value, int | str) or value not in self.better:
            values = ", ".join(map(repr, self.better))
            raise UserError(
                f"{self.judgement!r} holds {str(value)[:40]!r}",
                where=where,
                rule=f"as in {self.name}, it is one of {values}",
                fix="fix or delete the row",
            )
        if self.prompt is not None and MARK in str(row[self.prompt]):
            raise UserError(
                f"{self.prompt!r} has several turns, marked by {MARK}",
                where=where,
                rule="a prompt of text is one message",
                fix="write the row as prompt, chosen, rejected, each a list of messages",
            )
        number = self.better[value]
        return None if number is None else (self.answers[number], self.answers[1 - number])


FORMS = (
    Form("SHP", "history", ("human_ref_A", "human_ref_B"), "labels", {1: 0, 0: 1}),
    Form("PKU-SafeRLHF", "prompt", ("response_0", "response_1"), "better_response_id", {0: 0, 1: 1}),
    Form("PKU-SafeRLHF", "prompt", ("response_0", "response_1"), "safer_response_id", {0: 0, 1: 1}),
    Form(
        "HelpSteer2", "prompt", ("response_1", "response_2"), "preference_strength",
        {-3: 0, -2: 0, -1: 0, 0: None, 1: 1, 2: 1, 3: 1},
    ),
    Form(
        "Chatbot Arena", None, ("conversation_a", "conversation_b"), "winner",
        {"model_a": 0, "model_b": 1, "tie": None, "tie (bothbad)": None},
    ),
)  # fmt: skip

UNDECIDED: tuple[tuple[Collection[str], str], ...] = (
    ({"instruction", "completions"}, "scores of several answers, as in UltraFeedback: choose a better and a worse one"),
    ({"prompt", "response", "helpfulness"}, "scores of single answers, as in HelpSteer2: join two of a prompt"),
    ({"prompt", "completion", "label"}, "judgements of single answers, as for KTO: join two of a prompt"),
)
"""Columns of sets that do not say what a pair is, and what they have instead."""


def form_of(present: Sequence[str], where: str) -> Form | None:
    """The form of rows with these columns.

    Raises:
        UserError: they have judgements, but pairs do not follow from them.
    """
    matching = [form for form in FORMS if set(form.columns) <= set(present)]
    if len(matching) > 1:
        judgements = " and ".join(repr(form.judgement) for form in matching)
        raise UserError(
            f"two judgements, {judgements}, which may differ",
            where=where,
            rule="one column says which answer of a pair is better",
            fix="delete the column that is not to be learned",
        )
    for columns, what in UNDECIDED:
        if not matching and set(columns) <= set(present):
            what, _, decision = what.partition(": ")
            raise UserError(
                what,
                where=where,
                rule="a pair has a better and a worse answer to one prompt",
                fix=f"{decision}, and write them as prompt, chosen, rejected",
            )
    return matching[0] if matching else None


_HH_TURN = re.compile(r"\n\n(Human|Assistant): ?")


def hh_turns(value: Any) -> Any:
    """Messages of a conversation in the form of Anthropic's hh-rlhf; other values as they are."""
    if not isinstance(value, str) or not value.startswith("\n\nHuman:"):
        return value
    _, *parts = _HH_TURN.split(value)
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[who], "content": said} for who, said in zip(parts[::2], parts[1::2], strict=True)]


def as_message(role: str, value: Any) -> Any:
    """A text as a message of a role; other values as they are."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value
