"""Whether a run that was punished has ended as the one without faults."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from lab.punish.faults import STEPS
from lab.punish.signs import Signs
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.io import write_atomic
from llmrecipes.rundir import Run
from llmrecipes.tracking.jsonl import parse

LAST = "last-checkpoint.json"


def keep_manifest(run: Run, step: int) -> None:
    """Keep the digests of the last checkpoint, whose file system goes away."""
    entry = run.newest()
    if entry is None or entry.step != step or not run.store().valid(step, full=True):
        raise UserError("its last checkpoint is missing or damaged", where=str(run.path), code=ExitCode.STOP)
    files = {name: record.sha256 for name, record in entry.manifest.files.items()}
    write_atomic(run.logs / LAST, json.dumps(files, indent=1) + "\n")


def differences(reference: Signs, other: Signs, steps: int, ranks: int) -> list[str]:
    """In what a run differs from the reference: weights and optimizer, losses, batches of each rank and step."""
    differing = []
    last = [json.loads((signs.files.logs / LAST).read_text("utf-8")) for signs in (reference, other)]
    if last[0] != last[1]:
        differing.append(f"the checkpoint of step {steps} differs")
    curves = [curve(signs.files.metrics) for signs in (reference, other)]
    if curves[0] != curves[1] or len(curves[0]) != steps:
        unequal = [step for step in range(1, steps + 1) if curves[0].get(step) != curves[1].get(step)]
        differing.append(f"{len(unequal)} steps differ, the first is {min(unequal, default=None)}")
    for rank in range(ranks):
        seen = [batches(signs.orders, rank) for signs in (reference, other)]
        expected = {step: {digest} for step, digests in seen[0].items() for digest in digests}
        if seen[1] != expected or seen[1].keys() != set(range(1, steps + 1)):
            differing.append(f"rank {rank} had different samples")
    return differing


def curve(metrics: Path) -> dict[int, tuple[Any, ...]]:
    """Loss, gradient norm, learning rate and place in the data of each step."""
    lines = (parse(line) for line in metrics.read_bytes().splitlines())
    keys = ("loss", "grad_norm", "lr", "consumed_samples")
    return {line["step"]: tuple(line[key] for key in keys) for line in lines if line and "loss" in line}


def batches(orders: Path, rank: int) -> dict[int, set[str]]:
    """Digests of the tokens that a rank computed each step from: one, however often it did."""
    digests: dict[int, set[str]] = {}
    for line in (orders / f"{rank}-{STEPS}").read_text("utf-8").splitlines():
        with suppress(ValueError):  # of a rank that was killed while it wrote
            record = json.loads(line)
            digests.setdefault(record["step"], set()).add(record["batch"])
    return digests
