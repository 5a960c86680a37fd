"""Ways to cut the layers of a model into pipeline stages, for the search of layouts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from llmrecipes.plan.parameters import count as parameters
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.derived.stage_layout import EMBEDDING, LAYER, LOSS, PREDICTION, text
from llmrecipes.recipe.schema import Recipe

MOST_CHUNKS = 10
WRITTEN_CHUNKS = (1, 2, 3, 4, 6, 8)
"""Chunks of a stage for which the stages are cut by what they compute: any number would do, and few are enough."""


def stage_cuts(recipe: Recipe, stages: int) -> Iterator[dict[str, Any]]:
    """Chunks of the stages, and what is on each: the same number of layers, or fewer where the loss is."""
    layers = recipe.model.num_layers
    even = {
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
        "pipeline_model_parallel_layout": None,
    }
    ends = {**even, "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    if stages == 1:
        yield {**even, "virtual_pipeline_model_parallel_size": None}
        return
    present = recipe.layout
    if stages == present.pipeline_model_parallel_size:
        yield {}
    for split, total in ((even, layers), (ends, layers + 2)):
        if total % stages:
            continue
        for chunks in range(1, MOST_CHUNKS + 1):
            if (total // stages) % chunks == 0:
                yield {**split, "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None}
    for chunks in WRITTEN_CHUNKS:
        for written in dict.fromkeys(_written(recipe, stages, chunks)):
            yield {
                **even,
                "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
                "pipeline_model_parallel_layout": written,
            }


def _written(recipe: Recipe, stages: int, chunks: int) -> Iterator[str]:
    """Notations in which the last stage has fewer layers, by what its loss and its predictions take.

    First so that no chunk takes longer than the others, then so that no stage does, with more or less on the last one.
    """
    layers = recipe.model.num_layers
    places = stages * chunks
    end = _end_in_layers(recipe)
    each = math.ceil((layers + end) / places)
    yield from _with_last(recipe, stages, [min(each, layers // chunks)] * (chunks - 1) + [max(0, each - round(end))])
    for number in {math.floor((layers + end) / stages - end), math.ceil((layers + end) / stages - end)}:
        number = max(0, number)
        last = max(0, round((number + end) / chunks - end)) if chunks > 1 else number
        yield from _with_last(recipe, stages, [*_spread(number - last, chunks - 1), last])


def _with_last(recipe: Recipe, stages: int, last: list[int]) -> Iterator[str]:
    """The notation whose last stage has these layers on its chunks, and whose other stages share the rest evenly."""
    chunks = len(last)
    rest = recipe.model.num_layers - sum(last)
    others = _spread(rest, (stages - 1) * chunks)
    numbers = []
    for chunk in range(chunks):
        numbers += [*others[chunk * (stages - 1) : (chunk + 1) * (stages - 1)], last[chunk]]
    if min(others) >= 1 and min(last[:-1], default=1) >= 1:
        parts = [LAYER * number for number in numbers]
        parts[0] = f"{EMBEDDING}{parts[0]}"
        parts[-1] = f"{parts[-1]}{PREDICTION * (recipe.model.mtp_num_layers or 0)}{LOSS}"
        yield text(parts)


def _spread(number: int, places: int) -> list[int]:
    """A number in parts, the smaller ones first: early stages keep the most activations."""
    each, more = divmod(max(0, number), places) if places else (0, 0)
    return [each] * (places - more) + [each + 1] * more


def _end_in_layers(recipe: Recipe) -> float:
    """What loss and multi-token prediction compute, in layers."""
    model = recipe.model
    s = shape(recipe.model)
    sizes = parameters(model, s)
    layer = (sizes.active - sizes.embedding) / s.num_layers + s.keys_seen(causal=True) / s.num_layers * (
        s.query_size + s.context_size
    )
    return (1 + s.mtp_num_layers) * s.vocab_size * s.hidden_size / layer + s.mtp_num_layers
