"""`llmrecipes lr-range`: the loss while the learning rate rises step by step, and the rate that it suggests."""

from __future__ import annotations

import contextlib
import io
import json
import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmrecipes.errors import ExitCode, UserError
from llmrecipes.hardware.cluster import detect
from llmrecipes.launch.run_options import RunOptions
from llmrecipes.recipe.derived.batch_schedule import without_ramp
from llmrecipes.recipe.rules import recipe_rules
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.optimizer_section import Scheduler
from llmrecipes.recipe.sections.plugins import MetricSink, declared
from llmrecipes.recipe.variants.proxy import suffixed
from llmrecipes.rundir import Run
from llmrecipes.workflow.run import Log, Paths, TrainOptions
from llmrecipes.workflow.start import Machine, prepare_start
from llmrecipes.workflow.train import start

SUFFIX, RUN_ID = "-lr-range", "sweep"
SMOOTHED_OVER = 20
"""A part of the sweep: the time constant of the moving average is `steps` / this, at least 2 steps."""
DIVERGED = 1.25
"""Times the lowest smoothed loss above which the rest of the sweep is left out."""
BELOW_LOWEST = 10.0
RULE = (
    f"a tenth of the rate with the lowest smoothed loss: range test of Smith (arXiv 1506.01186, section 3.3), with the "
    f"exponential sweep and the factor {BELOW_LOWEST:g} of Gugger (How Do You Find A Good Learning Rate, 2018; "
    "fastai's lr_find)"
)


@dataclass(frozen=True)
class LrRange:
    """Result of a range test.

    Attributes:
        recipe: name of the recipe.
        low, high: ends of the sweep.
        rates, losses, smoothed: those of every step up to the divergence; losses in nats per token.
        lowest: rate with the lowest smoothed loss.
        suggestion: by `RULE`; None if the lowest is at an end of the sweep.
        diverged: rate at which the smoothed loss was `DIVERGED` times the lowest; None: it did not.
        rule: where the suggestion comes from.
        run_dir: run directory of the sweep.
    """

    recipe: str
    low: float
    high: float
    rates: list[float]
    losses: list[float]
    smoothed: list[float]
    lowest: float
    suggestion: float | None
    diverged: float | None
    rule: str
    run_dir: str

    @property
    def advice(self) -> str:
        """What to do if there is no suggestion."""
        end = "--high" if self.lowest == self.rates[-1] else "--low"
        return f"the lowest loss is at an end of the sweep: another {end}, or more --steps"

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


def lr_range(recipe: Recipe, paths: Paths, low: float, high: float, steps: int, nproc: int | None, log: Log) -> LrRange:
    """Train with a learning rate that rises from `low` to `high`, by the same factor in each step.

    The layout, batch, data and model are those of the recipe; weights begin at initial values, and nothing is kept but
    the metrics.

    Args:
        recipe: the resolved recipe.
        paths: where runs and data are kept.
        low, high: ends of the sweep.
        steps: steps of the sweep.
        nproc: ranks; None: as for `train`.
        log: receives one line for each slow step.

    Raises:
        UserError: it cannot run, or the run failed otherwise than by divergence.
    """
    sweep = range_recipe(recipe, low, high, steps)
    shutil.rmtree(Run.of(paths.runs_dir, sweep.name, RUN_ID).path, ignore_errors=True)
    options = TrainOptions(run_id=RUN_ID, run=RunOptions(sample=False))
    ready = prepare_start(sweep, paths, options, Machine(detect(), nproc), log)
    log(f"lr-range {recipe.name}: {steps} steps, learning rate {low:g} to {high:g}")
    with contextlib.redirect_stdout(io.StringIO()):
        code = start(ready)
    run = ready.spec.run
    shutil.rmtree(run.checkpoints, ignore_errors=True)
    points = _points(run.metrics)
    if code not in (ExitCode.DONE, ExitCode.STOP) or len(points) < LEAST_POINTS:
        raise UserError(
            f"the sweep ended with exit code {code} after {len(points)} steps", where=str(run.path),
            fix="see the messages above",
        )  # fmt: skip
    return judged(recipe.name, low, high, points, str(run.path))


LEAST_POINTS = 3
"""Steps of the shortest sweep."""


def range_recipe(recipe: Recipe, low: float, high: float, steps: int) -> Recipe:
    """The recipe of the sweep: a warm-up over all its steps, with nothing that saves, stops or goes back.

    Raises:
        UserError: the ends or steps make no sweep.
    """
    if not 0 < low < high:
        raise UserError(f"{low:g} to {high:g}", where="--low", rule="0 < --low < --high", fix="--low 1e-6 --high 1")
    if steps < LEAST_POINTS:
        raise UserError(f"{steps}", where="--steps", rule=f"at least {LEAST_POINTS}", fix="--steps 100")
    tracking = dict.fromkeys(declared(type(recipe.tracking), MetricSink), False)
    defaults = type(recipe.tracking)()
    off = {name: getattr(defaults, name) for name in type(recipe.tracking).model_fields if name != "experiment"}
    sweep = recipe.model_copy(
        update={
            "name": suffixed(recipe.name, SUFFIX),
            "train": without_ramp(
                recipe.train.without_stops(), train_iters=steps, eval_interval=steps, eval_iters=1, eval_tasks=None,
                eval_at_start=False, elastic=None, log_interval=max(1, steps // 10),
            ),
            "optimizer": recipe.optimizer.model_copy(update={"lr": high, "min_lr": 0.0}),
            "scheduler": Scheduler(
                lr_decay_style="constant", lr_warmup_iters=steps - 1, lr_warmup_init=low,
                lr_warmup_style="exponential", lr_decay_iters=steps,
            ),
            "checkpoint": recipe.checkpoint.of_short_run(steps).model_copy(update={"async_save": False}),
            "faults": recipe.faults.without_spikes().model_copy(update={"rerun_mode": "disabled"}),
            "tracking": recipe.tracking.model_copy(update={**off, **tracking}),
            "search": None,
            "stages": (),  # the sweep is as long as itself, and begins as the first of them
        }
    )  # fmt: skip
    if problems := recipe_rules.check(sweep):
        first = problems[0]
        raise UserError(first.what, where=first.key, rule=first.rule, fix=first.fix)
    return sweep


def judged(name: str, low: float, high: float, points: list[tuple[float, float]], run_dir: str) -> LrRange:
    """What the (rate, loss) of every step say."""
    losses = [loss for _, loss in points]
    smoothed = smooth(losses, max(2.0, len(points) / SMOOTHED_OVER))
    best, end = 0, len(points)
    for place, value in enumerate(smoothed):
        if value < smoothed[best]:
            best = place
        elif value > DIVERGED * smoothed[best]:
            end = place + 1
            break
    rates = [rate for rate, _ in points[:end]]
    return LrRange(
        recipe=name, low=low, high=high, rates=rates, losses=losses[:end], smoothed=smoothed[:end],
        lowest=rates[best],
        suggestion=rates[best] / BELOW_LOWEST if 0 < best < len(points) - 1 else None,
        diverged=rates[-1] if smoothed[end - 1] > DIVERGED * smoothed[best] else None,
        rule=RULE, run_dir=run_dir,
    )  # fmt: skip


def smooth(values: list[float], constant: float) -> list[float]:
    """Exponential moving average with a time constant in steps, without the bias of its beginning."""
    kept = math.exp(-1 / constant)
    mean = 0.0
    weight = 0.0
    smoothed = []
    for value in values:
        mean = kept * mean + (1 - kept) * value
        weight = kept * weight + (1 - kept)
        smoothed.append(mean / weight)
    return smoothed


def draw(result: LrRange, file: Path) -> None:
    """Write the figure of a result: loss over learning rate.

    Raises:
        UserError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(result.rates, result.losses, ".", markersize=3, color="0.7", label="loss of a step")
    axes.plot(result.rates, result.smoothed, label="smoothed")
    axes.axvline(result.lowest, color="0.5", linestyle=":", label=f"lowest, {result.lowest:.2g}")
    if result.suggestion is not None:
        axes.axvline(result.suggestion, color="tab:green", label=f"suggestion, {result.suggestion:.2g}")
    axes.set(xscale="log", xlabel="learning rate", ylabel="training loss [nats/token]", title=f"{result.recipe}")
    axes.legend(fontsize="small")
    try:
        figure.savefig(file, metadata={"Date": None} if file.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise UserError(
            f"cannot write: {error.strerror}", where=str(file), fix="use a path that can be written"
        ) from error


def _points(metrics: Path) -> list[tuple[float, float]]:
    """(rate, loss) of every step up to the first that is not finite."""
    points: list[tuple[float, float]] = []
    for line in metrics.read_text("utf-8").splitlines() if metrics.exists() else ():
        values = json.loads(line)
        if "lr" in values:
            if values.get("loss") is None:
                break
            points.append((float(values["lr"]), float(values["loss"])))
    return points
