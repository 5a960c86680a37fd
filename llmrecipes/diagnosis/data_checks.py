"""Checks of prepared data, from the manifest of its folder: duplicates, and text of evaluation files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from llmrecipes.diagnosis.finding import Sighting, value

MANY = 0.1
"""Share of a source's documents that another document of the data repeats."""
NEAR = "near_duplicates"
"""The step that drops near-copies, of which `prepare --verify` finds none in held-out text."""
DECONTAMINATE = "decontaminate"
"""The step that drops text of evaluation files; its rules are their names."""
LEAST = 10
"""Documents that are too few to judge by."""


def of_data(manifest: Mapping[str, Any]) -> Iterator[Sighting]:
    """What a manifest says about its sources; nothing for one that is damaged.

    Args:
        manifest: JSON values of a prepared folder's manifest.json.
    """
    sources = manifest.get("sources")
    of_files = Counter[str]()
    for source in sources if isinstance(sources, list) else []:
        if not isinstance(source, Mapping):
            continue
        rules = source.get("rules")
        counts: Mapping[str, Any] = rules if isinstance(rules, Mapping) else {}
        for rule in counts:
            step, _, file = str(rule).partition(".")
            if step == DECONTAMINATE and (number := value(counts, rule)):
                of_files[file] += int(number)
        steps = source.get("steps")
        near = value(steps, NEAR) if isinstance(steps, Mapping) else None
        read, equal = value(source, "read"), value(source, "duplicates")
        if not read or equal is None or read < LEAST:
            continue
        repeated = equal + (near or 0)
        if repeated > MANY * read:
            label = str(source.get("label"))
            text = f"{repeated:,} of {read:,} documents of source {label} repeat others ({repeated / read:.0%})"
            evidence = {"source": label, "equal": equal, "near": near, "read": read}
            yield Sighting("duplicate_data", None, text, evidence)
    if of_files:
        documents = of_files.total()
        ((most, _), *_) = of_files.most_common(1)
        text = f"{documents:,} documents had text of evaluation files, most of them of {most}"
        yield Sighting("leaking_data", None, text, {"documents": documents, "file": most})
