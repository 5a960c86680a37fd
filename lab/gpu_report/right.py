"""Whether a device computes, saves and resumes what it should: the checks of a GPU report beside the parity models."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from lab.gpu_report.parity import LIMITS, figures, recipe_of
from lab.gpu_report.report import Row
from llmrecipes.bench.measure import random_tokens
from llmrecipes.checkpoint.manifest import CheckpointInfo
from llmrecipes.checkpoint.saver import AsyncSaver, saver_group
from llmrecipes.dryrun.dry_run_spec import DryRunSpec, RankReport, report_name
from llmrecipes.engine.backends import backend
from llmrecipes.engine.base import Engine, Progress
from llmrecipes.hardware.cluster import detect
from llmrecipes.plan.derive import Plan, derive
from llmrecipes.recipe.schema import Recipe
from llmrecipes.rundir import Run

MODEL = "llama"
"""Of `parity.MODELS`."""
STEPS = 4
MakeRow = Callable[..., Row]


def info(plan: Plan, engine: Engine, step: int) -> CheckpointInfo:
    """What the manifest of a report's checkpoint says."""
    return CheckpointInfo(
        step=step, consumed_samples=step, consumed_tokens=step, layout=plan.layout.as_dict(), recipe_hash="report",
        engine=engine.name, recipe=plan.recipe.model_dump(mode="json"),
    )  # fmt: skip


def resume(row: MakeRow, device: str) -> Iterator[Row]:
    """A run that is killed goes on as one that is not, and checkpoints cross between a CPU and the device."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = _said(folder / "whole", STEPS, device)
        _said(folder / "killed", STEPS, device, kill_after=2)
        again = _said(folder / "killed", STEPS, device)
        resumed_at = STEPS - len(again["losses"])
        pairs = zip(again["losses"], whole["losses"][resumed_at:], strict=True)
        apart = max((abs(ours - theirs) / abs(theirs) for ours, theirs in pairs), default=float("inf"))
        yield row(
            "loss after a kill", apart, limit=LIMITS["fp32"],
            note=f"SIGKILL after the save of step 2, resumed at {resumed_at}; largest relative difference",
        )  # fmt: skip
        there = folder / "crossing"
        ended = [_said(there, steps, place) for steps, place in ((2, "cpu"), (3, device), (4, "cpu"))]
        for (source, before), (target, after) in (
            (("CPU", ended[0]), (device, ended[1])),
            ((device, ended[1]), ("CPU", ended[2])),
        ):
            moved = [name for name, figure in before["weights"].items() if after["loaded"].get(name) != figure]
            yield row(
                f"weights, {source} to {target}", len(moved), limit=0,
                note="tensors of the checkpoint that differ from the saved ones" + (f": {moved[0]}" if moved else ""),
            )  # fmt: skip
        apart = abs(ended[2]["losses"][-1] - whole["losses"][-1]) / abs(whole["losses"][-1])
        yield row("loss of a run on both", apart, limit=LIMITS["fp32"], note="compared with a run on the device only")


def _said(folder: Path, steps: int, device: str, kill_after: int | None = None) -> dict[str, Any]:
    """What a process that trains to a step prints: losses, and weights as loaded and at the end."""
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})}
    command = [sys.executable, "-m", "lab.gpu_report.right", str(folder), str(steps)]
    said: dict[str, Any] = {"losses": []}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stdout or ():
            answer = json.loads(line)
            if "loss" in answer:
                said["losses"].append(answer["loss"])
                if answer["step"] == kill_after:
                    process.send_signal(signal.SIGKILL)
            else:
                said.update(answer)
        code = process.wait()
    if code != (0 if kill_after is None else -signal.SIGKILL):
        raise RuntimeError(f"the training process on {device} exited with code {code}")
    return said


def _train(folder: Path, steps: int, answer: Callable[[dict[str, Any]], None]) -> None:
    """Train to a step from the newest checkpoint of a folder, saving after each."""
    recipe = recipe_of(MODEL)
    engines = backend(recipe)
    platform = engines.platform()
    with engines.join(recipe, platform) as world:
        plan = derive(recipe, world.size, detect())
        engine = engines.build(plan, platform)
        store = Run(folder).store()
        entry = store.latest_valid()
        done = 0 if entry is None else engine.load_state(entry).step
        with engine.params_synced():
            answer({"loaded": figures(engine.weights())})
        batches = islice(random_tokens(recipe, 0), done * plan.num_microbatches, None)
        with AsyncSaver(store, saver_group(), engine.checkpoint_format()) as saver:
            for step in range(done + 1, steps + 1):
                loss = engine.train_step(batches).loss
                saver.save(engine.state(Progress(step=step)), info(plan, engine, step))
                saver.wait()
                answer({"step": step, "loss": loss})
        with engine.params_synced():
            answer({"weights": figures(engine.weights())})
        engine.close()


def waits(row: MakeRow, recipe: Recipe, device: str) -> Iterator[Row]:
    """How often the host waits for the device in a step, beside a dry run."""
    expected = sum(_dry_run(recipe).waits.values())
    if device == "cpu":
        yield row("host waits", status="skipped", note=f"a CPU never waits; {expected} in a dry run")
        return
    with _trained(recipe) as step, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # Not the warning that the mode itself is a prototype.
    called = (warning for warning in caught if "called a synchronizing" in str(warning.message))
    lines = [f"{warning.filename}:{warning.lineno}" for warning in called]
    yield row("host waits", len(lines), expected=expected, note=", ".join(dict.fromkeys(lines)))


def _dry_run(recipe: Recipe) -> RankReport:
    """In a process without a GPU: it replaces torch's functions of one."""
    spec = DryRunSpec(recipe=recipe, cluster=detect(), world_size=1, ranks=(0,))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.json"
        path.write_text(spec.model_dump_json(), "utf-8")
        command = [sys.executable, "-m", "llmrecipes.dryrun.simulation", str(path), str(os.getpid())]
        subprocess.run(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, stdout=2, check=True)
        return RankReport.model_validate_json((path.parent / report_name(0)).read_text("utf-8"))


def breaks(row: MakeRow, device: str) -> Iterator[Row]:
    """Whether compiled layers are whole graphs. On a CPU they are only traced, not compiled."""
    recipe = recipe_of(MODEL)
    recipe = recipe.with_layout(torch_compile=True)
    compile_ = torch.compile

    def traced(*args: Any, **options: Any) -> Any:
        return compile_(*args, **{**options, "backend": "eager"})

    torch._dynamo.utils.counters.clear()
    with patch("torch.compile", traced if device == "cpu" else compile_), _trained(recipe):
        yield graph_breaks(row)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        yield row("graphs", graphs, note="of all layers with their loss; each new shape adds more")


def graph_breaks(row: MakeRow) -> Row:
    """How often torch has cut a graph since its counters were cleared."""
    counts = torch._dynamo.utils.counters["graph_break"]
    return row("graph breaks", sum(counts.values()), limit=0, note=next(iter(counts), "").partition("\n")[0][:200])


@contextmanager
def _trained(recipe: Recipe) -> Iterator[Callable[[], object]]:
    """A step of a recipe's engine, after two that are not looked at."""
    engines = backend(recipe)
    platform = engines.platform()
    with engines.join(recipe, platform) as world:
        engine = engines.build(derive(recipe, world.size, detect()), platform)
        batches = random_tokens(recipe, 0)
        for _ in range(2):
            engine.train_step(batches)
        yield partial(engine.train_step, batches)
        engine.close()


def main() -> None:
    """`python -m lab.gpu_report.right FOLDER STEPS`: JSON lines on stdout, everything else on stderr."""
    folder, steps = sys.argv[1:]
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)

        def answer(said: dict[str, Any]) -> None:
            answers.write(json.dumps(said) + "\n")
            answers.flush()

        _train(Path(folder), int(steps), answer)


if __name__ == "__main__":
    main()
