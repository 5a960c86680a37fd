"""The faults that a run is punished with, and the orders by which a rank gets those that happen inside it."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

from llmrecipes.io import write_atomic

KILLED = r"out: .*(ended first|was killed by signal|the ranks ended with)|exit: "
SAVED_AGAIN = r"note: checkpoint_saved"
STEPS, ORDERS = "steps.jsonl", "orders"
COMPARED = 5
"""Steps between comparisons of replicas."""


@dataclass(frozen=True)
class Fault:
    """A fault and what has to happen.

    Attributes:
        name: of the fault.
        what: is done, in a few words.
        noticed: matches the sign by which the run shows that it has noticed it; see `signs.Signs`.
        seconds: in which it has to be noticed, besides `steps` and `saves` of the run.
        steps: the run may do before it can notice.
        saves: the run may begin before it can notice; it evaluates at every second one.
        inside: whether a rank does it to itself, by order.
        launcher: whether the launcher is the target, not a rank.
        checkpoint: whether it needs an older checkpoint to go back to.
        mounted: whether it needs a file system of its own for the checkpoints, which needs root.
        replicas: whether it shows only between data-parallel replicas.
        recovered: matches the sign of recovery; empty: the next step that begins.
    """

    name: str
    what: str
    noticed: str
    seconds: float = 10.0
    steps: int = 0
    saves: int = 0
    inside: bool = False
    launcher: bool = False
    checkpoint: bool = False
    mounted: bool = False
    replicas: bool = False
    recovered: str = ""


FAULTS = (
    Fault("rank killed", "SIGKILL to a rank", KILLED),
    Fault("first rank killed", "SIGKILL to rank 0", KILLED),
    Fault("launcher killed", "SIGKILL to the launcher", "exit: -9", launcher=True),
    Fault("rank stopped", "SIGSTOP to a rank", "hang: ", 2.0),
    Fault("GIL held", "a rank sleeps in C with Python's lock", "hang: ", 2.0, inside=True),
    Fault("collective left out", "a rank leaves out its next all-reduce", rf"hang: |{KILLED}", 2.0, inside=True),
    Fault("exception", "a rank raises in a step", KILLED, inside=True),
    Fault("exception in evaluation", "a rank raises in an evaluation", KILLED, saves=2, inside=True),
    Fault("killed in a save", "SIGKILL while the rank's file is being written", KILLED, saves=1, inside=True),
    Fault("rank told to stop", "SIGTERM to a rank", "exit: 75", 60.0),
    Fault("preempted", "SIGTERM to the launcher", "exit: 75", 60.0, launcher=True),
    Fault("NaN", "a gradient of a rank is not finite, once", "note: hardware_suspect", steps=1, inside=True),
    Fault("NaN that stays", "the same each time", "exit: 93", steps=1, inside=True),
    Fault("flipped weight bit", "one bit on one replica in a step with a comparison", "note: replicas_differ|exit: 93",
          steps=COMPARED, inside=True, replicas=True),
    Fault("truncated checkpoint", "a file of the newest, then SIGKILL to the launcher", "note: checkpoint_damaged",
          120.0, launcher=True, checkpoint=True),
    Fault("flipped checkpoint bit", "in the newest, then SIGKILL to the launcher", "note: checkpoint_damaged",
          120.0, launcher=True, checkpoint=True),
    Fault("deleted checkpoint file", "of the newest, then SIGKILL to the launcher", "note: checkpoint_damaged",
          120.0, launcher=True, checkpoint=True),
    Fault("full disk", "no space for checkpoints until a save has failed", "note: save_failed", saves=2,
          mounted=True, recovered=SAVED_AGAIN),
    Fault("read-only disk", "checkpoints cannot be written until a save has failed", "note: save_failed", saves=2,
          mounted=True, recovered=SAVED_AGAIN),
)  # fmt: skip
"""All but those that change what is trained on (a spike that is left out), and a slow rank, which is not an end."""


@dataclass(frozen=True)
class Pace:
    """How fast faults come.

    Attributes:
        seed: of the faults, ranks and moments that are drawn.
        minutes: in which faults are injected; None: until each was once.
        every: seconds between faults on average, exponentially distributed as those of a cluster; None: at once, two to
            nine steps after the last recovery.
        save_interval: steps between checkpoints; a run evaluates at every second one.
    """

    seed: int = 0
    minutes: float | None = None
    every: float | None = None
    save_interval: int = 10

    def pause(self, source: random.Random) -> float:
        """Seconds to the next fault."""
        return 0.0 if self.every is None else source.expovariate(1.0 / self.every)


ALARMS = (
    r"note: (hang|hardware_suspect|replicas_differ|results_differ|save_failed|unreadable|checkpoint_damaged)"
    r"|exit: (?!0$)|hang: "
)
"""Signs that count as false alarms if no fault was injected."""


def give(folder: Path, rank: int, fault: str, number: int) -> None:
    """Order a rank to have a fault as soon as it can."""
    write_atomic(folder / f"rank-{rank}.json", json.dumps({"fault": fault, "number": number}), durable=False)


def take(folder: Path, rank: int, faults: frozenset[str]) -> str | None:
    """The fault that this rank is to have now, once; the time is recorded.

    Args:
        faults: that can happen at this place.
    """
    path = folder / f"rank-{rank}.json"
    if not path.exists():
        return None
    order = json.loads(path.read_text("utf-8"))
    fault: str = order["fault"]
    if fault not in faults:
        return None
    write_atomic(folder / f"taken-{order['number']}", repr(time.monotonic()), durable=False)
    path.unlink()
    return fault


def taken_at(folder: Path, number: int) -> float | None:
    """When an order was carried out, by CLOCK_MONOTONIC; None: not yet."""
    try:
        return float((folder / f"taken-{number}").read_text("utf-8"))
    except FileNotFoundError:
        return None
