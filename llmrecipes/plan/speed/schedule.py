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


def simulate(
    forward: Sequence[float], backward: Sequence[float], microbatches: int, chunks: int, hop: float, *, blocking: bool
) -> float:
    """Seconds from the first forward to the last backward pass.

    Args:
        forward: seconds of a micro-batch on each stage, over all its chunks.
        backward: the same of its backward pass.
        microbatches: in a step.
        chunks: model chunks of a stage.
        hop: seconds until the next stage has a result.
        blocking: the sender waits for it too.
    """
    stages = len(forward)
    if stages == 1:
        return microbatches * (forward[0] + backward[0])
    if chunks > 1 and microbatches % stages:
        # megatron-core refuses this with chunks; other programs make the rest one after the other.
        even = microbatches // stages * stages
        if not even:
            return simulate(forward, backward, microbatches, 1, hop, blocking=blocking)
        rest = (microbatches - even) * max(f + b for f, b in zip(forward, backward, strict=True))
        return rest + simulate(forward, backward, even, chunks, hop, blocking=blocking)
    # The middle repeats itself: what a further micro-batch adds is the slowest stage's passes.
    least = stages * (3 if chunks > 1 else 2) + 2
    number = microbatches
    if microbatches > least:
        number = least if chunks == 1 else -(-least // stages) * stages
        number = min(number, microbatches)
    ends = run(forward, backward, number, chunks, hop, blocking=blocking)
    slowest = max(f + b for f, b in zip(forward, backward, strict=True)) + (hop * chunks * 2 if blocking else 0.0)
    # The last sender waits for its message, too.
    return max(ends.values()) + (hop if blocking else 0.0) + (microbatches - number) * slowest


def run(
    forward: Sequence[float], backward: Sequence[float], number: int, chunks: int, hop: float, *, blocking: bool
) -> dict[tuple[bool, int, int, int], float]:
    """Seconds at which each pass ends: of forward or not, stage, chunk, micro-batch. Arguments as of `simulate`.

    Args:
        number: micro-batches; with chunks a multiple of the stages.
    """
    stages = len(forward)
    orders = [order(stages, chunks, number, stage) for stage in range(stages)]
    ends: dict[tuple[bool, int, int, int], float] = {}
    place, free = [0] * stages, [0.0] * stages
    left, last = sum(map(len, orders)), chunks - 1
    while left:
        moved = False
        for stage in range(stages):
            passes = orders[stage]
            while place[stage] < len(passes):
                ahead, chunk, micro = passes[place[stage]]
                if ahead:
                    before = (True, stage - 1, chunk, micro) if stage else (True, stages - 1, chunk - 1, micro)
                    first = stage == 0 and chunk == 0
                    seconds = forward[stage] / chunks
                else:
                    before = (False, stage + 1, chunk, micro) if stage < stages - 1 else (False, 0, chunk + 1, micro)
                    first = stage == stages - 1 and chunk == last
                    seconds = backward[stage] / chunks
                    if first:
                        before = (True, stage, chunk, micro)
                arrived = 0.0
                if not (ahead and first):
                    if before not in ends:
                        break
                    arrived = ends[before] + (0.0 if first else hop)
                start = max(free[stage], arrived)
                free[stage] = start + seconds + (hop if blocking else 0.0)
                ends[ahead, stage, chunk, micro] = start + seconds
                place[stage] += 1
                left -= 1
                moved = True
        if not moved:
            message = f"the schedule of {stages} stages, {chunks} chunks and {number} micro-batches has a deadlock"
            raise AssertionError(message)
    return ends
