"""The layers of a model in Megatron's notation, `model.hybrid_layer_pattern`, and the keys that it is short for.

When a file is read (`load`), its pattern is replaced by those keys: a recipe has only the keys, and the engine derives
the pattern from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import batched, islice
from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.recipe.derived import stage_layout
from llmrecipes.recipe.derived.stage_layout import layers_per_stage
from llmrecipes.recipe.derived.weight_names import moe_layers
from llmrecipes.recipe.document import Problem, clip
from llmrecipes.recipe.schema import Recipe

KEY = "model.hybrid_layer_pattern"
ATTENTION, LATENT, MLP, EXPERTS, CUT, PREDICTION = "*", "+", "-", "E", "|", "/"
"""Symbols of megatron-core's `hybrid_layer_allocation`, with which a test compares them."""
_STAGES = "pipeline_model_parallel_size"
_CUTS = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    stage_layout.KEY,
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Keys that cut the layers into stages."""
_DECIDED = ("num_layers", "moe_layer_freq", "multi_latent_attention", "mtp_num_layers", "pipeline stages")


def layer_pattern(recipe: Recipe) -> str:
    """The pattern of a recipe.

    A transformer layer is two symbols: its attention (`*`, or `+` if latent) and its MLP (`-`) or experts (`E`). `|` is
    between the chunks of pipeline stages, `/` before each layer of multi-token prediction.
    """
    model = recipe.model
    attention = LATENT if model.multi_latent_attention else ATTENTION
    layers = [attention + (EXPERTS if has_experts else MLP) for has_experts in moe_layers(model)]
    rest = iter(layers)
    per_stage = layers_per_stage(recipe)
    chunks = ["".join(islice(rest, stage[chunk])) for chunk in range(len(per_stage[0])) for stage in per_stage]
    return CUT.join(chunks) + f"{PREDICTION}{layers[-1]}" * (model.mtp_num_layers or 0)


def keys_of(pattern: str, stages: int | None, *, mixture: bool) -> dict[str, Any]:
    """The keys that a pattern decides and whose value is not their default, by dotted name.

    Args:
        stages: pipeline stages; None: as many as the pattern has parts.
        mixture: the model has experts.

    Raises:
        UserError: recipes have no such layers.
    """
    if others := sorted(set(pattern) - {ATTENTION, LATENT, MLP, EXPERTS, CUT, PREDICTION}):
        raise _refused(
            f"{' '.join(others[:8])} in {clip(pattern, 60)!r}",
            "attention (* or +), MLPs (-) and experts (E) are supported; M, G, D and others are not yet",
        )
    main, *predictions = pattern.split(PREDICTION)
    parts = [_pairs(part) for part in main.split(CUT)]
    layers = [layer for part in parts for layer in part]
    kinds = {f"{attention}{other}" for attention in pattern[:1] for other in (MLP, EXPERTS)}
    if not layers or not kinds.issuperset(layers):
        raise _refused(
            f"{clip(pattern, 60)!r} has other layers",
            "each layer is two symbols, attention (* in all layers, or + in all) and then an MLP (-) or experts (E)",
        )
    if odd := [each for each in predictions if each != layers[-1]]:
        raise _refused(
            f"{PREDICTION}{clip(odd[0], 60)} after {layers[-1]}",
            "layers of multi-token prediction (after /) are like the last layer",
        )
    if (EXPERTS in pattern) != mixture:
        raise _refused(
            f"{clip(pattern, 60)!r} {'with' if mixture else 'without'} num_moe_experts",
            "layers with E, and only they, have num_moe_experts experts",
        )
    stages = stages or len(parts)
    chunks, rest = divmod(len(parts), stages)
    if len(parts) > 1 and rest:
        raise _refused(
            f"{len(parts)} parts between | for {_STAGES} {stages}", "every pipeline stage has the same number of parts"
        )
    values: dict[str, Any] = {"model.num_layers": len(layers)}
    if pattern.startswith(LATENT):
        values["model.multi_latent_attention"] = True
    if mixture and not all(layer.endswith(EXPERTS) for layer in layers):
        values["model.moe_layer_freq"] = [int(layer.endswith(EXPERTS)) for layer in layers]
    if predictions:
        values["model.mtp_num_layers"] = len(predictions)
    if len(parts) > 1:
        values[f"layout.{_STAGES}"] = stages
        values |= {"layout.virtual_pipeline_model_parallel_size": chunks} if chunks > 1 else {}
    if len({len(part) for part in parts}) > 1:
        written = [stage_layout.LAYER * len(part) for part in parts]
        written[0] = stage_layout.EMBEDDING + written[0]
        written[-1] += stage_layout.PREDICTION * len(predictions) + stage_layout.LOSS
        values[f"layout.{stage_layout.KEY}"] = stage_layout.text(written)
    return values


def _pairs(part: str) -> list[str]:
    return ["".join(pair) for pair in batched(part, 2)]


def _refused(what: str, rule: str) -> UserError:
    return UserError(what, where=KEY, rule=rule, fix="for example *-*E, or *-|*- with two pipeline stages")


def take(data: dict[str, Any]) -> tuple[str, list[Problem]]:
    """Write the pattern of a recipe's plain data as the keys that it decides, where they are not set.

    Returns:
        The pattern, removed from the data, and its problems.
    """
    model = data.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("hybrid_layer_pattern"), str):
        return "", []  # none, or another type, which the schema refuses
    pattern: str = model.pop("hybrid_layer_pattern")
    parallel = data.setdefault("layout", {})
    sections = {"model": model, "layout": parallel if isinstance(parallel, dict) else {}}
    stages = sections["layout"].get(_STAGES)
    try:
        values = keys_of(
            pattern,
            stages if isinstance(stages, int) and stages > 0 else None,
            mixture=model.get("num_moe_experts") is not None,
        )
    except UserError as error:
        return pattern, [Problem(KEY, error.what, error.rule, error.fix)]
    if not sections["layout"].keys().isdisjoint(_CUTS):
        values.pop(f"layout.{stage_layout.KEY}", None)
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections[section].setdefault(name, value)
    return pattern, []


def unread(recipe: Recipe) -> Iterator[Problem]:
    """A pattern outside the file's section `model`, where other keys already say the layers."""
    if recipe.model.hybrid_layer_pattern is not None:
        rule = (
            "only the section model of a recipe has a pattern, which stages, teachers and searches know as other keys"
        )
        yield Problem(KEY, "not read here", rule, "num_layers and moe_layer_freq")


def contradicted(pattern: str, recipe: Recipe) -> list[Problem]:
    """Whether keys that are set beside a pattern say something else.

    Args:
        pattern: one without `|` leaves the stages to the other keys.
        recipe: with the keys of `take`.
    """
    made = layer_pattern(recipe)
    if not pattern or pattern in (made, made.replace(CUT, "")):
        return []
    return [
        Problem(
            KEY,
            f"{clip(pattern, 60)!r}, but other keys make it {clip(made, 60)!r}",
            "keys that a pattern decides may be set beside it only to the same value",
            "remove hybrid_layer_pattern, or what is set of " + ", ".join(_DECIDED),
        )
    ]
