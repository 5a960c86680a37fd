"""Which weights a stored tensor consists of: layers and experts may be stacked along its first dimensions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from llmrecipes.engine.megatron.checkpoint.index import Stored
from llmrecipes.engine.megatron.checkpoint.table import Numbers
from llmrecipes.engine.megatron.model.names import unfused

_LAYERS = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_EXPERTS = re.compile(r"mlp\.experts\.experts\.(?:(\d+)\.)?(.+)")


class Place(NamedTuple):
    """A weight in a stored tensor."""

    stored: Stored
    before: tuple[int, ...]
    """Its layer and expert, where these are dimensions of the tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape[len(self.before) :]


def weights_of(key: str, stored: Stored) -> Iterator[tuple[str, Place]]:
    """The weights that a stored tensor consists of, by their names in one process."""
    found = _LAYERS.fullmatch(key)
    if found is None:
        yield key, Place(stored, ())
        return
    number, rest = found.groups()
    stacked = number is None
    for layer in range(*stored.shape[:1]) if stacked else (int(number),):
        front, before = f"decoder.layers.{layer}.", (layer,) if stacked else ()
        yield from _of_layer(front, rest, stored, before)


def _of_layer(front: str, rest: str, stored: Stored, before: tuple[int, ...]) -> Iterator[tuple[str, Place]]:
    found = _EXPERTS.fullmatch(rest)
    if found is None:
        yield front + unfused(rest), Place(stored, before)
        return
    number, rest = found.groups()
    depth = len(before)
    for expert in range(*stored.shape[depth : depth + 1]) if number is None else (int(number),):
        place = Place(stored, (*before, expert) if number is None else before)
        yield f"{front}mlp.experts.local_experts.{expert}.{rest}", place


def slices(starts: Numbers, ends: Numbers) -> tuple[slice, ...]:
    """A box as an index."""
    return tuple(slice(start, end) for start, end in zip(starts.tolist(), ends.tolist(), strict=True))
