"""Steps of data preparation: from a document as it was read to one that is kept, or the reason why it is dropped.

They run in the worker processes of `prepare`, in front of the tokenizer. What depends on other documents (duplicates,
`max_tokens`) is done by the process that writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmrecipes.data.split import Split, SplitRule, digest
from llmrecipes.recipe.plugins import DataStep, declared, resolve
from llmrecipes.recipe.schema import Data

Step = Callable[[list[str]], list[str] | None]
"""Takes the texts of a document, of a conversation those of its messages, and returns as many; None drops it."""

UNDECODABLE, EMPTY, DUPLICATES = "undecodable", "empty", "duplicates"
"""Reasons for dropping a document besides the keys of steps."""


@dataclass(frozen=True)
class Document:
    """A document that is kept: UTF-8 text, its SHA-256, its split, and the bytes of the text."""

    text: bytes
    digest: bytes
    split: Split
    size: int


@dataclass(frozen=True)
class StepSpec:
    """All a worker process needs to make the steps.

    Args:
        rule: assigns the split.
        chat: the documents are conversations (`sources.conversation`).
        steps: key, `module:name` and the key's value as JSON, in order.
    """

    rule: SplitRule
    chat: bool = False
    steps: tuple[tuple[str, str, str], ...] = ()

    @property
    def reasons(self) -> tuple[str, ...]:
        """The keys of its steps, by which dropped documents are counted."""
        return tuple(key for key, _, _ in self.steps)


def selected(data: Data) -> dict[str, Any]:
    """The steps that a recipe has: key and value. At its default a key has no step."""
    section = type(data)
    values = {name: getattr(data, name) for name in declared(section, DataStep)}
    return {name: value for name, value in values.items() if value != section.model_fields[name].default}


def step_spec(data: Data) -> StepSpec:
    """How a recipe's documents are treated."""
    targets = {name: step.target for name, step in declared(type(data), DataStep).items()}
    values = data.model_dump(mode="json", include=set(selected(data)))
    steps = tuple((name, targets[name], json.dumps(values[name])) for name in selected(data))
    return StepSpec(SplitRule(data.split), data.chat is not None, steps)


def pipeline(spec: StepSpec) -> Callable[[str | None], Document | str]:
    """Make the function that turns a document, None if it is not valid Unicode, into one to keep or a reason."""
    steps: list[tuple[str, Step]] = [(key, resolve(target)(json.loads(value))) for key, target, value in spec.steps]

    def run(text: str | None) -> Document | str:
        if text is None:
            return UNDECODABLE
        if not text or text.isspace():
            return EMPTY
        if steps:
            messages = json.loads(text) if spec.chat else []
            texts = before = [message["content"] for message in messages] if spec.chat else [text]
            for key, step in steps:
                made = step(texts)
                if made is None:
                    return key
                if len(made) != len(before):
                    raise ValueError(f"data.{key}: {len(made)} texts of {len(before)}")
                texts = made
            if not any(each and not each.isspace() for each in texts):
                return EMPTY
            if texts != before:
                changed = [message | {"content": each} for message, each in zip(messages, texts, strict=False)]
                text = json.dumps(changed, ensure_ascii=False) if spec.chat else texts[0]
        data = text.encode()
        name = digest(data)
        return Document(data, name, spec.rule.of(name), len(data))

    return run


def min_characters(least: int) -> Step:
    """Drop documents with less text."""
    return lambda texts: texts if sum(map(len, texts)) >= least else None


def max_characters(most: int) -> Step:
    """Drop documents with more text."""
    return lambda texts: texts if sum(map(len, texts)) <= most else None
