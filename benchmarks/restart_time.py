"""Seconds from the death of a rank to the first step of the next start: `python -m benchmarks.restart_time`.

A real run on this machine is killed at random ranks (SIGKILL) as often as asked. Detection takes milliseconds, because
the launcher waits for the processes of its ranks, so the time counts from the signal.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil

T = TypeVar("T")

MICRO_BATCH = {"gpt-tiny": ("layout.micro_batch_size=4",)}
"""So that the global batch is divided over four ranks."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="gpt-tiny")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--faults", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="Steps between a start and a fault.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-spares", dest="spares", action="store_false", help="Restart without warm spares.")
    parser.add_argument("words", nargs="*", help="Overrides and options of `llmrecipes train`.")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "output").open("wb") as output:
        command = [
            sys.executable, "-m", "llmrecipes.cli", "train", chosen.recipe, "--nproc", str(chosen.ranks),
            "--run-id", "r", "--runs-dir", folder, "--no-sample", "--max-restarts", str(chosen.faults),
            "tracking.mlflow=false", "train.eval_interval=100000", "checkpoint.save_interval=2",
            *MICRO_BATCH.get(chosen.recipe, ()), *chosen.words, f"--{'' if chosen.spares else 'no-'}warm-spares",
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        metrics = next_value(process, lambda: next(Path(folder).glob("*/r/metrics.jsonl"), None))
        seconds, rng = [], random.Random(chosen.seed)
        for fault in range(chosen.faults):
            before = steps_after(metrics, fault)
            next_value(process, lambda: steps_after(metrics, fault) >= max(before, 0) + chosen.steps)  # noqa: B023
            if chosen.spares:
                next_value(process, lambda: spares_ready(process.pid, metrics.parent, chosen.ranks))
            children = psutil.Process(process.pid).children()
            used = {child.pid: cpu_seconds(child) for child in children}
            spares = waiting_spares(children, metrics.parent)
            memory = sum(spare.memory_full_info().uss for spare in spares) / max(len(spares), 1) / 2**20
            ranks = [child for child in children if child.pid in rank_pids(children, metrics.parent)]
            rng.choice(ranks).kill()
            killed = time.perf_counter()
            next_value(process, lambda: steps_after(metrics, fault + 1) > 0)  # noqa: B023
            seconds.append(time.perf_counter() - killed)
            processes = psutil.Process(process.pid).children()
            ranks = [child for child in processes if child.pid in rank_pids(processes, metrics.parent)]
            spent = sum(cpu_seconds(child) - used.get(child.pid, 0.0) for child in ranks)
            print(
                f"restart {fault + 1}: {seconds[-1]:.2f} s, {spent:.2f} core seconds of {len(ranks)} ranks; "
                f"{len(spares)} spares were ready, {memory:.0f} MiB of their own each",
                flush=True,
            )
        process.terminate()
        process.wait(120)
    load = psutil.getloadavg()[0]
    print(f"median {statistics.median(seconds):.2f} s, most {max(seconds):.2f} s; load {load:.1f}")


def waiting_spares(children: list[psutil.Process], run_dir: Path) -> list[psutil.Process]:
    """Spares, without those that have become ranks."""
    ranks = rank_pids(children, run_dir)
    return [child for child in children if child.pid not in ranks and "LLMRECIPES_SPARE" in child.environ()]


def spares_ready(launcher: int, run_dir: Path, ranks: int) -> bool:
    """Whether all spares have imported everything, so that their importing thread has ended."""
    spares = waiting_spares(psutil.Process(launcher).children(), run_dir)
    before = [cpu_seconds(spare) for spare in spares]
    if len(spares) < ranks:
        return False
    time.sleep(1)
    return [cpu_seconds(spare) for spare in spares] == before and min(before) > 1


def rank_pids(children: list[psutil.Process], run_dir: Path) -> set[int]:
    """Processes of the ranks that run now; without spares all that have a rank's environment."""
    known = run_dir / "logs" / "processes.json"
    if known.exists():
        return set(json.loads(known.read_text("utf-8")).values())
    return {child.pid for child in children if "RANK" in child.environ()}


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def next_value(process: subprocess.Popen[bytes], ask: Callable[[], T | None]) -> T:
    """The first true answer, while a command runs."""
    while not (answer := ask()):
        if process.poll() is not None:
            raise SystemExit(f"the run ended with {process.returncode}; see output beside the run")
        time.sleep(0.02)
    return answer


def steps_after(metrics: Path, restart: int) -> int:
    """Steps that a start has done; -1 before it began."""
    lines: list[dict[str, Any]] = []
    for text in metrics.read_text("utf-8").splitlines(keepends=True):
        if text.endswith("\n"):
            lines.append(json.loads(text))
    starts = [
        number
        for number, line in enumerate(lines)
        if line.get("event") == "restarted" and line["details"]["restart"] == restart
    ]
    if restart and not starts:
        return -1
    return sum("grad_norm" in line for line in lines[starts[-1] if starts else 0 :])


if __name__ == "__main__":
    main()
