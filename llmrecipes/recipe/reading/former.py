"""The form of recipes of version 0.1.0, which runs and users' files may still have: `layout` was several sections.

Nothing else knows it. What a key meant without being set is kept: nothing was chosen for the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmrecipes.recipe.schema import Train
from llmrecipes.recipe.sections.layout_section import LayoutKeys

NOTE = (
    "parallelism, speed, zero, engine, and micro_batch_size, recompute_*, torch_compile and loss_chunk_tokens of train "
    "are keys of layout now, and were read as those"
)
_SECTIONS = ("parallelism", "speed")
_OF_TRAIN = (
    "micro_batch_size", "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules",
    "torch_compile", "loss_chunk_tokens",
)  # fmt: skip


def current(key: str) -> str:
    """Today's name of a dotted key; of one that has not moved itself."""
    section, _, name = key.partition(".")
    if section == "stages" and name.count(".") > 1:
        number, _, inner = name.partition(".")
        return f"stages.{number}.{current(inner)}"
    first = name.partition(".")[0]
    if section in (*_SECTIONS, "zero") and first in Train.model_fields:
        return f"train.{name}"
    if section in _SECTIONS and first in LayoutKeys.model_fields:
        return f"layout.{name}"
    if section in ("zero", "engine") or (section == "train" and first in _OF_TRAIN):
        return f"layout.{key if section != 'train' else name}"
    return key


def translated(values: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe, or what a stage changes, in today's form; of a recipe that has it already, a copy.

    A key that is there in both forms stays where it was, for the schema to report.
    """
    new = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
    moved = [
        (section, name)
        for section in (*_SECTIONS, "zero", "train")
        if isinstance(new.get(section), dict)
        for name in new[section]
        if current(f"{section}.{name}") != f"{section}.{name}"
    ]
    if not moved and not any(name in new for name in (*_SECTIONS, "zero", "engine")):
        return _inside(new)
    layout = new.setdefault("layout", None)
    new["layout"] = layout if isinstance(layout, dict) else {"name": layout}
    for section, name in moved:
        _move(new, new[section], name, current(f"{section}.{name}"))
    for name in ("zero", "engine"):
        if name in new and new[name] != {}:
            _move(new, new, name, f"layout.{name}")
    for name in (*_SECTIONS, "zero"):
        if new.get(name) == {}:
            del new[name]
    return _inside(new)


def _inside(new: dict[str, Any]) -> dict[str, Any]:
    """With the keys of stages, and those that are searched."""
    if isinstance(new.get("stages"), list | tuple):
        new["stages"] = [_stage(stage) for stage in new["stages"]]
    space = new["search"].get("space") if isinstance(new.get("search"), dict) else None
    if isinstance(space, dict):
        new["search"]["space"] = {current(key): dimension for key, dimension in space.items()}
    elif isinstance(space, list | tuple):
        new["search"]["space"] = [
            {**each, "key": current(each["key"])}
            if isinstance(each, dict) and isinstance(each.get("key"), str)
            else each
            for each in space
        ]
    return new


def _stage(stage: Any) -> Any:
    if not isinstance(stage, dict):
        return stage
    new = translated(stage)
    if isinstance(new.get("layout"), dict):
        new["layout"].pop("name", None)
    return new


def _move(new: dict[str, Any], place: dict[str, Any], name: str, key: str) -> None:
    *sections, leaf = key.split(".")
    target: Any = new
    for section in sections:
        target = target.setdefault(section, {}) if isinstance(target, dict) else None
    if isinstance(target, dict) and leaf not in target:
        target[leaf] = place.pop(name)
