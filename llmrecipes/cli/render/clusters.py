"""Output of `clusters`."""

from __future__ import annotations

from typing import Any

from llmrecipes.cli.render.table import aligned
from llmrecipes.errors import UserError
from llmrecipes.hardware.load import load_profile


def summaries(names: list[str]) -> list[dict[str, Any]]:
    """Profiles as plain data; an invalid one has its `error` instead."""
    return [_summary(name) for name in names]


def table(rows: list[dict[str, Any]]) -> str:
    """The summaries as aligned lines."""
    return "\n".join(aligned([("cluster", "node", "between nodes", "description"), *map(_cells, rows)]))


def _summary(name: str) -> dict[str, Any]:
    try:
        return load_profile(name).model_dump(mode="json")
    except UserError as error:  # one invalid file must not hide the others
        return {"name": name, "error": str(error)}


def _cells(row: dict[str, Any]) -> tuple[str, str, str, str]:
    if "error" in row:
        return row["name"], "-", "-", f"broken: {row['error'].splitlines()[0]}"
    node = f"{row['gpus_per_node']} × {row['gpu']['name']}" if row["gpu"] else f"{row['cpu_cores']} cores"
    link = row["inter_node"]
    return row["name"], node, f"{link['kind']} {link['gb_per_s']:g} GB/s", row["description"]
