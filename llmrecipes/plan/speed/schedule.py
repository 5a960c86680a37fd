"""A pipeline's step, simulated pass by pass in megatron-core's order.

1F1B and its interleaved form are those of Narayanan et al. 2021 (arXiv 2104.04473): a stage warms up with forward
passes, then alternates, then finishes its backward passes. A pass begins when its stage is free and its input has
arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

Pass = tuple[bool, int, int]
"""Whether forward, chunk, micro-batch."""
Passes = Sequence[Sequence[float]]
"""Seconds of a micro-batch on each chunk of each stage."""


@lru_cache(maxsize=4096)
def order(stages: int, chunks: int, microbatches: int, stage: int) -> tuple[Pass, ...]:
    """Passes of one stage in the order in which it does them."""
    total = microbatches * chunks
    group = stages * chunks
    warm = stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages
    warm = min(total, warm)

    def at(number: int, *, forward: bool) -> Pass:
        if chunks == 1:
            return forward, 0, number
        chunk = number % group // stages
        micro = number // group * stages + number % stages
        return forward, chunk if forward else chunks - 1 - chunk, micro

    passes = [at(number, forward=True) for number in range(warm)]
    for number in range(total - warm):
        passes += [at(warm + number, forward=True), at(number, forward=False)]
    passes += [at(number, forward=False) for number in range(total - warm, total)]
    return tuple(passes)


def simulate(forward: Passes, backward: Passes, microbatches: int, hop: float, *, blocking: bool) -> float:
    """Seconds from the first forward to the last backward pass.

    Args:
        forward: of a micro-batch on each chunk of each stage.
        backward: the same of its backward pass.
        microbatches: in a step.
        hop: seconds until the next stage has a result.
        blocking: the sender waits for it too.
    """
    stages, chunks = len(forward), len(forward[0])
    together = [sum(f) + sum(b) for f, b in zip(forward, backward, strict=True)]
    if stages == 1:
        return microbatches * together[0]
    if chunks > 1 and microbatches % stages:
        # megatron-core refuses this with chunks; other programs make the rest one after the other.
        even = microbatches // stages * stages
        if not even:
            ahead, back = ([[sum(pass_)] for pass_ in passes] for passes in (forward, backward))
            return simulate(ahead, back, microbatches, hop, blocking=blocking)
        return (microbatches - even) * max(together) + simulate(forward, backward, even, hop, blocking=blocking)
    # The middle repeats itself: with one chunk a further micro-batch adds the slowest stage's passes. Chunks of
    # different length keep each other waiting, so that a further group of micro-batches is simulated.
    least = stages * (3 if chunks > 1 else 2) + 2
    number = least if chunks == 1 else -(-least // stages) * stages
    number = min(number, microbatches)

    def until(number: int) -> float:
        # The last sender waits for its message, too.
        return max(_ends(forward, backward, number, hop, blocking=blocking)) + (hop if blocking else 0.0)

    seconds = until(number)
    if number == microbatches:
        return seconds
    more = max(together) + (hop * chunks * 2 if blocking else 0.0)
    if any(max(seconds) > min(seconds) for seconds in forward):
        more = (until(number + stages) - seconds) / stages
        # Until every stage has caught up with the slowest one, a group adds less than that stage's passes.
        while more < max(together) * (1 - 1e-9) and number < microbatches:
            number = min(2 * number, microbatches)
            seconds = until(number)
            more = (until(number + stages) - seconds) / stages
    return seconds + (microbatches - number) * more


def shortest(forward: Passes, backward: Passes, microbatches: int) -> float:
    """A time that `simulate` does not fall below: a stage waits for those before it at both ends of the step."""
    most = before = 0.0
    for ahead, back in zip(forward, backward, strict=True):
        most = max(most, before + microbatches * (sum(ahead) + sum(back)))
        before += ahead[0] + back[0]
    return most


def run(
    forward: Passes, backward: Passes, number: int, hop: float, *, blocking: bool
) -> dict[tuple[bool, int, int, int], float]:
    """Seconds at which each pass ends: of forward or not, stage, chunk, micro-batch. Arguments as of `simulate`.

    Args:
        number: micro-batches; with chunks a multiple of the stages.
    """
    chunks = len(forward[0])
    names = [
        (ahead, stage, chunk, micro)
        for ahead in (True, False)
        for stage in range(len(forward))
        for chunk in range(chunks)
        for micro in range(number)
    ]
    return dict(zip(names, _ends(forward, backward, number, hop, blocking=blocking), strict=True))


Step = tuple[int, int, int, bool]
"""Place of a pass among all, of the one before it or -1, of its seconds among its stage's, and whether its input is
sent by another stage."""


@lru_cache(maxsize=128)
def _program(stages: int, chunks: int, number: int) -> tuple[tuple[Step, ...], ...]:
    """Passes of each stage in their order."""
    last = chunks - 1

    def place(ahead: bool, stage: int, chunk: int, micro: int) -> int:
        return ((stage if ahead else stages + stage) * chunks + chunk) * number + micro

    def step(stage: int, ahead: bool, chunk: int, micro: int) -> Step:
        sent = True
        if ahead and stage:
            before = place(True, stage - 1, chunk, micro)
        elif ahead:
            before, sent = (place(True, stages - 1, chunk - 1, micro), True) if chunk else (-1, False)
        elif stage < stages - 1:
            before = place(False, stage + 1, chunk, micro)
        elif chunk < last:
            before = place(False, 0, chunk + 1, micro)
        else:
            before = place(True, stage, chunk, micro)
            sent = False
        return place(ahead, stage, chunk, micro), before, chunk if ahead else chunks + chunk, sent

    return tuple(
        tuple(step(stage, *pass_) for pass_ in order(stages, chunks, number, stage)) for stage in range(stages)
    )


def _ends(forward: Passes, backward: Passes, number: int, hop: float, *, blocking: bool) -> list[float]:
    """Seconds at which the passes end, in the order of `run`."""
    stages, chunks = len(forward), len(forward[0])
    program = _program(stages, chunks, number)
    seconds = [(*f, *b) for f, b in zip(forward, backward, strict=True)]
    ends = [-1.0] * (2 * stages * chunks * number)
    place = [0] * stages
    free = [0.0] * stages
    held = hop if blocking else 0.0
    left = len(ends)
    while left:
        before_round = left
        for stage in range(stages):
            passes = program[stage]
            own = seconds[stage]
            now = free[stage]
            at = place[stage]
            start = at
            while at < len(passes):
                here, before, which, sent = passes[at]
                if before >= 0:
                    arrived = ends[before]
                    if arrived < 0.0:
                        break
                    if sent:
                        arrived += hop
                    if arrived > now:
                        now = arrived
                end = now + own[which]
                ends[here] = end
                now = end + held
                at += 1
            free[stage], place[stage] = now, at
            left -= at - start
        if left == before_round:
            message = f"the schedule of {stages} stages, {chunks} chunks and {number} micro-batches has a deadlock"
            raise AssertionError(message)
    return ends
