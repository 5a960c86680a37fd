"""What `layout.zero.extra` and `model.extra` have in common: keys that another program has and the recipe does not."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from llmrecipes.recipe.document import Problem


@dataclass(frozen=True)
class ExtraKeys:
    """A mapping that takes keys of another program.

    Attributes:
        key: of the mapping, dotted.
        takes: whose keys, in words.
        determined: key of the other program, and the recipe's key or section that determines it.
        unsupported: key that cannot be passed on, and why.
        listed: where all its keys can be read; empty: a message lists them.
    """

    key: str
    takes: str
    determined: Mapping[str, str]
    unsupported: Mapping[str, str]
    listed: str = ""

    def problems(self, values: Mapping[str, object], known: Collection[str], prefix: str = "") -> Iterator[Problem]:
        """Keys that are unknown, determined by the recipe, or unsupported.

        Args:
            values: those of the mapping, or of a section in it.
            known: keys that the other program has there.
            prefix: dotted, of the section.
        """
        yield from self.refused(values, prefix)
        ours = [key.removeprefix(prefix) for key in self.determined if key.startswith(prefix)]
        for name in values:
            if name not in known and f"{prefix}{name}" not in (*self.determined, *self.unsupported):
                close = difflib.get_close_matches(name.lower(), {*known, *ours} - self.unsupported.keys())
                yield Problem(
                    f"{self.key}.{prefix}{name}",
                    "unknown key",
                    f"extra takes {self.takes}",
                    f"did you mean {' or '.join(close)}?"
                    if close
                    else self.listed or f"known: {', '.join(known or ours)}",
                )

    def refused(self, values: Mapping[str, object], prefix: str = "") -> Iterator[Problem]:
        """Keys that are determined by the recipe or unsupported; arguments as `problems`."""
        for name in values:
            where = f"{self.key}.{prefix}{name}"
            if reason := self.unsupported.get(f"{prefix}{name}"):
                yield Problem(where, "not supported", reason, "remove it")
            if key := self.determined.get(f"{prefix}{name}"):
                yield Problem(
                    where, "determined by the recipe", f"{prefix}{name} is derived from {key}", f"set {key} instead"
                )
