"""What the benchmarks share: the machine they ran on, and how their figures are shown and kept."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from llmrecipes.tracking.run_environment import capture

ROOT = Path(__file__).parents[1]
OTHERS = ("accelerate", "lightning", "litgpt")
"""Packages that only benchmarks use."""


def machine() -> dict[str, Any]:
    """Processor, memory, load average of now, code and versions, as JSON values."""
    found = capture(ROOT)
    git = found["git"] or {}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": found["cpu"],
        "cores": found["cores"]["usable"],
        "memory_gib": round(found["memory_bytes"] / 2**30, 1),
        "gpus": [gpu["name"] for gpu in found["gpus"]],
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "commit": f"{git.get('commit', 'none')[:12]}{' with changes' if git.get('dirty') else ''}",
        "python": found["python"],
        "packages": {name: version for name, version in found["packages"].items() if version} | _others(),
    }


def _others() -> dict[str, str]:
    found = {}
    for name in OTHERS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the option that all benchmarks have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as JSON")
    return made


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; the first column is text, the others are numbers."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    Console(highlight=False, width=None if os.isatty(1) else 140).print(table)


def close(figures: dict[str, Any], started_on: dict[str, Any], file: Path | None) -> None:
    """Print the machine line and write the figures.

    Args:
        figures: JSON values.
        started_on: `machine()` of before the measurement; the load average of its end is added.
        file: where the JSON goes; None for nowhere.
    """
    where = started_on | {"load_average_at_end": [round(load, 2) for load in os.getloadavg()]}
    packages = " ".join(f"{name} {where['packages'][name]}" for name in ("torch", "megatron-core"))
    print(
        f"{where['cpu']}, {where['cores']} cores, {where['memory_gib']} GiB, {', '.join(where['gpus']) or 'no GPU'}; "
        f"load {where['load_average'][0]} before, {where['load_average_at_end'][0]} after; commit {where['commit']}; "
        f"Python {where['python']} {packages}; {where['date']}"
    )
    if file is not None:
        file.write_text(json.dumps({"machine": where, **figures}, indent=2) + "\n", "utf-8")
