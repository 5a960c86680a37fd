"""Output of `list`."""

from __future__ import annotations

from typing import Any

from llmrecipes.cli.render.table import aligned
from llmrecipes.console import number
from llmrecipes.errors import UserError
from llmrecipes.plan.parameters import count
from llmrecipes.recipe.load import load
from llmrecipes.recipe.shape import shape


def summaries(names: list[str]) -> list[dict[str, Any]]:
    """Name, parameters, training tokens and description of recipes; an invalid one has its `error` instead."""
    return [_summary(name) for name in names]


def table(rows: list[dict[str, Any]]) -> str:
    """The summaries as aligned lines."""
    cells = [("recipe", "parameters", "tokens", "description")]
    for row in rows:
        if "error" in row:
            cells.append((row["name"], "-", "-", f"broken: {row['error'].splitlines()[0]}"))
        else:
            cells.append((row["name"], number(row["parameters"]), number(row["tokens"]), row["description"]))
    return "\n".join(aligned(cells, right=(1, 2)))


def _summary(name: str) -> dict[str, Any]:
    try:
        recipe = load(name).recipe
    except UserError as error:  # one invalid file must not hide the others
        return {"name": name, "error": str(error)}
    tokens = recipe.train.train_iters * recipe.train.global_batch_size * recipe.model.seq_length
    parameters = count(recipe.model, shape(recipe.model)).total
    return {"name": name, "parameters": parameters, "tokens": tokens, "description": recipe.description}
