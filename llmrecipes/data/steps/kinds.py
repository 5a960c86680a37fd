"""Documents of a source by what they are: in which script, and in which language if a step knows. A step that drops
most of a kind, or of a source, was perhaps not made for it, and is reported."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

_LETTERS = 200  # of a document's beginning that are looked at
_FEWEST = 10  # dropped documents of a kind that are reported
_EXAMPLE = 60  # characters
_NAMES = {"Cjk": "Han"}


def script(text: str) -> str:
    """The script of most letters at the beginning of a text; empty if it has none there."""
    text = text[:_LETTERS]
    if text.isascii():
        return "Latin"
    scripts = Counter(map(_script, text))
    del scripts[""]
    return scripts.most_common(1)[0][0] if scripts else ""


@cache
def _script(character: str) -> str:
    """The first word of a letter's name in Unicode, which is that of its script."""
    if not character.isalpha():
        return ""
    name = unicodedata.name(character, "").split(" ")[0].split("-")[0].title()
    return _NAMES.get(name, name)


@dataclass
class Kinds:
    """How many documents of each kind a source has, and how many a step's rule dropped; "" is the kind of all.

    Args:
        read: by kind.
        dropped: by `kind/step/rule`.
        examples: the beginning of one, by `kind/step`.
    """

    read: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, kinds: tuple[str, ...], step: str = "", rule: str = "", text: str = "") -> None:
        """A document of these kinds that is kept or, by a step, dropped."""
        for kind in ("", *kinds):
            self.read[kind] += 1
            if step:
                self.dropped[f"{kind}/{step}/{rule}"] += 1
                self.examples.setdefault(f"{kind}/{step}", " ".join(text[: 2 * _EXAMPLE].split())[:_EXAMPLE])

    def update(self, more: Kinds) -> None:
        """Add those of later documents of the source."""
        self.read.update(more.read)
        self.dropped.update(more.dropped)
        self.examples = {**more.examples, **self.examples}

    def warnings(self, label: str) -> Iterator[str]:
        """A line for each step that dropped over half of the source, or of its documents in a script or language."""
        by_step: dict[tuple[str, str], Counter[str]] = {}
        for key, count in self.dropped.items():
            kind, step, rule = key.split("/", 2)
            by_step.setdefault((kind, step), Counter())[rule] += count
        of_all = {step for (kind, step), rules in by_step.items() if not kind and 2 * rules.total() > self.read[""]}
        lines: dict[tuple[str, int, int, str], str] = {}
        for (kind, step), rules in sorted(by_step.items()):  # a language, in small letters, replaces its script
            count = rules.total()
            if 2 * count <= self.read[kind] or (kind and (step in of_all or count < _FEWEST)):
                continue
            rule, most = rules.most_common(1)[0]
            what = f" in {kind}" if kind else ""
            by_rule = f" ({most:,} by its rule {rule})" if rule else ""
            example = self.examples[f"{kind}/{step}"]
            lines[step, count, self.read[kind], example] = (
                f"warning: {label}: {step} drops {count:,} of {self.read[kind]:,} documents{what}{by_rule}"
                + (f", such as {example!r}" if example else "")
            )
        yield from lines.values()
