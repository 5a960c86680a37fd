"""`llmrecipes smoke`: train, save and resume a small version of the recipe, and compare with an uninterrupted run."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from dataclasses import asdict, dataclass, replace
from typing import Any

from llmrecipes.errors import ExitCode, UserError
from llmrecipes.hardware.cluster import detect
from llmrecipes.launch.run_options import RunOptions
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.variants.proxy import Scaled, proxy, scaled
from llmrecipes.rundir import Run
from llmrecipes.workflow.run import Log, Paths, TrainOptions
from llmrecipes.workflow.start import Machine, PreparedStart, prepare_start
from llmrecipes.workflow.train import start


@dataclass(frozen=True)
class SmokeResult:
    """Result of a rehearsal.

    `first_difference` is the first step whose loss or gradient norm differs between the resumed and the uninterrupted
    run, or None.
    """

    recipe: str
    steps: int
    resumed_at: int
    first_loss: float
    last_loss: float
    first_difference: int | None
    run_dir: str
    layout: dict[str, int]
    """Degrees of the small version by name, and `world_size`."""
    scaled: Scaled
    """The recipe's degrees compared with those that ran."""

    @property
    def ok(self) -> bool:
        """Whether the resumed run equals the uninterrupted one bit for bit, and the loss fell."""
        return self.first_difference is None and self.last_loss < self.first_loss

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        values = {name: value for name, value in asdict(self).items() if name != "scaled"}
        return {**values, **self.scaled.as_dict("not_run"), "ok": self.ok}

    def as_text(self) -> str:
        """Human-readable lines."""
        if self.first_difference is not None:
            compared = f"DIFFERS from the uninterrupted run at step {self.first_difference}"
        else:
            compared = "equals the uninterrupted run bit for bit"
        return (
            f"smoke {self.recipe}: {'ok' if self.ok else 'FAILED'}\n"
            f"  trained  {self.steps} steps, loss {self.first_loss:.4f} -> {self.last_loss:.4f}"
            f"{'' if self.last_loss < self.first_loss else ' (did not fall)'}\n"
            f"  saved    step {self.resumed_at}\n"
            f"  resumed  {compared}\n"
            f"  kept in  {self.run_dir}"
            + "".join(f"\n  {heading:8} {text}" for heading, text in self.scaled.lines("not run"))
        )


def smoke(recipe: Recipe, paths: Paths, nproc: int | None, log: Log) -> SmokeResult:
    """Rehearse a recipe on this machine.

    Args:
        recipe: the full recipe; its proxy is what runs.
        paths: where runs and data are kept.
        nproc: ranks; None for `default_world_size` of the small recipe.
        log: receives one line for each slow step.

    Raises:
        UserError: the proxy does not run on this machine either, or a rehearsal failed.
    """
    cluster = detect()
    small = proxy(recipe, cluster.device)
    machine = Machine(cluster, nproc)
    half = small.train.train_iters // 2

    def ready(run_id: str) -> PreparedStart:
        shutil.rmtree(Run.of(paths.runs_dir, small.name, run_id).path, ignore_errors=True)
        options = TrainOptions(run_id=run_id, run=RunOptions(sample=False))
        return prepare_start(small, paths, options, machine, log)

    uninterrupted, cut = ready("uninterrupted"), ready("resumed")
    stopped = replace(cut, spec=cut.spec.model_copy(update={"stop_after": half}))
    starts = (
        ("uninterrupted", uninterrupted, ExitCode.DONE),
        (f"stopped at step {half}", stopped, ExitCode.REQUEUE),
        ("resumed", cut, ExitCode.DONE),
    )
    for what, ready_run, expected in starts:
        log(f"smoke {recipe.name}: {what}")
        _run(ready_run, expected)
    one, other = (_metrics(outcome.spec.run) for outcome in (uninterrupted, cut))
    different = (a["step"] for a, b in zip(one, other, strict=True) if _numbers(a) != _numbers(b))
    return SmokeResult(
        recipe=recipe.name,
        steps=small.train.train_iters,
        resumed_at=half,
        first_loss=one[0]["loss"],
        last_loss=one[-1]["loss"],
        first_difference=next(different, None),
        run_dir=str(uninterrupted.spec.run_dir.parent),
        layout=uninterrupted.plan.largest.layout.as_dict(),
        scaled=scaled(recipe, uninterrupted.plan.largest.layout.as_dict()),
    )


def _run(ready: PreparedStart, expected: ExitCode) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = start(ready)
    if code != expected:
        raise UserError(
            f"the rehearsal ended with exit code {code}", where=str(ready.spec.run_dir), fix="see the messages above"
        )


def _metrics(run: Run) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in run.metrics.read_text("utf-8").splitlines())
    return [line for line in lines if "grad_norm" in line]


def _numbers(metrics: dict[str, Any]) -> tuple[Any, ...]:
    return metrics["step"], metrics["loss"], metrics["grad_norm"], metrics["lr"]
