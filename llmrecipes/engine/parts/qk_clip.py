"""QK-clip (Kimi K2, arXiv 2507.20534, section 2.1): bounds the logits of attention by scaling what they are made of.

A head whose largest logit of the step is above the threshold t, S, has its queries multiplied by (t / S)^alpha and its
keys by (t / S)^(1 - alpha) behind the update; heads that share keys have the largest S of them. In latent attention
the keys' positional part is shared by all heads and stays, so that of the queries is multiplied by t / S. Biases are
multiplied too, which megatron-core's `clip_qk` leaves out.

megatron-core's needs TransformerEngine 2.9 and whole master weights; this one has any attention and the distributed
optimizer, whose master weights are scaled between its update and the gathering of parameters. Queries and keys are
multiplied once more for it, in parts: half of the FLOPs of attention's forward pass. Ranks with the same heads agree on
a number for each head and layer, in one collective a step. Nothing is kept between steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from llmrecipes.engine.core.masters import own_ranges, updated
from llmrecipes.engine.core.model.attention import tokens_before
from llmrecipes.engine.core.model.attention_logits import largest_logits, softmax_scale
from llmrecipes.engine.core.update import parts
from llmrecipes.engine.parts.base import Part, Step

Rows = Callable[[torch.Tensor], torch.Tensor]
"""From t / S of each head of this rank, at most 1, to a factor for each row of a weight."""


class QkClip(Part):
    """Scales the queries and keys of this rank's heads. A dry run has no logits."""

    def __init__(self, step: Step) -> None:
        recipe = step.plan.recipe
        modules = step.modules
        device = step.platform.device
        self._threshold = recipe.optimizer.qk_clip_threshold
        self._rows: dict[torch.nn.Parameter, tuple[int, Rows]] = {}
        attentions = [layer.self_attention for module in modules for layer in module.decoder.layers]
        heads = max((attention.num_attention_heads_per_partition for attention in attentions), default=0)
        self._logits = torch.empty(len(attentions), heads, device=device)
        self._factors = torch.ones_like(self._logits)
        for number, attention in enumerate(attentions):
            seen = partial(self._attend, number, attention)
            attention.core_attention.register_forward_pre_hook(seen)
            for parameter, rows in _scaled(attention, recipe.optimizer.qk_clip_alpha):
                self._rows[parameter] = (number, rows)
        for part in parts(step.optimizer):
            if part.optimizer is not None:
                part.optimizer.register_step_post_hook(partial(self._after_update, part))

    def before_passes(self, step: int, micro_batches: int) -> None:
        self._logits.fill_(-math.inf)

    def _attend(self, number: int, attention: Any, core: torch.nn.Module, inputs: Any) -> None:
        # Full recomputation runs a layer twice in a training step, the first time without gradients.
        if not (core.training and torch.is_grad_enabled()):
            return
        query, key, _, mask = inputs[:4]
        group = None
        if attention.config.context_parallel_size > 1:
            group = parallel_state.get_context_parallel_group()
        scale = softmax_scale(attention, query.size(-1))
        most = largest_logits(
            query.detach(), key.detach(), scale, mask, group, tokens_before(attention.config, attention.layer_number)
        )
        torch.maximum(self._logits[number], most, out=self._logits[number])

    @torch.no_grad()
    def before_update(self) -> None:
        """What the update of this step scales; a collective of the ranks with the same layers and heads."""
        if not self._rows:
            return
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(self._logits, dist.ReduceOp.MAX, group=group)
        above = self._logits > self._threshold
        self._factors = torch.where(above, self._threshold / self._logits, 1.0)

    @torch.no_grad()
    def _after_update(self, part: Any, *_: Any) -> None:
        """Scale this rank's master weights, before weights are made of them."""
        begins = dict(own_ranges(part)) if isinstance(part, DistributedOptimizer) else {}
        for parameter, _own, weight in updated(part):
            if parameter not in self._rows:
                continue
            number, rows = self._rows[parameter]
            factors = rows(self._factors[number])
            scale_rows(weight.view(-1), factors, parameter.numel() // len(factors), begins.get(parameter, 0))


def scale_rows(flat: torch.Tensor, factors: torch.Tensor, columns: int, begin: int) -> None:
    """Multiply a range of a flattened matrix by a factor for each row.

    Args:
        flat: the range, in place.
        factors: of the rows of the whole matrix.
        columns: of the matrix.
        begin: where the range begins in the flattened matrix.
    """
    first, within = divmod(begin, columns)
    head = min((columns - within) % columns, len(flat))
    if head:
        flat[:head].mul_(factors[first])
        first += 1
    rows = (len(flat) - head) // columns
    flat[head : head + rows * columns].view(rows, columns).mul_(factors[first : first + rows, None])
    if head + rows * columns < len(flat):
        flat[head + rows * columns :].mul_(factors[first + rows])


def _scaled(attention: Any, alpha: float) -> list[tuple[torch.nn.Parameter, Rows]]:
    """Weights and biases of queries and keys, with the factors of their rows."""
    config = attention.config
    scaled: list[tuple[torch.nn.Parameter, Rows]] = []

    def add(linear: Any, rows: Rows) -> None:
        bias = getattr(linear, "bias", None)
        scaled.extend((tensor, rows) for tensor in (linear.weight, bias) if tensor is not None and tensor.numel())

    if config.multi_latent_attention:
        queries = attention.linear_q_proj if config.q_lora_rank is None else attention.linear_q_up_proj
        content = config.qk_head_dim
        position = config.qk_pos_emb_head_dim
        value = config.v_head_dim
        add(queries, lambda eta: _by_row([(eta**alpha, content), (eta, position)]))
        add(attention.linear_kv_up_proj, lambda eta: _by_row([(eta ** (1 - alpha), content), (eta**0, value)]))
        return scaled
    groups = attention.num_query_groups_per_partition
    channels = attention.hidden_size_per_attention_head
    shared = attention.num_attention_heads_per_partition // groups

    def of_group(eta: torch.Tensor) -> torch.Tensor:
        least = eta.view(groups, shared).amin(1)
        return _by_row([(least**alpha, shared * channels), (least ** (1 - alpha), channels), (least**0, channels)])

    add(attention.linear_qkv, of_group)
    return scaled


def _by_row(blocks: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
    """[rows]: of each head one block after another, each a factor [heads] for so many rows."""
    return torch.cat([factor[:, None].expand(-1, rows) for factor, rows in blocks], dim=1).reshape(-1)
