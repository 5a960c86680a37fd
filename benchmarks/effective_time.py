"""Effective training time that is expected of a large run with faults, from measured detection and recovery.

    python -m benchmarks.effective_time
    python -m benchmarks.effective_time --measured RUNS/gpt-tiny.punish/ID/punish.json --interval 120 --start 60

A simulation: faults come at random (exponential times) at the rate of Llama 3's training, 419 unexpected interruptions
in 54 days of 16,384 GPUs (arXiv:2407.21783, section 3.3.4), in proportion to the GPUs. Each costs the time until it is
noticed, the time until ranks train again, and the steps since the state that they start from. Between faults, each
checkpoint stops the loop for a moment. A fault that comes during a restart starts it again.
"""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import parser, show

FAULTS, DAYS, GPUS = 419, 54.0, 16_384
DAY = 86_400.0
CLEAN, HANGS, SILENT = 406, 7, 6
"""Of those: NCCL watchdog timeouts are taken as hangs, and silent data corruption as what only a comparison of replicas
finds; all others end a process."""
HANG_NAMES = ("rank stopped", "GIL held", "collective left out")
DEATH_NAMES = ("rank killed", "first rank killed", "exception", "killed in a save")


@dataclass(frozen=True)
class Assumed:
    """What a simulation is made of; seconds."""

    gpus: int = GPUS
    death: float = 0.1
    """Until the end of a rank is noticed."""
    hang: float = 601.0
    """Until a hang is noticed: `faults.rank_heartbeat_timeout`, and what its watchdog was measured to need more."""
    compared: float = 500.0
    """Between comparisons of replicas, after half of which corruption is noticed on average."""
    start: float = 60.0
    """From there until ranks train again."""
    interval: float = 120.0
    """Between checkpoints; half of it is computed again on average."""
    stall: float = 0.5
    """For which a checkpoint stops the loop."""

    @property
    def between_faults(self) -> float:
        """Mean time between faults."""
        return DAYS * DAY / FAULTS * GPUS / self.gpus


def effective(assumed: Assumed, days: float, draw: random.Random) -> float:
    """Share of the time that goes into steps that count, in one simulated training."""
    now = kept = 0.0
    end = days * DAY
    stalled = assumed.stall / (assumed.interval + assumed.stall)
    while now < end:
        trained = min(draw.expovariate(1.0 / assumed.between_faults), end - now)
        lost = min(trained, draw.uniform(0.0, assumed.interval))
        (kind,) = draw.choices(("death", "hang", "silent"), (CLEAN, HANGS, SILENT))
        if kind == "silent":
            # Checkpoints are compared before they are saved, so that the newest one is good.
            lost = min(trained, lost + draw.uniform(0.0, assumed.compared))
        kept += (trained - lost) * (1.0 - stalled)
        now += trained + {"death": assumed.death, "hang": assumed.hang, "silent": 0.0}[kind]
        # A fault before the first step begins the restart once more.
        while (next_fault := draw.expovariate(1.0 / assumed.between_faults)) < assumed.start:
            now += next_fault
        now += assumed.start
    return kept / now


def simulated(assumed: Assumed, runs: int, days: float, seed: int) -> tuple[float, float, float]:
    """Mean effective time of many trainings, and the shares that 5 % of them are below and above."""
    draw = random.Random(seed)
    values = sorted(effective(assumed, days, draw) for _ in range(runs))
    return statistics.fmean(values), values[runs // 20], values[-1 - runs // 20]


def measured(path: Path) -> dict[str, float]:
    """Median seconds of the faults of a `punish.json`."""
    faults = json.loads(path.read_text("utf-8"))["faults"]

    def median(names: tuple[str, ...], key: str) -> float:
        return statistics.median(fault[key] for fault in faults if fault["fault"] in names and fault[key] is not None)

    # The limit of these runs is 10 s, or ten times the longest step.
    over = median(HANG_NAMES, "detection_seconds") - 10.0
    return {
        "death": median(DEATH_NAMES, "detection_seconds"),
        "hang": 600.0 + max(0.0, over),
        "restart": median(DEATH_NAMES, "recovery_seconds"),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--gpus", type=int, default=GPUS)
    options.add_argument("--measured", type=Path, metavar="punish.json", help="take detection and restart from it")
    options.add_argument("--interval", type=float, default=Assumed.interval, help="seconds between checkpoints")
    options.add_argument("--stall", type=float, default=Assumed.stall, help="seconds that one stops the loop")
    options.add_argument("--start", type=float, default=Assumed.start, help="seconds of a restart at that size")
    options.add_argument("--hang", type=float, help="seconds until a hang is noticed")
    options.add_argument("--runs", type=int, default=400)
    options.add_argument("--seed", type=int, default=0)
    asked = options.parse_args()
    found = {} if asked.measured is None else measured(asked.measured)
    base = Assumed(
        gpus=asked.gpus,
        death=found.get("death", Assumed.death),
        hang=asked.hang or found.get("hang", Assumed.hang),
        interval=asked.interval,
        stall=asked.stall,
        start=asked.start,
    )
    restart = found.get("restart", 6.0)
    variants = {
        "as assumed": base,
        f"a restart as measured on one machine ({restart:.1f} s)": replace(base, start=restart),
        "a restart in 180 s": replace(base, start=180.0),
        "a checkpoint every 30 minutes": replace(base, interval=1800.0),
        "a checkpoint stops the loop for 5 s": replace(base, stall=5.0),
        "hangs noticed after 60 s": replace(base, hang=60.0),
        "at most one step of 5 s lost": replace(base, interval=5.0, stall=0.0),
    }
    rows, kept = [], dict[str, Any]()
    for name, assumed in variants.items():
        mean, low, high = simulated(assumed, asked.runs, DAYS, asked.seed)
        rows.append((name, f"{mean:.2%}", f"{low:.2%} to {high:.2%}"))
        kept[name] = {**asdict(assumed), "effective_time": mean, "p5": low, "p95": high}
    print(
        f"{base.gpus:,} GPUs, a fault every {base.between_faults / 3600:.2f} h; {CLEAN + HANGS + SILENT} faults are "
        f"{CLEAN} deaths, {HANGS} hangs and {SILENT} silent corruptions;\nassumed: deaths noticed after "
        f"{base.death:.1f} s, hangs after {base.hang:.0f} s, replicas compared every {base.compared:.0f} s, a restart "
        f"in {base.start:.0f} s, a checkpoint every {base.interval:.0f} s that stops the loop for {base.stall:.1f} s;"
        f"\n{asked.runs} trainings of {DAYS:.0f} days, seed {asked.seed}"
    )
    show("Effective training time", ("", "mean", "90 % of trainings"), rows)
    if asked.json:
        asked.json.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
