"""The limits of a study: what it has used, what is left, and whether another trial may start."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from optuna.trial import FrozenTrial, TrialState

from llmrecipes.console import duration, number
from llmrecipes.recipe.sections.search_section import Search
from llmrecipes.search.trials import is_infeasible
from llmrecipes.tracking import status

TOKENS, RANK_SECONDS, RANKS, RUN_ID, ENDED = "tokens", "rank_seconds", "ranks", "run_id", "ended"
"""Attributes of trials: tokens trained on, seconds times ranks, ranks, id of the run, and how many had ended before."""
EARLIER_SEEDS = "rank_seconds_of_earlier_seeds"
"""Attribute of a trial whose point is trained with several seeds, one run per seed."""
HOUR = 3600.0


@dataclass(frozen=True)
class Used:
    """What the trials of a study have used; a running trial counts with all its tokens."""

    trials: int = 0
    running: int = 0
    tokens: int = 0
    gpu_hours: float = 0.0
    best: float | None = None
    """Best value of the first objective."""
    without_improvement: int = 0
    """Trials that ended since the best value improved."""


def recorded_seconds(run_dir: Path) -> float:
    """Seconds in which the processes of a run have run, as the run itself has recorded; 0 if it has not begun."""
    seconds = status.read(run_dir).get("seconds")
    return seconds if isinstance(seconds, float) and 0 <= seconds < math.inf else 0.0


def used(
    trials: Iterable[FrozenTrial],
    trial_tokens: int,
    min_improvement: float = 0.0,
    run_dir: Callable[[str], Path] | None = None,
) -> Used:
    """Add up the trials of a study.

    Args:
        trials: see `trials.own_trials`.
        trial_tokens: tokens of one trial.
        min_improvement: see `search.min_improvement`.
        run_dir: directory of a run, by its id: the jobs of trials that no process follows may run and use GPUs, which
            only their runs record. None: not looked at.
    """
    trials = list(trials)
    counted = [trial for trial in trials if trial.state != TrialState.WAITING and not is_infeasible(trial)]
    ended = sorted(
        (trial for trial in counted if trial.state.is_finished()),
        key=lambda each: (each.user_attrs.get(ENDED, 0), each.number),  # no clock: they may differ, and be set
    )
    best: float | None = None
    without = 0
    for trial in ended:
        value = trial.values[0] if trial.state == TrialState.COMPLETE and trial.values else None
        if value is not None and (best is None or value < best - min_improvement):
            best, without = value, 0
        else:
            without += trial.state != TrialState.FAIL
    running = [trial for trial in counted if trial.state == TrialState.RUNNING]
    return Used(
        trials=len(counted),
        running=len(running),
        tokens=sum(trial.user_attrs.get(TOKENS, 0) for trial in ended) + trial_tokens * len(running),
        gpu_hours=sum(_rank_seconds(trial, run_dir) for trial in trials) / HOUR,
        best=best,
        without_improvement=without,
    )


def _rank_seconds(trial: FrozenTrial, run_dir: Callable[[str], Path] | None) -> float:
    known: float = trial.user_attrs.get(RANK_SECONDS, 0.0)
    run_id, ranks = trial.user_attrs.get(RUN_ID), trial.user_attrs.get(RANKS, 1)
    if run_dir is None or run_id is None or ENDED in trial.user_attrs:
        return known
    return max(known, trial.user_attrs.get(EARLIER_SEEDS, 0.0) + recorded_seconds(run_dir(run_id)) * ranks)


@dataclass(frozen=True)
class Budget:
    """The limits of a study, from the time when this process started."""

    search: Search
    trial_tokens: int
    started: float = field(default_factory=time.monotonic)

    def spent(self, now: Used) -> str:
        """Why no further trial may start; empty if one may."""
        search = self.search
        seconds = time.monotonic() - self.started
        best = now.best
        if search.target is not None and best is not None and best <= search.target:
            return f"target reached: {best:.4f}, search.target {search.target:g}"
        if search.patience is not None and now.without_improvement >= search.patience:
            return f"no improvement in {now.without_improvement} trials, search.patience {search.patience}"
        limits = (
            ("n_trials", now.trials, search.n_trials),
            ("timeout", seconds, search.timeout),
            ("max_gpu_hours", now.gpu_hours, search.max_gpu_hours),
        )
        for name, value, limit in limits:
            if limit is not None and value >= limit:
                return f"search.{name} {limit:g} is used up"
        if search.max_tokens is not None and now.tokens + self.trial_tokens > search.max_tokens:
            return f"search.max_tokens {number(search.max_tokens)} is used up"
        return ""

    def left(self, now: Used, ended: int = 0) -> str:
        """The remaining limits as text.

        Args:
            now: what has been used.
            ended: trials that ended since this process started, by whose rate the rest takes so long; 0: unknown.
        """
        search, parts = self.search, []
        if search.n_trials is not None:
            left = max(0, search.n_trials - now.trials)
            seconds = (left + now.running) * (time.monotonic() - self.started) / ended if ended else 0.0
            about = f" (about {duration(seconds)})" if seconds else ""
            parts.append(f"{left} of {search.n_trials} trials{about}")
        if search.timeout is not None:
            parts.append(duration(max(0.0, search.timeout - (time.monotonic() - self.started))))
        if search.max_gpu_hours is not None:
            parts.append(f"{max(0.0, search.max_gpu_hours - now.gpu_hours):.3g} rank-hours")
        if search.max_tokens is not None:
            parts.append(f"{number(max(0, search.max_tokens - now.tokens))} tokens")
        if search.patience is not None:
            parts.append(f"{max(0, search.patience - now.without_improvement)} trials without improvement")
        return ", ".join(parts)
