"""Checks of prepared data, from the manifest of its folder: duplicates, and text that is in training and held out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmrecipes.diagnosis.finding import Sighting, value

MANY = 0.1
"""Share of a source's documents that another document of the data repeats."""
LEAST = 10
"""Documents that are too few to judge by."""


def of_data(manifest: Mapping[str, Any]) -> Iterator[Sighting]:
    """What a manifest says about its sources; nothing for one that is damaged.

    Args:
        manifest: JSON values of a prepared folder's manifest.json.
    """
    sources = manifest.get("sources")
    for source in sources if isinstance(sources, list) else []:
        if not isinstance(source, Mapping):
            continue
        read, duplicates = value(source, "read"), value(source, "duplicates")
        label = str(source.get("label"))
        if read and duplicates is not None and read >= LEAST and duplicates > MANY * read:
            text = f"{duplicates:,} of {read:,} documents of source {label} repeat others ({duplicates / read:.0%})"
            evidence = {"source": label, "duplicates": duplicates, "read": read}
            yield Sighting("duplicate_data", None, text, evidence)
        leaking = value(source, "leaking")
        if leaking:
            text = f"{leaking:,} held-out documents of source {label} are also in training, but for case and spaces"
            yield Sighting("leaking_data", None, text, {"source": label, "leaking": leaking})
