"""A config.json of transformers: the recipe of a model of that shape, trained from random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmrecipes.commandline import command_line
from llmrecipes.foreign.draft import Draft
from llmrecipes.hf.match import section_of, validated, without_effect
from llmrecipes.hf.reading import CONFIG
from llmrecipes.hf.table import NEUTRAL, Family
from llmrecipes.plan.parameters import count
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.reading.keys import keys
from llmrecipes.workflow.new import TOKENS_PER_PARAMETER, Made, Wanted, make, nearest
from llmrecipes.workflow.pretrained import SEQ_LENGTH, TOKENIZER_FILE

_TOKENIZER = ("bos_token_id", "eos_token_id", "pad_token_id")


def from_config(config: Mapping[str, Any], draft: Draft, path: Path, wanted: Wanted) -> Made:
    """Translate the shape; the rest is that of the nearest recipe in recipes/, or of `wanted.like`.

    Raises:
        UserError: no recipe can describe the model.
    """
    family, section = section_of(config, path.parent, predicting=True)
    _set_model(section, family, config, draft)
    most = section.get("max_position_embeddings")
    length = wanted.seq_length or (min(SEQ_LENGTH, most) if isinstance(most, int) else SEQ_LENGTH)
    draft.set("model.seq_length", length, why="config.json has only the largest: --seq-length changes it")
    _leave_others(section, family, config, draft, path.parent)
    model = validated(section, length, str(path))
    like = wanted.like or nearest(count(model, shape(model)).total)
    tokenizer = wanted.tokenizer
    if tokenizer is None and (path.parent / TOKENIZER_FILE).is_file():
        tokenizer = str(path.parent.absolute())
        draft.set("data.tokenizer.path", tokenizer, TOKENIZER_FILE)
    tokens = "--tokens" if wanted.tokens else f"{TOKENS_PER_PARAMETER} tokens for each parameter"
    made = make(
        replace(wanted, params=None, like=like, model=draft.values["model"], seq_length=length, tokenizer=tokenizer)
    )
    for name in ("train", "optimizer", "scheduler", "data", "checkpoint"):
        draft.set(name, f"as in {like}", why=f"not in config.json: for {tokens}" if name == "train" else "")
    folder = path.parent if path.name == CONFIG else path
    draft.advice.append(f"to start from its weights: {command_line('import', folder, options={'recipe': True})}")
    return made


def _set_model(section: Mapping[str, Any], family: Family, config: Mapping[str, Any], draft: Draft) -> None:
    """The keys of the model, each with its name in config.json or the reason for its value."""
    ours = {entry.ours: entry.theirs for entry in family.keys}
    for key, value in section.items():
        name = ours.get(key, "")
        given = name in config
        same = value == keys()[f"model.{key}"].default
        why = "" if given or same else f"{family.name}'s default" if name else f"of {family.name}"
        draft.set(f"model.{key}", value, name if given else "", config.get(name), why)
    std = config.get("initializer_range")
    if std is not None:
        draft.set("model.init_method_std", std, "initializer_range")


def _leave_others(
    section: Mapping[str, Any], family: Family, config: Mapping[str, Any], draft: Draft, folder: Path
) -> None:
    """What config.json says beside the model."""
    coefficient = config.get("router_aux_loss_coef")
    if coefficient and section.get("num_moe_experts"):
        draft.leave(
            "router_aux_loss_coef",
            coefficient,
            "transformers averages it over layers, Megatron adds layers: set model.moe_aux_loss_coeff",
            differs=True,
        )
    accounted = {row.name for row in draft.rows} | {fixed.theirs for fixed in family.fixed}
    accounted |= {key for special in family.specials for key in special.theirs}
    unused = {*NEUTRAL, *family.training_only, *without_effect(config, folder)}
    for name, value in config.items():
        if name in unused and name not in accounted:
            why = "the tokenizer's" if name in _TOKENIZER else "it does not change what the model computes"
            draft.leave(name, value, why)
