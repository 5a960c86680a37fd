"""The same recipe with a narrower or wider model: what a learning rate is transferred from and to."""

from __future__ import annotations

from typing import Any

from llmrecipes.errors import UserError
from llmrecipes.recipe.schema import Model, Recipe
from llmrecipes.recipe.shape import shape

_SCALED = ("ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")


def at_width(recipe: Recipe, hidden_size: int) -> Recipe:
    """The recipe with another `hidden_size`: as many channels in a head, and as many times wider MLPs.

    Depth, vocabulary, sequences and training are kept. So is `mup_base_hidden_size`; if `use_mup` is on without it,
    the recipe's own width becomes the base.

    Args:
        recipe: of any width.
        hidden_size: of the result.

    Raises:
        UserError: the heads or query groups are no whole number at that width.
    """
    model = recipe.model
    factor = hidden_size / model.hidden_size
    channels = shape(model).kv_channels
    update: dict[str, Any] = {"hidden_size": hidden_size}
    for name in ("num_attention_heads", "num_query_groups"):
        update[name] = _whole(model, name, hidden_size, factor)
    for name in _SCALED:
        value = getattr(model, name)
        update[name] = value and max(1, round(value * factor))
    if model.kv_channels is None and hidden_size // update["num_attention_heads"] != channels:
        update["kv_channels"] = channels
    if model.use_mup and model.mup_base_hidden_size is None:
        update["mup_base_hidden_size"] = model.hidden_size
    return recipe.model_copy(update={"model": model.model_copy(update=update)})


def _whole(model: Model, name: str, hidden_size: int, factor: float) -> int | None:
    value: int | None = getattr(model, name)
    if value is None or value == 1:
        return value  # multi-query attention has one group at every width
    scaled = value * factor
    if scaled < 1 or not scaled.is_integer():
        raise UserError(
            f"hidden_size {hidden_size} would have {scaled:g} {name}",
            where=f"model.{name}",
            rule=f"heads keep their channels: {value} at hidden_size {model.hidden_size}",
            fix=f"a multiple of {model.hidden_size // value}, for which the number is whole",
        )
    return int(scaled)
