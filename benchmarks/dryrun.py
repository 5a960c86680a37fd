"""What a rank of each recipe holds and sends, by dry run: the table in benchmarks/RESULTS.md.

    python -m benchmarks.dryrun [RECIPE ...] [--json FILE]
    python -m benchmarks.dryrun --drawn 100 [--json FILE]

On the fewest nodes that each layout fits, with two micro-batches for each pipeline stage: the first rank, and the
plan's activations against those of the first rank of every stage.

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
from llmrecipes.errors import UserError
from llmrecipes.files import recipes_dir
from llmrecipes.recipe.derived.stage_runs import as_run
from llmrecipes.recipe.load import load, names
from llmrecipes.workflow.dryrun import dry_run, environment
from llmrecipes.workflow.plan import plan_on

ON_CPUS = "tiny"
"""In the names of recipes for CPUs; the others are planned for GPUs."""

HEADER = ("recipe", "ranks", "weights", "gradients", "optimizer", "activations", "planned", "over all stages")


def measure(name: str, folder: Path) -> dict[str, Any]:
    """What the first rank of a recipe holds, and of each stage how far the plan is off, as JSON values.

    Raises:
        UserError: it has a part that no dry run can show.
    """
    cluster = "laptop" if ON_CPUS in name else "h100-ib"
    plan = plan_on(load(name, []).recipe, nproc=None, cluster=cluster, nodes=None)[0].largest
    layout, recipe = plan.layout, plan.recipe
    batch = 2 * layout.pipeline_model_parallel_size * layout.data_parallel_size * recipe.layout.micro_batch_size
    short = as_run(recipe)
    short = short.model_copy(update={"train": short.train.model_copy(update={"global_batch_size": batch})})
    reports = dry_run(short, folder, _say, cluster=cluster, stages=True).reports
    return {
        **reports[0].contract(),
        "stages": [report.planned["activations"] / report.memory["activations"] - 1 for report in reports],
    }


def row(found: dict[str, Any]) -> list[str]:
    """Cells of the table; sizes in GiB."""
    memory, off = found["memory_gib"], sorted({f"{100 * each:.1f}" for each in found["stages"]}, key=float)
    return [
        found["recipe"],
        f"{found['world_size']:,}",
        *(f"{memory[part]:.2f}" for part in ("weights", "gradients", "optimizer", "activations")),
        f"{found['planned_gib']['activations']:.2f}",
        " to ".join(dict.fromkeys((off[0], off[-1]))).replace("-0.0", "0.0").replace("-", "−") + " %",
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
        for name in asked.recipes or names(recipes_dir()):
            try:
                rows.append(measure(name, Path(folder)))
            except UserError as error:
                _say(str(error))
                continue
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
