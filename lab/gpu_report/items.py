"""`llmrecipes gpu-report`: measure one GPU against a CPU's results and the plan, within a budget of seconds."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lab.gpu_report.report import STAGES, Row, append, read
from llmrecipes.errors import UserError
from llmrecipes.hardware.builds import compiler_obstacle
from llmrecipes.hardware.cluster import Cluster, detect
from llmrecipes.launch.environment import detected_environment, missing
from llmrecipes.packages import find_spec
from llmrecipes.plan.run_plan import derive_run
from llmrecipes.recipe.load import load
from llmrecipes.workflow.run import Log


@dataclass(frozen=True)
class Planned:
    """An item and the seconds that it needs on a GPU; on a CPU as many are allowed."""

    stage: str
    name: str
    seconds: int


ITEMS = (
    Planned("right", "parity", 120),
    Planned("right", "resume", 120),
    Planned("right", "waits gpt-125m", 60),
    Planned("right", "breaks", 60),
    Planned("fast", "gemm", 30),
    *(
        Planned("fast", f"{kind} {name}", seconds)
        for name in ("gpt-125m", "gpt-1b")
        for kind, seconds in (
            ("dryrun", 30), ("model", 90), ("compiled", 120), ("plain", 90), ("hf-trainer", 60), ("torchtitan", 60)
        )
    ),
    *(Planned("big", f"layers {name}", 120) for name in ("llama3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3")),
    *(Planned("big", f"fusions {name}", 120) for name in ("llama3-8b", "mixtral-8x7b")),
    Planned("state", "saves gpt-125m", 60),
    Planned("state", "saves gpt-1b", 180),
    Planned("state", "offload gpt-125m", 60),
    Planned("fp8", "scalings llama3-8b", 240),
)  # fmt: skip
"""In the order in which they are measured; each in a process of its own."""
GRACE = 15
"""Seconds that are left when an item is stopped, for the pages."""


def gpu_report(stages: Sequence[str], folder: Path, budget: float, device: str | None, log: Log) -> list[Row]:
    """Measure what an earlier call with the same folder has not measured.

    Args:
        stages: of `STAGES`, or items by name (`saves gpt-1b`) or by the first word of it, in this order; empty: all.
        folder: receives report.jsonl, report.md and report.html; each row is written as soon as it is known.
        budget: seconds of this call. An item that would not fit is skipped, and measured by the next call.
        device: `cuda` or `cpu`; None: a GPU if there is one.
        log: receives a line for each item and each flagged row.

    Returns:
        All rows of the report.

    Raises:
        UserError: an unknown stage, no GPU, or the folder cannot be written.
    """
    ends = time.monotonic() + budget
    items = list(dict.fromkeys(item for stage in stages or STAGES for item in _named(stage)))
    cluster = detect()
    if device == "cuda" and not cluster.gpus:
        raise UserError("nvidia-smi lists no GPU", where="--device", fix="--device cpu")
    chosen = device or cluster.device
    try:
        folder.mkdir(parents=True, exist_ok=True)
        about = _about(cluster, chosen)
        for row in _rows(items, folder, chosen, _environment(cluster, chosen), ends, log):
            append(folder, row, about)
            if row.off:
                log(f"  {' · '.join(cell for cell in row.cells() if cell)}")
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror}", where=str(folder), fix="--out DIR with a writable folder"
        ) from error
    return read(folder)


def _named(stage: str) -> list[Planned]:
    """Items of a stage, or of this name or kind.

    Raises:
        UserError: there is none.
    """
    items = [item for item in ITEMS if stage in (item.stage, item.name, item.name.partition(" ")[0])]
    if not items and stage not in STAGES:
        kinds = dict.fromkeys(item.name.partition(" ")[0] for item in ITEMS)
        raise UserError(
            f"unknown stage or item {stage!r}", where="STAGE", rule=f"one of {', '.join((*STAGES, *kinds))}"
        )
    return items


def _environment(cluster: Cluster, device: str) -> dict[str, str]:
    """Variables of the items: those of a rank on the device, which is the first GPU, or none."""
    if device == "cpu":
        return {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    plan = derive_run(load("gpt-tiny", []).recipe, 1, cluster)
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    ours = missing(detected_environment(cluster, plan), os.environ)
    # With several, Hugging Face's Trainer would train on all of them.
    return {**os.environ, **ours, "CUDA_VISIBLE_DEVICES": first}


def _rows(
    items: Sequence[Planned], folder: Path, device: str, environment: dict[str, str], ends: float, log: Log
) -> Iterator[Row]:
    done = {(row.stage, row.item) for row in read(folder) if row.status == "measured" and row.quantity == "time"}
    for item in items:
        if (item.stage, item.name) in done:
            continue
        if obstacle := _obstacle(item.name.partition(" ")[0], device):
            yield Row(stage=item.stage, item=item.name, quantity="item", status="skipped", note=obstacle)
            continue
        left = ends - time.monotonic() - GRACE
        if left < item.seconds:
            note = f"{max(0, left):.0f} s left, {item.seconds} s needed; the same command continues"
            yield Row(stage=item.stage, item=item.name, quantity="item", status="skipped", note=note)
            continue
        log(f"{item.stage}: {item.name}")
        yield from _measured(item, folder, device, environment, left)


def _obstacle(kind: str, device: str) -> str | None:
    """Why an item that needs another project cannot be measured."""
    package = {"hf-trainer": "transformers", "torchtitan": "torchtitan", "offload": "deepspeed"}.get(kind)
    if package is not None and find_spec(package) is None:
        return f"{package} is not importable"
    if kind == "torchtitan":
        return "its loop is not driven: the configuration of a model changes with each release"
    if kind == "scalings" and device == "cuda" and find_spec("transformer_engine") is None:
        return "transformer_engine is not importable"
    if kind in ("plain", "compiled") and (obstacle := compiler_obstacle("cpu" if device == "cpu" else "cuda")):
        return f"it is compiled, and {obstacle}"
    return None


def _measured(item: Planned, folder: Path, device: str, environment: dict[str, str], limit: float) -> Iterator[Row]:
    """Rows of an item as its process prints them; the last says how long it took, or why it failed."""
    environment = {**environment, "LLMRECIPES_REPORT": str(folder)}
    command = [sys.executable, "-m", "lab.gpu_report.worker", item.stage, item.name, device]
    started = time.monotonic()
    log = folder / f"{item.stage}-{item.name.replace(' ', '-')}.log"
    with (
        log.open("w", encoding="utf-8") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
    ):
        clock = threading.Timer(limit, process.kill)
        clock.start()
        try:
            for line in process.stdout or ():
                yield Row.model_validate_json(line)
            code = process.wait()
        finally:
            clock.cancel()
            process.kill()
    seconds = time.monotonic() - started
    if code == 0:
        yield Row(stage=item.stage, item=item.name, quantity="time", value=seconds, unit="s")
    else:
        reason = f"stopped after {seconds:.0f} s" if seconds >= limit else f"exit code {code}"
        note = f"{reason}: {_last_line(log)}"
        yield Row(stage=item.stage, item=item.name, quantity="item", status="failed", note=note)


def _last_line(path: Path) -> str:
    lines = path.read_text("utf-8", errors="replace").split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "no output")


def _about(cluster: Cluster, device: str) -> list[str]:
    what = f"1 × {cluster.gpus[0].name}" if device == "cuda" else f"CPU, {cluster.cpu_cores:g} cores"
    return [
        f"device: {what}" + ("" if device == "cuda" else " (the models are tiny: only the stages are tried)"),
        f"Python {platform.python_version()}, "
        + ", ".join(_version(name) for name in ("torch", "megatron-core", "transformer-engine", "llmrecipes")),
    ]


def _version(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"{name} not installed"
