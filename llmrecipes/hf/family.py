"""Which family of transformers a recipe's model belongs to, and the other way round."""

from __future__ import annotations

from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.hf.families.deepseek import DEEPSEEK_V3
from llmrecipes.hf.families.ernie import ERNIE_4_5
from llmrecipes.hf.families.glm4_moe import GLM4_MOE
from llmrecipes.hf.families.gpt2 import GPT2
from llmrecipes.hf.families.gpt_oss import GPT_OSS
from llmrecipes.hf.families.llama import APERTUS, LLAMA_FAMILY, MINISTRAL, MISTRAL, QWEN2, QWEN3, SEED_OSS
from llmrecipes.hf.families.mixture import MIXTRAL, QWEN3_MOE
from llmrecipes.hf.families.phi3 import PHI3
from llmrecipes.hf.families.smollm3 import SMOLLM3
from llmrecipes.hf.table import Config, Family, Unsupported
from llmrecipes.recipe.schema import Model

_ORDER = (
    GPT2, LLAMA_FAMILY, MISTRAL, QWEN2, QWEN3, APERTUS, MIXTRAL, QWEN3_MOE, DEEPSEEK_V3,
    MINISTRAL, SEED_OSS, PHI3, SMOLLM3, ERNIE_4_5, GLM4_MOE, GPT_OSS,
)  # fmt: skip
FAMILIES: dict[str, Family] = {family.name: family for family in _ORDER}
"""By `model_type`; the first that has the form of a recipe is used."""

_AFTER = "norms after attention and MLP"
_ALL_HEADS = "norms of all heads of queries and keys together"
_BY_KIND = "rotation by kind of layer"
_DELTA = "layers of gated DeltaNet"
LACKING = {
    "gemma2": f"{_AFTER}, soft-capping",
    "gemma3_text": f"{_AFTER}, {_BY_KIND}",
    "olmo2": f"{_AFTER}, {_ALL_HEADS}",
    "olmo3": f"{_AFTER}, {_ALL_HEADS}, {_BY_KIND}",
    "glm4": _AFTER,
    "minimax_m2": _ALL_HEADS,
    "granite": "multiplier of the residual stream",
    "granitemoehybrid": "layers of Mamba-2, multiplier of the residual stream",
    "nemotron_h": "layers of Mamba-2",
    "qwen3_next": _DELTA,
    "qwen3_5_text": _DELTA,
    "ernie4_5_moe": "bias of experts beside softmax scores",
    "ministral3": "scaling of queries by their position",
    "deepseek_v32": "sparse attention",
}
"""What keeps some well-known types of models out."""


def family_of(model: Model, name: str | None = None) -> Family:
    """The family with the form of a model.

    Args:
        model: model of a recipe.
        name: `model_type` of the one to use; None: the first that fits.

    Raises:
        UserError: none fits; with the keys of the nearest that do not fit.
    """
    if name is not None and name not in FAMILIES:
        raise UserError(f"unknown family {name!r}", where="--family", rule=f"one of {', '.join(FAMILIES)}")
    tried = [FAMILIES[name]] if name is not None else list(FAMILIES.values())
    problems = {family.name: family.config_of(model)[1] for family in tried}
    for family in tried:
        if not problems[family.name]:
            return family
    # One that has experts, or has none, as the model; of these the one with the fewest differences.
    dense = not model.num_moe_experts
    nearest = min(
        problems,
        key=lambda key: (("num_moe_experts" in FAMILIES[key].needs) is not dense, len(problems[key])),
    )
    raise _refused(f"no matching transformers architecture; the nearest is {nearest}", "", problems[nearest])


def families_of(model: Model) -> list[Family]:
    """All families with the form of a model, in the order in which they are tried."""
    return [family for family in FAMILIES.values() if not family.config_of(model)[1]]


def family_named(model_type: object, where: str) -> Family:
    """The family of a config.json.

    Args:
        model_type: its key of that name.
        where: the file.

    Raises:
        UserError: it is not supported.
    """
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if isinstance(model_type, str) and (lacking := LACKING.get(model_type)):
        raise UserError(
            f"unsupported model_type {model_type!r}",
            where=where,
            rule=f"recipes have no {lacking}",
            fix=f"use a model of one of {', '.join(FAMILIES)}",
        )
    if family is None:
        raise UserError(
            "model_type is missing" if model_type is None else f"unsupported model_type {model_type!r}",
            where=where,
            rule=f"one of {', '.join(FAMILIES)}",
            fix="use a model of one of these types; CONTRIBUTING.md says how to add a family",
        )
    return family


def config_of(family: Family, model: Model) -> dict[str, Any]:
    """config.json of a model.

    Raises:
        UserError: with the keys of the recipe that have no counterpart.
    """
    config, problems = family.config_of(model)
    if problems:
        raise _refused(f"cannot be written as {family.name}", "", problems)
    return config


def model_of(family: Family, config: Config, where: str) -> dict[str, Any]:
    """The section `model` of a config.json that transformers has completed, but for `seq_length`.

    Raises:
        UserError: with the keys of config.json that have no counterpart.
    """
    model, problems = family.model_of(config)
    if problems:
        raise _refused("a recipe cannot describe this model", where, problems)
    return model


def _refused(what: str, where: str, problems: list[Unsupported]) -> UserError:
    parts = [
        UserError(f"{problem.value}", where=problem.key, rule=problem.rule, fix=problem.fix) for problem in problems
    ]
    if len(parts) == 1:
        (problem,) = problems
        key = ": ".join(filter(None, (where, problem.key)))
        return UserError(f"{problem.value}: {what}", where=key, rule=problem.rule, fix=problem.fix)
    lines = "\n    ".join(f"{problem.key}: {problem.value}; {problem.rule}" for problem in problems)
    fix = "; ".join(dict.fromkeys(problem.fix for problem in problems if problem.fix))
    return UserError(f"{what}:\n    {lines}", where=where or "model", fix=fix, parts=parts)
