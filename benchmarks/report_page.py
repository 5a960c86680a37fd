"""Time and size of the page of a long run: `python -m benchmarks.report_page`.

The records are made up, with the keys of a real run: every step, every tenth with numbers of all ranks and nodes and
with the load of experts; evaluations, saves and interruptions.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

from llmrecipes.recipe.load import load, to_yaml

BEGAN = 1_800_000_000.0


def spread(value: float, kind: str) -> dict[str, Any]:
    """A quantity of all ranks or nodes."""
    ends: dict[str, Any] = {"min_rank": 3, "max_rank": 7} if kind == "rank" else {"min_node": "n3", "max_node": "n7"}
    return {"min": 0.9 * value, "median": value, "max": 1.1 * value, **ends}


def records(steps: int, layers: int, experts: int) -> Iterator[dict[str, Any]]:
    """Lines of metrics.jsonl."""
    draw, now = random.Random(1), BEGAN
    for step in range(1, steps + 1):
        if step % (steps // 20) == 1:
            now += 300
            yield {"step": step - 1, "event": "started", "details": {"ranks": 64, "host": "n0", "pid": step,
                   "process_seconds": 60.0}, "alarm": False, "time": now}  # fmt: skip
        seconds = 0.5 * (1 + 0.1 * draw.random())
        now += seconds
        values: dict[str, Any] = {
            "step": step, "loss": 2 + 6 * math.exp(-step / 8000) + draw.gauss(0, 0.05), "grad_norm": 1 + draw.random(),
            "lr": 3e-4, "consumed_samples": 64 * step, "consumed_tokens": 131072 * step, "step_seconds": seconds,
            "tokens_per_second": 131072 / seconds, "skipped": False, "memory_bytes": 60 << 30, "mfu": 0.41,
            "mfu_causal": 0.39, "time": now,
        }  # fmt: skip
        if step % 10 == 0:
            names = ("data_seconds", "compute_seconds", "communication_seconds", "memory_allocated_bytes", "slowness")
            values["ranks"] = {name: spread(draw.random(), "rank") for name in names}
            of_nodes = (
                "gpu_use",
                "power_watts",
                "sm_clock_mhz",
                "temperature_c",
                "cpu_use",
                "network_bytes_per_second",
            )
            values["nodes"] = {name: spread(draw.random(), "node") for name in of_nodes}
            values["experts"] = [
                {"layer": layer + 1, "tokens_per_expert": [draw.randrange(1000) for _ in range(experts)],
                 "imbalance": 1.2, "dropped": 0, "entropy": 1.0, "z_loss": 0.1}
                for layer in range(layers)
            ]  # fmt: skip
        yield values
        if step % 1000 == 0:
            now += 20
            yield {"step": step, "valid_loss": values["loss"], "valid_bits_per_byte": 1.0, "consumed_samples": 1,
                   "consumed_tokens": 1, "eval_seconds": 20.0, "time": now}  # fmt: skip
            yield {"step": step, "event": "checkpoint_saved", "details": {"path": "p", "seconds": 9.0,
                   "loop_waited": 0.5}, "alarm": False, "time": now}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--layers", type=int, default=0, help="Layers with experts.")
    parser.add_argument("--experts", type=int, default=64)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "gpt-tiny", "made")
        (run / "logs").mkdir(parents=True)
        (run / "recipe.yaml").write_text(to_yaml(load("gpt-tiny", []).recipe))
        with (run / "metrics.jsonl").open("w") as file:
            for record in records(chosen.steps, chosen.layers, chosen.experts):
                file.write(json.dumps(record) + "\n")
        began, before = time.perf_counter(), getrusage(RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "llmrecipes.cli", "report", str(run)], check=True)
        wall, after = time.perf_counter() - began, getrusage(RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        sizes = [f"{(run / name).stat().st_size / 1e6:.2f} MB" for name in ("metrics.jsonl", "report.html")]
        print(f"{wall:.1f} s, {seconds:.1f} s of processor time, {after.ru_maxrss / 1024:.0f} MiB; {', '.join(sizes)}")


if __name__ == "__main__":
    main()
