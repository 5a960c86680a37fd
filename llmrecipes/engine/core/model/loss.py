"""Cross entropy with one exchange between tensor-parallel ranks, of all logits or with the output layer in chunks.

In chunks of tokens the logits of a micro-batch are never in memory together.

As in Liger Kernel (arXiv 2410.10989, section 3.2) the gradients of a chunk are computed with its loss, in one pass:
those of a sum of losses, of which only a common factor is not known yet. Where the weights of that sum are not known,
or in fp16, whose small gradients need the loss scale, the backward pass computes a chunk's logits again (as in arXiv
2411.09009). The gradient of the output weight is added up over the chunks in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Split:
    """How the rows of the output weight, and tokens, are split over tensor-parallel ranks."""

    group: Any = None
    """The ranks; None: there is one."""
    sequence: bool = False
    """Each has a part of the tokens (sequence parallelism)."""

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    def local(self, labels: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Each label's row on this rank, and whether it has it."""
        local = labels - (0 if self.group is None else dist.get_rank(self.group)) * rows
        has = (local >= 0) & (local < rows)
        return local.clamp(0, rows - 1), has

    def all_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, h] of all ranks from those of this one."""
        if not self.sequence:
            return hidden
        whole = hidden.new_empty(hidden.size(0) * self.ranks, hidden.size(1))
        dist.all_gather_into_tensor(whole, hidden.contiguous(), group=self.group)
        return whole

    def summed(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of this rank's tokens from each rank's part of the gradient of all."""
        if self.sequence:
            local = gradient.new_empty(gradient.size(0) // self.ranks, gradient.size(1))
            dist.reduce_scatter_tensor(local, gradient, group=self.group)
            return local
        if self.group is not None:
            dist.all_reduce(gradient, group=self.group)
        return gradient


@dataclass(frozen=True)
class Chunking:
    """How the losses are computed, with which kernels.

    With `z_loss` its multiple of the squared log-sum-exp Z of a token's logits is added to its loss. The gradient of
    z·Z² is 2 z Z times the probabilities, so those of the loss get the factor 1 + 2 z Z.

    `evaluated` sees the logits [n, rows] of each chunk if no gradients are computed, and may return others. `seen` is
    called with those of each chunk and its labels [n], before they are overwritten.
    """

    tokens: int
    split: Split
    smoothing: float
    z_loss: float
    kernels: LossKernels
    evaluated: Callable[[torch.Tensor], torch.Tensor]
    seen: Callable[[torch.Tensor, torch.Tensor], None]

    def share(self, total: torch.Tensor) -> torch.Tensor | None:
        """[n, 1] factor of the probabilities in the gradient, from the log-sum-exp [n, 1]; None: 1."""
        return 1 + 2 * self.z_loss * total if self.z_loss else None

    def chunks(self, number: int) -> Iterator[slice]:
        """Parts of a number of tokens."""
        return (slice(start, start + self.tokens) for start in range(0, number, self.tokens))


class LossKernels:
    """What is computed of the logits of a chunk, with torch's operations.

    The logits are overwritten with their exponentials, which both the loss and its gradient need.
    """

    def statistics(
        self, logits: torch.Tensor, local: torch.Tensor, has: torch.Tensor, smoothing: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What a rank's logits contribute.

        Args:
            logits: [n, rows], of any precision; overwritten in fp32.
            local, has: [n], from `Split.local`.
            smoothing: probability spread over the vocabulary.

        Returns:
            Values [n, rows], and their offset [n, 1], for `gradient`; and [n, 2 or 3]: log-sum-exp, logit of the label,
            and with smoothing the sum of the logits.
        """
        values = logits.float()  # first: on a CPU, operations on two types take twice as long
        most = values.amax(-1, keepdim=True)
        label = values.gather(-1, local[:, None]) * has[:, None]
        parts = [label]
        if smoothing:
            parts.append(values.sum(-1, keepdim=True))
        values.sub_(most).exp_()
        parts.insert(0, most + values.sum(-1, keepdim=True).log())
        return values, most, torch.cat(parts, dim=-1)

    def again(self, logits: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As the first two results of `statistics`, with the log-sum-exp over all ranks, [n, 1]."""
        return logits.float().sub_(total).exp_(), total

    def gradient(
        self,
        values: torch.Tensor,
        shift: torch.Tensor,
        factor: torch.Tensor,
        label: torch.Tensor,
        local: torch.Tensor,
        spread: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Gradient of the logits; overwrites `values`.

        Args:
            values: [n, rows], from `statistics`.
            shift: [n, 1], their offset less the log-sum-exp.
            factor: [n, 1], of the probabilities.
            label: [n, 1], taken off at the label's row.
            local: [n], that row.
            spread: [n, 1], taken off at every row; None: nothing.
            dtype: of the result.
        """
        values.mul_(factor * shift.exp())
        if spread is not None:
            values.sub_(spread)
        return values.scatter_add_(-1, local[:, None], -label).to(dtype)


class CompiledLossKernels(LossKernels):
    """The same in one compiled kernel that reads the logits, and one that replaces them with their gradient.

    In 16 bits these are 6 bytes for each logit, where torch's operations move 44: they compute in fp32, one after the
    other.

    Args:
        backend: of torch.compile; `eager` traces only.
    """

    def __init__(self, backend: str = "inductor") -> None:
        # Compiled once more, for all numbers of tokens, with the second one: the last chunk, or an evaluation's.
        self._statistics = torch.compile(statistics, backend=backend)
        self._gradient = torch.compile(gradient, backend=backend)

    def statistics(
        self, logits: torch.Tensor, local: torch.Tensor, has: torch.Tensor, smoothing: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As the values of `gradient` the logits themselves."""
        parts = self._statistics(logits.detach(), local, has, smoothing)
        return logits, parts.new_zeros(1, 1), parts

    def again(self, logits: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits."""
        return logits, total.new_zeros(1, 1)

    def gradient(self, values: torch.Tensor, *others: Any) -> torch.Tensor:
        """As there, in the place of the logits, whose type the result has."""
        result: torch.Tensor = self._gradient(values.detach(), *others)
        return result


def statistics(logits: torch.Tensor, local: torch.Tensor, has: torch.Tensor, smoothing: float) -> torch.Tensor:
    """The last result of `LossKernels.statistics`, for torch.compile to make one kernel of; arguments as there."""
    values = logits.float()
    most = values.amax(-1, keepdim=True)
    total = most + (values - most).exp().sum(-1, keepdim=True).log()
    label = values.gather(-1, local[:, None]) * has[:, None]
    return torch.cat([total, label, *([values.sum(-1, keepdim=True)] if smoothing else [])], dim=-1)


def gradient(
    logits: torch.Tensor,
    shift: torch.Tensor,
    factor: torch.Tensor,
    label: torch.Tensor,
    local: torch.Tensor,
    spread: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`LossKernels.gradient` of logits, for torch.compile to make one kernel of; arguments as there."""
    rows = torch.arange(logits.size(-1), device=logits.device)
    slope = (logits.float() + shift).exp() * factor
    if spread is not None:
        slope = slope - spread
    return logits.copy_(torch.where(rows == local[:, None], slope - label, slope).to(dtype))


def losses_of_logits(logits: torch.Tensor, labels: torch.Tensor, how: Chunking) -> torch.Tensor:
    """Cross entropy of each token, whose backward pass overwrites the logits with their gradient.

    Args:
        logits: [s, b, rows] on this rank.
        labels: [b, s].

    Returns:
        [b, s] in fp32.
    """
    losses: torch.Tensor = _LossesOfLogits.apply(logits.reshape(-1, logits.size(-1)), labels.t().reshape(-1), how)
    return losses.view(labels.size(1), labels.size(0)).t().contiguous()


class _LossesOfLogits(torch.autograd.Function):
    """`losses_of_logits` of [n, rows]; keeps the logits and the log-sum-exp of each token."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, how: Chunking) -> torch.Tensor:
        """[n] from logits [n, rows] and labels [n]."""
        losses, total, _, offset = _of_chunk(logits, labels, how)
        ctx.how, ctx.offset = how, offset
        ctx.save_for_backward(logits, labels, total)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradient of the logits."""
        logits, labels, total = ctx.saved_tensors
        return _of_logits(logits, ctx.offset, total, labels, gradients[0], logits.dtype, ctx.how), None, None


def chunked_losses(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None, how: Chunking
) -> torch.Tensor:
    """Cross entropy of each token.

    Args:
        hidden: [s, b, h], with sequence parallelism [s / ranks, b, h]; input of the output layer.
        weight: [rows, h] on this rank.
        labels: [b, s].
        weights: [b, s], what the losses are weighted with before they are summed, up to a factor that all tokens have
            in common; None: not known. If another gradient arrives, the gradients are NaN.

    Returns:
        [b, s] in fp32.
    """
    size, length = labels.shape
    target = labels.t().reshape(-1)
    shares = None if weights is None else weights.t().reshape(-1)
    rows = hidden.reshape(-1, hidden.size(-1))
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        losses = _ChunkedLosses.apply(rows, weight, target, None if hidden.dtype == torch.float16 else shares, how)
    else:
        losses = _losses(how.split.all_tokens(rows), weight, target, how)
    return losses.view(length, size).t().contiguous()


def _losses(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, how: Chunking) -> torch.Tensor:
    logits = ((part, how.evaluated(hidden[part] @ weight.t())) for part in how.chunks(len(labels)))
    return torch.cat([_of_chunk(of_chunk, labels[part], how)[0] for part, of_chunk in logits])


def _of_chunk(
    logits: torch.Tensor, labels: torch.Tensor, how: Chunking
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses [n], log-sum-exp [n, 1], and the first two results of `LossKernels.statistics`."""
    rows = logits.size(-1)
    how.seen(logits, labels)
    local, has = how.split.local(labels, rows)
    values, offset, parts = how.kernels.statistics(logits, local, has, how.smoothing)
    if how.split.group is not None:
        gathered = parts.new_empty(how.split.ranks * parts.size(0), parts.size(1))
        dist.all_gather_into_tensor(gathered, parts, group=how.split.group)
        gathered = gathered.view(how.split.ranks, *parts.shape)
        parts = torch.cat([gathered[..., :1].logsumexp(0), gathered[..., 1:].sum(0)], dim=-1)
    total = parts[:, :1]
    losses = total[:, 0] - (1 - how.smoothing) * parts[:, 1]
    if how.smoothing:
        losses = losses - how.smoothing / (rows * how.split.ranks) * parts[:, 2]
    if how.z_loss:
        losses = losses + how.z_loss * total[:, 0].square()
    return losses, total, values, offset


class _ChunkedLosses(torch.autograd.Function):
    """`chunked_losses` of [n, h]; keeps gradients, or the log-sum-exp of each token."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor | None,
        how: Chunking,
    ) -> torch.Tensor:
        """[n] from hidden states [n / ranks with sequence parallelism, h], labels and weights [n]."""
        ctx.how = how
        ctx.dtype = weight.dtype
        ctx.one_pass = weights is not None
        tokens = how.split.all_tokens(hidden)
        grads = _Gradients(tokens, weight, ctx.needs_input_grad, how) if weights is not None else None
        losses, totals = [], []
        for part in how.chunks(len(labels)):
            loss, total, values, offset = _of_chunk(tokens[part] @ weight.t(), labels[part], how)
            losses.append(loss)
            totals.append(total)
            if grads is not None and weights is not None:
                grads.add(part, values, offset, total, labels[part], weights[part])
            del values
        if grads is not None:
            ctx.save_for_backward(weights, grads.hidden, grads.weight)
        else:
            ctx.save_for_backward(hidden, weight, labels, torch.cat(totals))
        return torch.cat(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the hidden states and the weight."""
        (incoming,) = gradients
        how: Chunking = ctx.how
        if ctx.one_pass:
            weights, of_hidden, of_weight = ctx.saved_tensors
            factor = _factor(incoming, weights)
            for each in (of_hidden, of_weight):
                if each is not None:
                    each.mul_(factor)
        else:
            hidden, weight, labels, totals = ctx.saved_tensors
            tokens = how.split.all_tokens(hidden)
            grads = _Gradients(tokens, weight, ctx.needs_input_grad, how)
            for part in how.chunks(len(labels)):
                values, offset = how.kernels.again(tokens[part] @ weight.t(), totals[part])
                grads.add(part, values, offset, totals[part], labels[part], incoming[part])
                del values
            of_hidden, of_weight = grads.hidden, grads.weight
        of_hidden = None if of_hidden is None else how.split.summed(of_hidden)
        return of_hidden, None if of_weight is None else of_weight.to(ctx.dtype), None, None, None


class _Gradients:
    """Gradients of hidden states [n, h] and weight [rows, h], chunk by chunk."""

    def __init__(self, tokens: torch.Tensor, weight: torch.Tensor, needed: tuple[bool, ...], how: Chunking) -> None:
        self._tokens = tokens
        self._weight = weight
        self._how = how
        self.hidden = torch.empty_like(tokens) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=torch.float32) if needed[1] else None

    def add(
        self,
        part: slice,
        values: torch.Tensor,
        offset: torch.Tensor,
        total: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """Add a chunk's.

        Args:
            values, offset: from `LossKernels`; may be overwritten.
            total: [n, 1], log-sum-exp over all ranks.
            weights: [n] of the losses.
        """
        of_logits = _of_logits(values, offset, total, labels, weights, self._weight.dtype, self._how)
        if self.hidden is not None:
            torch.mm(of_logits, self._weight, out=self.hidden[part])
        if self.weight is not None:
            if self._weight.dtype == torch.float32:
                self.weight.addmm_(of_logits.t(), self._tokens[part])
            else:
                self.weight.add_(of_logits.t() @ self._tokens[part])


def _of_logits(
    values: torch.Tensor,
    offset: torch.Tensor,
    total: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    dtype: torch.dtype,
    how: Chunking,
) -> torch.Tensor:
    """Gradient of the logits, [n, rows]; arguments as of `_Gradients.add`."""
    rows = values.size(-1)
    smoothing = how.smoothing
    local, has = how.split.local(labels, rows)
    weighted = weights.float()[:, None]
    spread = smoothing / (rows * how.split.ranks) * weighted if smoothing else None
    label = (1 - smoothing) * weighted * has[:, None]
    share = how.share(total)
    factor = weighted if share is None else weighted * share
    return how.kernels.gradient(values, offset - total, factor, label, local, spread, dtype)


def _factor(incoming: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The number that, times the weights of the losses, is their gradient: on the device, NaN if there is none."""
    weights = weights.float()
    factor = (incoming * weights).sum() / weights.square().sum().clamp_min(torch.finfo(torch.float32).tiny)
    same = torch.isclose(incoming, factor * weights, rtol=1e-3, atol=0.0).all()
    return torch.where(same, factor, torch.nan)
