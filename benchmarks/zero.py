"""ZeRO: what each stage holds and sends, what it costs, and the largest model that trains.

    python -m benchmarks.zero --part bytes|speed|largest [--json FILE]

`bytes` walks the tensors of the engine `deepspeed` in its second step: parameters, gradients and optimizer state of a
rank, by distinct memory, beside the formulas (`benchmarks.zero_formulas`) and the plan. `speed` gives tokens/s, peak
memory and the bytes sent in a step. `largest` searches the largest model of which every rank stays below `--limit-gib`:
resident memory of the process on a CPU, torch's allocator on a GPU. Every try is a new world of ranks. Devices are
those of this machine: without a GPU, processes of one thread.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.chart import bars
from benchmarks.common import close, machine, parser, show
from benchmarks.former import FORMER
from benchmarks.ranks import small
from benchmarks.traffic import Call
from benchmarks.zero_formulas import BF16_FP32_GRADIENTS, FP32, STAGES, TYPES, Bytes, Types, held, largest, sent
from benchmarks.zero_rank import TOO_MUCH
from llmrecipes.hardware.cluster import detect
from llmrecipes.launch.local.processes import run_ranks
from llmrecipes.plan.derive import Plan, derive
from llmrecipes.recipe.schema import Recipe
from llmrecipes.units import GIB

ALLOWED = 0.05
BUCKET = 1_000_000
MIB = 2**20


class Variant(NamedTuple):
    """Stage, engine and further keys of `zero`."""

    name: str
    stage: int
    engine: str = "deepspeed"
    keys: tuple[str, ...] = ()


PROBES = (4, 12)
"""Layers of the models from whose peaks `largest` guesses."""
SUB_GROUP = 50_000_000
OFFLOAD = ("layout.zero.offload_optimizer=cpu",)
PLAIN = tuple(Variant(f"stage {stage}", stage) for stage in STAGES)
MEGATRON = Variant("stage 1, megatron", 1, engine="megatron")
BY_SIZE = (Variant("stage 0, megatron", 0, engine="megatron"), *PLAIN[1:], MEGATRON)
"""Of `largest`: without ZeRO, the engine deepspeed trains in fp32 alone. Offload is to the memory that it measures."""
VARIANTS = (
    *PLAIN,
    Variant(
        "stage 2, all-reduce", 2, keys=("layout.zero.extra.zero_optimization.use_multi_rank_bucket_allreduce=true",)
    ),
    Variant("stage 2, optimizer offloaded", 2, keys=OFFLOAD),
    Variant("stage 3, optimizer offloaded", 3, keys=OFFLOAD),
    Variant("stage 3, parameters too", 3, keys=(*OFFLOAD, "layout.zero.offload_param=cpu")),
    MEGATRON,
)


def recipe_of(variant: Variant, types: Types, ranks: int, *shape: str) -> Recipe:
    """A GPT of 29M parameters; one micro-batch a step, buckets that are small beside the model."""
    keys = [
        "model.num_layers=8", "model.hidden_size=512", "model.num_attention_heads=8", "model.seq_length=64",
        "layout.micro_batch_size=1", f"train.global_batch_size={ranks}", "checkpoint.async_save=false", *shape,
        f"train.precision={'fp32' if types.weight == 4 else 'bf16'}",
        f"train.grad_reduce_in_fp32={str(types.gradient == 4).lower()}",
        f"layout.use_distributed_optimizer={str(variant.stage > 0).lower()}",
        f"layout.engine={variant.engine}", f"layout.zero.stage={variant.stage}", *variant.keys,
    ]  # fmt: skip
    if variant.stage == 3:
        keys.append(f"layout.zero.sub_group_size={SUB_GROUP}")
    if variant.engine == "deepspeed" and variant.stage > 0:
        keys.append(f"layout.zero.reduce_bucket_size={BUCKET}")
        if variant.stage < 3:
            keys.append(f"layout.zero.allgather_bucket_size={BUCKET}")
        else:
            for name in ("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance"):
                keys.append(f"layout.zero.{name}={BUCKET}")
    return small("gpt-tiny", *FORMER, *keys)


class Failed(Exception):
    """Ranks ended with a code."""

    def __init__(self, code: int, logs: str) -> None:
        super().__init__(f"the ranks ended with {code}\n{logs}")
        self.code = code


def run(
    recipes: Sequence[Recipe], ranks: int, *, warmup: int = 1, steps: int = 0, count: bool = False, walk: bool = False,
    tight: bool = False, limit_bytes: int | None = None, limit_seconds: float | None = None,
) -> list[list[dict[str, Any]]]:  # fmt: skip
    """Train the recipes in turn in new processes of one thread each; gives each rank's reports.

    Args:
        recipes: of models that grow, where peaks are asked for.
        ranks: world size.
        warmup: steps before the clock starts.
        steps: measured steps.
        count: take one more step and report its collectives.
        walk: take one more step and report the tensors in it.
        tight: on a CPU, return freed memory to the kernel: slower, and peaks are what tensors take.
        limit_bytes, limit_seconds: end a rank that exceeds them.

    Raises:
        Failed: a rank ended, for one because it exceeded a limit.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec = folder / "spec.json"
        job = {
            "recipes": [recipe.model_dump_json() for recipe in recipes], "warmup": warmup, "steps": steps,
            "count": count, "bytes": walk, "tight": tight, "limit_bytes": limit_bytes, "limit_seconds": limit_seconds,
        }  # fmt: skip
        spec.write_text(json.dumps(job), "utf-8")
        code = run_ranks("benchmarks.zero_rank", [str(spec)], world_size=ranks, threads=1, logs=folder)
        if code:
            logs = "\n".join(path.read_text("utf-8")[-3000:] for path in sorted(folder.glob("rank-*.log")))
            raise Failed(code, logs)
        return [json.loads((folder / f"rank-{rank}.json").read_text("utf-8")) for rank in range(ranks)]


def bytes_part(worlds: Sequence[int]) -> list[dict[str, Any]]:
    """The rows of every stage, precision and number of ranks."""
    cases = [
        (variant, types)
        for types in TYPES
        for variant in PLAIN
        if variant.stage > 0 or types is FP32  # without ZeRO the engine deepspeed trains in fp32 alone
    ]
    rows = []
    for ranks in worlds:
        print(f"{ranks} ranks …", flush=True)
        recipes = [recipe_of(variant, types, ranks) for variant, types in cases]
        for (variant, types), recipe, *reports in zip(cases, recipes, *run(recipes, ranks, walk=True), strict=True):
            rows.append(_bytes_row(variant, types, ranks, derive(recipe, ranks, detect()), reports))
    show("Model states of a rank, MiB, engine deepspeed", *_bytes_table(rows))
    return rows


def _bytes_row(variant: Variant, types: Types, ranks: int, plan: Plan, reports: Sequence[Any]) -> dict[str, Any]:
    """What the rank that holds most holds before the update, beside the formula and the plan."""
    moments = max((report["moments"] for report in reports), key=lambda each: _states(each["reduced"]).total)
    measured = _states(moments["reduced"])
    expected = held(plan.num_parameters_on_rank, ranks, variant.stage, types)
    return {
        "variant": variant.name, "types": types.name, "ranks": ranks, "parameters": plan.num_parameters_on_rank,
        "measured": measured._asdict(), "expected": expected._asdict(), "over": measured.total / expected.total - 1,
        "plan": {name: plan.memory.as_dict()[name] for name in ("weights", "gradients", "optimizer")},
        "gathered": max(moment["gathered"] for moment in moments.values()),
        "in_update": _states(moments["update"]).total - measured.total,
        "moments": moments,
    }  # fmt: skip


def _states(moment: dict[str, Any]) -> Bytes:
    return Bytes(moment["weights"], moment["gradients"], moment["optimizer"])


def _bytes_table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    columns = ["stage", "types", "ranks", "weights", "gradients", "optimizer", "sum", "formula", "over", "plan",
               "gathered", "in update"]  # fmt: skip
    table = []
    for row in rows:
        measured, expected = Bytes(**row["measured"]), Bytes(**row["expected"])
        numbers = (*measured, measured.total, expected.total)
        table.append([
            row["variant"], row["types"], str(row["ranks"]), *(f"{number / MIB:.1f}" for number in numbers),
            f"{row['over']:+.1%}",
            *(f"{size / MIB:.1f}" for size in (sum(row["plan"].values()), row["gathered"], row["in_update"])),
        ])  # fmt: skip
    return columns, table


def speed_part(ranks: int, warmup: int, steps: int, rounds: int) -> list[dict[str, Any]]:
    """Rate of the fastest round, peak memory and bytes sent of every variant in fp32; a round has each variant once."""
    recipes = {variant.name: recipe_of(variant, FP32, ranks) for variant in VARIANTS}
    seconds: dict[str, list[float]] = {name: [] for name in recipes}
    reports = {
        name: [own for (own,) in run([recipe], ranks, steps=1, count=True, tight=True)]
        for name, recipe in recipes.items()
    }
    for number in range(rounds):
        for name, recipe in recipes.items():
            print(f"round {number + 1}, {name} …", flush=True)
            timed = [own["seconds"] for (own,) in run([recipe], ranks, warmup=warmup, steps=steps)]
            seconds[name].append(statistics.median(max(each) for each in zip(*timed, strict=True)))
            print(f"  {seconds[name][-1]:.3f} s a step, load {os.getloadavg()[0]:.1f}", flush=True)
    rows = []
    for variant in VARIANTS:
        last, plan = reports[variant.name], derive(recipes[variant.name], ranks, detect())
        rows.append({
            "variant": variant.name, "seconds": seconds[variant.name],
            "tokens_per_second": plan.tokens_per_step / min(seconds[variant.name]),
            "peak": max(report["peak"] for report in last), "empty": max(report["empty"] for report in last),
            "sent": statistics.mean(sum(Call(*call).volume for call in report["calls"]) for report in last),
            "expected_sent": sent(plan.num_parameters_on_rank, ranks, variant.stage, FP32),
        })  # fmt: skip
    columns = ["fp32", "tokens/s", "peak MiB", "of it without a model", "sent MiB a rank", "formula", "over"]
    show(f"{ranks} ranks", columns, [
        [
            row["variant"], f"{row['tokens_per_second']:,.0f}", f"{row['peak'] / MIB:,.0f}",
            f"{row['empty'] / MIB:,.0f}", f"{row['sent'] / MIB:,.1f}", f"{row['expected_sent'] / MIB:,.1f}",
            f"{row['sent'] / row['expected_sent'] - 1:+.1%}" if row["expected_sent"] else "",
        ]
        for row in rows
    ])  # fmt: skip
    return rows


def largest_part(
    ranks: int, limit_gib: float, hidden: int, seconds: float, chosen: Sequence[Variant], svg: Path | None
) -> list[dict[str, Any]]:
    """The largest number of layers that trains for two steps, of every variant, in the types of a recipe's default."""
    rows: list[dict[str, Any]] = []
    limit = int(limit_gib * GIB)
    for variant in chosen:
        tries: dict[int, str] = {}

        def peak(layers: int, variant: Variant = variant, tries: dict[int, str] = tries) -> float | None:
            reached: float | None = None
            recipe = _deep(variant, ranks, layers, hidden)
            try:
                reports = run([recipe], ranks, steps=1, tight=True, limit_bytes=limit, limit_seconds=seconds)
                reached = max(own["peak"] for (own,) in reports)
            except Failed as failed:
                if failed.code != TOO_MUCH:
                    raise
            tries[layers] = "too much" if reached is None else f"{reached / GIB:.2f} GiB"
            print(f"{variant.name}, {layers} layers: {tries[layers]}", flush=True)
            return reached

        layers = largest(peak, limit, *_first(variant, ranks, limit, hidden, seconds))
        plan = derive(_deep(variant, ranks, max(layers, 1), hidden), ranks, detect())
        parameters = plan.num_parameters_on_rank if layers else 0
        rows.append({"variant": variant.name, "layers": layers, "parameters": parameters, "tries": tries})
    show(f"Largest model in {limit_gib:g} GiB a rank, {ranks} ranks, hidden {hidden}", ["", "layers", "parameters"], [
        [row["variant"], str(row["layers"]), f"{row['parameters'] / 1e6:,.1f}M"] for row in rows
    ])  # fmt: skip
    if svg is not None:
        title = f"Largest model that trains in {limit_gib:g} GiB for each of {ranks} ranks"
        svg.write_text(bars(title, {row["variant"]: row["parameters"] / 1e6 for row in rows}, "M"), "utf-8")
    return rows


def _deep(variant: Variant, ranks: int, layers: int, hidden: int) -> Recipe:
    return recipe_of(
        variant, BF16_FP32_GRADIENTS, ranks, f"model.num_layers={layers}", f"model.hidden_size={hidden}"
    )  # fmt: skip


def _first(variant: Variant, ranks: int, limit: int, hidden: int, seconds: float) -> tuple[int, float]:
    """Layers that should just fit, and bytes of a layer, from the peaks of two small models."""
    small_models = [_deep(variant, ranks, layers, hidden) for layers in PROBES]
    reports = run(small_models, ranks, steps=1, tight=True, limit_bytes=limit, limit_seconds=seconds)
    low, high = (max(report[number]["peak"] for report in reports) for number in (0, 1))
    each = (high - low) / (PROBES[1] - PROBES[0])
    print(f"{variant.name}: {each / MIB:.0f} MiB a layer", flush=True)
    return max(1, PROBES[1] + int((limit - high) / each)), each


def main() -> int:
    """Print the tables of a part; 1 where stages hold more than they should."""
    made = parser(__doc__)
    made.add_argument("--part", choices=("bytes", "speed", "largest"), default="bytes")
    made.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4], metavar="N", help="ranks of `bytes`")
    made.add_argument("--ranks", type=int, help="of `speed` and `largest`; default: the GPUs, or two processes")
    made.add_argument("--warmup", type=int, default=2)
    made.add_argument("--steps", type=int, default=5)
    made.add_argument("--rounds", type=int, default=3, help="of `speed`, each with all variants")
    made.add_argument("--limit-gib", type=float, default=8.0)
    made.add_argument("--hidden-size", type=int, default=1024)
    made.add_argument("--try-seconds", type=float, default=600.0, help="a try of `largest` that takes longer ends it")
    made.add_argument("--variants", nargs="+", choices=[each.name for each in BY_SIZE], metavar="NAME")
    made.add_argument("--svg", type=Path, metavar="FILE", help="bar chart of `largest`")
    arguments = made.parse_args()
    started_on = machine()
    ranks = arguments.ranks or len(detect().gpus) or 2
    chosen = [each for each in BY_SIZE if each.name in (arguments.variants or [each.name])]
    if arguments.part == "bytes":
        rows = bytes_part(arguments.worlds)
    elif arguments.part == "speed":
        rows = speed_part(ranks, arguments.warmup, arguments.steps, arguments.rounds)
    else:
        rows = largest_part(
            ranks, arguments.limit_gib, arguments.hidden_size, arguments.try_seconds, chosen, arguments.svg
        )
    close({arguments.part: rows}, started_on, arguments.json)
    wrong = [row for row in rows if row.get("over", 0.0) > ALLOWED]
    for row in wrong:
        print(f"over by {row['over']:.1%}: {row['variant']}, {row['types']}, {row['ranks']} ranks", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
