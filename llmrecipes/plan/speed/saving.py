"""When to save, and what failures leave of the time: Young 1974 and Daly 2006 for saves that hide behind training."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from llmrecipes.hardware.profile import Profile
from llmrecipes.plan.derive import Plan
from llmrecipes.units import GIB

_TO_HOST = 20e9
"""Bytes a second that a GPU copies to pinned memory while the others of its node do: 16 lanes of PCIe 4 carry 31.5 GB/s
of data at most. No machine was measured."""


@dataclass(frozen=True)
class Saving:
    """Checkpoints of a run on a site, and failures of the site's GPUs.

    Attributes:
        bytes: of one checkpoint.
        stall: seconds that training waits for a save: for the copy to main memory, or all of it without
            `checkpoint.async_save`.
        write: seconds until a checkpoint is complete.
        interval: seconds between the recipe's saves.
        mtbf: seconds between two failures of any of the run's GPUs; None: the profile does not say.
        restart: seconds from a failure to the next step.
    """

    bytes: int
    stall: float
    write: float
    interval: float
    mtbf: float | None
    restart: float

    @property
    def best_interval(self) -> float | None:
        """Seconds between saves that lose the least time; not shorter than a save takes.

        Daly 2006, A higher order estimate of the optimum checkpoint interval for restart dumps, equation 37; Young's
        square root is its first factor.
        """
        if self.mtbf is None:
            return None
        half = self.stall / (2 * self.mtbf)
        if half >= 1:
            return max(self.mtbf, self.write)
        best = sqrt(2 * self.stall * self.mtbf) * (1 + sqrt(half) / 3 + half / 9) - self.stall
        return max(best, self.write)

    def effective(self, interval: float | None) -> float | None:
        """Share of the time that trains, with this many seconds between saves; 0 if failures leave nothing.

        A failure loses half an interval and what is not yet written, and the restart. A save that is due while the one
        before is being written waits for it.
        """
        if self.mtbf is None or interval is None:
            return None
        lag = self.write - self.stall
        waits = max(self.stall, self.write - interval)
        return interval / (interval + waits) * max(0.0, 1 - (interval / 2 + lag + self.restart) / self.mtbf)

    def days(self, seconds: float) -> float | None:
        """Days of this many seconds of training with the recipe's saves and failures; None: no end, or unknown."""
        share = self.effective(self.interval)
        return seconds / share / 86400 if share else None


def saving(plan: Plan, profile: Profile, step: float) -> Saving:
    """What saving costs a plan on its site.

    Args:
        profile: with the rate of its storage and of its GPUs' failures.
        step: seconds.
    """
    ranks = plan.layout.world_size
    write = plan.checkpoint_bytes / (profile.storage_gb_per_s * 1e9)
    copied = plan.checkpoint_bytes / ranks / _TO_HOST
    failures = profile.failures
    return Saving(
        bytes=plan.checkpoint_bytes,
        stall=min(copied, write) if plan.recipe.checkpoint.async_save else write,
        write=write,
        interval=plan.recipe.checkpoint.save_interval * step,
        mtbf=None if failures is None else failures.gpu_hours_per_failure * 3600 / ranks,
        restart=0.0 if failures is None else failures.restart_minutes * 60,
    )


def as_dict(of: Saving | None, step: float, training: float) -> dict[str, object]:
    """Keys of `plan --json`; null where the profile does not say.

    Args:
        of: None: there is no profile.
        step: seconds.
        training: seconds of all steps.
    """
    best = None if of is None else of.best_interval
    share = None if of is None else of.effective(of.interval)
    return {
        "checkpoint_gib": None if of is None else of.bytes / GIB,
        "checkpoint_stall_seconds": None if of is None else of.stall,
        "checkpoint_write_seconds": None if of is None else of.write,
        "mtbf_hours": None if of is None or of.mtbf is None else of.mtbf / 3600,
        "best_save_interval": None if best is None else max(1, round(best / step)),
        "effective_time": share,
        "best_effective_time": None if of is None else of.effective(best),
        "days_with_failures": None if of is None else of.days(training),
    }
