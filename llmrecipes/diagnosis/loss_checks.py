"""Checks of the loss curve: divergence, plateau, learning rate, over- and underfitting."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator

from llmrecipes.diagnosis.finding import Record, RunFacts, Sighting, median_of, noise, steps_only, value

WINDOW = 20
"""Losses of a median."""
ABOVE = 0.1
"""Nats above guessing that noise of a batch may give."""
NATS, DEVIATIONS = 0.5, 10.0
"""A median this far above the lowest one, in nats and in standard deviations of the loss, is a divergence."""


class Divergence:
    """The loss stays far above what it had been: the median of `WINDOW` losses, so that a spike does not count."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._lowest = math.inf
        self._where = 0
        self._noise = math.inf

    def add(self, record: Record) -> Iterator[Sighting]:
        step = record["step"]
        if "loss" in record and "loss" in record.get("non_finite", ()) and not record.get("skipped"):
            yield Sighting("divergence", step, f"the loss of step {step} is not finite", {"loss": None})
        loss = value(record, "loss")
        if loss is None or not steps_only(record):
            return
        self._losses.append(loss)
        if len(self._losses) < WINDOW:
            return
        median = median_of(self._losses)
        self._noise = min(self._noise, noise(self._losses))
        if median < self._lowest:
            self._lowest = median
            self._where = step
        elif median > self._lowest + max(NATS, DEVIATIONS * self._noise):
            text = f"the median loss rose from {self._lowest:.3f} (step {self._where}) to {median:.3f} (step {step})"
            yield Sighting("divergence", step, text, {"loss": median, "lowest": self._lowest, "lowest_at": self._where})


BUCKET, BUCKETS = 10, 20
"""Steps of a bucket, and buckets that are compared."""
RISES = 4
"""Buckets of the last `BUCKETS` that may not rise by more than noise explains."""
CALM = 5
JUMPS, AMONG = 5, 100
"""Steps among the last ones whose loss may not be `NATS` and `DEVIATIONS` above the median before them."""


class LearningRateHigh:
    """The loss goes up and down by more than the noise of its batches: the updates themselves throw it back.

    Batches make the loss of a step noisy, independently of its neighbours, so the medians of buckets of steps hardly
    rise, and single losses stay within some standard deviations. The noise is that of the calmest `CALM` buckets,
    because an unstable run is noisy in every respect.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._jumps: deque[bool] = deque(maxlen=AMONG)
        self._bucket: list[float] = []
        self._last: float | None = None
        self._noises: deque[float] = deque(maxlen=CALM)
        self._noise = math.inf
        self._rises: deque[bool] = deque(maxlen=BUCKETS)
        self._highest_rise = 0.0

    def add(self, record: Record) -> Iterator[Sighting]:
        loss = value(record, "loss")
        if loss is None or not steps_only(record):
            return
        yield from self._jumped(record, loss)
        self._bucket.append(loss)
        if len(self._bucket) < BUCKET:
            return
        median = median_of(self._bucket)
        self._noises.append(noise(self._bucket))
        self._bucket = []
        if len(self._noises) == CALM:
            self._noise = min(self._noise, median_of(self._noises))
        last = self._last
        self._last = median
        if last is None or not math.isfinite(self._noise):
            return
        # 1.25: the standard error of a median, in that of a mean.
        limit = max(6 * 1.25 * self._noise * math.sqrt(2 / BUCKET), 0.02 * last)
        self._rises.append(median - last > limit)
        if self._rises[-1] and sum(self._rises) >= RISES:
            rises = sum(self._rises)
            step = record["step"]
            text = (
                f"in {rises} of the last {len(self._rises)} groups of {BUCKET} steps the loss rose by more than "
                f"{limit:.3f}, which the noise of its batches ({self._noise:.3f}) does not explain"
            )
            evidence = {"rises": rises, "groups": len(self._rises), "limit": limit, "noise": self._noise}
            yield Sighting("learning_rate_high", step, text, evidence | {"lr": value(record, "lr")})

    def _jumped(self, record: Record, loss: float) -> Iterator[Sighting]:
        if len(self._losses) == WINDOW and math.isfinite(self._noise):
            limit = median_of(self._losses) + max(NATS, DEVIATIONS * self._noise)
            self._jumps.append(loss > limit)
            if self._jumps[-1] and (jumps := sum(self._jumps)) >= JUMPS:
                text = (
                    f"in {jumps} of the last {len(self._jumps)} steps the loss was over {NATS} nats and "
                    f"{DEVIATIONS:.0f} standard deviations above its median; in step {record['step']} it was {loss:.3f}"
                )
                evidence = {"jumps": jumps, "steps": len(self._jumps), "loss": loss, "limit": limit}
                lr = {"lr": value(record, "lr")}
                yield Sighting("learning_rate_high", record["step"], text, evidence | lr)
        self._losses.append(loss)


LOW_AFTER, LOW_SHARE = 100, 0.8
"""Steps after the warm-up, and the loss then, as a share of that of guessing."""


class LearningRateLow:
    """The loss falls steadily and much too slowly, and the gradients have not become smaller.

    Judged once, for a model that starts from random weights: after the warm-up and `LOW_AFTER` more steps it has learnt
    at least the frequencies of tokens, which takes a loss far below log(vocabulary), and its gradients are smaller.
    """

    def __init__(self, facts: RunFacts) -> None:
        self._at = facts.warmup + LOW_AFTER
        self._guessing = math.log(facts.vocabulary) if facts.vocabulary > 1 else math.inf
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._first: tuple[float, float] | None = None
        self._middle = math.nan

    def add(self, record: Record) -> Iterator[Sighting]:
        loss, norm = value(record, "loss"), value(record, "grad_norm")
        if loss is None or norm is None or not steps_only(record) or record["step"] > self._at:
            return
        step = record["step"]
        self._losses.append(loss)
        self._norms.append(norm)
        if step == WINDOW and len(self._losses) == WINDOW:
            self._first = median_of(self._losses), median_of(self._norms)
        if step == (self._at + WINDOW) // 2:
            self._middle = median_of(self._losses)
        if step != self._at or self._first is None or not self._first[0] > LOW_SHARE * self._guessing:
            return
        now, norm_now = median_of(self._losses), median_of(self._norms)
        first, norm_first = self._first
        falls = first - self._middle > 0 and self._middle - now > 0.3 * (first - self._middle)
        if falls and now > LOW_SHARE * self._guessing and norm_now > 0.5 * norm_first:
            text = (
                f"after {step} steps the loss is still {now:.2f}, {now / self._guessing:.0%} of guessing "
                f"({self._guessing:.2f}); it falls steadily, with gradients as large as at the start ({norm_now:.2g})"
            )
            evidence = {"loss": now, "guessing": self._guessing, "grad_norm": norm_now, "grad_norm_start": norm_first}
            yield Sighting("learning_rate_low", step, text, evidence | {"lr": value(record, "lr")})


class Guessing:
    """The loss is above that of guessing, ln(vocabulary): after the warm-up and `LOW_AFTER` steps, or at the end.

    Also says whether it had been lower before the learning rate reached its peak: then the rate is the cause.
    """

    def __init__(self, facts: RunFacts) -> None:
        self._warmup, self._steps = facts.warmup, facts.steps
        self._guessing = math.log(facts.vocabulary) if facts.vocabulary > 1 else math.inf
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._lowest = math.inf
        self._lowest_at = 0

    def add(self, record: Record) -> Iterator[Sighting]:
        loss = value(record, "loss")
        step = record["step"]
        if loss is None or not steps_only(record):
            return
        self._losses.append(loss)
        if loss < self._lowest:
            self._lowest = loss
            self._lowest_at = step
        median = median_of(self._losses)
        if median <= self._guessing + ABOVE or not (step >= self._warmup + LOW_AFTER or step == self._steps):
            return
        text = f"the loss is {median:.2f}; guessing, with equal probabilities for all tokens, is {self._guessing:.2f}"
        evidence = {"loss": median, "guessing": self._guessing, "lr": value(record, "lr")}
        if self._lowest < median - NATS and self._lowest_at <= self._warmup + WINDOW:
            text += f"; it was lowest, {self._lowest:.2f}, at step {self._lowest_at}, when the warm-up to the peak of "
            text += f"the learning rate ended (step {self._warmup})"
            evidence |= {"lowest": self._lowest, "lowest_at": self._lowest_at}
        yield Sighting("worse_than_guessing", step, text, evidence)


PLATEAU_SHARE, PLATEAU_LEAST, PLATEAU_GAIN = 0.25, 200, 0.002
"""Share of the run, and steps, in which the loss must improve by this share of itself."""
FEW_UPDATES = 0.1
"""Share of the largest learning rate below which nothing is expected any more."""
_PARTS = 20


class Plateau:
    """The loss has stopped to fall although the learning rate is not small; with held-out loss, also underfitting.

    Means of the halves of the last quarter of the run (at least `PLATEAU_LEAST` steps) are compared.
    """

    def __init__(self, facts: RunFacts) -> None:
        self._size = max(1, round(max(PLATEAU_LEAST, PLATEAU_SHARE * facts.steps) / _PARTS))
        self._lr = facts.lr
        self._one_batch = facts.one_batch
        self._warmup = facts.warmup
        self._parts: deque[tuple[float, float]] = deque(maxlen=_PARTS)
        self._sum = self._squares = 0.0
        self._number = 0
        self._held_out: float | None = None

    def add(self, record: Record) -> Iterator[Sighting]:
        if (held_out := value(record, "valid_loss")) is not None:
            self._held_out = held_out
        loss = value(record, "loss")
        if loss is None or not steps_only(record) or record["step"] <= self._warmup or self._one_batch:
            return
        self._number, self._sum, self._squares = self._number + 1, self._sum + loss, self._squares + loss * loss
        if self._number < self._size:
            return
        mean = self._sum / self._number
        self._parts.append((mean, max(0.0, self._squares / self._number - mean * mean)))
        self._number = 0
        self._sum = 0.0
        self._squares = 0.0
        if len(self._parts) == _PARTS:
            yield from self._judge(record)

    def _judge(self, record: Record) -> Iterator[Sighting]:
        lr = value(record, "lr")
        if self._lr and lr is not None and lr < FEW_UPDATES * self._lr:
            return
        parts = [*self._parts]
        half = _PARTS // 2
        before = statistics.fmean(mean for mean, _ in parts[:half])
        after = statistics.fmean(mean for mean, _ in parts[half:])
        variance = statistics.fmean(variance for _, variance in parts)
        error = math.sqrt(2 * variance / (half * self._size))
        gain = before - after
        # A rise is a divergence, or the next part of the data.
        if not -2 * error <= gain < max(2 * error, 0.0) or gain >= PLATEAU_GAIN * before:
            return
        steps = _PARTS * self._size
        text = (
            f"over {steps:,} steps the mean loss went from {before:.4f} to {after:.4f}, within its noise ({error:.4f})"
        )
        evidence = {"before": before, "after": after, "standard_error": error, "steps": steps, "lr": lr}
        yield Sighting("plateau", record["step"], text, evidence)
        gap = None if self._held_out is None else self._held_out - after
        if gap is not None and gap < UNDERFITTING * after:
            text = f"the loss has stopped at {after:.4f}, and held-out text is no worse ({self._held_out:.4f})"
            evidence = {"loss": after, "valid_loss": self._held_out, "gap": gap}
            yield Sighting("underfitting", record["step"], text, evidence)


UNDERFITTING, OVERFITTING = 0.02, 0.01
"""Shares of a loss: the gap below which a model does not know its training text, and the rise that counts."""
EVALUATIONS = 2
"""Evaluations in a row above the best one."""


class Overfitting:
    """Held-out loss rises while the training loss falls."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=50)
        self._best = self._loss_then = math.inf
        self._best_at = self._worse = 0

    def add(self, record: Record) -> Iterator[Sighting]:
        loss = value(record, "loss")
        if loss is not None and steps_only(record):
            self._losses.append(loss)
        held_out = value(record, "valid_loss")
        if held_out is None or not self._losses:
            return
        now = statistics.fmean(self._losses)
        if held_out < self._best:
            self._best = held_out
            self._best_at = record["step"]
            self._loss_then = now
            self._worse = 0
            return
        rises = held_out > self._best * (1 + OVERFITTING) and now < self._loss_then * (1 - OVERFITTING)
        self._worse = self._worse + 1 if rises else 0
        if self._worse >= EVALUATIONS:
            text = (
                f"held-out loss rose from {self._best:.3f} (step {self._best_at}) to {held_out:.3f}, while the "
                f"training loss fell from {self._loss_then:.3f} to {now:.3f}"
            )
            evidence = {
                "valid_loss": held_out,
                "best": self._best,
                "best_at": self._best_at,
                "loss": now,
                "loss_then": self._loss_then,
            }
            yield Sighting("overfitting", record["step"], text, evidence)


GAP = 0.1
"""Share of the training loss by which the gap to the held-out loss may grow beyond the smallest that it was."""


class TrainValidGap:
    """The gap between training and held-out loss grows: the model learns its training text by heart.

    Held-out text may be harder from the start, so only the growth counts; the held-out loss may still fall.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=50)
        self._smallest = math.inf
        self._smallest_at = 0
        self._wide = 0

    def add(self, record: Record) -> Iterator[Sighting]:
        loss = value(record, "loss")
        if loss is not None and steps_only(record):
            self._losses.append(loss)
        held_out = value(record, "valid_loss")
        if held_out is None or len(self._losses) < WINDOW:
            return
        now = statistics.fmean(self._losses)
        gap = held_out - now
        if gap < self._smallest:
            self._smallest = gap
            self._smallest_at = record["step"]
        # Before the model knows anything, the mean of the last training losses is behind: the gap is below zero.
        grown = gap - max(self._smallest, 0.0)
        self._wide = self._wide + 1 if grown > GAP * now else 0
        if self._wide >= EVALUATIONS:
            text = (
                f"held-out loss {held_out:.3f} is {gap:.3f} above the training loss {now:.3f}; at step "
                f"{self._smallest_at} it was {self._smallest:.3f}"
            )
            evidence = {
                "valid_loss": held_out,
                "loss": now,
                "gap": gap,
                "smallest": self._smallest,
                "smallest_at": self._smallest_at,
            }
            yield Sighting("train_valid_gap", record["step"], text, evidence)
