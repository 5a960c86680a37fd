"""Core attention on torch's scaled_dot_product_attention.

It replaces megatron-core's `DotProductAttention`, which materializes the score matrix and does not support context
parallelism, if TransformerEngine is not used: torch selects a flash kernel on CPU and GPU.

Packed sequences: the conversations that share a sequence do not see each other. Where each begins is read from the
positions, which begin at 0 there. Learned positions follow them; rotary ones need not, because a rotation by position
makes attention depend only on distances (arXiv 2104.09864, section 3.2).

Context parallelism: the sequence is cut into 2·CP chunks and rank r has the chunks r and 2·CP−1−r, so that under the
causal mask all ranks have the same work (Llama 3, arXiv 2407.21783, section 3.3.2). megatron-core's embeddings and
TransformerEngine's attention rely on the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint

from llmrecipes.engine.core.model.dropout import Masks, dropped
from llmrecipes.plan.kernels import attends_by_boundaries
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.schema import Recipe


# Both modules import torch's compiler, without which a rank that needs neither starts half a second earlier.
def causal_lower_right(queries: int, keys: int) -> torch.Tensor:
    """torch's causal mask of [queries, keys], whose diagonal ends at the bottom right."""
    from torch.nn.attention import bias

    return bias.causal_lower_right(queries, keys)


def varlen_attn(*args: Any, **options: Any) -> Any:
    """torch's attention of sequences in one tensor; arguments as there."""
    from torch.nn.attention import varlen

    return varlen.varlen_attn(*args, **options)


class SdpaCoreAttention(MegatronModule):
    """Causal attention of the heads of one tensor-parallel rank.

    With context parallelism a rank has the queries of two chunks of the sequence (`model.context`). Keys and values of
    the full sequence are gathered over the context-parallel group, and their gradients reduce-scattered.

    Args:
        config: megatron-core's configuration.
        layer_number: position of the layer, from 1.
        attn_mask_type: causal, or none for a query that sees every key.
        attention_type: self-attention only; kept for megatron-core's signature.
        attention_dropout: overrides `config.attention_dropout`.
        softmax_scale: overrides 1/sqrt(channels of a head).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = softmax_scale
        self.before = tokens_before(config, layer_number)
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
        self._masks: Masks | None = None
        self._place = ""
        self.context_group: Any = None
        if config.context_parallel_size > 1:
            self.context_group = parallel_state.get_context_parallel_group()

    def drop_by(self, masks: Masks, place: str) -> None:
        """Take the masks of dropout from here on from these, which need the whole matrix of scores."""
        self._masks = masks
        self._place = place

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [sq, b, heads, channels].
            key, value: [sk, b, groups, channels]; sk > sq when keys of earlier tokens come from a cache.
            attention_mask: of packed conversations, see `attention_mask`; else None, and the mask follows
                from `attn_mask_type`.

        Returns:
            [sq, b, heads × channels of a value].
        """
        if attention_bias is not None or packed_seq_params is not None:
            raise NotImplementedError("only causal attention is built, over whole sequences or packed conversations")
        # megatron-core disables the mask for a token whose predecessors are in a cache.
        causal = (attn_mask_type or self.attn_mask_type) == AttnMaskType.causal
        dropout = self.dropout if self.training else 0.0
        # Tensor-parallel ranks hold different heads, so they must not use the same dropout mask.
        with get_cuda_rng_tracker().fork() if dropout and self._masks is None else nullcontext():
            if attention_mask is not None:
                out = self._attend_to_own(query, key, value, dropout, attention_mask)
            elif self.context_group is None:
                out = self._attend(query, key, value, dropout, is_causal=causal)
            else:
                out = self._attend_over_context(query, key, value, dropout)
        return out.reshape(query.size(0), query.size(1), -1)

    def _attend_to_own(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, mask: torch.Tensor
    ) -> torch.Tensor:
        """Each conversation of a sequence by itself."""
        if self.context_group is not None:
            raise NotImplementedError("packed conversations are not split over context-parallel ranks")
        if mask.dtype == torch.bool:
            # With a mask and fewer keys than queries, torch has no fused kernel on a GPU.
            key, value = _one_each(query, key, value)
            return self._attend(query, key, value, dropout, is_causal=False, mask=mask, is_dense=True)
        return self._attend_one_by_one(query, key, value, dropout, mask)

    def _attend_one_by_one(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, boundaries: torch.Tensor
    ) -> torch.Tensor:
        if query.device.type != "cpu":
            return self._attend_by_boundaries(query, key, value, boundaries)
        rows = []
        for number, sizes in enumerate(lengths(boundaries, query.size(0))):
            parts = zip(*(tensor[:, number : number + 1].split(sizes) for tensor in (query, key, value)), strict=True)
            begins = accumulate(sizes, initial=0)
            rows.append(
                torch.cat(
                    [
                        self._attend(q, k, v, dropout, is_causal=True, begin=(number, begin, begin))
                        for (q, k, v), begin in zip(parts, begins, strict=False)
                    ]
                )
            )
        return torch.cat(rows, dim=1)

    def _attend_by_boundaries(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, boundaries: torch.Tensor
    ) -> torch.Tensor:
        """All conversations in one kernel, which skips what they do not see."""
        length, batch = query.shape[:2]
        q, k, v = (tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value))
        out: Any = varlen_attn(
            q,
            k,
            v,
            boundaries,
            boundaries,
            length,  # no conversation is longer
            length,
            scale=self._scale(query),
            window_size=(-1 if self.before is None else self.before, 0),  # causal
            enable_gqa=q.size(1) != k.size(1),
        )
        result: torch.Tensor = out.unflatten(0, (batch, length)).transpose(0, 1)
        return result

    def _scale(self, query: torch.Tensor) -> float:
        return 1.0 / math.sqrt(query.size(-1)) if self.scale is None else self.scale

    def _attend_over_context(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        size = self.context_group.size()
        rank = self.context_group.rank()
        key, value = (in_sequence_order(_gather(part, self.context_group), size) for part in (key, value))
        length = query.size(0) // 2
        parts = []
        for half, chunk in zip(query.split(length), (rank, 2 * size - 1 - rank), strict=True):
            seen = (chunk + 1) * length
            # The chunk's queries are the last of the visible positions: the diagonal ends at the bottom right.
            mask = causal_lower_right(length, seen) if chunk else None
            begin = (0, chunk * length, 0)
            part = self._attend(half, key[:seen], value[:seen], dropout, is_causal=mask is None, mask=mask, begin=begin)
            parts.append(part)
        return torch.cat(parts)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout: float,
        *,
        is_causal: bool,
        mask: torch.Tensor | None = None,
        is_dense: bool = False,
        begin: tuple[int, int, int] = (0, 0, 0),
    ) -> torch.Tensor:
        """Arguments as of `forward` and of torch's.

        Args:
            is_dense: whether the mask has a value for each pair of tokens, else it is causal.
            begin: the first sample, query and key in the micro-batch and the sequence.
        """
        if self.before is not None and key.size(0) > self.before + 1:
            # In each call the last query and the last key have the same position, so earlier keys are out of sight.
            hidden = max(0, key.size(0) - query.size(0) - self.before)
            key, value = key[hidden:], value[hidden:]
            begin = (begin[0], begin[1], begin[2] + hidden)
            near = window_mask(query.size(0), key.size(0), self.before, query.dtype, query.device)
            mask = near.masked_fill(~mask[..., hidden:], -math.inf) if mask is not None and is_dense else near
            is_causal, is_dense = False, True
            if query.device.type != "cpu":
                key, value = _one_each(query, key, value)
        # [s, b, h, d] -> [b, h, s, d] and back, as views.
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        if (dropout and self._masks is not None) or self.config.softmax_type != "vanilla":
            drop = partial(F.dropout, p=dropout)
            if dropout and self._masks is not None:
                place, draw = self._place, self._masks.of_scores
                kept = partial(draw, place=place, probability=dropout, begin=begin, device=q.device)
                drop = partial(_dropped, draw=kept, probability=dropout)
            return self._attend_by_scores(q, k, v, mask if is_dense else None, drop).permute(2, 0, 1, 3)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=is_causal,
            scale=self._scale(q),
            enable_gqa=q.size(1) != k.size(1),
        )
        return out.permute(2, 0, 1, 3)

    def _attend_by_scores(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        drop: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """What torch computes on a CPU where something is dropped, and what it has no kernel for: sinks.

        Args:
            query, key, value: [b, heads, s, channels]; the last query and the last key have the same position.
            mask: true, or 0 if not bool, where a query sees a key; None: causal.
            drop: dropout of probabilities.
        """
        copies = query.size(1) // key.size(1)
        if copies > 1:
            key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
        root = math.sqrt(self._scale(query))
        scores = (query.float() * root) @ (key.float() * root).transpose(2, 3)
        if mask is None:
            before = key.size(2) - query.size(2)
            mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=query.device).tril(before)
        if mask.dtype != torch.bool:
            mask = mask == 0
        probabilities = self._softmax(scores.masked_fill_(~mask, -math.inf))
        return (drop(probabilities) @ value.float()).to(query.dtype)

    def _softmax(self, scores: torch.Tensor) -> torch.Tensor:
        """With a sink, a key of each head's own score whose value is nothing (arXiv 2309.17453)."""
        if self.config.softmax_type == "vanilla":
            return torch.softmax(scores, -1)
        offset = scores.new_zeros(scores.size(1)) if self.softmax_offset is None else self.softmax_offset.float()
        sinks = offset.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """The sinks of all heads, split over tensor-parallel ranks; nothing without."""
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        return state


def _dropped(values: torch.Tensor, draw: Callable[[torch.Size], torch.Tensor], probability: float) -> torch.Tensor:
    return dropped(values, draw(values.shape), probability)


def _one_each(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A key and a value for each query head: with a mask and fewer, torch has no fused kernel on a GPU."""
    copies = query.size(2) // key.size(2)
    if copies == 1:
        return key, value
    return key.repeat_interleave(copies, dim=2), value.repeat_interleave(copies, dim=2)


def tokens_before(config: TransformerConfig, layer_number: int) -> int | None:
    """Tokens before it that a token attends to in a layer with a sliding window; None: to all.

    Args:
        config: megatron-core's configuration.
        layer_number: of the layer, from 1.
    """
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    before, _after = config.window_size
    return int(before)


@lru_cache(maxsize=4)  # for all layers; a GPU has a few lengths too
def window_mask(queries: int, keys: int, before: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What is added to the scores of [queries, keys] whose last ones have the same position: 0, or -inf where a key is
    after the query or more than `before` tokens ahead of it."""
    later = keys - queries
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(later).triu(later - before)
    return torch.zeros(queries, keys, dtype=dtype, device=device).masked_fill_(~seen, -math.inf)


def _gather(part: torch.Tensor, group: Any) -> torch.Tensor:
    return gather_from_sequence_parallel_region(part.contiguous(), tensor_parallel_output_grad=True, group=group)


def packs(recipe: Recipe) -> bool:
    """Whether several conversations share a sequence."""
    return recipe.data.chat is not None and recipe.data.chat.packing


Apart = Callable[[torch.Tensor], dict[str, Any]]


def apart(recipe: Recipe, device: torch.device, implementation: str) -> Apart:
    """What keeps the conversations of a micro-batch apart, as arguments of the model, from its positions [b, s] in host
    memory."""
    if implementation == "local" or not packs(recipe):
        mask = masks(recipe, device)
        return lambda positions: {"attention_mask": mask(positions)}

    def in_one_sequence(positions: torch.Tensor) -> dict[str, Any]:
        boundaries = attention_mask(positions, dense=False, multiple=BOUNDARIES).to(device, non_blocking=True)
        return {"attention_mask": None, "packed_seq_params": packed_sequences(boundaries, positions.numel())}

    return in_one_sequence


def masks(recipe: Recipe, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor | None]:
    """The attention mask of a micro-batch, on a device, from its positions [b, s] in host memory; None if it is causal
    over whole sequences."""
    if not packs(recipe):
        return lambda _positions: None
    on_cpu = device.type == "cpu"
    if attends_by_boundaries(recipe, shape(recipe.model), "cpu" if on_cpu else "cuda"):
        even = 1 if on_cpu else BOUNDARIES
        return lambda positions: attention_mask(positions, dense=False, multiple=even).to(device, non_blocking=True)
    return lambda positions: attention_mask(positions.to(device, non_blocking=True), dense=True)


BOUNDARIES = 64
"""On a GPU their number is a multiple, so that layers are compiled for a few numbers of them only."""


def attention_mask(position_ids: torch.Tensor, *, dense: bool, multiple: int = 1) -> torch.Tensor:
    """What `SdpaCoreAttention` takes as the attention mask of packed sequences; all layers share it.

    Args:
        position_ids: [b, s], 0 at the beginning of each conversation; in host memory, unless `dense`.
        dense: as one mask, which takes a byte for each pair of tokens of a sequence. Else where the conversations begin
            and the last one ends, if all rows are one sequence of b·s tokens.
        multiple: of the number of conversations, the last of which may be empty.

    Returns:
        [b, 1, s, s] bool, true where a query sees a key; or [conversations + 1] int32.
    """
    begins = position_ids == 0
    if not dense:
        begins[:, 0] = True
        places = begins.flatten().nonzero().flatten()
        empty = -len(places) % multiple
        return F.pad(places, (0, 1 + empty), value=begins.numel()).to(torch.int32)
    numbers = begins.cumsum(1)
    length = position_ids.size(1)
    causal = torch.ones(length, length, dtype=torch.bool, device=position_ids.device).tril()
    return ((numbers[:, :, None] == numbers[:, None, :]) & causal)[:, None]


def packed_sequences(boundaries: torch.Tensor, length: int) -> PackedSeqParams:
    """What TransformerEngine's attention takes of packed conversations.

    Args:
        boundaries: from `attention_mask`, on the device.
        length: tokens of a sequence. No conversation is longer, and a number that is always the same lets kernels be
            planned once.
    """
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=length,
        max_seqlen_kv=length,
    )


def lengths(boundaries: torch.Tensor, row: int) -> list[list[int]]:
    """Tokens of each conversation of each row, in order.

    Args:
        boundaries: from `attention_mask`, in host memory.
        row: tokens of a row.
    """
    places = boundaries.tolist()
    rows = list[list[int]]()
    for begin, end in pairwise(places):
        if begin % row == 0:
            rows.append([])
        rows[-1].append(end - begin)
    return rows


def own_chunks(batch: dict[str, torch.Tensor], size: int, rank: int) -> dict[str, torch.Tensor]:
    """A rank's part of each tensor [b, s]: [b, s / size]; those of whole sequences, [b], stay."""
    if size == 1:
        return batch
    pieces = {name: tensor.chunk(2 * size, dim=1) for name, tensor in batch.items() if tensor.dim() > 1}
    return batch | {name: torch.cat([chunks[rank], chunks[-1 - rank]], dim=1) for name, chunks in pieces.items()}


def prediction_weights(mask: torch.Tensor, depths: int, size: int = 1, rank: int = 0) -> list[torch.Tensor]:
    """Weights of a rank's losses of multi-token prediction, for a loss mask of ones.

    A token predicted *k* further has no label for the last *k* of the *s* tokens of a sequence. megatron-core
    compensates: it multiplies the loss by tokens / tokens with such a label, of the loss mask of this rank's
    micro-batch, so a token's weight depends on the tokens beside it. Here every token has *s* / (*s* - *k*),
    which is the same where all tokens count.

    Args:
        mask: loss mask of full sequences, [b, s].
        depths: `mtp_num_layers`.
        size: context-parallel ranks.
        rank: this one.

    Returns:
        [b, s / size] for each further token.
    """
    weights, length = [], mask.size(1)
    for depth in range(1, depths + 1):
        local = own_chunks({"mask": F.pad(mask[:, depth:], (0, depth))}, size, rank)["mask"]
        # Of a mask of ones, only the rank with the end of a sequence (`own_chunks`) has tokens without a label.
        labels = length // size - (depth if rank == 0 else 0)
        weights.append(local * (length / (length - depth) * labels / (length // size)))
    return weights


def in_sequence_order(gathered: torch.Tensor, size: int) -> torch.Tensor:
    """Chunks gathered rank by rank (0, 2·CP−1, 1, 2·CP−2, …), in sequence order.

    Args:
        gathered: [s, …], from all `size` context-parallel ranks.
    """
    chunks = gathered.chunk(2 * size)
    return torch.cat([*chunks[0::2], *reversed(chunks[1::2])])
