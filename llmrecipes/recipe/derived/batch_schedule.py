"""The global batch of each step, where it grows: Megatron's ramp, or sizes from numbers of tokens on."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from llmrecipes.recipe.derived.stages import begins, merged, span_of
from llmrecipes.recipe.schema import Recipe, Train

_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
GROWING = ("rampup_batch_size", "step_batch_size_schedule")
"""Keys of `train` with which the global batch changes."""


@dataclass(frozen=True)
class Stretch:
    """Steps with one global batch: how many steps and samples are before them, and their size in samples."""

    first_step: int
    first_sample: int
    global_batch_size: int


@dataclass(frozen=True)
class BatchSchedule:
    """The stretches of a run, in order; the last has no end. All of it is a pure function of the recipe."""

    stretches: tuple[Stretch, ...]

    @property
    def is_constant(self) -> bool:
        return len(self.stretches) == 1

    def of_step(self, steps: int) -> int:
        """Samples of the step that follows this many steps."""
        return self._at_step(steps).global_batch_size

    def of_sample(self, consumed_samples: int) -> int:
        """Samples of the step that follows this many samples."""
        number = bisect_right(self.stretches, consumed_samples, key=lambda each: each.first_sample) - 1
        return self.stretches[number].global_batch_size

    def samples(self, steps: int) -> int:
        """Samples of this many steps."""
        at = self._at_step(steps)
        return at.first_sample + (steps - at.first_step) * at.global_batch_size

    def steps(self, samples: int) -> int:
        """The fewest steps with at least this many samples."""
        number = bisect_right(self.stretches, samples, key=lambda each: each.first_sample) - 1
        at = self.stretches[number]
        return at.first_step + -(-(samples - at.first_sample) // at.global_batch_size)

    def until(self, steps: int, first: int = 0) -> tuple[Stretch, ...]:
        """The stretches that have some of the steps before `steps`, behind the first ones."""
        later = [*(stretch.first_step for stretch in self.stretches[1:]), steps]
        pairs = zip(self.stretches, later, strict=True)
        return tuple(each for each, end in pairs if each.first_step < steps and end > first)

    def since(self, steps: int) -> BatchSchedule:
        """The schedule of a run that begins after this many steps."""
        first = self._at_step(steps)
        begin = Stretch(0, 0, first.global_batch_size)
        samples = self.samples(steps)
        later = (
            Stretch(stretch.first_step - steps, stretch.first_sample - samples, stretch.global_batch_size)
            for stretch in self.stretches
            if stretch.first_step > steps
        )
        return BatchSchedule((begin, *later))

    def _at_step(self, steps: int) -> Stretch:
        return self.stretches[bisect_right(self.stretches, steps, key=lambda each: each.first_step) - 1]


def batch_schedule(recipe: Recipe) -> BatchSchedule:
    """The global batch of each step of a run, also of the run that a stage's recipe belongs to."""
    span = span_of(recipe)
    if span is not None:
        batches: BatchSchedule = span.batches
        return batches
    return _of_stages(recipe)[0] if recipe.stages else _of_one(recipe)


def stretches(recipe: Recipe) -> tuple[Stretch, ...]:
    """The stretches of a run or a stage."""
    span = span_of(recipe)
    return batch_schedule(recipe).until(recipe.train.train_iters, 0 if span is None else span.first_step)


def common(recipe: Recipe) -> int:
    """Greatest common divisor of the global batches of a run or a stage."""
    return math.gcd(*(stretch.global_batch_size for stretch in stretches(recipe)))


def samples_of(recipe: Recipe) -> int:
    """Samples of the run, or of the stages that share an order with this one."""
    first, end = (0, recipe.train.train_iters) if (span := span_of(recipe)) is None else span.order
    batches = batch_schedule(recipe)
    return batches.samples(end) - batches.samples(first)


def ends(recipe: Recipe) -> list[int]:
    """The last step of each stage of a recipe."""
    return _of_stages(recipe)[1]


def _of_stages(recipe: Recipe) -> tuple[BatchSchedule, list[int]]:
    stretches: list[Stretch] = []
    last: list[int] = []
    step = sample = 0
    current, began = constant(1), (0, 0)
    for number, (stage, each) in enumerate(zip(recipe.stages, merged(recipe), strict=True)):
        if number == 0 or begins(stage)[1]:
            current = _of_one(each)
            began = (step, sample)
        steps = stage.train_iters or max(1, recipe.train.train_iters - step)
        if stage.tokens is not None:
            done = sample - began[1]
            steps = current.steps(done + -(-stage.tokens // each.model.seq_length)) - (step - began[0])
        end = step - began[0] + steps
        for part in current.until(end, step - began[0]):
            first = max(part.first_step, step - began[0])
            at = Stretch(began[0] + first, began[1] + current.samples(first), part.global_batch_size)
            if not stretches or stretches[-1].global_batch_size != at.global_batch_size:
                stretches.append(at)
        step = began[0] + end
        sample = began[1] + current.samples(end)
        last.append(step)
    return BatchSchedule(tuple(stretches)), last


def _of_one(recipe: Recipe) -> BatchSchedule:
    train = recipe.train
    if train.rampup_batch_size is not None:
        return _ramp(*train.rampup_batch_size, train.global_batch_size)
    if train.step_batch_size_schedule is not None:
        return _steps(thresholds(train.step_batch_size_schedule, recipe.model.seq_length))
    return constant(train.global_batch_size)


def tokens_of(recipe: Recipe) -> int:
    """Training tokens of a run or a stage."""
    span = span_of(recipe)
    if span is not None:
        batches = batch_schedule(recipe)
        return (batches.samples(span.last_step) - batches.samples(span.first_step)) * recipe.model.seq_length
    if not recipe.stages:
        return batch_schedule(recipe).samples(recipe.train.train_iters) * recipe.model.seq_length
    batches, last = _of_stages(recipe)
    samples = [batches.samples(step) for step in (0, *last)]
    lengths = [stage.model.seq_length for stage in merged(recipe)]
    return sum((b - a) * length for (a, b), length in zip(pairwise(samples), lengths, strict=True))


def constant(global_batch_size: int) -> BatchSchedule:
    """The schedule of equal steps."""
    return BatchSchedule((Stretch(0, 0, global_batch_size),))


def without_ramp(train: Train, **update: object) -> Train:
    """The section with a constant batch."""
    return train.model_copy(update={**dict.fromkeys(GROWING), **update})


def varies(recipe: Recipe) -> bool:
    """Whether the recipe has a batch that grows."""
    return recipe.train.rampup_batch_size is not None or recipe.train.step_batch_size_schedule is not None


def _ramp(start: int, increment: int, samples: int, global_batch_size: int) -> BatchSchedule:
    """Megatron's: increments at equal numbers of samples, in floating point as in its calculator."""
    of_increment = samples / ((global_batch_size - start) // increment)

    def size(consumed: int) -> int:
        if consumed > samples:
            return global_batch_size
        return start + int(consumed / of_increment) * increment

    return _built(size, lambda consumed: (int(consumed / of_increment) + 1) * of_increment, global_batch_size)


def _steps(pairs: Sequence[tuple[int, int]]) -> BatchSchedule:
    starts = [first for first, _ in pairs]

    def size(consumed: int) -> int:
        return pairs[bisect_right(starts, consumed) - 1][1]

    stretches = [Stretch(0, 0, pairs[0][1])]
    for first, _ in pairs[1:]:
        last = stretches[-1]
        steps = -(-(first - last.first_sample) // last.global_batch_size)
        begin = last.first_sample + steps * last.global_batch_size
        if steps > 0 and size(begin) != last.global_batch_size:
            stretches.append(Stretch(last.first_step + steps, begin, size(begin)))
    return BatchSchedule(tuple(stretches))


def _built(size: Callable[[int], int], threshold: Callable[[int], float], last: int) -> BatchSchedule:
    """The stretches of a size that depends on the consumed samples, up to the last size.

    Args:
        size: samples of the step that follows a number of samples.
        threshold: about where the next size begins.
    """
    stretches = [Stretch(0, 0, size(0))]
    while (at := stretches[-1]).global_batch_size != last:
        batch, first = at.global_batch_size, at.first_sample
        steps = max(1, math.ceil((threshold(first) - first) / batch))
        while size(first + steps * batch) == batch:
            steps += 1
        while steps > 1 and size(first + (steps - 1) * batch) != batch:
            steps -= 1
        begin = first + steps * batch
        stretches.append(Stretch(at.first_step + steps, begin, size(begin)))
    return BatchSchedule(tuple(stretches))


def thresholds(text: str, seq_length: int) -> list[tuple[int, int]]:
    """Samples and sizes of `step_batch_size_schedule`.

    Raises:
        ValueError: it has another form.
    """
    pairs = [entry.split(":") for entry in text.replace(",", " ").split()]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"{text!r} is not a list of TOKENS:SIZE pairs")
    return [(_number(tokens) // seq_length, _number(size)) for tokens, size in pairs]


def _number(text: str) -> int:
    factor = _SUFFIXES.get(text[-1:].upper(), 1)
    digits = text[:-1] if factor > 1 else text
    try:
        number = float(digits) * factor
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
    if not 0 <= number < 2**53:
        raise ValueError(f"{text} is out of range")
    return int(number)
