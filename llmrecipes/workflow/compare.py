"""`llmrecipes compare`: differences between runs in recipe and results, read from their files."""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmrecipes.checkpoint.compatibility import differences
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
    known = [(number, recipe) for number, recipe in enumerate(recipes) if recipe is not None]
    by_key: dict[str, list[Any]] = {}
    for number, other in known[1:]:
        for difference in differences(other, known[0][1]):
            same = ["unknown" if recipe is None else difference.then for recipe in recipes]
            by_key.setdefault(difference.key, same)[number] = difference.now
    return {key: tuple(by_key[key]) for key in sorted(by_key)}


def _read(run_dir: Path, *, partial: bool) -> ComparedRun:
    train, valid = Curve(), Curve()
    speeds, seconds, used = array("d"), array("d"), array("d")
    memory: float | None = None
    bits: float | None = None
    energy: Energy | None = None
    try:
        for line in lines(Run(run_dir).metrics, root=run_dir):
            record = parse(line)  # the last line of a run that is still training may be incomplete
            if record is None:
                continue
            energy = Energy.of(record) or energy
            if "loss" in record:
                train.add(record, "loss")
                for numbers, key in ((speeds, "tokens_per_second"), (seconds, "step_seconds"), (used, "mfu")):
                    if isinstance(record.get(key), int | float):
                        numbers.append(record[key])
                memory = max(memory or 0.0, record.get("memory_bytes") or 0.0) or None
            elif "valid_loss" in record:
                valid.add(record, "valid_loss")
                bits = record.get("valid_bits_per_byte")
    except OSError:
        pass  # no first step yet
    except UserError:
        if not partial:
            raise
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
        "bits_per_byte": bits,
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "step_seconds": statistics.median(seconds) if seconds else None,
        "memory_bytes": memory,
        "mfu": statistics.median(used) if used else None,
    }
    # How its values were found is not a property of a run; the runs of a search's trials have no such section.
    recipe = None
    try:
        recipe = Run(run_dir).recipe().model_dump(mode="json", exclude={"search"})
    except (UserError, OSError):
        if not partial:
            raise
    return ComparedRun(run_dir, recipe, str(state.get("state", "unknown")), train, valid, figures, energy)


def _last(curve: Curve) -> float | None:
    """The last loss; None if there is none or it is not finite."""
    return curve.losses[-1] if curve.losses and math.isfinite(curve.losses[-1]) else None
