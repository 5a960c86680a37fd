"""Rules of the steps of data preparation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.data_steps import (
    LANGUAGES,
    DuplicatesStep,
    LanguageStep,
    NearDuplicatesStep,
    StepSection,
)
from llmrecipes.recipe.sections.plugins import DataStep, declared
from llmrecipes.recipe.sections.source import Source, TextSource, source_names


def held_out_sets(recipe: Recipe) -> Iterator[Problem]:
    """Labels that appear twice, weights, and sets of conversations."""
    sets = recipe.data.valid_sources
    counts = Counter(set_.label for set_ in sets)
    for number, each in enumerate(sets):
        key = f"data.valid_sources.{number}"
        if counts[each.label] > 1:
            yield Problem(
                f"{key}.label",
                f"{each.label!r} appears {counts[each.label]} times",
                "labels must be unique: they name the metrics of a set",
                "rename one of them",
            )
        if each.weight != 1.0:
            yield Problem(
                f"{key}.weight", "set", "held-out sets are evaluated separately and have no weight", "remove weight"
            )
    if sets and recipe.data.chat is not None:
        yield Problem(
            "data.valid_sources",
            "set with data.chat",
            "held-out sets must be plain text; conversations are only held out by the validation split",
            "remove valid_sources",
        )


def by_source(recipe: Recipe) -> Iterator[Problem]:
    """Names that two curves would share, and what has no loss by source."""
    data, tracking = recipe.data, recipe.tracking
    used = data.multiple_validation_sets or tracking.loss_by_source
    names = source_names(data.sources) if used else [source.label for source in data.sources]
    counts = Counter([*names, *(held_out.label for held_out in data.valid_sources)])
    for number, (name, source) in enumerate(zip(names, data.sources, strict=True)):
        if name is not None and counts[name] > 1:
            origin = "" if source.label else ", derived from the path,"
            yield Problem(
                f"data.sources.{number}.label",
                f"{name!r}{origin} appears {counts[name]} times among data.sources and data.valid_sources",
                "labels must be unique: they name the metrics of a source",
                "set a different label",
            )
    if data.multiple_validation_sets and not data.split[1]:
        yield Problem(
            "data.multiple_validation_sets",
            "true, but data.split has no validation split",
            "it evaluates the validation split of every source",
            "data.split 98,1,1, or remove it",
        )
    if tracking.loss_by_source and recipe.dpo is not None:
        yield Problem(
            "tracking.loss_by_source",
            "true with dpo",
            "the loss compares two answers of a pair and cannot be summed by source",
            "remove it, or use data.multiple_validation_sets instead",
        )


def token_sets(recipe: Recipe) -> Iterator[Problem]:
    """What needs the text of documents, where a source has only tokens."""
    data = recipe.data
    texts = [number for number, source in enumerate(data.sources) if not source.tokenized]
    for number, each in enumerate(data.valid_sources):
        if each.tokenized and texts:
            yield Problem(
                f"data.valid_sources.{number}.type",
                f"{each.type}, but data.sources.{texts[0]} is text",
                "documents of a held-out set are removed from the sources by token ids or by text, so both must be "
                "of one kind",
                "a text set, sources with tokens only, or a validation split (data.split) instead",
            )
    numbers = [number for number, each in enumerate(data.sources) if each.tokenized]
    if not numbers:
        return
    first = f"data.sources.{numbers[0]}"
    if data.tokenizer.type == "bpe":
        yield Problem(
            "data.tokenizer.type",
            f"bpe, but {first} is already tokenized",
            "the recipe's tokenizer must be the one that tokenized the source",
            "type: huggingface, with the path of that tokenizer",
        )
    every: list[tuple[str, Source]] = [(f"data.sources.{number}", each) for number, each in enumerate(data.sources)]
    every += [(f"data.valid_sources.{number}", each) for number, each in enumerate(data.valid_sources)]
    for key, source in every:
        path = source.location
        if source.tokenized and (path.endswith((".bin", ".idx")) or "*" in path or "://" in path):
            yield Problem(
                f"{key}.path",
                repr(path),
                "a megatron source needs the path of two local files, without .bin and .idx",
                path.removesuffix(".bin").removesuffix(".idx")
                if path.endswith((".bin", ".idx"))
                else "one source per dataset",
            )
    keys = [name for name in declared(type(data), DataStep) if getattr(data, name) is not None]
    keys += [f"steps.{n}.type" for n, step in enumerate(data.steps) if not step.does.weighs]
    keys += [f"valid_sources.{n}.type" for n, each in enumerate(data.valid_sources) if not each.tokenized]
    keys += ["curriculum.score"] if data.curriculum and data.curriculum.score != "length" else []
    for name in keys:
        yield Problem(
            f"data.{name}",
            f"set, but {first} is already tokenized",
            "steps and held-out sets work on text and cannot be applied to tokens",
            f"clean the text and tokenize it again, or remove {name} or the source; only balance is possible",
        )


def monitored(recipe: Recipe) -> Iterator[Problem]:
    """What a run that goes by its held-out loss needs."""
    train = recipe.train
    labels = [held_out.label for held_out in recipe.data.valid_sources]
    sets = [*labels, *(source_names(recipe.data.sources) if recipe.data.multiple_validation_sets else ())]
    users = {
        "train.early_stop": train.early_stop is not None,
        "train.target_loss": train.target_loss is not None,
        "checkpoint.keep_best": recipe.checkpoint.keep_best,
    }
    used = [key for key, is_used in users.items() if is_used]
    if train.monitor is not None and train.monitor not in sets:
        yield Problem(
            "train.monitor",
            f"{train.monitor!r} is not the label of a held-out set",
            "a label of data.valid_sources, or with data.multiple_validation_sets the name of a source: "
            + (", ".join(sets) or "there is none"),
            "one of these, or remove monitor to use the validation split",
        )
    if train.monitor is not None and not used:
        yield Problem(
            "train.monitor", "set without a key that uses it", f"used by {', '.join(users)}", "set one, or remove it"
        )
    if used and not labels and not recipe.data.split[1]:
        yield Problem(
            used[0],
            "set, but data.split has no validation split",
            "it needs a held-out loss",
            "data.split 98,1,1, or sets in data.valid_sources",
        )


def curriculum(recipe: Recipe) -> Iterator[Problem]:
    """What goes with an order by difficulty."""
    section = recipe.data.curriculum
    if section is None:
        return
    if recipe.data.chat is not None:
        yield Problem(
            "data.curriculum",
            "set with data.chat",
            "conversations cannot be ordered by difficulty",
            "remove curriculum",
        )
    if section.score == "loss" and section.scores is None:
        yield Problem(
            "data.curriculum.scores",
            "not set with score loss",
            "score loss needs losses computed beforehand",
            "llmrecipes eval RUN --data train --per-document DIR, and data.curriculum.scores=DIR",
        )
    if section.score != "loss" and section.scores is not None:
        yield Problem(
            "data.curriculum.scores",
            f"set with score {section.score}",
            "scores is only used with score loss",
            "score loss, or remove scores",
        )
    steps = int(recipe.train.train_iters * section.share)
    if section.windows > max(steps, 1):
        yield Problem(
            "data.curriculum.windows",
            f"{section.windows} for {steps:,} ordered steps",
            "a window must contain at least one step",
            f"windows {max(steps, 1)} or less",
        )


def fill_in_the_middle(recipe: Recipe) -> Iterator[Problem]:
    """Settings without a rate, conversations, and special tokens that are the same."""
    data = recipe.data
    used = [
        f"data.{section}.{number}.fim_rate"
        for section in ("sources", "valid_sources")
        for number, source in enumerate(getattr(data, section))
        if isinstance(source, TextSource) and source.fim_rate
    ]
    if data.fim != type(data.fim)() and not used:
        yield Problem(
            "data.fim",
            "set, but no source has fim_rate",
            "data.fim applies to the documents selected by data.sources[].fim_rate",
            "set fim_rate of a source, or remove fim",
        )
    if used and data.chat is not None:
        yield Problem(
            used[0], "set with data.chat", "conversations cannot be rearranged", "remove fim_rate, or data.chat"
        )
    texts = (data.fim.prefix_token, data.fim.middle_token, data.fim.suffix_token)
    if used and (len(set(texts)) < len(texts) or "" in texts):
        yield Problem(
            "data.fim",
            f"the tokens are {', '.join(map(repr, texts))}",
            "prefix_token, middle_token and suffix_token must be three different tokens",
            "the tokenizer's three fill-in-the-middle tokens",
        )


def characters(recipe: Recipe) -> Iterator[Problem]:
    """The keys that are limits of characters."""
    yield from _crossed("data", dict(recipe.data), "min_characters", "max_characters")


def _crossed(section: str, values: Mapping[str, Any], low: str, high: str) -> Iterator[Problem]:
    """A minimum above its maximum, where a section has both."""
    least, most = values.get(low), values.get(high)
    if least is not None and most is not None and least > most:
        yield Problem(
            f"{section}.{low}",
            f"{least} is more than {high} {most}",
            f"{low} must be at most {high}",
            f"lower {low} or raise {high}",
        )


_LIMITS = (
    ("min_characters", "max_characters"),
    ("min_words", "max_words"),
    ("max_mean_line_length", "max_line_length"),
)


def steps(recipe: Recipe) -> Iterator[Problem]:
    """Limits that are missing or contradict, types that appear twice, comparisons that do not come last."""
    steps = recipe.data.steps
    for number, step in enumerate(steps):
        key = f"data.steps.{number}"
        if step.needs_one and all(getattr(step, name) is None for name in step.needs_one):
            names = " or ".join(step.needs_one)
            yield Problem(
                f"{key}.{step.needs_one[0]}",
                "missing",
                f"{step.type} needs {names}",
                f"set {names}, or remove the step",
            )
        languages = step.languages if isinstance(step, LanguageStep) else ()
        for code in sorted(set(languages) - set(LANGUAGES)):
            short = code[:2].lower()
            yield Problem(
                f"{key}.languages",
                f"{code!r} is not a language code",
                f"one of the ISO 639 codes {', '.join(LANGUAGES)}",
                short if short in LANGUAGES else "",
            )
        for low, high in _LIMITS:
            yield from _crossed(key, step.settings, low, high)
        if isinstance(step, DuplicatesStep):
            yield from _spans(recipe, key, step)
    for kind, count in Counter(step.type for step in steps).items():
        if count > 1:
            yield Problem(
                "data.steps",
                f"{kind} appears {count} times",
                "a type may appear only once, because dropped documents are counted by type",
                f"keep one step of type {kind}",
            )
    yield from _contradictions(recipe)
    for number, (before, after) in enumerate(pairwise(steps), start=1):
        if _place(before) > _place(after):
            reason = next(words for name, words in _LATE.items() if getattr(before.does, name))
            yield Problem(
                f"data.steps.{number}",
                f"{after.type} after {before.type}",
                f"{before.type} must come after {after.type}: it {reason}",
                f"move {after.type} before {before.type}",
            )


_LATE = {
    "weighs": "weighs sources by what all other steps keep",
    "augments": "changes what all other steps keep",
    "compares": "compares the documents that other steps keep",
}
"""What steps do that come after others; those of the first line come last."""


def _place(step: StepSection) -> tuple[bool, ...]:
    return (*(getattr(step.does, name) for name in _LATE), isinstance(step, NearDuplicatesStep))


def _spans(recipe: Recipe, key: str, step: DuplicatesStep) -> Iterator[Problem]:
    """A limit that has no effect, and conversations that are cut."""
    if step.cut_spans and "max_repeated_spans" in step.model_fields_set:
        yield Problem(
            f"{key}.max_repeated_spans",
            "set with cut_spans",
            "max_repeated_spans drops whole documents; cut_spans cuts spans out of them instead",
            "remove one of them",
        )
    if step.cut_spans and recipe.data.chat is not None:
        yield Problem(
            f"{key}.cut_spans",
            "set with data.chat",
            "conversations can only be kept or dropped as a whole",
            "remove cut_spans",
        )


def _contradictions(recipe: Recipe) -> Iterator[Problem]:
    """Steps of which one drops what another one keeps, or judges what another one has not made yet."""
    places: dict[str, int] = {step.type: number for number, step in enumerate(recipe.data.steps)}
    of: dict[str, Any] = {step.type: step for step in recipe.data.steps}
    if "c4" in of and "code" in of:
        yield Problem(
            f"data.steps.{places['code']}.type",
            "code with c4",
            "c4 drops documents with curly brackets, and so nearly all code",
            "remove c4 or code, and prepare code with a separate recipe",
        )
    if "language" in of and "gopher" in of and "en" not in of["language"].languages:
        yield Problem(
            f"data.steps.{places['gopher']}.type",
            f"gopher with the languages {', '.join(of['language'].languages)}",
            "gopher drops documents without English stop words, and so other languages",
            "add en to the languages, or remove gopher",
        )
    if "noise" in of and recipe.data.chat is not None:
        yield Problem(
            f"data.steps.{places['noise']}.type",
            "noise with data.chat",
            "noise would change the answers that the model learns",
            "remove noise",
        )
    if "noise" in of and "duplicates" in of and of["duplicates"].cut_spans:
        yield Problem(
            f"data.steps.{places['noise']}.type",
            "noise with cut_spans of duplicates",
            "cut_spans needs the text that is tokenized, but noise changes it",
            "remove noise or cut_spans",
        )
    early = [kind for kind in of if places[kind] < places.get("html", -1) and not of[kind].does.takes_markup]
    if early:
        yield Problem(
            f"data.steps.{places['html']}.type",
            f"html after {early[0]}",
            f"{early[0]} needs text, which html extracts from web pages",
            f"move html before {early[0]}",
        )
    least = recipe.data.min_characters
    length = of.get("length")
    if least is not None and length is not None and least > (length.max_characters or least):
        yield Problem(
            f"data.steps.{places['length']}.max_characters",
            f"{length.max_characters} is less than data.min_characters {least}",
            "data.min_characters must be at most max_characters of length",
            "lower data.min_characters or raise max_characters",
        )
