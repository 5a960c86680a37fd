"""How many tokens each expert gets, where there are no tokens: the counts that a dispatcher reads on the host."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from llmrecipes.engine.megatron.platform.patching import replace, resolve

_MODULE = "megatron.core.transformer.moe.token_dispatcher"
_DISPATCHER = f"{_MODULE}.MoEAlltoAllTokenDispatcher"
_GATHERING = f"{_MODULE}.MoEAllGatherTokenDispatcher"
_PLAIN = resolve(f"{_DISPATCHER}._maybe_dtoh_and_synchronize")
_PLAIN_GATHERED = resolve(f"{_GATHERING}.dispatch_postprocess")


def install_routing(skew: float) -> None:
    """Answer the dispatchers' questions; a later call replaces the answers.

    Args:
        skew: times its even share that the first expert of this rank gets, on every rank; the others share the rest.
            Without effect where all tokens are gathered.
    """

    @wraps(_PLAIN)
    def read(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
        read_now = not dispatcher.drop_and_pad and point == dispatcher.cuda_dtoh_point
        tokens_per_expert = _PLAIN(dispatcher, point, tokens_per_expert)
        return _fill(dispatcher, skew) if read_now else tokens_per_expert

    @wraps(_PLAIN_GATHERED)
    def gathered(dispatcher: Any, *inputs: Any) -> Any:
        tokens, _, probabilities = _PLAIN_GATHERED(dispatcher, *inputs)
        return tokens, torch.tensor(counts(tokens.size(0), dispatcher.num_local_experts, 0, 1.0)), probabilities

    replace(_DISPATCHER, "_maybe_dtoh_and_synchronize", read)
    replace(_GATHERING, "dispatch_postprocess", gathered)
    replace(_MODULE, "maybe_move_tensor_to_cpu", _to_host)


def counts(assignments: int, experts: int, hot: int, skew: float) -> list[int]:
    """Tokens of each expert from one rank.

    Args:
        assignments: tokens of the rank times the experts that each chooses.
        experts: of a layer.
        hot: the expert with `skew` times its even share.
        skew: at least 1; bounded by what there is.
    """
    most = min(assignments, round(skew * assignments / experts))
    rest, others = assignments - most, experts - 1
    found = [most] * experts
    for number, expert in enumerate(expert for expert in range(experts) if expert != hot):
        found[expert] = rest // others + (number < rest % others)
    return found


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
