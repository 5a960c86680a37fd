"""The same recipe with a narrower or wider model: what hyperparameters are transferred from and to."""

from __future__ import annotations

from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.recipe.derived.degrees import DEGREES, SHARING, undivided
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.rules.recipe_rules import check
from llmrecipes.recipe.schema import Model, Recipe
from llmrecipes.recipe.variants.proxy import suffixed

PROXY = "-proxy"
_HEADS = ("num_attention_heads", "num_query_groups")
_SCALED = ("ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
_UNSCALED = ("kv_channels", "mup_base_hidden_size", "mup_base_head_dim")
_WIDTH = {f"model.{name}" for name in ("hidden_size", *_HEADS, *_SCALED, *_UNSCALED)}


def at_width(recipe: Recipe, hidden_size: int) -> Recipe:
    """The recipe with another `hidden_size`: as many channels in a head, and as many times wider MLPs.

    Depth, vocabulary, sequences and training are kept. So is `mup_base_hidden_size`; if `use_mup` is on without it,
    the recipe's own width becomes the base.

    Raises:
        UserError: the heads or query groups are not a whole number at that width.
    """
    model = recipe.model
    factor = hidden_size / model.hidden_size
    channels = shape(model).kv_channels
    update: dict[str, Any] = {"hidden_size": hidden_size}
    for name in _HEADS:
        update[name] = _whole(model, name, hidden_size, factor)
    for name in _SCALED:
        value = getattr(model, name)
        update[name] = value and max(1, round(value * factor))
    if model.kv_channels is None and hidden_size // update["num_attention_heads"] != channels:
        update["kv_channels"] = channels
    if model.use_mup and model.mup_base_hidden_size is None:
        update["mup_base_hidden_size"] = model.hidden_size
    return recipe.model_copy(update={"model": model.model_copy(update=update)})


def base_width(recipe: Recipe) -> Recipe:
    """The recipe at `mup_base_hidden_size`, with one rank per replica: what `search --proxy` trains.

    With the maximal-update parametrisation, values that are optimal at this width are optimal at the recipe's own
    (arXiv 2203.03466, table 2).

    Args:
        recipe: with the section `search`.

    Raises:
        UserError: the recipe has no narrower base, its search is over keys that depend on the width or the layout, or
            the narrow model breaks a rule.
    """
    model = recipe.model
    base = model.mup_base_hidden_size if model.use_mup else None
    if base is None or base >= model.hidden_size:
        raise UserError(
            f"{base} with hidden_size {model.hidden_size}" if base else "unset" if model.use_mup else "false",
            where="model.mup_base_hidden_size" if model.use_mup else "model.use_mup",
            rule="a proxy is a narrower model; values transfer from it only with the maximal-update parametrisation",
            fix="model.use_mup=true model.mup_base_hidden_size=256 model.mup_base_head_dim=CHANNELS_OF_A_HEAD",
        )
    for dimension in recipe.search.space if recipe.search else ():
        if dimension.key in _WIDTH or dimension.key.removeprefix("layout.") in DEGREES:
            raise UserError(
                f"{dimension.key} is searched",
                where="--proxy",
                rule="--proxy sets width and layout itself",
                fix="search it without --proxy",
            )
    kept = {name: getattr(recipe.layout, name) for name in (*SHARING, "zero", "engine")}
    narrow = undivided(at_width(recipe, base), **kept).model_copy(update={"name": suffixed(recipe.name, PROXY)})
    if problems := check(narrow):
        first = problems[0]
        raise UserError(first.what, where=f"--proxy: {first.key}", rule=first.rule, fix=first.fix)
    return narrow


def _whole(model: Model, name: str, hidden_size: int, factor: float) -> int | None:
    value: int | None = getattr(model, name)
    if value is None or value == 1:
        return value  # multi-query attention has one group at every width
    scaled = value * factor
    if scaled < 1 or not scaled.is_integer():
        raise UserError(
            f"hidden_size {hidden_size} would have {scaled:g} {name}",
            where=f"model.{name}",
            rule=f"channels per head stay the same: {value} {name} at hidden_size {model.hidden_size}",
            fix=f"a hidden_size that is a multiple of {model.hidden_size // value}",
        )
    return int(scaled)
