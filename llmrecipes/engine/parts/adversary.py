"""Adversarial training on embeddings: FGM (arXiv 1605.07725), PGD (arXiv 1706.06083) and FreeLB (arXiv 1909.11764).

What is moved is the output of the embedding, which the first layer takes. Its gradient is that of the sequence's own
loss, so the movement of a sequence depends on nothing but the weights and the sequence, in any layout: a common factor,
such as a loss scale or the number of tokens, does not change its direction.

A step makes all its micro-batches' passes, then moves them all, and so on: pipeline stages wait for each other once in
a pass. Only ranks with the embedding keep something, the movement and the gradient of each micro-batch of the step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from llmrecipes.engine.base import Batch
from llmrecipes.engine.core.model.attention import own_chunks
from llmrecipes.engine.parts.base import Part, Step

Outputs = list[dict[str, torch.Tensor]]
ROWS = 1 << 20
"""Random numbers drawn at a time: each takes some 32 bytes while it is drawn."""
_WORD = 0xFFFFFFFF


class Adversary(Part):
    """The passes of a step on moved embeddings."""

    def __init__(self, step: Step) -> None:
        section = step.plan.recipe.train.adversarial
        if section is None:
            raise ValueError("the recipe has no train.adversarial")
        self._section = section
        self._plan = step.plan
        self._chunks = step.chunks
        self._config = get_model_config(step.chunks[0])
        self._moves: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, torch.Tensor] = {}
        self._step = self._seen = 0
        self._passing = self._watching = False
        for module in step.modules:
            if module.pre_process:
                module.embedding.register_forward_hook(self._moved)

    def before_passes(self, step: int, micro_batches: int) -> None:
        self._step = step

    def around(self, batches: Iterator[Batch], number: int, run: Callable[[Iterator[Batch]], Outputs]) -> Outputs:
        """All passes of a step; what those that the weights learn from report.

        Args:
            batches: micro-batches of this rank.
            number: of them in this step.
            run: passes micro-batches through the pipeline.
        """
        of_step = list(islice(batches, number))
        last = self._section.passes - 1
        counted = sum(map(self._section.counts, range(last + 1)))
        self._moves.clear()
        self._passing = True
        outputs: Outputs = []
        try:
            for each in range(last + 1):
                self._seen = 0
                self._watching = each < last
                with self._reduced(counted) if each == last else self._added_up():
                    reported = run(iter(of_step))
                if self._section.counts(each):
                    outputs += reported
                else:
                    for chunk in self._chunks:
                        chunk.zero_grad_buffer()
                if self._watching:
                    self._move()
        finally:
            self._passing = False
            self._moves.clear()
            self._gradients.clear()
        return outputs

    @contextmanager
    def _added_up(self) -> Iterator[None]:
        """A block in which gradients are added to those of this rank, and not reduced."""
        config = self._config
        finalize, no_sync = config.finalize_model_grads_func, config.no_sync_func
        config.finalize_model_grads_func = config.no_sync_func = None
        try:
            with ExitStack() as stack:
                for chunk in self._chunks:
                    stack.enter_context(chunk.no_sync())
                yield
        finally:
            config.finalize_model_grads_func = finalize
            config.no_sync_func = no_sync

    @contextmanager
    def _reduced(self, counted: int) -> Iterator[None]:
        """A block in which gradients are reduced, and divided by the tokens of all passes that count."""
        finalize = self._config.finalize_model_grads_func

        def of_all(chunks: Any, tokens: torch.Tensor | None, *args: Any, **options: Any) -> None:
            finalize(chunks, None if tokens is None else tokens * counted, *args, **options)

        self._config.finalize_model_grads_func = of_all
        try:
            yield
        finally:
            self._config.finalize_model_grads_func = finalize

    def _moved(self, _module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        """Hook of the embedding, whose output is [tokens, b, h]; micro-batches come in order, once in a pass."""
        if not self._passing:
            return None
        number = self._seen
        self._seen += 1
        if number not in self._moves and self._section.type != "fgm":
            self._moves[number] = self._start(number, output)
        if number in self._moves:
            output = output + self._moves[number]
        if self._watching:
            if not output.requires_grad:  # of a frozen embedding
                output = output.detach().requires_grad_()
            output.register_hook(partial(self._gradients.__setitem__, number))
        return output

    @torch.no_grad()
    def _move(self) -> None:
        """Move every micro-batch along its gradient; a collective of the ranks that share a sequence."""
        numbers = sorted(self._gradients)
        if not numbers:
            return
        section = self._section
        fgm = section.type == "fgm"
        length = section.epsilon if fgm else float(section.alpha or 0.0)
        if section.norm == "linf":
            for number in numbers:
                move = self._gradients.pop(number).sign_().mul_(length)
                if not fgm:
                    move.add_(self._moves[number]).clamp_(-section.epsilon, section.epsilon)
                self._moves[number] = move
            return
        sums = torch.stack([_sums(self._gradients[number], self._moves.get(number)) for number in numbers])
        if (group := self._group()) is not None:
            dist.all_reduce(sums, group=group)
        for number, (gradient, product, start) in zip(numbers, sums, strict=True):
            norm = gradient.sqrt().clamp_min(torch.finfo(torch.float32).tiny)
            move = self._gradients.pop(number)
            if fgm:
                self._moves[number] = move.mul_(_row(length / norm, move))
                continue
            # Of what the movement becomes, and the factor that projects it onto the ball.
            after = (start + 2 * length * product / norm + length**2 * gradient / norm**2).clamp_min(0.0).sqrt()
            factor = (section.epsilon / after.clamp_min(torch.finfo(torch.float32).tiny)).clamp_max(1.0)
            moved = self._moves[number].mul_(_row(factor, move))
            moved.add_(move.mul_(_row(length / norm * factor, move)))

    def _start(self, number: int, output: torch.Tensor) -> torch.Tensor:
        """Where a micro-batch begins, [tokens, b, h]: a function of seed, step, and place of a sequence in the step."""
        recipe = self._plan.recipe
        layout = self._plan.layout
        tokens = recipe.model.seq_length
        size = output.size(1)
        batch = {"tokens": torch.arange(tokens, device=output.device)[None]}
        batch = own_chunks(batch, layout.context_parallel_size, parallel_state.get_context_parallel_rank())
        (places,) = batch["tokens"]
        if self._config.sequence_parallel:
            ranks = layout.tensor_model_parallel_size
            places = places.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
        first = (number * layout.data_parallel_size + parallel_state.get_data_parallel_rank()) * size
        keys = [_key(recipe.train.seed, self._step, first + number) for number in range(size)]
        start = torch.stack([uniform(key, places, output.size(2)) for key in keys], dim=1)
        share = 1.0 if self._section.norm == "linf" else (tokens * output.size(2)) ** -0.5
        return start.mul_(self._section.epsilon * share).to(output.dtype)

    def _group(self) -> Any:
        """Ranks that have parts of a sequence; None: each has whole sequences."""
        context = self._plan.layout.context_parallel_size > 1
        if self._config.sequence_parallel:
            if context:
                return parallel_state.get_tensor_and_context_parallel_group()
            return parallel_state.get_tensor_model_parallel_group()
        return parallel_state.get_context_parallel_group() if context else None


def _sums(gradient: torch.Tensor, move: torch.Tensor | None) -> torch.Tensor:
    """[3, b] in fp64: squares of the gradient, its product with the movement, and squares of the movement."""
    wide = gradient.float()
    square = wide.square().sum((0, 2)).double()
    if move is None:
        return torch.stack([square, torch.zeros_like(square), torch.zeros_like(square)])
    other = move.float()
    return torch.stack([square, (wide * other).sum((0, 2)).double(), other.square().sum((0, 2)).double()])


def _row(factor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Factors of sequences [b], for [tokens, b, h]."""
    return factor[None, :, None].to(like.dtype)


def _key(seed: int, step: int, sequence: int) -> tuple[int, int]:
    """Two words that name a sequence of a step."""
    digest = hashlib.sha256(f"{seed}:adversarial:{step}:{sequence}".encode()).digest()
    return int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:8], "big")


def uniform(key: tuple[int, int], places: torch.Tensor, channels: int) -> torch.Tensor:
    """Values in (-1, 1) in fp32, [places, channels], by integers only: the same on every device, for any places.

    Two rounds of a mixing function of 32 bits (Wellons' lowbias32) are enough where no one predicts the numbers.

    Args:
        key: of the sequence.
        places: of its tokens, [n].
    """
    columns = (torch.arange(channels, device=places.device) * 0x9E3779B9) & _WORD
    values = torch.empty(len(places), channels, dtype=torch.float32, device=places.device)
    rows = max(1, ROWS // channels)
    for first in range(0, len(places), rows):
        part = slice(first, first + rows)
        bits = _mixed((_mixed(places[part] ^ key[0])[:, None] + columns ^ key[1]) & _WORD)
        values[part] = ((bits & 0xFFFFFF).float() + 0.5) * 2.0**-23 - 1.0
    return values


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    """Words of 32 bits in int64, mixed; the product with a word of 32 bits wraps, and its low half is right."""
    bits = bits ^ (bits >> 16)
    bits = (bits * 0x7FEB352D) & _WORD
    bits = bits ^ (bits >> 15)
    bits = (bits * 0x846CA68B) & _WORD
    return bits ^ (bits >> 16)
