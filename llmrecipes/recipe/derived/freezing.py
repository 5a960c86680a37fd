"""Which parameters a run does not train (`train.freeze`), and the rules of the key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from llmrecipes.recipe.derived.weight_names import weights
from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.engines import MEGATRON, engine_name
from llmrecipes.recipe.schema import Model, Recipe

KEY = "train.freeze"
_QKV = "self_attention.linear_qkv."


def is_frozen(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a parameter of the whole model has a pattern that matches its name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def parameters(model: Model) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's parameters by name; without buffers and multi-token prediction."""
    return {name: shape for name, shape in weights(model).items() if not name.endswith(".expert_bias")}


def frozen(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    """Shapes of the frozen parameters by name."""
    return _frozen(recipe.model, recipe.train.freeze) if recipe.train.freeze else {}


@lru_cache(maxsize=16)
def _named(model: str) -> dict[str, tuple[int, ...]]:
    return parameters(Model.model_validate_json(model))


@lru_cache(maxsize=64)
def _matching(model: str, patterns: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in _named(model).items() if is_frozen(name, patterns)}


def _frozen(model: Model, patterns: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    return _matching(model.model_dump_json(), patterns)


def patterns_of(recipe: Mapping[str, Any] | None) -> tuple[str, ...]:
    """All patterns of a recipe and its stages, as JSON values: what a checkpoint of it may have no state of."""
    recipe = recipe or {}
    trains = [recipe.get("train", {}), *(stage.get("train", {}) for stage in recipe.get("stages") or ())]
    return tuple(pattern for train in trains for pattern in train.get("freeze") or ())


def frozen_weights(recipe: Recipe) -> str | None:
    """The key because of which weights have no gradient; None: all of them have."""
    if recipe.lora is not None:
        return "lora"
    return KEY if recipe.train.freeze else None


def kept(patterns: tuple[str, ...], model: Model) -> tuple[str, ...]:
    """The patterns that match parameters of another model; none if they match all of them."""
    known = parameters(model)
    left = tuple(pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in known))
    return () if all(is_frozen(name, left) for name in known) else left


def rules(recipe: Recipe) -> Iterator[Problem]:
    """What frozen parameters go with."""
    patterns = recipe.train.freeze
    if not patterns:
        return
    obstacles = {
        "lora": (
            recipe.lora is not None,
            "with train.freeze",
            "with adapters, the whole model is frozen already",
            "remove train.freeze; lora.target_modules selects the adapted matrices",
        ),
        "layout.engine": (
            engine_name(recipe) != MEGATRON,
            f"{engine_name(recipe)} with train.freeze",
            "the engine deepspeed does not support weights without optimizer state",
            "engine megatron without layout.zero.stage 2, 3 and offload",
        ),
        "model.mtp_num_layers": (
            recipe.model.mtp_num_layers is not None,
            f"{recipe.model.mtp_num_layers} with train.freeze",
            "multi-token prediction layers share parameters with layers that would be frozen",
            "model.mtp_num_layers null",
        ),
        "optimizer.optimizer": (
            recipe.optimizer.optimizer in ("muon", "lion"),
            f"{recipe.optimizer.optimizer} with train.freeze",
            "frozen parameters are not supported with this optimizer, whose state is planned for all parameters",
            "optimizer.optimizer adam",
        ),
        "optimizer.ema_decay": (
            recipe.optimizer.ema_decay is not None,
            f"{recipe.optimizer.ema_decay} with train.freeze",
            "the moving average is optimizer state, which frozen weights do not have",
            "optimizer.ema_decay null",
        ),
    }
    problems = [Problem(key, *each[1:]) for key, each in obstacles.items() if each[0]]
    yield from problems
    if not problems:
        yield from _patterns(recipe.model, patterns)


def _patterns(model: Model, patterns: tuple[str, ...]) -> Iterator[Problem]:
    known = parameters(model)
    for number, each in enumerate(patterns):
        if not any(fnmatchcase(name, each) for name in known):
            names = ", ".join(list(known)[:: max(1, len(known) // 4)][:5])
            yield Problem(
                f"{KEY}.{number}",
                f"{each!r} matches no parameter",
                "a pattern must match parameter names of the whole model",
                f"names are such as {names}",
            )
    frozen_names = _frozen(model, patterns)
    if len(frozen_names) == len(known):
        yield Problem(KEY, "matches all parameters", "a run must train something", "fewer patterns")
    for name in frozen_names:
        bias = f"{name.removesuffix('weight')}bias"
        if name.endswith(f"{_QKV}weight") and bias in known and bias not in frozen_names:
            yield Problem(
                KEY,
                f"matches {name} but not its bias",
                "megatron-core computes the gradient of this bias only together with that of its weight",
                f"add {bias}, or do not match {name}",
            )
            return
