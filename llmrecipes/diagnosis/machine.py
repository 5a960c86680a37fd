"""Checks of speed and memory: GPU use, data, communication, ranks, clocks, storage, memory."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from itertools import pairwise

from llmrecipes.diagnosis.finding import Lasting, Record, RunFacts, Sighting, Spread, spread, steps_only, value
from llmrecipes.units import GIB, MIB

FIRST = 10
"""Steps of a run that compile, connect and fill caches."""
WINDOW, MOST = 20, 0.8
"""Steps, and the share of them in which something must hold."""
LOW_USE, LOW_MFU = 0.6, 0.15
"""Share of the time in which a GPU computes, and of its peak."""
WAITING, SENDING = 0.1, 0.35
"""Shares of a step."""
FEW_TOKENS = 2048
"""Tokens of a micro-batch below which kernels do not fill a GPU."""


class Use:
    """GPUs compute for a small part of the time; and why: data, communication, or too little work at a time."""

    def __init__(self, facts: RunFacts) -> None:
        self._tokens = facts.micro_batch_tokens
        self._low, self._late = Lasting(WINDOW, MOST), Lasting(WINDOW, MOST)

    def add(self, record: Record) -> Iterator[Sighting]:
        seconds = value(record, "step_seconds")
        if not steps_only(record) or not seconds or record["step"] <= FIRST:
            return
        waited = _share(spread(record, "data_seconds"), seconds)
        if waited is not None and self._late.add(waited > WAITING):
            text = f"a step of {seconds:.3g} s waits {waited:.0%} of it for data"
            yield Sighting("loader_bound", record["step"], text, {"waiting": waited, "step_seconds": seconds})
        used, mfu = spread(record, "gpu_use"), value(record, "mfu")
        low = used.median < LOW_USE if used is not None else mfu is not None and mfu < LOW_MFU
        if (used is None and mfu is None) or not self._low.add(low):
            return
        sent = _share(spread(record, "communication_seconds"), seconds)
        reason, why = self._reason(waited, sent)
        what = f"GPUs compute {used.median:.0%} of the time" if used is not None else f"MFU is {mfu:.1%}"
        evidence = {
            "gpu_use": None if used is None else used.median, "mfu": mfu, "reason": reason, "waiting": waited,
            "communication": sent, "micro_batch_tokens": self._tokens,
        }  # fmt: skip
        yield Sighting("gpu_use_low", record["step"], f"{what}: {why}", evidence)

    def _reason(self, waited: float | None, sent: float | None) -> tuple[str, str]:
        if waited is not None and waited > WAITING:
            return "data", f"they wait {waited:.0%} of a step for data"
        if sent is not None and sent > SENDING:
            return "communication", f"communication takes {sent:.0%} of a step"
        if 0 < self._tokens < FEW_TOKENS:
            return "small batch", f"a micro-batch has {self._tokens:,} tokens, too few to fill a GPU"
        return "unknown", "no cause is recorded; --profile 3 shows where the time goes"


def _share(seconds: Spread | None, of: float) -> float | None:
    return None if seconds is None else seconds.median / of


SLOWER = 1.15
"""Seconds of the slowest rank, as a multiple of the median."""


class SlowRank:
    """The same rank computes longer than the others, which wait for it: by its time before a collective."""

    def __init__(self) -> None:
        self._ranks: deque[int | None] = deque(maxlen=WINDOW)
        self._counts: Counter[int | None] = Counter()

    def add(self, record: Record) -> Iterator[Sighting]:
        computed = spread(record, "compute_seconds")
        if computed is None or not steps_only(record) or record["step"] <= FIRST or computed.median <= 0:
            return
        if len(self._ranks) == WINDOW:
            self._counts[self._ranks[0]] -= 1
        slow = computed.most_rank if computed.most > SLOWER * computed.median else None
        self._ranks.append(slow)
        self._counts[slow] += 1
        if slow is not None and self._counts[slow] >= MOST * WINDOW:
            times = computed.most / computed.median
            text = f"rank {slow} computes {computed.most:.3g} s a step, {times:.2f} times the median of all ranks"
            evidence = {"rank": slow, "seconds": computed.most, "median": computed.median, "times": times}
            yield Sighting("slow_rank", record["step"], text, evidence)


class Clocks:
    """A GPU lowers its clock: heat, power, or a fault of the board."""

    def __init__(self) -> None:
        self._throttled = Lasting(WINDOW, MOST)

    def add(self, record: Record) -> Iterator[Sighting]:
        throttled = spread(record, "throttled")
        if throttled is None or not self._throttled.add(throttled.most > 0):
            return
        clock, heat = spread(record, "sm_clock_mhz"), spread(record, "temperature_c")
        evidence = {
            "rank": throttled.most_rank,
            "sm_clock_mhz": None if clock is None else clock.least,
            "temperature_c": None if heat is None else heat.most,
        }
        at = "" if clock is None else f", the lowest clock is {clock.least:.0f} MHz"
        text = f"the GPU of rank {throttled.most_rank} is throttled in {MOST:.0%} of the last {WINDOW} samples{at}"
        yield Sighting("clock_throttling", record["step"], text, evidence)


GROUP, GROUPS = 20, 10
"""Steps of a group, and groups that are compared."""
GROWS, LEAST_GROWTH = 0.05, 256 * MIB
"""Growth over all of them, as a share of the memory and in bytes."""


class MemoryCreep:
    """The memory of a rank grows in nearly every group of steps, long after the start.

    The record has peaks, which stay after the largest batch, evaluation and save; a leak does not.
    """

    def __init__(self) -> None:
        self._groups: deque[float] = deque(maxlen=GROUPS)
        self._number, self._most = 0, 0.0

    def add(self, record: Record) -> Iterator[Sighting]:
        used = value(record, "memory_bytes")
        if used is None or "loss" not in record:
            return
        self._number, self._most = self._number + 1, max(self._most, used)
        if self._number < GROUP:
            return
        self._groups.append(self._most)
        self._number, self._most = 0, 0.0
        groups = [*self._groups]
        if len(groups) < GROUPS:
            return
        growth = groups[-1] - groups[0]
        # A step by one large allocation is not a creep: no group may have more than half of the growth.
        gains = [later - earlier for earlier, later in pairwise(groups)]
        steady = sum(gain > 0 for gain in gains) >= len(gains) - 1 and max(gains) < growth / 2
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
        wrote, waited = value(details, "seconds"), value(details, "loop_waited") or 0.0
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
