"""Output of `list` and `clusters`."""

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


def cluster_summaries(names: list[str]) -> list[dict[str, Any]]:
    """Profiles as plain data; an invalid one has its `error` instead."""
    return [_cluster_summary(name) for name in names]


def cluster_table(rows: list[dict[str, Any]]) -> str:
    """The summaries as aligned lines."""
    return "\n".join(aligned([("cluster", "node", "between nodes", "description"), *map(_cluster_cells, rows)]))


def _cluster_summary(name: str) -> dict[str, Any]:
    from llmrecipes.hardware.load import load_profile

    try:
        return load_profile(name).model_dump(mode="json")
    except UserError as error:  # one invalid file must not hide the others
        return {"name": name, "error": str(error)}


def _cluster_cells(row: dict[str, Any]) -> tuple[str, str, str, str]:
    if "error" in row:
        return row["name"], "-", "-", f"broken: {row['error'].splitlines()[0]}"
    node = f"{row['gpus_per_node']} × {row['gpu']['name']}" if row["gpu"] else f"{row['cpu_cores']} cores"
    link = row["inter_node"]
    return row["name"], node, f"{link['kind']} {link['gb_per_s']:g} GB/s", row["description"]
