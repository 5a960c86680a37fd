"""A process beside each rank that ends it when it hangs, and says where it hung and which ranks were elsewhere.

The rank writes into shared memory what it does, since when, and until when that may last; this costs it a microsecond.
The other process reads it, so neither a thread that keeps Python's lock nor a stopped rank can hide a hang. Limits
follow from the longest time that was measured for the same work. Times are CLOCK_MONOTONIC of one machine.

It reports the stacks of all threads (faulthandler's, written by a signal handler in C), and what the other hung ranks
of the run were doing, from files in the run directory that exist only after a hang. Then it kills the rank, whose
launcher ends the others and may restart the run.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from llmrecipes.faults.collectives import waits
from llmrecipes.io import write_atomic
from llmrecipes.parent import end_with_parent

PHASES = ("data", "step", "evaluate", "tasks", "save")
"""What a rank does."""
LEAST = {"save": 7200.0, "tasks": 3600.0}
"""Seconds of a phase that may wait for something else: a save for the one before, which has its own timeout; a batch of
a task for the first rank, which prepares texts and computes statistics."""
LEARNED_LEAST = {"tasks": LEAST["tasks"]}
"""The same where limits are learned: batches of tasks have too little in common."""
FACTOR = 10.0
"""Times the longest measured time of a phase that it may last."""
POLL_SECONDS = 1.0
PAUSED_SECONDS = 1.0
"""A watchdog that itself wakes so much too late was paused with its rank, which gets the time again."""
STACK_SECONDS = 3.0
"""For the rank to write its stacks."""
GATHER_SECONDS = 10.0
"""For the other ranks' watchdogs to notice the same hang; so long again if the first rank does not notice it."""
ANSWER_SECONDS = 1.0
"""For a thread of it to say which collectives it has called, once the stacks are there; less where limits are short."""
STACKS = signal.SIGUSR2
_STATE = struct.Struct("=ddqq")
"""Since when, until when (0: no limit), step, number of the phase."""
REPORT = "report.json"


class Beat(Protocol):
    """Called when a phase begins, of `PHASES` or `rest`."""

    def __call__(self, phase: str, step: int | None = None) -> None: ...


def unwatched(phase: str, step: int | None = None) -> None:
    """Without a watchdog."""


@dataclass(frozen=True)
class HangLimits:
    """How long a phase may last, in seconds."""

    least: float
    """However short it was before."""
    first: float
    """Before it was measured once: compilation, connections, cold caches."""
    learned: bool = False
    """`least` is for work whose duration is known; saves too have a limit by how long they were written."""


class RankHeartbeat:
    """What a rank does, in memory that its watchdog reads.

    Args:
        limits: limits of each phase.
        memory: to write to.
    """

    def __init__(self, limits: HangLimits, memory: mmap.mmap) -> None:
        self._limits = limits
        self._memory = memory
        self._longest: dict[str, float] = {}
        self._written: float | None = None
        self._phase = ""
        self._since = 0.0
        self._step = 0
        self._steps = 0

    def __call__(self, phase: str, step: int | None = None) -> None:
        """Begin a phase, or the next part of the same one; the one before is measured, if it is not of the first step.

        `rest` has no limit.
        """
        now = time.monotonic()
        if self._phase and not self._in_first_step(self._phase):
            self._longest[self._phase] = max(self._longest.get(self._phase, 0.0), now - self._since)
        if phase == "rest":
            self._phase = ""
            _STATE.pack_into(self._memory, 0, 0.0, 0.0, self._step, 0)
            return
        self._phase = phase
        self._since = now
        if step is not None:
            self._steps += phase == "step"
            self._step = step
        _STATE.pack_into(self._memory, 0, now, now + self.limit(phase), self._step, PHASES.index(phase))

    def written(self, seconds: float) -> None:
        """Learn how long a save took to the end of its writing, for which the next one waits."""
        self._written = max(self._written or 0.0, seconds)

    def limit(self, phase: str) -> float:
        """Seconds that a phase may last."""
        learned = self._limits.learned and (phase != "save" or self._written is not None)
        least = max(self._limits.least, (LEARNED_LEAST if learned else LEAST).get(phase, 0.0))
        longest = self._longest.get(phase)
        if learned and phase == "save":
            longest = max(longest or 0.0, self._written or 0.0)
        if longest is None or self._in_first_step(phase):
            return max(self._limits.first, least)
        return max(least, FACTOR * longest)

    def _in_first_step(self, phase: str) -> bool:
        return phase in ("data", "step") and self._steps < 2


@dataclass(frozen=True)
class Hang:
    """A rank that hung, as its watchdog saw it."""

    rank: int
    node: str
    step: int
    phase: str
    seconds: float
    """Since the phase began."""
    limit: float
    state: str
    """Of the process, as in `/proc/PID/stat`: T is stopped, D waits for the kernel."""
    innermost: str
    """The innermost frame of the main thread."""
    stacks: str = ""
    collectives: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The last one of each of its process groups; empty where they could not be asked for."""


@contextmanager
def watched(
    limits: HangLimits, folder: Path, *, rank: int, world_size: int, collectives: Callable[[], str] | None = None
) -> Iterator[RankHeartbeat]:
    """Watch this process while the block runs.

    Args:
        folder: for reports, the same for all ranks and of this start only; made when a rank hangs.
        rank: rank of this process.
        world_size: ranks of the run.
        collectives: what the report says of this rank's, as JSON; called in a thread when it hangs. None: nothing.
    """
    state, stacks, last = (os.memfd_create(name) for name in ("heartbeat", "stacks", "collectives"))
    asked, ask = os.pipe()
    os.ftruncate(state, _STATE.size)
    memory = mmap.mmap(state, _STATE.size)
    beat = RankHeartbeat(limits, memory)
    faulthandler.register(STACKS, file=stacks, all_threads=True)
    answer = (lambda: "{}") if collectives is None else collectives
    threading.Thread(target=_answer, args=(asked, last, answer), daemon=True).start()
    arguments = [str(argument) for argument in (os.getpid(), state, stacks, last, ask, rank, world_size, folder)]
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, *arguments], pass_fds=(state, stacks, last, ask), stdin=subprocess.DEVNULL
    )
    try:
        yield beat
    finally:
        beat("rest")
        process.kill()
        process.wait()
        faulthandler.unregister(STACKS)
        memory.close()
        os.close(ask)  # which ends the thread
        for path in (state, stacks):
            os.close(path)


def _answer(asked: int, last: int, collectives: Callable[[], str]) -> None:
    """Wait, without Python's lock, until the watchdog asks."""
    if os.read(asked, 1):
        with suppress(Exception):
            os.pwrite(last, f"{collectives()}\n".encode(), 0)
    os.close(asked)
    os.close(last)


@dataclass(frozen=True)
class Evidence:
    """Descriptors of what a rank says when it hangs."""

    stacks: int
    last: int
    ask: int


def watch(pid: int, memory: mmap.mmap, evidence: Evidence, rank: int, world_size: int, folder: Path) -> None:
    """Return when the process has ended, or was killed because it hung."""
    process = os.pidfd_open(pid)
    ended = select.poll()
    ended.register(process, select.POLLIN)
    given_back, of_phase = 0.0, 0.0
    while True:
        asleep = time.monotonic()
        if ended.poll(POLL_SECONDS * 1000):
            return
        now = time.monotonic()
        since, until, step, phase = _STATE.unpack_from(memory)
        if since != of_phase:
            given_back, of_phase = 0.0, since
        if (late := now - asleep - POLL_SECONDS) > PAUSED_SECONDS:
            given_back += late
        if until and now > until + given_back:
            # What the rank waits for, a file system for example, may also hold up or fail its report.
            latest = threading.Timer(STACK_SECONDS + 3 * _gathering(until - since), _kill, (process,))
            latest.start()
            hang = _examined(pid, process, evidence, rank, step, PHASES[phase], (now - since, until - since))
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                write_atomic(folder / f"rank-{rank}.json", json.dumps(asdict(hang)))
            hangs = _others(folder, hang, world_size)
            others = f"    in {_doing(hang)}; {folder / REPORT} has the other ranks"
            text = others if hangs is None else report(hangs, world_size)
            print(f"rank {rank} hangs:\n{text}\n{hang.stacks}", file=sys.stderr, flush=True)
            if hangs is not None:
                with suppress(OSError):
                    short = [{**asdict(report), "stacks": ""} for report in hangs.values()]
                    write_atomic(folder / REPORT, json.dumps({"text": text, "ranks": short}, indent=1) + "\n")
            _kill(process)
            latest.cancel()
            return


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGKILL)


def _gathering(limit: float) -> float:
    """Seconds to wait for other ranks."""
    return min(GATHER_SECONDS, limit / 2)


def report(hangs: Mapping[int, Hang], world_size: int) -> str:
    """Which ranks are not where most are; the lines of a message.

    Args:
        hangs: the ranks that hang.
        world_size: number of ranks of the run.
    """
    lines = []
    places = Counter(_place(hang) for hang in hangs.values())
    usual, _ = places.most_common(1)[0]
    for place, count in places.most_common():
        ranks = [rank for rank, hang in sorted(hangs.items()) if _place(hang) == place]
        named = ", ".join(f"{rank} on {hangs[rank].node}" for rank in ranks[:8])
        more = f" and {count - 8} more" if count > 8 else ""
        lines.append(f"    {count} of {world_size} ranks in {_doing(hangs[ranks[0]])}: {named}{more}")
    absent = sorted(rank for rank, hang in hangs.items() if _place(hang) != usual)
    if absent and len(hangs) > 1:
        lines.append(f"    not where most ranks wait: {', '.join(map(str, absent[:16]))}")
    lines += waits({rank: hang.collectives for rank, hang in hangs.items()})
    missing = sorted(set(range(world_size)) - hangs.keys())
    if missing:
        lines.append(f"    did not report a hang: {', '.join(map(str, missing[:16]))}{' …' if missing[16:] else ''}")
    return "\n".join(lines)


def _doing(hang: Hang) -> str:
    stopped = " (stopped)" if hang.state == "T" else ""
    times = f"for {hang.seconds:.1f} s (limit {hang.limit:.1f} s)"
    return f"step {hang.step}, {hang.phase}, {times}{stopped}, at {hang.innermost}"


def _place(hang: Hang) -> tuple[int, str, str]:
    return hang.step, hang.phase, hang.innermost


def _examined(
    pid: int, process: int, evidence: Evidence, rank: int, step: int, phase: str, times: tuple[float, float]
) -> Hang:
    stacks = evidence.stacks
    state = _state(pid)
    node = socket.gethostname()
    if state == "T":
        # Continued for its stacks, it would train on, and the other ranks with it, until it is killed.
        return Hang(rank, node, step, phase, *times, state, "?", "(no stacks: the process is stopped)\n")
    before = os.fstat(stacks).st_size
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, STACKS)
    end = time.monotonic() + STACK_SECONDS
    size = before
    complete = False
    while time.monotonic() < end and not os.fstat(evidence.last).st_size:
        time.sleep(0.1)
        size, last = os.fstat(stacks).st_size, size
        if size == last > before and not complete:
            complete = True
            end = min(end, time.monotonic() + min(ANSWER_SECONDS, max(0.0, _gathering(times[1]) - 1) / 4))
            # Only now: faulthandler reads all frames without Python's lock, and one that runs meanwhile may crash it.
            with suppress(OSError):
                os.write(evidence.ask, b"?")
    text = os.pread(stacks, size - before, before).decode("utf-8", "replace")
    text = text or "(no stacks: the process did not answer)\n"
    collectives: dict[str, dict[str, Any]] = {}
    with suppress(OSError, ValueError):
        collectives = json.loads(os.pread(evidence.last, os.fstat(evidence.last).st_size, 0) or "{}")
    return Hang(rank, node, step, phase, *times, state, _innermost(text), text, collectives)


def _innermost(stacks: str) -> str:
    """The innermost frame of the thread that faulthandler prints last: the main one."""
    *_, last = stacks.split("\n\n")
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', last)
    if not frames:
        return "?"
    # A collective looks the same from inside: its caller outside of libraries tells which it is.
    ours = next((frame for frame in frames if "/lib/python" not in frame[0]), frames[0])
    named = [f"{function} ({Path(file).name}:{line})" for file, line, function in dict.fromkeys((frames[0], ours))]
    return " from ".join(named)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "?"


def _others(folder: Path, mine: Hang, world_size: int) -> dict[int, Hang] | None:
    """The hangs of all ranks, on the first rank that hangs; None on the others.

    If all of 16,384 ranks read the files of all, they would open 268 million.
    """
    hangs, first = {mine.rank: mine}, 0
    for _ in range(2):
        end = time.monotonic() + _gathering(mine.limit)
        while time.monotonic() < end:
            if mine.rank == first:
                _read(folder, hangs)
                if len(hangs) == world_size:
                    return hangs
            elif (folder / REPORT).exists():
                return None
            time.sleep(0.1 if mine.rank == first else 0.5)
        if mine.rank == first:
            return hangs
        # Rank 0 may not hang, or cannot say so.
        first = min(_reports(folder), default=mine.rank)
    return None


def _read(folder: Path, hangs: dict[int, Hang]) -> None:
    for rank, path in _reports(folder).items():
        if rank not in hangs:
            with suppress(OSError, ValueError, TypeError):
                hangs[rank] = replace(Hang(**json.loads(path.read_text("utf-8"))), stacks="")


def _reports(folder: Path) -> dict[int, Path]:
    return {int(path.stem.removeprefix("rank-")): path for path in folder.glob("rank-*.json")}


def main(arguments: list[str]) -> None:
    """The process beside a rank."""
    pid, state, stacks, last, ask, rank, world_size = map(int, arguments[:7])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # those of a scheduler or terminal are for the rank
    end_with_parent(pid)
    watch(pid, mmap.mmap(state, _STATE.size), Evidence(stacks, last, ask), rank, world_size, Path(arguments[7]))


if __name__ == "__main__":
    main(sys.argv[1:])
