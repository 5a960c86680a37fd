"""What a rank of each recipe holds and sends, by dry run: the table in docs/recipes.md.

    python -m benchmarks.dryrun [RECIPE ...] [--json FILE]
    python -m benchmarks.dryrun --drawn 100 [--json FILE]

Of each recipe that the megatron engine runs, on the nodes below: the first rank and one of the last stage, with
all micro-batches of a step. The one that needs more memory is shown, beside the plan.

`--drawn N` compares the plan with dry runs of all stages of N layouts drawn at random (`benchmarks.drawn_layouts`).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks.common import close, machine, parser
from benchmarks.drawn_layouts import CLOSE, described, deviations, drawn
from llmrecipes.recipe.load import load
from llmrecipes.units import GIB
from llmrecipes.workflow.dryrun import dry_run, environment

NODES = {
    "gpt-tiny": ("laptop", 1),
    "gpt-tiny-3d": ("laptop", 1),
    "moe-tiny": ("laptop", 1),
    "gpt-125m": ("h100-ib", 1),
    "gpt-350m": ("h100-ib", 1),
    "gpt-1b": ("h100-ib", 1),
    "gpt-7b": ("h100-ib", 4),
    "gpt-175b": ("h100-ib", 128),
    "llama3-8b": ("h100-ib", 2),
    "llama3-70b": ("h100-ib", 32),
    "llama3-405b": ("h100-ib", 2048),
    "mixtral-8x7b": ("h100-ib", 8),
    "qwen3-30b-a3b": ("h100-ib", 16),
    "deepseek-v3": ("h100-ib", 128),
}
"""Cluster profile and nodes of each recipe."""

HEADER = (
    "recipe", "ranks", "stage", "weights", "gradients", "optimizer", "activations", "temporary", "total", "planned",
    "sent, of it between nodes", "host waits", "operations",
)  # fmt: skip


def measure(name: str, folder: Path) -> dict[str, Any]:
    """The fuller of a recipe's first and last stage, as JSON values."""
    cluster, nodes = NODES[name]
    recipe = load(name, []).recipe
    first = dry_run(recipe, folder, _say, cluster=cluster, nodes=nodes, rank=0)
    reports = list(first.reports)
    if recipe.parallelism.pipeline_model_parallel_size > 1:
        last = first.plan.layout.world_size - 1
        reports += dry_run(recipe, folder, _say, cluster=cluster, nodes=nodes, rank=last).reports
    fullest = max(reports, key=lambda report: sum(report.memory.values()))
    sent = [each for each in fullest.traffic if each.op != "receive"]
    return {
        **fullest.contract(),
        "sent_gib": sum(each.bytes for each in sent) / GIB,
        "between_nodes_gib": sum(each.bytes for each in sent if not each.node_local) / GIB,
        "operations": fullest.operations,
    }


def row(found: dict[str, Any]) -> list[str]:
    """Cells of the table; sizes in GiB."""
    memory = found["memory_gib"]
    return [
        found["recipe"],
        f"{found['world_size']:,}",
        str(found["stage"]),
        *(f"{memory[part]:.2f}" for part in ("weights", "gradients", "optimizer", "activations", "temporary", "total")),
        f"{found['planned_gib']['total']:.2f}",
        f"{found['sent_gib']:.1f}, {found['between_nodes_gib']:.1f}",
        str(found["syncs_per_step"]),
        f"{found['operations']:,} in {found['seconds']:.0f} s",
    ]


def main() -> None:
    """Measure, and print the table as Markdown."""
    options = parser(__doc__)
    options.add_argument("recipes", nargs="*", metavar="RECIPE")
    options.add_argument("--drawn", type=int, metavar="N", help="compare N drawn layouts with the plan instead")
    asked = options.parse_args()
    if asked.drawn:
        compare_drawn(asked.drawn, asked.json)
        return
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in asked.recipes or NODES:
            rows.append(measure(name, Path(folder)))
            print(f"| {' | '.join(row(rows[-1]))} |", flush=True)
    if asked.json is not None:
        asked.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n", "utf-8")


def compare_drawn(number: int, file: Path | None) -> None:
    """Print the largest deviations of drawn layouts.

    Args:
        number: of layouts.
        file: where the JSON of all ranks goes; None for nowhere.
    """
    os.environ |= environment()
    warnings.filterwarnings("ignore", module=r"llmrecipes\.dryrun\.recorder")
    started, began = machine(), time.monotonic()
    rows = []
    for index in range(number):
        spec = drawn(index)
        for stage, found in enumerate(deviations(spec)):
            rows.append({"layout": described(spec), "number": index, "stage": stage, **found._asdict()})
        print(f"{index + 1} of {number}", end="\r", file=sys.stderr)
    for name in ("weights", "gradients", "optimizer", "most_activations", "total"):
        worst = max(rows, key=lambda row: abs(row[name]))
        print(f"{name}: {worst[name]:+.4f} of layout {worst['number']}, stage {worst['stage']}: {worst['layout']}")
    other = sum(bool(row["traffic"]) for row in rows)
    beyond = [row for row in rows if abs(row["most_activations"]) > CLOSE]
    print(f"{len(rows)} ranks of {number} layouts in {time.monotonic() - began:.0f} s; ", end="")
    print(f"{len(beyond)} with activations beyond {CLOSE:.0%}; {other} with other traffic")
    for row in rows:
        for line in row["traffic"]:
            print(f"layout {row['number']}, stage {row['stage']}: {line}")
    close({"drawn": rows}, started, file)


def _say(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
