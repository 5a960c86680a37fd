"""ZeRO: what each stage holds and sends, what it costs, and the largest model that trains.

    python -m benchmarks.zero --part bytes|speed|largest [--json FILE]

`bytes` walks the tensors of the engines after some steps: parameters, gradients and optimizer state of a rank, by
distinct memory, beside the formulas (`benchmarks.zero_formulas`) and the plan. `speed` gives tokens/s, peak memory and
the bytes sent in a step. `largest` searches the largest model of which every rank stays below `--limit-gib`: resident
memory of the process on a CPU, torch's allocator on a GPU. Every try is a new world of ranks. Devices are those of this
machine: without a GPU, processes of one thread.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.chart import bars
from benchmarks.common import close, machine, parser, show
from benchmarks.ranks import small
from benchmarks.traffic import Call
from benchmarks.zero_formulas import BF16, FP32, STAGES, TYPES, Bytes, Types, held, largest, sent
from benchmarks.zero_rank import TOO_LONG, TOO_MUCH
from llmrecipes.hardware.cluster import detect
from llmrecipes.launch.local.ranks import run_ranks
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


OFFLOAD = ("zero.offload_optimizer=cpu",)
PLAIN = tuple(Variant(f"stage {stage}", stage) for stage in STAGES)
VARIANTS = (
    *PLAIN,
    Variant("stage 2, optimizer offloaded", 2, keys=OFFLOAD),
    Variant("stage 3, optimizer offloaded", 3, keys=OFFLOAD),
    Variant("stage 3, parameters too", 3, keys=(*OFFLOAD, "zero.offload_param=cpu")),
    Variant("megatron, stage 1", 1, engine="megatron"),
)


def recipe_of(variant: Variant, types: Types, ranks: int, *shape: str) -> Recipe:
    """A GPT of 29M parameters; one micro-batch a step, buckets that are small beside the model."""
    keys = [
        "model.num_layers=8", "model.hidden_size=512", "model.num_attention_heads=8", "model.seq_length=64",
        "train.micro_batch_size=1", f"train.global_batch_size={ranks}", "checkpoint.async_save=false", *shape,
        f"train.precision={'fp32' if types.weight == 4 else 'bf16'}",
        f"parallelism.grad_reduce_in_fp32={str(types.gradient == 4).lower()}",
        f"parallelism.use_distributed_optimizer={str(variant.stage > 0).lower()}",
        f"engine={variant.engine}", f"zero.stage={variant.stage}", *variant.keys,
    ]  # fmt: skip
    if variant.engine == "deepspeed" and variant.stage > 0:
        keys.append(f"zero.reduce_bucket_size={BUCKET}")
        if variant.stage < 3:
            keys.append(f"zero.allgather_bucket_size={BUCKET}")
        else:
            for name in ("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance"):
                keys.append(f"zero.{name}={BUCKET}")
    return small("gpt-tiny", *keys)


class Failed(Exception):
    """Ranks ended with a code."""

    def __init__(self, code: int, logs: str) -> None:
        super().__init__(f"the ranks ended with {code}\n{logs}")
        self.code = code


def run(
    recipe: Recipe, ranks: int, *, warmup: int = 1, steps: int = 0, count: bool = False, walk: bool = False,
    limit_bytes: int | None = None, limit_seconds: float | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Train in new processes of one thread each; gives each rank's report.

    Raises:
        Failed: a rank ended, for one because it exceeded a limit.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec = folder / "spec.json"
        job = {
            "recipe": recipe.model_dump_json(), "warmup": warmup, "steps": steps, "count": count, "bytes": walk,
            "limit_bytes": limit_bytes, "limit_seconds": limit_seconds,
        }  # fmt: skip
        spec.write_text(json.dumps(job), "utf-8")
        code = run_ranks("benchmarks.zero_rank", [str(spec)], world_size=ranks, threads=1, logs=folder)
        if code:
            logs = "\n".join(path.read_text("utf-8")[-3000:] for path in sorted(folder.glob("rank-*.log")))
            raise Failed(code, logs)
        return [json.loads((folder / f"rank-{rank}.json").read_text("utf-8")) for rank in range(ranks)]


def bytes_row(variant: Variant, types: Types, ranks: int) -> dict[str, Any]:
    """What the rank that holds most holds, beside the formula and the plan."""
    recipe = recipe_of(variant, types, ranks)
    plan = derive(recipe, ranks, detect())
    reports = run(recipe, ranks, warmup=2, walk=True)
    found = [_states(report["moments"]) for report in reports]
    measured = max(found, key=lambda each: each.total)
    expected = held(plan.num_parameters_on_rank, ranks, variant.stage, types)
    moments = reports[found.index(measured)]["moments"]
    return {
        "variant": variant.name, "types": types.name, "ranks": ranks, "parameters": plan.num_parameters_on_rank,
        "measured": measured._asdict(), "expected": expected._asdict(), "over": measured.total / expected.total - 1,
        "plan": {name: plan.memory.as_dict()[name] for name in ("weights", "gradients", "optimizer")},
        "gathered": max(moment["gathered"] for moment in moments.values()),
        "moments": moments,
    }  # fmt: skip


def _states(moments: dict[str, dict[str, Any]]) -> Bytes:
    """Weights and state do not change; gradients are those at the update, or before it where they are freed by then."""
    last = moments["update"]
    return Bytes(last["weights"], last["gradients"], last["optimizer"])
