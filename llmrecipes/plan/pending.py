"""Forward passes of a pipeline stage whose backward pass is pending, through a step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from llmrecipes.plan.layout import Layout

Moment = tuple[tuple[int, ...], int, tuple[int, ...], int]
"""Pending forward passes of each chunk, the chunk of the next backward pass, inputs of each chunk that are held, and
how many gradients of inputs and outputs of other chunks there are besides."""


@lru_cache(maxsize=4096)
def fullest(
    stages: int, chunks: int, num_microbatches: int, stage: int, experts: bool, combined: bool = False
) -> tuple[Moment, ...]:
    """Those of `_pending` that no other moment with the same next chunk exceeds in all numbers.

    Args:
        combined: a forward and a backward pass at the same time (`layout.overlap_moe_expert_parallel_comm`).
    """
    fullest: list[Moment] = []
    for pending, chunk, held, sent in set(_pending(stages, chunks, num_microbatches, stage, experts, combined)):
        moment = (*pending, *held, sent)
        others = [(moment, (*moment[0], *moment[2], moment[3])) for moment in fullest if moment[1] == chunk]
        if any(all(x >= y for x, y in zip(other, moment, strict=True)) for _, other in others):
            continue
        less = {each for each, other in others if all(x <= y for x, y in zip(other, moment, strict=True))}
        fullest = [moment for moment in fullest if moment not in less] + [(pending, chunk, held, sent)]
    return tuple(fullest)


def _pending(
    stages: int, chunks: int, num_microbatches: int, stage: int, experts: bool, combined: bool
) -> Iterator[Moment]:
    """Forward passes of each chunk whose backward pass is pending, and the chunk of the next one, through a step.

    Also the inputs that are there besides: that of the last backward pass, which megatron-core's 1F1B schedule and
    layers with experts hold until there is another one; with several chunks, the first that is received after the
    warm-up, the last of each chunk until it gets another one, and that of the next forward pass, which is there early.
    Inputs that are held have their gradients. With several chunks, a backward pass begins before what the forward pass
    beside it has computed is sent, and while the gradient that was sent last is there.

    Chunks take turns in groups of as many micro-batches as there are stages (arXiv 2104.04473, figure 4).
    """
    passes = num_microbatches * chunks
    # A forward pass runs beside the backward pass before which the plain schedules have finished it.
    ahead = min(num_microbatches * chunks, _in_flight(stages, chunks, num_microbatches, stage) + combined)
    pending, number = [0] * chunks, [0] * chunks
    done: list[tuple[int, int]] = []  # backward passes, each as its chunk and micro-batch
    for forward in range(passes + ahead - 1):
        if forward < passes:
            number[forward // stages % chunks] += 1
            pending[forward // stages % chunks] += 1
        if forward + 1 < ahead:
            continue
        held = set(done[-1:]) if chunks == 1 or experts else set()
        following = forward + 1
        if chunks > 1:
            held |= {_pass(ahead - 1, stages, chunks)} & set(done)
            held |= {(chunk, number[chunk] - 1) for chunk in range(chunks) if not pending[chunk]}
            held |= {_pass(following, stages, chunks)} if following < passes else set()
        chunk, micro_batch = _pass(len(done), stages, chunks)
        chunk = chunks - 1 - chunk
        received = [each for each in held if stage > 0 or each[0] > 0]
        inputs = [sum(each == other for other, _ in received) for each in range(chunks)]
        gradients = {*received} & {*done}
        output = False
        if chunks > 1:
            gradients |= {each for each in done[-1:] if stage > 0 or each[0] > 0}
            output = forward < passes and (stage < stages - 1 or forward // stages % chunks < chunks - 1)
        yield tuple(pending), chunk, tuple(inputs), len(gradients) + output
        pending[chunk] -= 1
        done.append((chunk, micro_batch))


def _pass(number: int, stages: int, chunks: int) -> tuple[int, int]:
    """Chunk and micro-batch of a forward pass, counted over all chunks; a backward pass has the opposite chunk."""
    return number // stages % chunks, number // (stages * chunks) * stages + number % stages


def in_flight(layout: Layout, num_microbatches: int, stage: int) -> int:
    """Peak number of chunk forward passes whose backward pass is pending, on one pipeline stage.

    Narayanan et al. 2021 (arXiv 2104.04473): in 1F1B, stage r of p has p - r micro-batches. With v chunks a stage the
    interleaved schedule warms up with 2 (p - r - 1) + (v - 1) p passes and then does one more.
    """
    return _in_flight(
        layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size, num_microbatches, stage
    )


def _in_flight(stages: int, chunks: int, num_microbatches: int, stage: int) -> int:
    if chunks == 1:
        return min(num_microbatches, stages - stage)
    return min(num_microbatches * chunks, 2 * (stages - stage - 1) + (chunks - 1) * stages + 1)
