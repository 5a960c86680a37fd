"""`llmrecipes compare`: differences between runs in recipe and results, read from their files."""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmrecipes.checkpoint.compatibility import differences
from llmrecipes.console import number
from llmrecipes.errors import UserError
from llmrecipes.recipe.halves import learned
from llmrecipes.rundir import Run
from llmrecipes.tracking import status
from llmrecipes.tracking.energy import Energy
from llmrecipes.tracking.jsonl import parse
from llmrecipes.untrusted import lines
from llmrecipes.webpage import table

MOST_POINTS = 1000
"""Maximum points of a curve in JSON; a longer one is reduced to every n-th point and the last."""


@dataclass
class Curve:
    """Losses in nats per token; non-finite ones are NaN."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    tokens: array[int] = field(default_factory=lambda: array("q"))
    losses: array[float] = field(default_factory=lambda: array("d"))

    def add(self, record: dict[str, Any], key: str) -> None:
        """Add a line of metrics.jsonl."""
        loss = record[key]
        self.steps.append(record["step"])
        self.tokens.append(int(record.get("consumed_tokens", 0)))
        self.losses.append(float(loss) if isinstance(loss, int | float) else math.nan)

    def as_list(self) -> list[list[float | None]]:
        """[step, tokens, loss] of at most about `MOST_POINTS` points."""
        stride = -(-len(self.steps) // MOST_POINTS)
        last = len(self.steps) - 1
        return [
            [self.steps[n], self.tokens[n], self.losses[n] if math.isfinite(self.losses[n]) else None]
            for n in range(len(self.steps))
            if n % stride == 0 or n == last
        ]


@dataclass
class ComparedRun:
    """One run. `recipe` is None if it cannot be read.

    `figures` by name; None if the run has no such number. Speed and step time are medians; `memory_bytes` is the
    maximum over steps, on the first rank.
    """

    path: Path
    recipe: dict[str, Any] | None
    state: str
    train: Curve
    valid: Curve
    figures: dict[str, float | None]
    energy: Energy | None = None
    """None: nothing says what it has used."""

    @property
    def name(self) -> str:
        return Run(self.path).name

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "run": self.name,
            "path": str(self.path),
            "state": self.state,
            "figures": self.figures,
            "energy": {} if self.energy is None else self.energy.values(*self.train.tokens[-1:]),
            "train": self.train.as_list(),
            "valid": self.valid.as_list(),
        }


@dataclass(frozen=True, repr=False)
class RunComparison:
    """Runs in the order they were named, and the recipe keys that differ, with a value of each run."""

    runs: tuple[ComparedRun, ...]
    differences: dict[str, tuple[Any, ...]]

    @property
    def same_experiment(self) -> bool | None:
        """Whether the runs learn the same, however they are executed; None if a recipe cannot be read."""
        halves = [None if run.recipe is None else learned(run.recipe) for run in self.runs]
        return None if None in halves else all(half == halves[0] for half in halves)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "runs": [run.as_dict() for run in self.runs],
            "same_experiment": self.same_experiment,
            "differences": [{"key": key, "values": list(values)} for key, values in self.differences.items()],
        }

    def __repr__(self) -> str:
        return f"RunComparison({', '.join(run.name for run in self.runs)})"

    def _repr_html_(self) -> str:
        """A row for each figure and each key that differs, in a notebook."""
        figures = {name: tuple(run.figures[name] for run in self.runs) for name in self.runs[0].figures}
        rows = {**figures, **self.differences}.items()
        return table(("", *(run.name for run in self.runs)), [(name, *values) for name, values in rows])


def compare(run_dirs: Sequence[Path], *, partial: bool = False) -> RunComparison:
    """Read and compare runs, which may still be running.

    Args:
        partial: also those without any step or with a recipe that cannot be read.

    Raises:
        UserError: fewer than two runs; or, unless `partial`, one without any step or with a corrupt recipe.
    """
    if len(run_dirs) < 2:
        raise UserError(
            "only one run", where="RUN", rule="compare needs at least two runs", fix="llmrecipes runs lists them"
        )
    runs = tuple(_read(run_dir, partial=partial) for run_dir in run_dirs)
    return RunComparison(runs, _differences([run.recipe for run in runs]))


def _differences(recipes: Sequence[dict[str, Any] | None]) -> dict[str, tuple[Any, ...]]:
    known = [(place, recipe) for place, recipe in enumerate(recipes) if recipe is not None]
    by_key: dict[str, list[Any]] = {}
    for place, other in known[1:]:
        for difference in differences(other, known[0][1]):
            same = ["unknown" if recipe is None else difference.then for recipe in recipes]
            by_key.setdefault(difference.key, same)[place] = difference.now
    return {key: tuple(by_key[key]) for key in sorted(by_key)}


FIGURES = {
    "loss": ("training loss, last", "{:.4f}"),
    "valid_loss": ("validation loss, last", "{:.4f}"),
    "valid_loss_best": ("validation loss, best", "{:.4f}"),
    "bits_per_byte": ("bits per byte, last", "{:.4f}"),
    "tokens_per_second": ("tokens/s, median", "{:,.0f}"),
    "step_seconds": ("seconds a step, median", "{:.3g}"),
    "mfu": ("MFU, median", "{:.1%}"),
}
"""Names and forms of final figures."""


def figure_rows(runs: Sequence[ComparedRun], unknown: str) -> Iterator[tuple[str, ...]]:
    """Rows of final figures, without those that no run has.

    Args:
        unknown: value for a run that has no such figure.
    """
    yield ("tokens", *(number(run.figures["tokens"] or 0) for run in runs))
    for key, (words, shape) in FIGURES.items():
        values = [run.figures[key] for run in runs]
        if any(value is not None for value in values):
            yield (words, *(unknown if value is None else shape.format(value) for value in values))


@dataclass
class _Metrics:
    """What is kept of the lines of metrics.jsonl."""

    train: Curve = field(default_factory=Curve)
    valid: Curve = field(default_factory=Curve)
    steps: dict[str, array[float]] = field(
        default_factory=lambda: {key: array("d") for key in ("tokens_per_second", "step_seconds", "mfu")}
    )
    memory: float | None = None
    bits: float | None = None
    energy: Energy | None = None

    def add(self, record: dict[str, Any]) -> None:
        self.energy = Energy.of(record) or self.energy
        if "loss" in record:
            self.train.add(record, "loss")
            for key, values in self.steps.items():
                if isinstance(record.get(key), int | float):
                    values.append(record[key])
            self.memory = max(self.memory or 0.0, record.get("memory_bytes") or 0.0) or None
        elif "valid_loss" in record:
            self.valid.add(record, "valid_loss")
            self.bits = record.get("valid_bits_per_byte")


def _read(run_dir: Path, *, partial: bool) -> ComparedRun:
    metrics = _Metrics()
    try:
        for line in lines(Run(run_dir).metrics, root=run_dir):
            if (record := parse(line)) is not None:  # the last line of a run may be incomplete while it trains
                metrics.add(record)
    except OSError:
        pass  # no first step yet
    except UserError:
        if not partial:
            raise
    train = metrics.train
    valid = metrics.valid
    if not train.steps and not partial:
        raise UserError(
            "no metrics yet",
            where=str(run_dir),
            rule="a run can be compared after its first step",
            fix="leave it out; llmrecipes runs shows its state",
        )
    state = status.read(run_dir)
    figures: dict[str, float | None] = {
        "steps": train.steps[-1] if train.steps else 0,
        "steps_planned": state.get("total"),
        "tokens": train.tokens[-1] if train.steps else 0,
        "loss": _last(train),
        "valid_loss": _last(valid),
        "valid_loss_best": min((loss for loss in valid.losses if math.isfinite(loss)), default=None),
        "bits_per_byte": metrics.bits,
        "memory_bytes": metrics.memory,
        **{key: statistics.median(values) if values else None for key, values in metrics.steps.items()},
    }
    # How its values were found is not a property of a run; the runs of a search's trials have no such section.
    recipe = None
    try:
        recipe = Run(run_dir).recipe().model_dump(mode="json", exclude={"search"})
    except (UserError, OSError):
        if not partial:
            raise
    return ComparedRun(run_dir, recipe, str(state.get("state", "unknown")), train, valid, figures, metrics.energy)


def _last(curve: Curve) -> float | None:
    """The last loss; None if there is none or it is not finite."""
    return curve.losses[-1] if curve.losses and math.isfinite(curve.losses[-1]) else None
