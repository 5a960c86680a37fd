"""Dropout that is the same in every layout, for layers without TransformerEngine.

megatron-core's draws from random states: each rank and stage has its own, and a mask depends on what was drawn before.
Here whether an element is dropped is a function of the seed, the step, the place in the model, the sample's place in
the global batch and the element's place in the sample: position and channel, or for attention head, query and key. So a
rank draws its part of masks that are the same in every layout and for every micro-batch size, nothing is sent or saved
for them, and a resumed run has them again. A GPU's masks are not a CPU's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from llmrecipes.engine.core.model import philox
from llmrecipes.plan.derive import Plan

MICRO_BATCH = "micro-batch"
"""Key in megatron-core's RNG tracker of (step, place of the micro-batch's first sample in the global batch). It is not
a generator state; it is kept there because recomputation restores the tracker's states."""

Rows = Sequence[tuple[int, int]]
"""Ranges of rows of a table: the first, and how many."""

_WORDS, _BLOCK = 1 << 32, 4
_AT_ONCE = 1 << 22
"""Words that a GPU draws together: 8 bytes each, and those of some operations besides."""
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_STEPS = (0x9E3779B9, 0xBB67AE85)


class Masks:
    """The dropout masks of a rank.

    Args:
        plan: of the recipe.
        compiled: whether a GPU draws a mask in one compiled kernel, instead of a hundred operations.
    """

    def __init__(self, plan: Plan, *, compiled: bool = False) -> None:
        recipe = plan.recipe
        self._seed = recipe.train.seed
        self._length = recipe.model.seq_length
        self._heads = plan.shape.num_attention_heads
        self._micro_batch_size = recipe.layout.micro_batch_size
        self._data = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        self._context = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
        self._tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        self._sequence_parallel = recipe.layout.sequence_parallel
        self._words: Callable[..., torch.Tensor] = torch.compile(words, dynamic=False) if compiled else words
        if recipe.layout.torch_compile:  # in whose graphs the step would be a constant
            self._kept = torch.compiler.disable(self._kept)  # type: ignore[method-assign]

    def begin(self, step: int, number: int) -> None:
        """Say what is computed next: a micro-batch of this rank, counted from 0 in its step."""
        rank, ranks = self._data
        first = (number * ranks + rank) * self._micro_batch_size  # as `sample_ids`
        tracker = get_cuda_rng_tracker()
        tracker.set_states({**tracker.get_states(), MICRO_BATCH: (step, first)})

    def drop(self, values: torch.Tensor, place: str, probability: float) -> torch.Tensor:
        """Values [s, b, h] of this rank's part of the sequence: some 0, the others divided by 1 - `probability`.

        Args:
            place: in the model; each dropout has another.
        """
        own, batch, width = values.shape
        positions = list(self._positions(own))
        rows = [(sample * self._length + first, count) for sample in range(batch) for first, count in positions]
        mask = self._kept(place, rows, self._length, (0, width), width, probability, values.device)
        return dropped(values, mask.view(batch, own, width).transpose(0, 1).contiguous(), probability)

    def of_scores(
        self, size: Sequence[int], place: str, probability: float, begin: tuple[int, int, int], device: torch.device
    ) -> torch.Tensor:
        """A mask of attention, true where a probability is kept.

        Args:
            size: [samples, heads of this rank, queries, keys].
            place: as of `drop`.
            begin: the first sample, counted from that of the micro-batch, query and key.
        """
        samples, heads, queries, keys = size
        sample, query, key = begin
        first = self._tensor_rank * heads
        rows = [
            ((row * self._heads + first + head) * self._length + query, queries)
            for row in range(sample, sample + samples)
            for head in range(heads)
        ]
        each = self._heads * self._length
        return self._kept(place, rows, each, (key, keys), self._length, probability, device).view(*size)

    def _positions(self, own: int) -> Iterator[tuple[int, int]]:
        """Ranges of the `own` positions of the sequence that this rank has."""
        rank, ranks = self._context
        chunk = self._length // (2 * ranks)
        # Two chunks, as in `own_chunks`; tensor-parallel ranks have equal parts of them in this order.
        chunks = [(rank * chunk, chunk), ((2 * ranks - 1 - rank) * chunk, chunk)] if ranks > 1 else [(0, self._length)]
        begin = own * self._tensor_rank if self._sequence_parallel else 0
        end, place = begin + own, 0
        for first, count in chunks:
            taken = range(max(begin, place), min(end, place + count))
            if taken:
                yield first + taken.start - place, len(taken)
            place += count

    def _kept(
        self,
        place: str,
        rows: Rows,
        rows_of_a_sample: int,
        columns: tuple[int, int],
        width: int,
        probability: float,
        device: torch.device,
    ) -> torch.Tensor:
        """[rows, columns] of the table of a dropout, true where an element is kept.

        Args:
            place, probability: as of `drop`.
            rows: counted from the first sample of the micro-batch.
            rows_of_a_sample: in the table.
            columns: the first, and how many.
            width: columns of the table.
        """
        first, count = columns
        if device.type == "meta":
            return torch.empty(sum(number for _, number in rows), count, dtype=torch.bool, device=device)
        step, sample = get_cuda_rng_tracker().get_states().get(MICRO_BATCH, (0, 0))
        key = hashlib.blake2b(f"{self._seed} {step} {place}".encode(), digest_size=16).digest()
        rows = _joined((sample * rows_of_a_sample + row, number) for row, number in rows)
        dropped = round(probability * _WORDS)
        if device.type == "cpu":
            bits = partial(philox.bits, int.from_bytes(key), (_WORDS * rows_of_a_sample, width))
            parts = [bits((row, first), (number, count)) >= np.uint32(dropped) for row, number in rows]
            return torch.from_numpy(np.concatenate(parts))
        return kept_by_words(self._words, key, rows, columns, dropped, device)


def _joined(rows: Iterable[tuple[int, int]]) -> Rows:
    """The same rows in as few ranges."""
    joined: list[tuple[int, int]] = []
    for first, count in rows:
        if joined and first == sum(joined[-1]):
            joined[-1] = joined[-1][0], joined[-1][1] + count
        else:
            joined.append((first, count))
    return joined


class EmbeddingDropout(torch.nn.Module):
    """Dropout of the embedding's output; in place of torch's in megatron-core's embedding."""

    def __init__(self, masks: Masks, probability: float) -> None:
        super().__init__()
        self.masks = masks
        self.p = probability
        self.place = "embedding"

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """[s, b, h], of this rank's part of the sequence."""
        return self.masks.drop(values, self.place, self.p) if self.training else values


@contextmanager
def another_use(dropout: torch.nn.Module, place: str) -> Iterator[None]:
    """A block in which the embedding is used once more in the same pass."""
    if not isinstance(dropout, EmbeddingDropout):
        yield
        return
    before = dropout.place
    dropout.place = place
    try:
        yield
    finally:
        dropout.place = before


class BiasDropoutAdd:
    """Bias, dropout and residual of a branch; in place of megatron-core's `get_bias_dropout_add`.

    Args:
        place: of the branch.
    """

    def __init__(self, masks: Masks, place: str) -> None:
        self._masks = masks
        self._place = place

    def __call__(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        """A function as megatron-core's."""
        plain: Callable[..., torch.Tensor] = get_bias_dropout_add(training, fused)

        def add(
            output: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, probability: float
        ) -> torch.Tensor:
            values, bias = output
            values = values if bias is None else values + bias
            return plain((self._masks.drop(values, self._place, probability), None), residual, 0.0)

        return add if training else plain


def dropped(values: torch.Tensor, mask: torch.Tensor, probability: float) -> torch.Tensor:
    """Values: 0 where the mask is false, and divided by 1 - `probability` where it is true."""
    result: torch.Tensor = _Dropped.apply(values, mask, 1 / (1 - probability))
    return result


class _Dropped(torch.autograd.Function):
    """Keeps a byte for each element."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        """As the values."""
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return torch.ops.aten.native_dropout_backward(values, mask, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Gradient of the values."""
        (mask,) = ctx.saved_tensors
        return torch.ops.aten.native_dropout_backward(gradients[0], mask, ctx.scale), None, None


def create(plan: Plan, modules: Sequence[Any], *, on_gpu: bool, compiled: bool) -> Masks | None:
    """Give a model these dropouts.

    Attention on a GPU keeps torch's: its kernels never have the scores that such a mask is for.

    Args:
        plan: of the recipe.
        modules: this rank's chunks, of layers without TransformerEngine.
        on_gpu: whether they compute on one.
        compiled: as of `Masks`.

    Returns:
        None if nothing is dropped. A captured layer keeps torch's too: its graph would have the step as a constant.
    """
    model = plan.recipe.model
    if not (model.hidden_dropout or model.attention_dropout) or plan.recipe.layout.cuda_graph_impl is not None:
        return None
    masks = Masks(plan, compiled=compiled)
    for module in modules:
        embedding = getattr(module, "embedding", None)
        if embedding is not None and model.hidden_dropout:
            embedding.embedding_dropout = EmbeddingDropout(masks, model.hidden_dropout)
        for name, layer in _layers(module):
            if model.hidden_dropout:
                layer.self_attn_bda = BiasDropoutAdd(masks, f"{name} attention")
                layer.mlp_bda = BiasDropoutAdd(masks, f"{name} mlp")
            if model.attention_dropout and not on_gpu:
                layer.self_attention.core_attention.drop_by(masks, f"{name} scores")
    return masks


def _layers(module: Any) -> Iterator[tuple[str, Any]]:
    """The layers of a chunk, and names that are the same in every layout."""
    for layer in module.decoder.layers:
        yield f"layer {layer.layer_number}", layer
    prediction = getattr(module, "mtp", None)
    for each in () if prediction is None else prediction.layers:
        yield f"prediction {each.layer_number}", each.mtp_model_layer


def kept_by_words(
    draw: Callable[..., torch.Tensor],
    key: bytes,
    rows: Rows,
    columns: tuple[int, int],
    dropped: int,
    device: torch.device,
) -> torch.Tensor:
    """As `Masks._kept`, on any device. Nothing is copied from the host, which would wait.

    Args:
        draw: `words`, which may be compiled.
        key: 16 bytes.
        rows: of all samples together.
        columns: the first, and how many.
        dropped: words below this are.
    """
    first, count = columns
    low, high = (torch.full((), int.from_bytes(key[at : at + 4]), device=device) for at in (0, 4))
    numbers = torch.cat([torch.arange(row, row + number, device=device) for row, number in rows])
    blocks = -(-(first + count) // _BLOCK)
    parts = numbers.split(max(1, _AT_ONCE // (blocks * _BLOCK)))
    return torch.cat([draw(low, high, part, blocks)[:, first : first + count] >= dropped for part in parts])


def words(low: torch.Tensor, high: torch.Tensor, rows: torch.Tensor, blocks: int) -> torch.Tensor:
    """Random words of 32 bits as int64, [rows, 4 · `blocks`]: Philox 4x32-10 (Salmon et al., SC 2011).

    Args:
        low, high: the key; int64 below 2^32.
        rows: their numbers, int64 [rows].
        blocks: in a row.
    """
    mask = _WORDS - 1
    block = torch.arange(blocks, device=rows.device)[None]
    c0 = block
    c1 = (rows & mask)[:, None]
    c2 = (rows >> 32)[:, None]
    c3 = torch.zeros_like(block)
    for _ in range(10):
        # The product of two words wraps around in int64, which has the same bits.
        first = c0 * _MULTIPLIERS[0]
        second = c2 * _MULTIPLIERS[1]
        c0 = (second >> 32 & mask) ^ c1 ^ low
        c1 = second & mask
        c2 = (first >> 32 & mask) ^ c3 ^ high
        c3 = first & mask
        low = low + _STEPS[0] & mask
        high = high + _STEPS[1] & mask
    return torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), -1).flatten(1)
