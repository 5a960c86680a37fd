"""Non-finite numbers, and where they first appeared."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch

from llmrecipes.errors import ExitCode, UserError


@dataclass(frozen=True)
class BadParameter:
    """The first tensor, in model order, with non-finite values."""

    name: str
    kind: Literal["nan", "inf"]
    """`nan` if it has any; else `inf`."""
    count: int
    """Elements that are NaN or infinite."""
    size: int
    """Elements in all."""

    def __str__(self) -> str:
        return f"{self.name} ({self.kind} among {self.count} of {self.size} elements)"


MOST_SAMPLES = 16
"""Samples that a message names."""


class NonFinite(UserError):
    """A loss or a gradient norm that is NaN or infinite; running again would fail the same way.

    Args:
        quantity: `loss` or `gradient norm`.
        first_bad: first non-finite gradient or parameter on this rank, if any.
        samples: ids of the rank's samples in this step.
        again: whether the step was computed twice, with the same result.
    """

    def __init__(
        self,
        *,
        step: int,
        rank: int,
        quantity: str,
        value: float,
        first_bad: BadParameter | None,
        node: str = "",
        samples: Sequence[int] = (),
        again: bool = False,
    ) -> None:
        self.step = step
        self.rank = rank
        self.quantity = quantity
        self.value = value
        self.first_bad = first_bad
        self.node, self.samples, self.again = node, tuple(samples), again
        where = f"first bad parameter: {first_bad}" if first_bad else "all parameters and gradients on it are finite"
        super().__init__(
            f"{quantity} is {value}{', twice' if again else ''}; {where}{self._of_samples()}",
            where=f"step {step}, rank {rank}{f' on {node}' if node else ''}",
            rule="training stops at the first loss or gradient norm that is not finite"
            + (" when the step is computed again from the same batches" if again else ""),
            fix="lower optimizer.lr, lengthen scheduler.lr_warmup_iters, set optimizer.clip_grad: 1.0, or use "
            "train.precision: bf16 or fp32; the newest checkpoint predates this",
            code=ExitCode.STOP,
        )

    def _of_samples(self) -> str:
        if not self.samples:
            return ""
        more = len(self.samples) - MOST_SAMPLES
        named = ", ".join(map(str, self.samples[:MOST_SAMPLES]))
        return f"; samples {named}{f' and {more} more' if more > 0 else ''}"


def first_bad_parameter(tensors: Iterable[tuple[str, torch.Tensor]]) -> BadParameter | None:
    """The first tensor with a NaN or an infinity, or None.

    Args:
        tensors: (name, tensor) in the order in which to look.
    """
    for name, tensor in tensors:
        values = tensor.detach()
        bad = int((~torch.isfinite(values)).sum())
        if bad:
            kind: Literal["nan", "inf"] = "nan" if bool(torch.isnan(values).any()) else "inf"
            return BadParameter(name, kind, bad, values.numel())
    return None


def named_gradients(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then their gradients as `<name>.grad` (megatron-core's DDP keeps them in `main_grad`)."""
    parameters = list(model.named_parameters())
    yield from parameters
    for name, parameter in parameters:
        gradient = getattr(parameter, "main_grad", None)
        gradient = parameter.grad if gradient is None else gradient
        if gradient is not None:
            yield f"{name}.grad", gradient


@dataclass(frozen=True)
class StepSpike:
    """A loss or gradient norm of one step far above those of the steps before it."""

    quantity: Literal["loss", "grad_norm"]
    value: float
    usual: float
    """Median of the last steps."""
    limit: float
    """Largest value that is not a spike."""


class SpikeRule:
    """Tells the spike of a single step before its update.

    A value is a spike above the median of the last steps plus a number of standard deviations, which are estimated by
    the median absolute deviation: the spike itself, and others in the window, hardly move it (OLMo's rule, with
    medians for means). Every value enters the window, so that a lasting change is usual after half of it.

    Args:
        window: steps in the statistic; none is a spike before half of them are known.
        sigmas: standard deviations.
        losses, norms: those of the steps before, oldest first.
    """

    def __init__(self, window: int, sigmas: float, losses: Iterable[float] = (), norms: Iterable[float] = ()) -> None:
        self._least = -(-window // 2)
        self._sigmas = sigmas
        self.losses, self.norms = deque(losses, maxlen=window), deque(norms, maxlen=window)

    def add(self, loss: float, norm: float) -> StepSpike | None:
        """Judge a step by those before it, and add it to them."""
        spike = self._judge("loss", loss, self.losses) or self._judge("grad_norm", norm, self.norms)
        self.losses.append(loss)
        self.norms.append(norm)
        return spike

    def _judge(self, quantity: Literal["loss", "grad_norm"], value: float, last: deque[float]) -> StepSpike | None:
        if len(last) < self._least:
            return None
        usual = statistics.median(last)
        deviation = statistics.median(abs(value - usual) for value in last) / MEDIAN_OF_DEVIATIONS
        limit = usual + self._sigmas * max(deviation, LEAST_DEVIATION * abs(usual))
        return StepSpike(quantity, value, usual, limit) if value > limit else None


MEDIAN_OF_DEVIATIONS = 0.6745
"""Median absolute deviation of a standard normal distribution."""
LEAST_DEVIATION = 1e-3
"""Of the median: a loss that hardly changes has no spikes in its last digits."""

WINDOW = 50
"""Losses in the running median."""
FEWEST = 20
"""Losses needed to estimate their variation."""
NATS, FIRST_NATS = 1.0, 3.0
"""Smallest rise that is an alarm (1 nat is e times the perplexity), and the one before `FEWEST` losses."""
DEVIATIONS = 10.0
"""Robust standard deviations below which a rise is the noise of small batches."""
TO_STANDARD_DEVIATION = 1.4826 / math.sqrt(2)
"""Factor from the median absolute difference of two draws of a normal distribution to its standard deviation."""


@dataclass(frozen=True)
class Spike:
    """A loss far above the usual one.

    Args:
        loss: loss of this step, nats per token.
        usual: lowest median of up to 50 consecutive losses since the start.
        limit: largest loss that is not a spike.
    """

    loss: float
    usual: float
    limit: float


class LossWatch:
    """Raises one alarm when the loss spikes, and another only after it has recovered.

    The limit is the lowest running median so far, plus one nat or ten robust standard deviations of the last losses,
    whichever is more; plus three nats until 20 losses are known. A falling loss, the noise of small batches and a
    warm-up stay below it; a jump and a slow rise do not. The state is reset at every start of a run.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._usual = float("inf")
        self._alarmed = False

    def add(self, loss: float) -> Spike | None:
        """Add the loss of a step; returns a spike at the first one above the limit; never for NaN or infinity."""
        spike = self._judge(loss)
        if not self._alarmed:  # a spike is not part of what is usual
            self._losses.append(loss)
        return spike

    def _judge(self, loss: float) -> Spike | None:
        if not self._losses:
            return None
        median = statistics.median(self._losses)
        self._usual = min(self._usual, median)
        rise = max(NATS, DEVIATIONS * self._deviation()) if len(self._losses) >= FEWEST else FIRST_NATS
        if self._alarmed:
            self._alarmed = loss > self._usual + rise / 2
            return None
        # A non-finite loss stops the run elsewhere, and is not reported twice.
        self._alarmed = self._usual + rise < loss < float("inf")
        return Spike(loss, self._usual, self._usual + rise) if self._alarmed else None

    def _deviation(self) -> float:
        """Robust standard deviation of step-to-step changes, so that the slope of the curve does not count."""
        return TO_STANDARD_DEVIATION * statistics.median(abs(later - loss) for loss, later in pairwise(self._losses))
