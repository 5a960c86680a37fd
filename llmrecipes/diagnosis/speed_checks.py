"""Checks of speed and memory: GPU use, data, communication, ranks, clocks, storage, memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import pairwise

from llmrecipes.diagnosis.finding import Lasting, Record, RunFacts, Sighting, Spread, spread, steps_only, value
from llmrecipes.units import GIB, MIB

STARTED = "started"
"""`tracking.events.STARTED`, which is of a package above this one."""
FIRST = 10
"""Steps of a run that compile, connect and fill caches."""
WINDOW, REPORTS, MOST = 20, 5, 0.8
"""Steps and reports of ranks and nodes, and the share of them in which something must hold."""
LOW_USE, LOW_MFU = 0.6, 0.15
"""Share of the time in which a GPU computes, and of its peak."""
WAITING, SENDING = 0.1, 0.35
"""Shares of a step."""
FEW_TOKENS = 2048
"""Tokens of a micro-batch below which kernels do not fill a GPU."""


PARTS = ("data", "compute", "communication")
"""Of a step of a rank."""


class Use:
    """GPUs compute for a small part of the time; and why: data, communication, or too little work at a time.

    Ranks and nodes are in about every tenth step, about the steps since. MFU is in every step, and judged where no GPU
    says how busy it is.
    """

    def __init__(self, facts: RunFacts) -> None:
        self._tokens = facts.micro_batch_tokens
        self._late, self._idle = Lasting(REPORTS, MOST), Lasting(REPORTS, MOST)
        self._low = Lasting(WINDOW, MOST)
        self._waited: float | None = None
        self._sent: float | None = None
        self._measured = False

    def add(self, record: Record) -> Iterator[Sighting]:
        if not steps_only(record) or record["step"] <= FIRST:
            return
        parts = {name: spread(record, "ranks", f"{name}_seconds") for name in PARTS} if "ranks" in record else {}
        seconds = sum(part.median for part in parts.values() if part is not None) if parts else 0.0
        if seconds > 0:
            self._waited = _share(parts["data"], seconds)
            self._sent = _share(parts["communication"], seconds)
            if self._waited is not None and self._late.add(self._waited > WAITING):
                text = f"ranks wait {self._waited:.0%} of a step of {seconds:.3g} s for data"
                evidence = {"waiting": self._waited, "step_seconds": seconds}
                yield Sighting("loader_bound", record["step"], text, evidence)
        used = spread(record, "nodes", "gpu_use")
        mfu = value(record, "mfu")
        if used is not None:
            self._measured = True
            if self._idle.add(used.median < LOW_USE):
                text = f"the least busy GPU of the median node computes {used.median:.0%} of the time"
                yield self._sighting(record, text, used.median, mfu)
        elif not self._measured and mfu is not None and self._low.add(mfu < LOW_MFU):
            yield self._sighting(record, f"MFU is {mfu:.1%}", None, mfu)

    def _sighting(self, record: Record, what: str, used: float | None, mfu: float | None) -> Sighting:
        reason, why = self._reason()
        evidence = {
            "gpu_use": used,
            "mfu": mfu,
            "reason": reason,
            "waiting": self._waited,
            "communication": self._sent,
            "micro_batch_tokens": self._tokens,
        }
        return Sighting("gpu_use_low", record["step"], f"{what}: {why}", evidence)

    def _reason(self) -> tuple[str, str]:
        if self._waited is not None and self._waited > WAITING:
            return "data", f"ranks wait {self._waited:.0%} of a step for data"
        if self._sent is not None and self._sent > SENDING:
            return "communication", f"communication takes {self._sent:.0%} of a step"
        if 0 < self._tokens < FEW_TOKENS:
            return "small batch", f"a micro-batch has {self._tokens:,} tokens, too few to fill a GPU"
        return "unknown", "no cause is recorded; --profile 3 shows where the time goes"


def _share(seconds: Spread | None, of: float) -> float | None:
    return None if seconds is None else seconds.median / of


class Clocks:
    """A GPU lowers its clock: heat, power, or a fault of the board."""

    def __init__(self) -> None:
        self._throttled = Lasting(REPORTS, MOST)

    def add(self, record: Record) -> Iterator[Sighting]:
        throttled = spread(record, "nodes", "throttled")
        if throttled is None or not self._throttled.add(throttled.most > 0):
            return
        clock = spread(record, "nodes", "sm_clock_mhz")
        heat = spread(record, "nodes", "temperature_c")
        evidence = {
            "node": throttled.where,
            "share": throttled.most,
            "sm_clock_mhz": None if clock is None else clock.least,
            "temperature_c": None if heat is None else heat.most,
        }
        at = "" if clock is None else f"; the slowest clock is {clock.least:.0f} MHz"
        text = f"{throttled.most:.0%} of the GPUs of {throttled.where} are throttled{at}"
        yield Sighting("clock_throttling", record["step"], text, evidence)


SLOW, SLOW_REPORTS = 1.2, 10
"""Own time of a rank over that of its peers, and the reports of which it must be so in most."""


class SlowRank:
    """The same rank is slower than its peers in most reports, by less than makes the alarm `straggler`.

    Silent where peers have other work: with experts, whose load decides, and on pipeline stages of a single rank.
    """

    def __init__(self, facts: RunFacts) -> None:
        self._limit = facts.straggler
        self._stages = facts.pipeline_stages
        self._experts = facts.experts
        self._ranks: float | None = None
        self._slow = Lasting(SLOW_REPORTS, MOST)
        self._rank = ""

    def add(self, record: Record) -> Iterator[Sighting]:
        if record.get("event") == STARTED and isinstance(details := record.get("details"), dict):
            self._ranks, self._slow = value(details, "ranks"), Lasting(SLOW_REPORTS, MOST)
        if "ranks" not in record or self._experts or self._stages == self._ranks:
            return
        slowness = spread(record, "ranks", "slowness")
        if slowness is None:
            return
        if slowness.where != self._rank:
            self._rank, self._slow = slowness.where, Lasting(SLOW_REPORTS, MOST)
        if self._slow.add(SLOW < slowness.most <= self._limit):
            text = f"rank {self._rank} takes {slowness.most:.2f} times as long as its peers for its own work"
            yield Sighting("slow_rank", record["step"], text, {"rank": self._rank, "slowness": slowness.most})


GROUP, GROUPS = 20, 10
"""Steps of a group, and groups that are compared."""
WARM_UP = 5
"""Groups after a start that are not compared: allocators grow until they have a place for each size."""
GROWS, LEAST_GROWTH = 0.05, 256 * MIB
"""Growth over all of them, as a share of the memory and in bytes."""
STILL = 0.75
"""Growth over the second half of the groups, as a share of that over the first: a leak does not slow down, but an
allocator that still warms up does."""


class MemoryCreep:
    """The memory of a rank grows in nearly every group of steps, long after the start, and no slower than before.

    The record has peaks, which stay after the largest batch, evaluation and save; a leak does not.
    """

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._groups: deque[float] = deque(maxlen=GROUPS)
        self._number = 0
        self._most = 0.0
        self._warming = WARM_UP

    def add(self, record: Record) -> Iterator[Sighting]:
        if record.get("event") == STARTED:  # another process
            self._start()
        used = value(record, "memory_bytes")
        if used is None or "loss" not in record:
            return
        self._number, self._most = self._number + 1, max(self._most, used)
        if self._number < GROUP:
            return
        most = self._most
        self._number = 0
        self._most = 0.0
        if self._warming:
            self._warming -= 1
            return
        self._groups.append(most)
        groups = [*self._groups]
        if len(groups) < GROUPS:
            return
        growth = groups[-1] - groups[0]
        # A step by one large allocation is not a creep: no group may have more than half of the growth.
        gains = [later - earlier for earlier, later in pairwise(groups)]
        steady = sum(gain > 0 for gain in gains) >= len(gains) - 1 and max(gains) < growth / 2
        half = len(gains) // 2
        steady &= sum(gains[-half:]) >= STILL * sum(gains[:half])
        if steady and growth > max(GROWS * groups[0], LEAST_GROWTH):
            steps = GROUP * (GROUPS - 1)
            text = f"memory grew by {growth / GIB:.2f} GiB over {steps} steps, to {groups[-1] / GIB:.2f} GiB"
            evidence = {"memory_bytes": groups[-1], "growth_bytes": growth, "bytes_a_step": growth / steps}
            yield Sighting("memory_creep", record["step"], text, evidence)


STALLS = 0.05
"""Share of the time between two saves in which training may wait for them."""
LEAST_STALL = 1.0
"""Seconds of a wait that counts."""


class Storage:
    """Saves take longer than the time between them, or training waits for them."""

    def __init__(self) -> None:
        self._since, self._steps = 0.0, 0

    def add(self, record: Record) -> Iterator[Sighting]:
        seconds = value(record, "step_seconds")
        if "loss" in record and seconds is not None:
            self._since, self._steps = self._since + seconds, self._steps + 1
            return
        details = record.get("details")
        if record.get("event") != "checkpoint_saved" or not isinstance(details, dict):
            return
        wrote = value(details, "seconds")
        waited = value(details, "loop_waited") or 0.0
        trained, steps = self._since, self._steps
        self._since, self._steps = 0.0, 0
        if wrote is None or steps < FIRST:
            return
        evidence = {"seconds": wrote, "loop_waited": waited, "training_seconds": trained, "steps": steps}
        if waited > max(STALLS * trained, LEAST_STALL):
            text = f"a save stopped training for {waited:.1f} s, after {trained:.1f} s of steps"
            yield Sighting("slow_storage", record["step"], text, evidence)
        elif wrote > max(trained, LEAST_STALL):
            text = f"a save took {wrote:.1f} s, longer than the {trained:.1f} s of steps between two saves"
            yield Sighting("slow_storage", record["step"], text, evidence)
