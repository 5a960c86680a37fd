"""The weights in a checkpoint of Megatron-LM, of any layout: read slice by slice, without the optimizer's state.

Layers may be stacked along a first dimension of one tensor, or have one each, and experts in the same way; a norm has
its own name, or that of the linear layer that TransformerEngine fuses it into. All become the names of a model of local
layers that one process holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch.distributed.checkpoint.utils import _create_file_view

from llmrecipes.engine.core.checkpoint.index import StoredTensor, as_index
from llmrecipes.engine.core.checkpoint.loader import load_plain, open_inside
from llmrecipes.engine.core.checkpoint.tensors import weights_of
from llmrecipes.engine.core.megatron_lm.folder import Saved, corrupt
from llmrecipes.engine.core.model.gpt import construct_without_memory
from llmrecipes.engine.core.model.init import global_name, whole_name
from llmrecipes.errors import UserError
from llmrecipes.plan.derive import Plan

_SHOWN = 8
_WRAPPED = re.compile(r"\A(?:module\.|model\.)+")
"""In front of the names of a model that is a part of another module."""
_NO_WEIGHT = re.compile(r"(?:chained_\d+\.)?optimizer\..*|rng_state.*|.*\._extra_state.*|.*\.local_tokens_per_expert")
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Weights with a row for each token, padded to a multiple that depends on the layout."""


class SavedWeights:
    """Implements `engine.base.WeightSource`.

    Only the stored slices of one weight at a time are in memory; each is read once if weights are read one by one.

    Args:
        saved: the checkpoint.
    """

    def __init__(self, saved: Saved) -> None:
        self._saved = saved
        self._places = {
            name: place
            for key, stored in saved.index.tensors.items()
            if not _NO_WEIGHT.fullmatch(key)
            for name, place in weights_of(_WRAPPED.sub("", key), stored)
        }
        self._held: dict[tuple[int, ...], torch.Tensor] = {}
        self._holding = ""

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        place = self._places.get(name)
        if place is None:
            raise UserError(f"{name} is not in the checkpoint", where=str(self._saved.path))
        if name != self._holding:
            self._held, self._holding = {}, name
        stored, before = place
        box = (*(1 for _ in before), *shape)
        low = np.asarray((*before, *offset), np.int64)
        try:
            parts = stored.slices(tuple(low.tolist()), box)
        except ValueError as problem:
            raise corrupt(self._saved.path, str(problem)) from problem
        # Rows that pad the vocabulary are not in the checkpoint, or are others.
        values = torch.zeros(box, dtype=stored.dtype)
        for start, size, where in zip(parts.offsets, parts.sizes, parts.places.tolist(), strict=True):
            first, last = np.maximum(start, low), np.minimum(start + size, low + np.asarray(box))
            part = self._part(stored, tuple(where), tuple(size.tolist()))
            values[as_index(first - low, last - low)] = part[as_index(first - start, last - start)]
        return values.view(shape)

    def require_fit(self, plan: Plan) -> None:
        """Check that the checkpoint has the weights of a model, in its shapes, and no others.

        Args:
            plan: of the recipe, for one rank; this process has joined that world.

        Raises:
            UserError: it has not; with the weights that differ.
        """
        wanted = _wanted(plan)
        rows = plan.recipe.model.vocab_size
        differing = list(_differences(wanted, {name: place.shape for name, place in self._places.items()}, rows))
        if not differing:
            return
        hidden = len(differing) - _SHOWN
        lines = [*islice(differing, _SHOWN), *([f"and {hidden} more"] if hidden > 0 else [])]
        raise UserError(
            "the recipe describes another model:\n    " + "\n    ".join(lines),
            where=str(self._saved.path),
            rule="every weight of the checkpoint has a place in the recipe's model, with the same shape, and the "
            "other way round",
            fix="change the recipe's section model to what was trained",
        )

    def _part(self, stored: StoredTensor, place: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """A stored part of the weight that is held."""
        if place not in self._held:
            number, start, length = place
            name = self._saved.index.files[number]
            path = self._saved.path / name
            self._held[place] = _load(self._saved.path, path, start, length)
        value = self._held[place]
        if value.dtype != stored.dtype or tuple(value.shape) != shape:
            what = f"{stored.name!r} is {value.dtype} {list(value.shape)}"
            raise corrupt(self._saved.path, f"{what}, its index says {stored.dtype} {list(shape)}")
        return value


def _load(folder: Path, path: Path, start: int, length: int) -> torch.Tensor:
    try:
        with open_inside(folder, path.name) as stream:
            value = load_plain(_create_file_view(stream, start, length), path)
    except (UserError, OSError) as problem:
        raise corrupt(path, problem.what if isinstance(problem, UserError) else str(problem)) from problem
    if not isinstance(value, torch.Tensor):
        raise corrupt(path, f"byte {start} begins a {type(value).__name__}, expected a tensor")
    return value


def _wanted(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Shapes of the model's weights, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for value in nested_values(construct_without_memory(plan).sharded_state()):
        shards = list(nested_values(value.build())) if isinstance(value, ShardedTensorFactory) else [value]
        for shard in shards:
            if isinstance(shard, ShardedTensor) and shard.data.is_floating_point():
                shapes[whole_name(global_name(shard))] = tuple(shard.global_shape[shard.prepend_axis_num :])
    return shapes


def _differences(
    wanted: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]], tokens: int
) -> Iterator[str]:
    """Weights that differ, a line each; `tokens` is how many rows of the vocabulary the model needs."""
    for name in sorted(wanted.keys() | stored.keys()):
        if name not in stored:
            yield f"{name}: not in the checkpoint"
        elif name not in wanted:
            yield f"{name}: {list(stored[name])} in the checkpoint, none in the recipe's model"
        elif name in _VOCABULARY and stored[name][1:] == wanted[name][1:]:
            if stored[name][0] < tokens:
                yield f"{name}: {stored[name][0]} rows in the checkpoint, fewer than model.vocab_size {tokens}"
        elif stored[name] != wanted[name]:
            yield f"{name}: {list(stored[name])} in the checkpoint, {list(wanted[name])} in the recipe's model"
