"""The reference page and the JSON Schema of recipes, both generated from the schema."""

from __future__ import annotations

import json
from pathlib import Path

from llmrecipes.recipe.keys import Key, keys, schema
from llmrecipes.recipe.schema import Recipe


def json_schema() -> str:
    """JSON Schema (draft 2020-12) of a recipe file, for editors and other programs."""
    made = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema(Recipe)}
    return json.dumps(made, indent=2, ensure_ascii=False) + "\n"


def reference() -> str:
    """The Markdown page of all keys: type, default, description."""
    lines = [
        "# Recipe keys",
        "",
        "Generated from `llmrecipes/recipe/schema.py` by `llmrecipes docs`; do not edit. Key names are Megatron's.",
        "`N` stands for an index, counted from 0, in files a list item and in overrides a number.",
    ]
    top = [key for key in keys().values() if "." not in key.name and not key.section]
    lines += ["", "## Top level", "", *_table(top)]
    for section in (key for key in keys().values() if key.section):
        members = [key for key in keys().values() if key.name.rpartition(".")[0] == section.name and not key.section]
        lines += ["", f"## {section.name}", "", section.description, "", *_table(members)]
    return "\n".join(lines) + "\n"


def generated(root: Path) -> dict[Path, str]:
    """The generated files of a checkout with their expected text."""
    return {root / "docs" / "reference.md": reference(), root / "recipes" / "schema.json": json_schema()}


def _table(members: list[Key]) -> list[str]:
    rows = ["| key | takes | default | meaning |", "| --- | --- | --- | --- |"]
    for key in members:
        default = key.default_text if key.required else f"`{key.default_text}`"
        cells = [f"`{key.name}`", key.takes, default, key.description]
        rows.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return rows
