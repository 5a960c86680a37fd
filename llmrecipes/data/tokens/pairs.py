"""Token ids of pairs of a better and a worse answer to a prompt.

A prepared document is a pair: the ids of prompt and better answer, then those of prompt and worse answer, with a byte
for each id (`ANSWER`, `SECOND`). What is an answer is decided as in TRL's DPOTrainer: the prompt ends where the ids of
the prompt without an answer differ from those with one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from llmrecipes.data.sources.rows import CHOSEN, PROMPT, REJECTED, TOOLS, common
from llmrecipes.data.tokens.chat import (
    CUT,
    FORGED,
    LONG,
    UNANSWERED,
    ChatSpec,
    Conversations,
    Messages,
    Tools,
    forged_tokens,
    reason,
    render,
    strings,
)
from llmrecipes.data.tokens.chat import REJECTED as REFUSED
from llmrecipes.data.tokens.encode import load
from llmrecipes.errors import UserError

ANSWER, SECOND = 1, 2
"""Marks of a token: of an answer; and the first one of the second sequence, which is never a label."""
SHOWN = 80
"""Characters of a prompt that a message has."""


def pair_encoder(
    tokenizer_json: str, dtype: str, eod: int, spec: ChatSpec, prefix: Sequence[int] = ()
) -> Callable[[list[bytes]], Conversations]:
    """Make the function that turns pairs (`rows.pair`) into ids.

    Args:
        tokenizer_json: the tokenizer's `tokenizer.json`.
        dtype: NumPy name of the ids' type.
        eod: id that ends an answer of a pair of texts; templates end messages themselves.
        spec: template, and the longest prompt with its answer.
        prefix: ids before the prompt of a pair of texts; templates begin messages themselves.
    """
    backend = load(tokenizer_json, special_as_text=False)
    forged = forged_tokens(backend)

    def ids_of(messages: Messages, tools: Tools, *, prompt: bool) -> list[int]:
        if not messages or messages[0]["role"]:
            spec.template.require_reads(messages, tools)
            text = render(spec.template, messages, tools=tools, add_generation_prompt=prompt)[0]
            return list(backend.encode(text, add_special_tokens=False).ids)
        ids = backend.encode("".join(message["content"] for message in messages), add_special_tokens=False).ids
        return [*prefix, *ids] if prompt else [*prefix, *ids, eod]

    def of_a_pair(messages: Messages, tally: Counter[str]) -> tuple[list[int], bytes] | None:
        tools = messages[0].pop(TOOLS, [])
        if any(forged.search(said) for said in strings([messages, tools])):
            tally[FORGED] += 1
            return None
        parts = _by_part(messages)
        question = parts[PROMPT]
        prompt = ids_of(question, tools, prompt=True)
        both = [ids_of([*question, *parts[part]], tools, prompt=False) for part in (CHOSEN, REJECTED)]
        asked = min(common(prompt, answer) for answer in both)
        if asked >= spec.max_length and spec.truncate:
            raise _too_long(question, asked, spec.max_length)
        beyond = [max(0, len(answer) - spec.max_length) for answer in both]
        if any(beyond) and not spec.truncate:
            tally[LONG] += 1
            return None
        kept = [answer[: spec.max_length] for answer in both]
        if min(map(len, kept)) <= max(asked, 1) or kept[0] == kept[1]:
            tally[UNANSWERED] += 1
            return None
        if any(beyond):
            tally[CUT] += 1
            tally[f"{CUT}_tokens"] += sum(beyond)
        marks = [bytes(asked) + bytes([ANSWER]) * (len(answer) - asked) for answer in kept]
        return kept[0] + kept[1], marks[0] + bytes([SECOND]) + marks[1][1:]

    def encode(documents: list[bytes]) -> Conversations:
        tallies: list[Counter[str]] = [Counter() for _ in documents]
        lengths, refusal = list[int](), ""
        ids, answers = list[bytes](), list[bytes]()
        for document, tally in zip(documents, tallies, strict=True):
            encoded = None
            try:
                encoded = of_a_pair(json.loads(document), tally)
            except UserError:
                raise
            except Exception as error:  # of the template, which may raise anything
                tally[REFUSED] += 1
                refusal = refusal or reason(error)
            lengths.append(0 if encoded is None else len(encoded[0]))
            if encoded is not None:
                ids.append(np.asarray(encoded[0], dtype).tobytes())
                answers.append(encoded[1])
        return Conversations(b"".join(ids), lengths, b"".join(answers), [dict(tally) for tally in tallies], refusal)

    return encode


def _by_part(messages: Messages) -> dict[str, Messages]:
    parts: dict[str, Messages] = {PROMPT: [], CHOSEN: [], REJECTED: []}
    for message in messages:
        parts[message.pop("part")].append(message)
    return parts


def _too_long(prompt: Messages, tokens: int, most: int) -> UserError:
    start = prompt[0]["content"][:SHOWN] if prompt else ""
    return UserError(
        f"a prompt has {tokens:,} tokens: {start!r}",
        where="data.chat.max_length",
        rule=f"prompt and answer together have at most {most:,} tokens",
        fix="raise model.seq_length, or set data.chat.overlong=drop",
    )
