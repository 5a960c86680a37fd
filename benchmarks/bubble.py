"""Idle share of pipeline stages in megatron-core's schedules, beside (p − 1)/(m·v + p − 1).

    python -m benchmarks.bubble [--repeats N]

p stages of v chunks each take m micro-batches (arXiv 2104.04473, section 2.2). The order of forward and backward passes
is recorded from a real training step; then the step is replayed: each rank makes its passes in that order, each as soon
as its input is there. `replayed` counts 1 for a forward and 2 for a backward pass of a chunk; `with measured passes`
takes the processor time of each kind of pass on each chunk (the median over micro-batches and steps), so it has the
imbalance of embedding and output layer too. Messages are taken to cost nothing. `by the clock` is the share of the time
from the first pass to the last that the ranks did not compute in the real step. It has messages and the waiting for a
core in it too, so it says something only where every rank has a core of its own and the machine is quiet.
"""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from benchmarks.common import close, machine, parser, show
from benchmarks.ranks import run, small

SHAPE = ("model.num_layers=8", "model.hidden_size=256", "model.seq_length=128", "model.vocab_size=1024",
         "layout.micro_batch_size=1")  # fmt: skip
CASES = ((2, 4, 1), (2, 8, 1), (4, 8, 1), (2, 4, 2), (2, 8, 2), (2, 8, 4), (4, 8, 2))
"""Stages, micro-batches, chunks."""


class Pass(NamedTuple):
    """A forward or backward pass of one micro-batch through one chunk of layers."""

    kind: str
    chunk: int
    micro_batch: int


def idle_share(ranks: Sequence[Sequence[Pass]], chunks: int, cost: Callable[[int, Pass], float]) -> float:
    """Idle share of the ranks' time from the first pass to the last when each pass starts as soon as it can.

    Args:
        ranks: the passes of each stage, in the order it makes them.
        chunks: chunks of each stage; chunk c of stage s comes after chunk c of stage s − 1.
        cost: seconds of a stage's pass.

    Raises:
        ValueError: the orders wait for each other for ever.
    """
    stages = len(ranks)
    last = stages * chunks - 1
    ended: dict[tuple[str, int, int], float] = {}
    clocks, next_pass, busy = [0.0] * stages, [0] * stages, 0.0
    while any(position < len(ranks[stage]) for stage, position in enumerate(next_pass)):
        moved = False
        for stage, passes in enumerate(ranks):
            while next_pass[stage] < len(passes):
                each = passes[next_pass[stage]]
                place = each.chunk * stages + stage
                needs = _needs(each, place, last)
                if needs is not None and needs not in ended:
                    break
                start = max(clocks[stage], ended[needs] if needs else 0.0)
                seconds = cost(stage, each)
                clocks[stage] = ended[each.kind, place, each.micro_batch] = start + seconds
                busy += seconds
                next_pass[stage] += 1
                moved = True
        if not moved:
            raise ValueError("the schedules of the stages wait for each other")
    return 1 - busy / (stages * max(clocks))


def _needs(each: Pass, place: int, last: int) -> tuple[str, int, int] | None:
    """The pass whose result this one waits for."""
    if each.kind == "forward":
        return ("forward", place - 1, each.micro_batch) if place else None
    return ("backward", place + 1, each.micro_batch) if place < last else ("forward", place, each.micro_batch)


def formula(stages: int, micro_batches: int, chunks: int) -> float:
    """Idle share of 1F1B and its interleaved form (arXiv 2104.04473, section 2.2), as a share of the whole time."""
    return (stages - 1) / (micro_batches * chunks + stages - 1)


def measure(stages: int, micro_batches: int, chunks: int, repeats: int) -> dict[str, Any]:
    """Idle shares of one schedule."""
    changes = [f"layout.pipeline_model_parallel_size={stages}", f"train.global_batch_size={micro_batches}"]
    if chunks > 1:
        changes.append(f"layout.virtual_pipeline_model_parallel_size={chunks}")
    reports = run(small("gpt-tiny", *SHAPE, *changes), stages, warmup=2, steps=0, record=repeats)
    steps = [report["passes"] for report in reports]
    ranks = [[Pass(each["kind"], each["chunk"], each["micro_batch"]) for each in of_rank[0]] for of_rank in steps]
    seconds: dict[tuple[int, str, int], list[float]] = defaultdict(list)
    for stage, of_rank in enumerate(steps):
        for each in chain.from_iterable(of_rank):
            seconds[stage, each["kind"], each["chunk"]].append(each["seconds"])
    typical = {key: statistics.median(values) for key, values in seconds.items()}
    clock = [_by_the_clock(list(chain.from_iterable(of_step))) / stages for of_step in zip(*steps, strict=True)]
    return {
        "stages": stages,
        "micro_batches": micro_batches,
        "chunks": chunks,
        "formula": formula(stages, micro_batches, chunks),
        "replayed": idle_share(ranks, chunks, lambda _stage, each: 1.0 if each.kind == "forward" else 2.0),
        "with_measured_passes": idle_share(
            ranks, chunks, lambda stage, each: typical[stage, each.kind, each.chunk]
        ),
        "by_the_clock": 1 - statistics.median(clock) if stages <= len(os.sched_getaffinity(0)) else None,
    }  # fmt: skip


def _by_the_clock(passes: list[dict[str, Any]]) -> float:
    """Ranks that computed on average, from the first pass of a step to its last."""
    window = max(pass_["ended"] for pass_ in passes) - min(pass_["started"] for pass_ in passes)
    return float(sum(pass_["seconds"] for pass_ in passes) / window)


def main() -> None:
    """Print one line a schedule."""
    made = parser(__doc__)
    made.add_argument("--repeats", type=int, default=3, help="recorded steps of each schedule")
    arguments = made.parse_args()
    started_on = machine()
    found = [measure(*case, arguments.repeats) for case in CASES]
    rows = [
        [
            "interleaved" if row["chunks"] > 1 else "1F1B",
            *(row[name] for name in ("stages", "micro_batches", "chunks")),
            *("" if row[name] is None else f"{row[name]:.1%}"
              for name in ("formula", "replayed", "with_measured_passes", "by_the_clock")),
        ]
        for row in found
    ]  # fmt: skip
    columns = ["schedule", "p", "m", "v", "formula", "replayed", "with measured passes", "by the clock"]
    show("Idle share of pipeline stages", columns, rows)
    close({"schedules": found}, started_on, arguments.json)


if __name__ == "__main__":
    main()
