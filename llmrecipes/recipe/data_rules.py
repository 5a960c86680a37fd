"""Rules of the steps of data preparation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from llmrecipes.recipe.data_steps import LANGUAGES, REQUIRED, STEPS
from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.schema import Recipe


def characters(recipe: Recipe) -> Iterator[Problem]:
    """The keys that are limits of characters."""
    least, most = recipe.data.min_characters, recipe.data.max_characters
    if least is not None and most is not None and least > most:
        yield Problem(
            "data.min_characters",
            f"{least} is more than max_characters {most}",
            "min_characters is at most max_characters",
            "lower min_characters or raise max_characters",
        )


def steps(recipe: Recipe) -> Iterator[Problem]:
    """Keys of other types, limits that contradict, types that appear twice, comparisons that do not come last."""
    steps = recipe.data.steps
    for number, step in enumerate(steps):
        key, takes = f"data.steps.{number}", STEPS[step.type].takes
        for name in step.model_fields_set - {"type", *takes}:
            choices = f"its keys are {', '.join(takes)}" if takes else "it has no keys"
            of = [kind for kind, each in STEPS.items() if name in each.takes]
            yield Problem(
                f"{key}.{name}",
                f"set with type {step.type}",
                f"{name} is a key of {', '.join(of)}; of {step.type}, {choices}",
                f"leave {name} out",
            )
        if getattr(step, REQUIRED.get(step.type, "type")) is None:
            name = REQUIRED[step.type]
            yield Problem(f"{key}.{name}", "missing", f"{step.type} needs {name}", f"set {name}, or take the step out")
        for code in sorted(set(step.languages or ()) - set(LANGUAGES)):
            short = code[:2].lower()
            yield Problem(
                f"{key}.languages",
                f"{code!r} is not a language of the model",
                f"the codes are those of ISO 639: {', '.join(LANGUAGES)}",
                short if short in LANGUAGES else "",
            )
        for unit in ("characters", "words"):
            values = step.settings
            least, most = values.get(f"min_{unit}"), values.get(f"max_{unit}")
            if least is not None and most is not None and least > most:
                yield Problem(
                    f"{key}.min_{unit}",
                    f"{least} is more than max_{unit} {most}",
                    f"min_{unit} is at most max_{unit}",
                    f"lower min_{unit} or raise max_{unit}",
                )
        if step.type == "length" and step.min_characters is None and step.max_characters is None:
            yield Problem(
                key, "length without a limit", "length has min_characters or max_characters", "set one, or take it out"
            )
    for kind, count in Counter(step.type for step in steps).items():
        if count > 1:
            yield Problem(
                "data.steps",
                f"{kind} appears {count} times",
                "a type appears once: its documents are counted by it",
                f"keep one step of type {kind}",
            )
    for number, (before, after) in enumerate(pairwise(steps), start=1):
        if STEPS[before.type].compares and not STEPS[after.type].compares:
            yield Problem(
                f"data.steps.{number}",
                f"{after.type} after {before.type}",
                f"{before.type} compares the documents that all other steps keep",
                f"move {after.type} in front of {before.type}",
            )
