"""Predicted beside measured steps of ten tiny layouts on this machine, from a profile that `bench machine` wrote.

    llmrecipes bench machine --write here.yaml && python benchmarks/cpu_steps.py here.yaml [--json OUT] [--repeats N]

Other programs slow the clock on the wall, so processor time is compared: that of the rank with the most, the least of
the repeats. Its prediction is a step without the pipeline's bubble, in which a rank waits. Layouts of one rank are
bound to one core, and planned for one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from llmrecipes.hardware.load import load_profile
from llmrecipes.hardware.machine import machine
from llmrecipes.plan.derive import derive
from llmrecipes.plan.speed.forecast import forecast
from llmrecipes.recipe.load import load

_TENSOR = ("layout.tensor_model_parallel_size=2", "layout.sequence_parallel=true")
_BIG = ("model.hidden_size=384", "model.num_layers=4")
LAYOUTS: tuple[tuple[str, str, int, tuple[str, ...]], ...] = (
    ("gpt-tiny", "gpt-tiny", 1, ()),
    ("gpt-tiny, 4 layers of 384", "gpt-tiny", 1, _BIG),
    ("gpt-tiny, sequences of 512", "gpt-tiny", 1, ("model.seq_length=512", "layout.micro_batch_size=2")),
    ("gpt-tiny, 16,384 words", "gpt-tiny", 1, ("model.vocab_size=16384",)),
    ("gpt-tiny, data 2", "gpt-tiny", 2, ()),
    ("gpt-tiny, tensor 2", "gpt-tiny", 2, _TENSOR),
    ("gpt-tiny, 4 layers of 384, pipeline 2", "gpt-tiny", 2, (*_BIG, "layout.pipeline_model_parallel_size=2")),
    ("gpt-tiny, sequences of 512, context 2", "gpt-tiny", 2,
     ("model.seq_length=512", "layout.micro_batch_size=2", "layout.context_parallel_size=2")),
    ("moe-tiny, expert 2", "moe-tiny", 2, ()),
    ("moe-tiny, one rank", "moe-tiny", 1, ("layout.expert_model_parallel_size=1",)),
)  # fmt: skip
AIM = 0.15


def predicted(name: str, overrides: tuple[str, ...], ranks: int, profile_path: str) -> tuple[float, dict[str, float]]:
    """Seconds that a rank is busy in a step, and their parts."""
    profile = load_profile(profile_path).model_copy(update={"cpu_cores": ranks})
    made = forecast(derive(load(name, list(overrides)).recipe, ranks, machine(profile, 1)), profile)
    return made.step.seconds - made.step.bubble, made.step.parts()


def measured(name: str, overrides: tuple[str, ...], ranks: int, repeats: int) -> tuple[float, float]:
    """Least processor time and least time on the wall of a step."""
    command = [sys.executable, "-m", "llmrecipes.cli", "bench", "step", name, *overrides]
    command += ["--nproc", str(ranks), "--repeats", str(repeats), "--json"]
    cores = sorted(os.sched_getaffinity(0))[:ranks]
    done = subprocess.run(
        ["taskset", "-c", ",".join(map(str, cores)), *command], stdout=subprocess.PIPE, text=True, check=True
    )
    values = json.loads(done.stdout)
    return min(values["processor_seconds"]), min(values["seconds"])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("profile", help="YAML file of bench machine --write")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--repeats", type=int, default=8, metavar="N")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("| layout | predicted | processor time | difference | wall |")
    print("|---|---|---|---|---|")
    for title, name, ranks, overrides in LAYOUTS:
        busy, parts = predicted(name, overrides, ranks, arguments.profile)
        processor, wall = measured(name, overrides, ranks, arguments.repeats)
        rows.append({"layout": title, "predicted": busy, "processor": processor, "wall": wall, "parts": parts})
        difference = f"{busy / processor - 1:+.0%}"
        print(f"| {title} | {busy:.3f} s | {processor:.3f} s | {difference} | {wall:.3f} s |", flush=True)
    errors = [abs(row["predicted"] / row["processor"] - 1) for row in rows]
    print(f"median {statistics.median(errors):.1%}, most {max(errors):.1%}; aim {AIM:.0%}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
