"""What a GPU would run, for tensors without data.

torch chooses a kernel by the device of its arguments, and `meta` has none of its own; TransformerEngine's modules do
not run without a GPU. What differs is what autograd keeps and what is sent, and all of it is in this module: flash
attention, a ring of keys and values under context parallelism, dropout masks, the fused RMSNorm, and the number of
tokens for each expert, which a dispatcher reads on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from llmrecipes.engine.core.model.layer_spec import LatentAttention, PlainQueries
from llmrecipes.engine.core.model.loss import CompiledLossKernels
from llmrecipes.engine.core.platform.patching import replace, resolve

_FUNCTIONAL = "torch.nn.functional"
_ATTENTION = "llmrecipes.engine.core.model.attention"
_SWIGLU = "megatron.core.fusions.fused_bias_swiglu"
_DROPOUT = "megatron.core.fusions.fused_bias_dropout"
_GELU = "llmrecipes.engine.core.platform.gelu"
_ROPE = "llmrecipes.engine.core.platform.rope"
_GPT = "llmrecipes.engine.core.model.gpt"
_LATENT = "megatron.core.transformer.multi_latent_attention"
_REPLACED = (
    (_FUNCTIONAL, "scaled_dot_product_attention"),
    (_FUNCTIONAL, "dropout"),
    (_FUNCTIONAL, "rms_norm"),
    (f"{_ATTENTION}.SdpaCoreAttention", "_attend_over_context"),
    (f"{_ATTENTION}.SdpaCoreAttention", "_attend_by_scores"),
    (_LATENT, "TELinear"),
    ("llmrecipes.engine.core.model.layer_spec", "_use_ours"),
    ("megatron.core.transformer.transformer_layer.TransformerLayer", "__init__"),
    (_SWIGLU, "swiglu"),
    (_SWIGLU, "bias_swiglu"),
    (_SWIGLU, "weighted_swiglu"),
    (_SWIGLU, "swiglu_back"),
    (_SWIGLU, "bias_swiglu_back"),
    (_SWIGLU, "weighted_swiglu_back"),
    (_DROPOUT, "bias_dropout_add_fused_train"),
    (_ROPE, "kernel"),
    (_GELU, "bias_gelu_kernel"),
    (_GELU, "bias_gelu_kernel_back"),
    (_GPT, "CompiledLossKernels"),
)
_PLAIN = {name: getattr(resolve(owner), name) for owner, name in _REPLACED}
_ALIGNED = torch.empty(0)
"""A causal mask aligned to the lower right. torch's is a tensor of a class that no dispatch mode can make."""


def install_kernels(device: str) -> None:
    """Choose as on `cuda`, on `cpu`, on a GPU with megatron-core's own layers (`cuda, local`), or on one where
    TransformerEngine's attention is not fused (`cuda, unfused`); a later call replaces the choice."""
    on_gpu = {
        "scaled_dot_product_attention": _flash_attention,
        "dropout": _dropout,
        "rms_norm": _rms_norm,
        "_attend_over_context": _ring_attention,
        "_attend_by_scores": _sink_attention,
        "TELinear": DuplicatedLinear,
        "_use_ours": _use_duplicated,
        "__init__": _with_fused_norms,
    }
    originals = {name: on_gpu[name] for name in ("scaled_dot_product_attention", "dropout", "rms_norm")}
    unfused = {**on_gpu, "scaled_dot_product_attention": _unfused_attention}
    del unfused["_attend_by_scores"]
    of_device = {"cuda": on_gpu, "cuda, local": originals, "cuda, unfused": unfused}
    chosen = of_device.get(device, {"scaled_dot_product_attention": _cpu_attention})
    chosen = {**chosen, **_COMPILED}
    for owner, name in _REPLACED:
        replace(owner, name, chosen.get(name, _PLAIN[name]))
    replace(_ATTENTION, "causal_lower_right", lambda *_sizes: _ALIGNED)


def _with_fused_norms(layer: Any, *args: Any, **options: Any) -> None:
    """Recompute the norms only that TransformerEngine does not fuse with the product after them."""
    _PLAIN["__init__"](layer, *args, **options)
    layer.recompute_input_layernorm &= layer.config.multi_latent_attention
    layer.recompute_pre_mlp_layernorm &= layer.is_moe_layer


def _flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_options: Any,
) -> torch.Tensor:
    """Memory of FlashAttention (arXiv 2205.14135): inputs, output and the logarithm of each row's sum are kept.

    Every fused kernel of a GPU keeps these. A causal mask aligned to the lower right is a flag of the kernel.
    """
    causal = is_causal or attn_mask is not None
    output: torch.Tensor = _FlashAttention.apply(query, key, value, causal)
    return output


def _sink_attention(_module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    """cuDNN's, which adds a key to each row; arguments as `SdpaCoreAttention._attend_by_scores`."""
    return _flash_attention(query, key, value, is_causal=True)


def _unfused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    **_options: Any,
) -> torch.Tensor:
    """Memory of TransformerEngine's UnfusedDotProductAttention with its kernel of the softmax: both products are of
    heads that have keys and values of their own."""
    if key.size(1) < query.size(1):
        groups = query.size(1) // key.size(1)
        key = key.repeat_interleave(groups, 1)
        value = value.repeat_interleave(groups, 1)
    probabilities = _dropout(torch.softmax(query @ key.transpose(2, 3), -1), dropout_p)
    return probabilities @ value


class _FlashAttention(torch.autograd.Function):
    """Shapes only."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> torch.Tensor:
        """Attention of [b, h, s, d] tensors; output of the value's d, with strides of [b, s, h, d] like the kernel."""
        batch, heads, length, _ = query.shape
        output = query.new_empty(batch, length, heads, value.size(-1)).transpose(1, 2)
        rows = query.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, rows)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the inputs."""
        query, key, value, _output, rows = ctx.saved_tensors
        _delta = torch.empty_like(rows)  # sums of output times gradient
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def _dropout(values: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Keeps a mask of one byte for each element."""
    if not training or p == 0.0:
        return values
    return torch.native_dropout(values, p, training)[0]


def _rms_norm(
    values: torch.Tensor, shape: Sequence[int], weight: torch.Tensor, eps: float | None = None
) -> torch.Tensor:
    """One kernel; keeps its input and a number for each row. Its version without data would be several operations."""
    output: torch.Tensor = _RMSNorm.apply(values, weight)
    return output


class _RMSNorm(torch.autograd.Function):
    """Shapes only."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """As the values."""
        ctx.save_for_backward(values, weight, values.new_empty(values.shape[:-1], dtype=torch.float32))
        return torch.empty_like(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of values and weight."""
        values, weight, _ = ctx.saved_tensors
        return torch.empty_like(values), torch.empty_like(weight)


def _half(values: torch.Tensor, *_others: torch.Tensor) -> torch.Tensor:
    """SwiGLU of [..., 2 f] in one kernel."""
    return values.new_empty(*values.shape[:-1], values.size(-1) // 2)


def _gradient(_gradient: torch.Tensor, values: torch.Tensor, *_others: torch.Tensor) -> torch.Tensor:
    """Gradient of SwiGLU's input."""
    return torch.empty_like(values)


def _weighted_gradient(
    _gradient: torch.Tensor, values: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of SwiGLU's input and of the weights of its rows."""
    return torch.empty_like(values), torch.empty_like(weights)


def _same(values: torch.Tensor, *_others: Any) -> torch.Tensor:
    """Rotary embeddings, or GELU of a sum, in one kernel."""
    return torch.empty_like(values, memory_format=torch.contiguous_format)


class LossShapes(CompiledLossKernels):
    """Shapes of what the kernels of the loss compute."""

    def __init__(self, _backend: str = "") -> None:
        pass

    @staticmethod
    def _statistics(logits: torch.Tensor, _local: Any, _has: Any, smoothing: float) -> torch.Tensor:
        return logits.new_empty(logits.size(0), 2 + bool(smoothing), dtype=torch.float32)

    @staticmethod
    def _gradient(logits: torch.Tensor, *_others: Any) -> torch.Tensor:
        return logits


_COMPILED = {
    "swiglu": _half,
    "bias_swiglu": _half,
    "weighted_swiglu": _half,
    "swiglu_back": _gradient,
    "bias_swiglu_back": _gradient,
    "weighted_swiglu_back": _weighted_gradient,
    "kernel": _same,
    "bias_gelu_kernel": _same,
    "bias_gelu_kernel_back": _same,
    "CompiledLossKernels": LossShapes,
    "bias_dropout_add_fused_train": partial(resolve(_DROPOUT)._bias_dropout_add_func, training=True),
}
"""Kernels that torch compiles for a device that has one; what it compiles of bias and dropout keeps a mask as well."""


def _ring_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float
) -> torch.Tensor:
    """TransformerEngine's under context parallelism; arguments as `SdpaCoreAttention._attend_over_context`."""
    q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    output: torch.Tensor = _RingAttention.apply(q, k, v, module.context_group)
    return output.permute(2, 0, 1, 3)


class _RingAttention(torch.autograd.Function):
    """Keys and values go round the ranks, and in the backward pass their gradients too; each rank keeps its own."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: Any) -> torch.Tensor:
        """As `_FlashAttention.forward`."""
        ctx.group = group
        _rotate([key, value], group)
        return _FlashAttention.forward(ctx, query, key, value, True)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the inputs."""
        result = _FlashAttention.backward(ctx, *gradients)
        _, key, value, *_ = ctx.saved_tensors
        _rotate([key, value], ctx.group)
        _rotate([key, value], ctx.group)  # gradients, of the same size
        return result


def _rotate(tensors: Sequence[torch.Tensor], group: Any) -> None:
    """Send to the next rank and receive from the previous one, once for each other rank; in one message."""
    ranks = dist.get_process_group_ranks(group)
    group_rank = group.rank()
    sent = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))
    received = torch.empty_like(sent)
    for _ in range(len(ranks) - 1):
        dist.isend(sent, ranks[(group_rank + 1) % len(ranks)], group=group)
        dist.irecv(received, ranks[group_rank - 1], group=group)


class DuplicatedLinear(torch.nn.Module):
    """TransformerEngine's linear layer of which each tensor-parallel rank has all; megatron-core's signature."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **_options: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, device="meta", dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The product, and no bias."""
        return torch.nn.functional.linear(values, self.weight), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Whole on each tensor-parallel rank."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, None, sharded_offsets
        )


def _use_duplicated(layer: Any) -> None:
    """Latent attention as TransformerEngine's specification builds it: whole down-projections."""
    _PLAIN["_use_ours"](layer)
    if layer.submodules.self_attention.module is LatentAttention:
        layer.submodules.self_attention.module = PlainQueries
        parts = layer.submodules.self_attention.submodules
        parts.linear_q_down_proj = parts.linear_kv_down_proj = DuplicatedLinear


def _cpu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """torch's choice on a CPU: flash attention, but the whole matrix with dropout or values of another width."""
    if dropout_p == 0.0 and query.size(-1) == value.size(-1):
        return _flash_attention(query, key, value, attn_mask, is_causal=is_causal)
    causal = is_causal or attn_mask is not None  # the mask's values do not matter, and it has none
    output: torch.Tensor = _PLAIN["scaled_dot_product_attention"](query, key, value, None, dropout_p, causal, **options)
    return output


_DISPATCHERS = "megatron.core.transformer.moe.token_dispatcher"
_DISPATCHER = f"{_DISPATCHERS}.MoEAlltoAllTokenDispatcher"
_GATHERING = f"{_DISPATCHERS}.MoEAllGatherTokenDispatcher"
_PLAIN_READ = resolve(f"{_DISPATCHER}._maybe_dtoh_and_synchronize")
_PLAIN_GATHERED = resolve(f"{_GATHERING}.dispatch_postprocess")
_PLAIN_PERMUTE = resolve(f"{_DISPATCHERS}.permute")


def install_routing(skew: float) -> None:
    """Answer the dispatchers' questions; a later call replaces the answers.

    Args:
        skew: times its even share that the first expert of this rank gets, on every rank; the others share the rest.
            Without effect where all tokens are gathered.
    """

    @wraps(_PLAIN_READ)
    def read(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
        read_now = not dispatcher.drop_and_pad and point == dispatcher.cuda_dtoh_point
        tokens_per_expert = _PLAIN_READ(dispatcher, point, tokens_per_expert)
        return _fill(dispatcher, skew) if read_now else tokens_per_expert

    @wraps(_PLAIN_GATHERED)
    def gathered(dispatcher: Any, hidden_states: torch.Tensor, *inputs: Any) -> Any:
        config = dispatcher.config
        chosen = hidden_states.size(0) * config.moe_router_topk * dispatcher.num_local_experts / config.num_moe_experts
        replace(_DISPATCHERS, "permute", partial(_permute, round(chosen)))
        try:
            tokens, _, probabilities = _PLAIN_GATHERED(dispatcher, hidden_states, *inputs)
        finally:
            replace(_DISPATCHERS, "permute", _PLAIN_PERMUTE)
        return tokens, torch.tensor(counts(tokens.size(0), dispatcher.num_local_experts, 0, 1.0)), probabilities

    replace(_DISPATCHER, "_maybe_dtoh_and_synchronize", read)
    replace(_GATHERING, "dispatch_postprocess", gathered)
    replace(_DISPATCHERS, "maybe_move_tensor_to_cpu", _to_host)


def _permute(chosen: int, *args: Any, **options: Any) -> Any:
    """megatron-core's, with a known number of rows: it reads the number from the device, which has no data here."""
    return _PLAIN_PERMUTE(*args, **{**options, "num_out_tokens": chosen})


def counts(assignments: int, experts: int, hot: int, skew: float) -> list[int]:
    """Tokens of each expert from one rank.

    Args:
        assignments: tokens of the rank times the experts that each chooses.
        experts: of a layer.
        hot: the expert with `skew` times its even share.
        skew: at least 1; bounded by what there is.
    """
    most = min(assignments, round(skew * assignments / experts))
    rest = assignments - most
    others = experts - 1
    counts = [most] * experts
    for number, expert in enumerate(expert for expert in range(experts) if expert != hot):
        counts[expert] = rest // others + (number < rest % others)
    return counts


def _fill(dispatcher: Any, skew: float) -> torch.Tensor:
    """Set what the dispatcher has just read; returns the tokens of each local expert from all ranks."""
    local, number = dispatcher.num_local_experts, dispatcher.num_experts
    first = dispatcher.local_expert_indices[0]
    each = counts(dispatcher.routing_map.size(0) * dispatcher.config.moe_router_topk, number, first, skew)
    ranks = dispatcher.ep_size
    here = each[first : first + local]
    sources = dispatcher.tp_size * ranks
    if dispatcher.input_splits is not None:
        share = number // ranks
        dispatcher.input_splits = [sum(each[rank * share : (rank + 1) * share]) for rank in range(ranks)]
        dispatcher.output_splits = [sum(here)] * ranks
    if dispatcher.output_splits_tp is not None:
        dispatcher.output_splits_tp = torch.tensor([sum(here) * ranks] * dispatcher.tp_size)
    if torch.is_tensor(dispatcher.num_out_tokens):
        dispatcher.num_out_tokens = torch.tensor(sum(each))
    if local > 1:
        dispatcher.num_global_tokens_per_local_expert = torch.tensor([here] * sources)
    return torch.tensor(here) * sources


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """The copy that megatron-core makes for a GPU's tensor; it does not wait."""
    if not torch.is_tensor(tensor):
        return tensor
    copied = tensor.to("cpu", non_blocking=True)
    return copied.numpy() if as_numpy else copied
