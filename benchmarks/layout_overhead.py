"""What each parallel layout costs beside one process at the same global batch, and what it sends beside what it has to.

    python -m benchmarks.layout_overhead [--layouts NAME ...] [--steps N]

Every layout runs in a world of its own on this machine's CPU, one thread a rank. Time is the median step by the clock;
processor time is summed over ranks, so it shows the layout's cost also where ranks share cores or the machine is busy.
Calls and bytes are counted in one step (`benchmarks.traffic` has the conventions) and set beside the formulas; the
benchmark fails where more than 5 % over that is sent. Calls of at most 4 KiB are bookkeeping and counted apart.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from typing import Any, NamedTuple

from benchmarks.common import close, machine, parser, show
from benchmarks.former import FORMER
from benchmarks.ranks import run, small
from benchmarks.traffic import SMALL, Call, expected
from llmrecipes.hardware.cluster import detect
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.schema import Recipe

ALLOWED = 0.05
SAME = ("model.num_layers=4", "model.hidden_size=256", "model.seq_length=128", "layout.micro_batch_size=2",
        "train.global_batch_size=8")  # fmt: skip
OVERLAP = "overlap_grad_reduce=true overlap_param_gather=true"


class Layout(NamedTuple):
    """A row: recipe, ranks, keys of `parallelism`, other keys."""

    recipe: str
    ranks: int
    parallelism: str = ""
    others: tuple[str, ...] = ()


TP, SP, PP, VPP, CP = (
    "tensor_model_parallel_size=2",
    "sequence_parallel=true",
    "pipeline_model_parallel_size=2",
    "virtual_pipeline_model_parallel_size=2",
    "context_parallel_size=2",
)
ETP = "expert_tensor_parallel_size=1"
LAYOUTS = {
    "one": Layout("gpt-tiny", 1),
    "dp2": Layout("gpt-tiny", 2),
    "dp2, whole optimizer": Layout("gpt-tiny", 2, "use_distributed_optimizer=false"),
    "dp2, overlapped": Layout("gpt-tiny", 2, OVERLAP),
    "tp2": Layout("gpt-tiny", 2, TP),
    "tp2 sp": Layout("gpt-tiny", 2, f"{TP} {SP}"),
    "pp2": Layout("gpt-tiny", 2, PP),
    "pp2 vpp2": Layout("gpt-tiny", 2, f"{PP} {VPP}"),
    "cp2": Layout("gpt-tiny", 2, CP),
    "tp2 sp pp2": Layout("gpt-tiny", 4, f"{TP} {SP} {PP}"),
    "tp2 sp cp2": Layout("gpt-tiny", 4, f"{TP} {SP} {CP}"),
    "tp2 sp pp2 dp2": Layout("gpt-tiny", 8, f"{TP} {SP} {PP}"),
    "moe one": Layout("moe-tiny", 1, "expert_model_parallel_size=1"),
    "moe dp2": Layout("moe-tiny", 2, f"expert_model_parallel_size=1 {OVERLAP}"),
    "moe ep2": Layout("moe-tiny", 2, OVERLAP),
    "moe ep2, not overlapped": Layout("moe-tiny", 2),
    "moe ep2, allgather": Layout("moe-tiny", 2, OVERLAP, ("model.moe_token_dispatcher_type=allgather",)),
    "moe ep2 tp2 sp": Layout("moe-tiny", 2, f"{TP} {SP} {ETP} {OVERLAP}"),
}
GATHERED_TWICE = "moe ep2, not overlapped"
"""megatron-core 0.16 gathers all parameters once for dense parameters and once more for experts, unless overlapped."""


def recipe_of(layout: Layout) -> Recipe:
    """What a row trains: with the optimizer and the shape that the formulas of the papers are about."""
    keys = [f"layout.{change}" for change in layout.parallelism.split()]
    former = FORMER if layout.recipe == "gpt-tiny" else ()
    return small(layout.recipe, *former, *SAME, *keys, *layout.others)


def measure(layout: Layout, warmup: int, steps: int) -> dict[str, Any]:
    """Times, calls and bytes of one layout; calls and bytes are means over ranks."""
    recipe = recipe_of(layout)
    plan = derive(recipe, layout.ranks, detect())
    reports = run(recipe, layout.ranks, warmup=warmup, steps=steps, count=True)
    counted = Counter(Call(*call) for report in reports for call in report["calls"])
    large = Counter({call: number for call, number in counted.items() if call.payload > SMALL})
    formula = Counter({call: number for call, number in expected(plan).items() if call.payload > SMALL})
    total = volume(counted)
    return {
        "ranks": layout.ranks,
        "seconds": statistics.median(max(walls) for walls in zip(*(report["wall"] for report in reports), strict=True)),
        "core_seconds": statistics.median(
            sum(used) for used in zip(*(report["core_seconds"] for report in reports), strict=True)
        ),
        "calls": large.total() / layout.ranks,
        "expected_calls": formula.total() / layout.ranks,
        "small_calls": (counted - large).total() / layout.ranks,
        "bytes": total / layout.ranks,
        "expected_bytes": volume(expected(plan)) / layout.ranks,
        "bytes_by_kind": {
            kind: sum(call.volume * number for call, number in counted.items() if call.kind == kind) / layout.ranks
            for kind in sorted({call.kind for call in counted})
        },
    }


def volume(calls: Counter[Call]) -> float:
    """Bytes sent by all ranks."""
    return sum(call.volume * number for call, number in calls.items())


def over(row: dict[str, Any]) -> float:
    """How far the bytes are over those of the formulas, as a share."""
    return float(row["bytes"] / row["expected_bytes"] - 1) if row["expected_bytes"] else 0.0


def main() -> int:
    """Print the table; 1 where a layout sends too much."""
    made = parser(__doc__)
    made.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), metavar="NAME")
    made.add_argument("--warmup", type=int, default=1)
    made.add_argument("--steps", type=int, default=5)
    arguments = made.parse_args()
    started_on = machine()
    found: dict[str, dict[str, Any]] = {}
    for name in arguments.layouts:
        print(f"{name} …", flush=True)
        found[name] = measure(LAYOUTS[name], arguments.warmup, arguments.steps)
    show("One optimizer step of each layout", *_table(found))
    close({"layouts": found}, started_on, arguments.json)
    wrong = [name for name, row in found.items() if over(row) > ALLOWED and name != GATHERED_TWICE]
    for name in wrong:
        print(f"error: {name} sends {over(found[name]):.1%} more than it has to", file=sys.stderr)
    return 1 if wrong else 0


def _table(found: dict[str, dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    columns = ["layout", "ranks", "ms", "core ms", "× one", "calls a rank", "formula", "small", "KiB a rank", "formula",
               "over"]  # fmt: skip
    rows = []
    for name, row in found.items():
        one = found.get("moe one" if name.startswith("moe") else "one")
        times = f"{row['core_seconds'] / one['core_seconds']:.2f}" if one else ""
        rows.append([
            name, str(row["ranks"]), f"{row['seconds'] * 1e3:.0f}", f"{row['core_seconds'] * 1e3:.0f}", times,
            f"{row['calls']:g}", f"{row['expected_calls']:g}", f"{row['small_calls']:g}", f"{row['bytes'] / 1024:,.0f}",
            f"{row['expected_bytes'] / 1024:,.0f}", f"{over(row):+.1%}",
        ])  # fmt: skip
    return columns, rows


if __name__ == "__main__":
    sys.exit(main())
