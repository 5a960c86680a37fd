"""Steps of data preparation: from a document as it was read to one that is kept, or the reason why it is dropped.

They run in the worker processes of `prepare`, in front of the tokenizer. A step that compares documents only makes its
marks there; they are compared when all documents have theirs (`compare`), so that what is dropped does not depend on
the number of processes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from llmrecipes.data.sources.rows import beside_content
from llmrecipes.data.steps.kinds import script
from llmrecipes.data.steps.split import Split, SplitRule, digest
from llmrecipes.data.steps.words import pieces, with_pieces
from llmrecipes.errors import UserError
from llmrecipes.packages import find_spec
from llmrecipes.recipe.schema import Data
from llmrecipes.recipe.sections.data_steps import ClassifierStep, DecontaminateStep, StepSection
from llmrecipes.recipe.sections.plugins import DataStep, declared, resolve

Step = Callable[[list[str]], list[str] | str | None]
"""Takes the texts of a document, of a conversation those of its messages, and returns as many. None drops it; a string
does so too, and names the rule. One that finds out the language of documents has that of the latest as `language`."""

UNDECODABLE, EMPTY, DUPLICATES, UNREADABLE = "undecodable", "empty", "duplicates", "unreadable"
"""Reasons for dropping a document besides steps; `unreadable` is the rest of a file. `duplicates` are equal to an
earlier document in every byte, or as the step of that name sees it."""
NEAR_DUPLICATES = "near_duplicates"
"""The step that compares documents by the buckets of `copies.NearDuplicates`."""
CUT_PIECES, TOO_SHORT = "cut_sentences", "too_short"
"""Rules of a step that cuts: the sentences that it cut out, and the documents of which too little was left."""
VALID_SOURCES = "valid_sources"
"""The step that keeps documents of `data.valid_sources` out of training, in front of all others."""
_EXCLUDING = "llmrecipes.data.preparation.valid_sets:excluding"
EXCERPT = 1000
"""Characters of a dropped document that are kept as a sample."""


class Unreadable(str):
    """In place of a document: the rest of a file cannot be read, and why."""

    __slots__ = ()


class Comparison(Protocol):
    """A step that compares documents with earlier ones."""

    def mark(self, text: str) -> bytes:
        """All that is compared of a document; the messages of a conversation, with their calls of tools, are
        joined by newlines."""

    def add(self, mark: bytes) -> bool:
        """Whether the document is kept, because no earlier one that was is like it."""


@runtime_checkable
class Cutting(Protocol):
    """A comparison that can cut out of a document what earlier ones have."""

    def cut(self, mark: bytes, text: str) -> tuple[str, list[str]]:
        """What is left of a document that was added, empty if that is too little, and what is cut out of it."""


@dataclass(frozen=True)
class Document:
    """A document that is kept: UTF-8 text, its SHA-256, its split, and the bytes of the text.

    Args:
        changed: the steps that changed it.
        marks: marks of the steps that compare.
        excerpt: the beginning of its text, with marks.
        score: score of a curriculum; None: it has none, or is not trained on.
        kinds: its script and, if a step knows, its language.
    """

    text: bytes
    digest: bytes
    split: Split
    size: int
    changed: tuple[str, ...] = ()
    marks: tuple[bytes, ...] = ()
    excerpt: str = ""
    score: float | None = None
    kinds: tuple[str, ...] = ()

    def without_text(self) -> Document:
        """The same without its text; `dataclasses.replace` takes twice as long."""
        kept = self.changed, self.marks, self.excerpt, self.score, self.kinds
        return Document(b"", self.digest, self.split, self.size, *kept)


@dataclass(frozen=True)
class Dropped:
    """A document that is dropped: by which step, by which of its rules if it has several, how its text begins, and its
    kinds, of which the step that drops other languages leaves none."""

    reason: str
    rule: str = ""
    excerpt: str = ""
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cut:
    """A document that is kept in part: by which step, what is left, the pieces that were cut out, how those begin."""

    reason: str
    document: Document
    pieces: int
    excerpt: str


@dataclass(frozen=True)
class StepSpec:
    """All a worker process needs to make the steps.

    Args:
        rule: assigns the split.
        chat: the documents are conversations (`rows.conversation`).
        steps: key or type, `module:name`, and its value or keys as JSON, in order.
        comparisons: the same of the steps that compare documents; the rules put `near_duplicates` last.
        augmentations: the same of the steps that change training documents behind all others.
        max_unreadable: share of the files of a source that are skipped where they cannot be read.
    """

    rule: SplitRule
    chat: bool = False
    steps: tuple[tuple[str, str, str], ...] = ()
    comparisons: tuple[tuple[str, str, str], ...] = ()
    augmentations: tuple[tuple[str, str, str], ...] = ()
    max_unreadable: float = 0.0

    @property
    def shareable(self) -> bool:
        """Whether any number of tasks can compare documents, because what happens to one does not depend on which
        others are kept: a document is dropped if an earlier one is equal, in its text or by its mark, or else by the
        representatives of its buckets."""
        comparisons = [(name, json.loads(value)) for name, _, value in self.comparisons]
        return all(
            name == NEAR_DUPLICATES or (name == DUPLICATES and settings.get("span_sentences") is None)
            for name, settings in comparisons
        )

    @property
    def near(self) -> dict[str, Any] | None:
        """The settings of `near_duplicates`; None without it."""
        return next((json.loads(value) for name, _, value in self.comparisons if name == NEAR_DUPLICATES), None)

    @property
    def cuts(self) -> bool:
        """Whether a comparison cuts documents, whose texts are needed for that."""
        return any(json.loads(value).get("cut_spans") for _, _, value in self.comparisons)

    @property
    def reasons(self) -> tuple[str, ...]:
        """The names of its steps, by which dropped documents are counted."""
        all_steps = (*self.steps, *self.comparisons, *self.augmentations)
        return tuple(name for name, _, _ in all_steps if name != DUPLICATES)


def selected(data: Data) -> dict[str, Any]:
    """The keys of a recipe's section that are steps, with their values. At its default a key has no step."""
    section = type(data)
    values = {name: getattr(data, name) for name in declared(section, DataStep)}
    return {name: value for name, value in values.items() if value != section.model_fields[name].default}


def step_spec(data: Data) -> StepSpec:
    """How a recipe's documents are treated."""
    targets = {name: step.target for name, step in declared(type(data), DataStep).items()}
    values = data.model_dump(mode="json", include=set(selected(data)))
    keys = [(name, targets[name], json.dumps(values[name])) for name in selected(data)]
    typed = [
        (step.does, (step.type, step.does.target, json.dumps(_settings(step))))
        for step in data.steps
        if not step.does.weighs
    ]
    if data.valid_sources:
        near = next((step.settings for step in data.steps if step.type == NEAR_DUPLICATES), None)
        sets = [held_out.model_dump(mode="json") for held_out in data.valid_sources]
        keys.insert(0, (VALID_SOURCES, _EXCLUDING, json.dumps({"sets": sets, "near": near})))
    compares = tuple(step for does, step in typed if does.compares)
    augments = tuple(step for does, step in typed if does.augments)
    single = tuple(step for _, step in typed if step not in compares + augments)
    return StepSpec(
        SplitRule(data.split), data.chat is not None, (*keys, *single), compares, augments, data.max_unreadable
    )


def _settings(step: StepSection) -> dict[str, Any]:
    """The settings of a step for its processes: of tasks of lm-evaluation-harness their files."""
    if not isinstance(step, DecontaminateStep) or not step.tasks:
        return step.settings
    from llmrecipes.data.steps.eval_files import files_of_tasks

    return step.settings | {"tasks": {name: list(map(str, of)) for name, of in files_of_tasks(step.tasks).items()}}


def require_usable(data: Data) -> None:
    """Refuse steps whose package or files are missing, before minutes of work.

    Raises:
        UserError: the first of them.
    """
    for number, step in enumerate(data.steps):
        kind = step.does
        if kind.package and find_spec(kind.package) is None:
            raise UserError(
                f"the step {step.type} needs the package {kind.package}, which is not installed",
                where=f"data.steps.{number}.type",
                rule=f"the package is in the extra {kind.extra}",
                fix=f"pip install 'llmrecipes[{kind.extra}]', or remove the step",
            )
        if isinstance(step, DecontaminateStep | ClassifierStep):
            resolve(kind.target)(**_settings(step))  # reads them


def _made(steps: tuple[tuple[str, str, str], ...]) -> Iterator[tuple[str, Any]]:
    for name, target, value in steps:
        make = resolve(target)
        settings = json.loads(value)
        yield name, make(**settings) if isinstance(settings, dict) else make(settings)


def pipeline(spec: StepSpec) -> Callable[[str | None], Document | Dropped]:
    """Make the function that turns a document, None if it is not valid Unicode, into one to keep or a reason."""
    steps: list[tuple[str, Step]] = list(_made(spec.steps))
    comparisons: list[tuple[str, Comparison]] = list(_made(spec.comparisons))
    augmentations: list[tuple[str, Step]] = list(_made(spec.augmentations))

    def run(text: str | None) -> Document | Dropped:
        if text is None:
            return Dropped(UNDECODABLE)
        if dropped := _dropped_at_once(text):
            return dropped
        messages = json.loads(text) if spec.chat and (steps or comparisons) else []
        cleaned = _cleaned([message["content"] for message in messages] if spec.chat else [text], steps)
        if isinstance(cleaned, Dropped):
            return cleaned
        texts, changed, language = cleaned
        data = (_joined(messages, texts, chat=spec.chat) if changed else text).encode()
        identity = digest(data)
        split = spec.rule.of(identity)
        marks = _marks("\n".join([*texts, *beside_content(messages)]), comparisons) if comparisons else ()
        excerpt = _excerpt(texts) if marks else ""
        kinds = (*_script_of(texts), *language) if steps or marks else ()
        texts, augmented = _augmented(texts, augmentations if split == "train" else [])
        if augmented:
            changed += augmented
            data = texts[0].encode()
        return Document(data, identity, split, len(data), tuple(changed), marks, excerpt, kinds=kinds)

    return run


def _dropped_at_once(text: str) -> Dropped | None:
    """Why no step sees a document; None if they do."""
    if isinstance(text, Unreadable):
        return Dropped(UNREADABLE, excerpt=str(text))
    return Dropped(EMPTY) if not text or text.isspace() else None


class _Cleaned(NamedTuple):
    """A document after the steps, the names of those that changed it, and its language where one of them tells."""

    texts: list[str]
    changed: list[str]
    language: tuple[str, ...]


def _cleaned(texts: list[str], steps: Sequence[tuple[str, Step]]) -> _Cleaned | Dropped:
    before = len(texts)
    changed: list[str] = []
    language: tuple[str, ...] = ()
    for name, step in steps:
        result = step(texts)
        its_language: str | None = getattr(step, "language", None)
        if result is None or isinstance(result, str):
            kinds = () if its_language is not None else (*_script_of(texts), *language)
            return Dropped(name, result or "", _excerpt(texts), kinds)
        if its_language is not None:
            language = (its_language,)
        if len(result) != before:
            raise ValueError(f"{name}: {len(result)} texts of {before}")
        if result != texts:
            changed.append(name)
        texts = result
    if steps and not any(text and not text.isspace() for text in texts):
        return Dropped(EMPTY)
    return _Cleaned(texts, changed, language)


def _marks(text: str, comparisons: Sequence[tuple[str, Comparison]]) -> tuple[Any, ...]:
    return tuple(comparison.mark(text) for _, comparison in comparisons)


def _joined(messages: list[dict[str, Any]], texts: list[str], *, chat: bool) -> str:
    """The document with these texts."""
    contents = [message | {"content": text} for message, text in zip(messages, texts, strict=False)]
    return json.dumps(contents, ensure_ascii=False) if chat else texts[0]


def _augmented(texts: list[str], augmentations: Sequence[tuple[str, Step]]) -> tuple[list[str], list[str]]:
    """The texts, and the names of the steps that changed them."""
    changed = []
    for name, step in augmentations:
        result = step(texts)
        if result != texts and isinstance(result, list):
            changed.append(name)
            texts = result
    return texts, changed


def _script_of(texts: list[str]) -> tuple[str, ...]:
    name = script("\n".join(texts))
    return (name,) if name else ()


def _excerpt(texts: list[str]) -> str:
    return "\n".join(texts)[:EXCERPT]


@dataclass
class Seen:
    """The documents that were kept so far, of all sources, and what the steps that compare know of them."""

    spec: StepSpec
    _digests: set[bytes] = field(default_factory=set)
    _comparisons: list[tuple[str, Comparison]] = field(init=False)
    _cuts: bool = field(init=False)

    def __post_init__(self) -> None:
        self._comparisons, self._cuts = list(_made(self.spec.comparisons)), self.spec.cuts

    def add(self, document: Document) -> Dropped | Cut | None:
        """None if the document is kept; it is then one of them. Of one that is cut, what is left of it is."""
        if document.digest in self._digests:
            return Dropped(DUPLICATES)
        self._digests.add(document.digest)
        cut: Cut | None = None
        marks = document.marks
        for place, (name, comparison) in enumerate(self._comparisons):
            if not comparison.add(marks[place]):
                return Dropped(name, excerpt=document.excerpt)
            if not (self._cuts and isinstance(comparison, Cutting)):
                continue
            text, pieces = comparison.cut(marks[place], document.text.decode())
            if pieces and not text:
                return Dropped(name, TOO_SHORT, document.excerpt)
            if pieces:
                left = left_of(document, text, name, self.spec.rule)
                if left.digest in self._digests:
                    return Dropped(DUPLICATES)
                self._digests.add(left.digest)
                marks = tuple(each.mark(text) for _, each in self._comparisons)
                cut = Cut(name, left, len(pieces), "".join(pieces)[:EXCERPT])
        return cut

    def kept(self, outcome: Document | Dropped) -> Document | None:
        """Add a document; returns what is kept of it."""
        if isinstance(outcome, Dropped):
            return None
        judged = self.add(outcome)
        if isinstance(judged, Dropped):
            return None
        return outcome if judged is None else judged.document


def left_of(document: Document, text: str, step: str, rule: SplitRule) -> Document:
    """What is left of a document of which a step has cut something out."""
    data = text.encode()
    identity = digest(data)
    return Document(data, identity, rule.of(identity), len(data), (*document.changed, step), excerpt=text[:EXCERPT])


def length(min_characters: int | None, max_characters: int | None) -> Step:
    """Drop documents with less or more text, of a conversation that of all its messages."""
    least = min_characters or 0
    most = max_characters

    def step(texts: list[str]) -> list[str] | str:
        size = sum(map(len, texts))
        if size < least:
            return "min_characters"
        return "max_characters" if most is not None and size > most else texts

    return step


def min_characters(least: int) -> Step:
    """Drop documents with less text."""
    return lambda texts: texts if sum(map(len, texts)) >= least else None


def max_characters(most: int) -> Step:
    """Drop documents with more text."""
    return lambda texts: texts if sum(map(len, texts)) <= most else None


def noise(noise_rate: float, replacement: str, seed: int) -> Step:
    """Replace words, with the white space as it is (Xie et al. 2017, arXiv 1703.02573, 3.2).

    `blank` writes `_`. `unigram` writes a word of the document, drawn by its frequency there: a step knows nothing of
    other documents, where the paper has the frequencies of the corpus. Which words follows from the seed and the text.
    """

    def step(texts: list[str]) -> list[str]:
        draw = random.Random(digest(f"{seed}\n{texts[0]}".encode())).random
        words = pieces(texts[0])

        def replaced(word: str) -> str:
            if draw() >= noise_rate:
                return word
            return "_" if replacement == "blank" else words[int(draw() * len(words))]

        return [with_pieces(texts[0], replaced)]

    return step
