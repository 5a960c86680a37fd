"""Model and layout of the scaled-down recipe: options and kinds of parallelism are kept, sizes are reduced."""

from __future__ import annotations

import math
from typing import Any, Literal

from llmrecipes.recipe.rules import MIN_BPE_VOCAB
from llmrecipes.recipe.schema import Model, Parallelism, Recipe

Device = Literal["cpu", "cuda"]

MAX_DEGREE = 2
MAX_LAYERS = 4
MAX_HEADS = 8
MAX_HEAD_CHANNELS = 16
MAX_ROTATED_CHANNELS = 8
MAX_HIDDEN = 128
MAX_SEQUENCE = 128
MAX_VOCAB = 1024
MAX_EXPERTS = 8
MAX_EXPERT_GROUPS = 4


def small_layout(recipe: Recipe, device: Device) -> Parallelism:
    """The recipe's kinds of parallelism, each on two ranks: at most 8, as experts use the dense layers' ranks.

    On a CPU experts are not split, because gloo cannot gather uneven numbers of tokens; the tensor-parallel ranks
    that shared each expert get different experts. A first or last stage with more, as many or fewer layers than the
    others has 2, 1 or 1 of them, and the others have 1, 1 or 2; twice that with virtual stages.

    Args:
        recipe: the full recipe.
        device: of the ranks.
    """
    parallel = recipe.parallelism
    update: dict[str, Any] = {
        name: min(getattr(parallel, name), MAX_DEGREE)
        for name in (
            "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
            "expert_model_parallel_size",
        )
    }  # fmt: skip
    inner = parallel.expert_tensor_parallel_size
    if recipe.model.num_moe_experts and device == "cuda":
        update["expert_tensor_parallel_size"] = inner and min(inner, MAX_DEGREE)
    elif recipe.model.num_moe_experts:
        update["expert_tensor_parallel_size"] = 1
        if update["tensor_model_parallel_size"] > 1:
            # Without expert parallelism megatron-core splits experts like the dense layers, which gloo cannot do.
            update["expert_model_parallel_size"] = MAX_DEGREE
    chunks = parallel.virtual_pipeline_model_parallel_size
    update["virtual_pipeline_model_parallel_size"] = chunks and MAX_DEGREE
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    if first or last:
        other = _other_layers(recipe)
        unit = MAX_DEGREE if chunks else 1
        update["num_layers_in_first_pipeline_stage"] = first and unit * (2 if first > (last or other) else 1)
        update["num_layers_in_last_pipeline_stage"] = last and unit * (2 if last > (first or other) else 1)
    return parallel.model_copy(update=update)


def small_model(recipe: Recipe, parallel: Parallelism) -> Model:
    """The model for the small layout `parallel`."""
    model = recipe.model
    ranks = parallel.tensor_model_parallel_size
    heads, groups = small_heads(model.num_attention_heads, model.num_query_groups, ranks)
    channels = model.kv_channels or model.hidden_size // model.num_attention_heads
    small = min(channels, MAX_HEAD_CHANNELS)
    width = model.hidden_size / (model.num_attention_heads * channels)
    hidden = heads * small if model.kv_channels is None else _even(width * heads * small, model.hidden_size)
    sequence = _sequence(model.seq_length, parallel)
    longest = model.max_position_embeddings
    layers = _layers(recipe, parallel)
    shrink = hidden / model.hidden_size
    vocabulary = max(MIN_BPE_VOCAB, min(model.vocab_size, MAX_VOCAB))
    step = min(model.make_vocab_size_divisible_by, 128)
    return model.model_copy(
        update={
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "kv_channels": None if model.kv_channels is None else small,
            "ffn_hidden_size": _scaled(model.ffn_hidden_size, shrink),
            "seq_length": sequence,
            # Twice the sequence if the recipe's table is longer than its sequence, so that it stays longer.
            "max_position_embeddings": None if longest is None else max(sequence, min(longest, 2 * sequence)),
            "rotary_percent": _rotary_percent(model, small),
            **_yarn(model, sequence, parallel),
            "vocab_size": vocabulary,
            "make_vocab_size_divisible_by": step * ranks if -(-vocabulary // step) * step % ranks else step,
            "transformer_impl": "local" if model.transformer_impl == "local" else "auto",
            "mtp_num_layers": model.mtp_num_layers and 1,
            **(_experts(model, parallel, layers, shrink) if model.num_moe_experts else {}),
            **(_latent(model, shrink) if model.multi_latent_attention else {}),
        }
    )


def small_heads(heads: int, groups: int | None, ranks: int) -> tuple[int, int | None]:
    """At most `MAX_HEADS` heads, divisible by `ranks`, with the same queries per group if that many heads
    allow it."""
    if groups is None or groups == heads:
        small = max(ranks, min(heads, MAX_HEADS) // ranks * ranks)
        return small, None if groups is None else small
    each = heads // groups
    if each > MAX_HEADS or (groups > 1 and 2 * each > MAX_HEADS):
        # Too many to keep the ratio: only keep whether there is one group or several.
        return MAX_HEADS, min(groups, 2)
    small_groups = max(ranks, min(groups, MAX_HEADS // each) // ranks * ranks)
    return small_groups * each, small_groups


def _layers(recipe: Recipe, parallel: Parallelism) -> int:
    """Layers for all stages: about `MAX_LAYERS`, at least one per chunk, counting embedding and loss if they count."""
    stages, chunks = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    if first or last:
        given = (first or 0) + (last or 0)
        if first and last:
            return given
        end = recipe.parallelism.num_layers_in_first_pipeline_stage
        end = end or recipe.parallelism.num_layers_in_last_pipeline_stage or 0
        return given + chunks * (2 if end < _other_layers(recipe) else 1)
    extra = parallel.account_for_embedding_in_pipeline_split + parallel.account_for_loss_in_pipeline_split
    if extra:
        return 2 * stages * chunks - extra
    pieces = stages * chunks
    return max(pieces, min(recipe.model.num_layers, MAX_LAYERS) // pieces * pieces)


def _other_layers(recipe: Recipe) -> int:
    """Layers of a stage without an explicit number; 0 if there is none."""
    parallel = recipe.parallelism
    given = (parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage)
    others = parallel.pipeline_model_parallel_size - sum(1 for number in given if number)
    return (recipe.model.num_layers - sum(number or 0 for number in given)) // others if others else 0


def _experts(model: Model, parallel: Parallelism, layers: int, shrink: float) -> dict[str, Any]:
    """At most `MAX_EXPERTS`, of which two are active if the recipe has more than one active."""
    number, shares = model.num_moe_experts or 1, parallel.expert_model_parallel_size
    small = max(shares, min(number, MAX_EXPERTS) // shares * shares)
    topk, groups, chosen = model.moe_router_topk, model.moe_router_num_groups, model.moe_router_group_topk
    if small != number:
        topk = min(topk, 2, small)
        if groups and chosen:
            every = chosen == groups
            groups = max(size for size in range(1, MAX_EXPERT_GROUPS + 1) if small % size == 0 and size <= groups)
            chosen = groups if every else max(1, groups // 2)
            topk = chosen  # one from each
    return {
        "num_moe_experts": small,
        "moe_router_topk": topk,
        "moe_router_pre_softmax": model.moe_router_pre_softmax or topk == 1,
        "moe_router_num_groups": groups,
        "moe_router_group_topk": chosen,
        "moe_ffn_hidden_size": _scaled(model.moe_ffn_hidden_size, shrink),
        "moe_shared_expert_intermediate_size": _scaled(model.moe_shared_expert_intermediate_size, shrink),
        "moe_layer_freq": _pattern(model.moe_layer_freq, layers),
    }


def _pattern(pattern: int | list[Any], layers: int) -> int | list[Any]:
    """Every n-th entry of a list, including both ends and both kinds of layers."""
    if isinstance(pattern, int):
        return pattern
    small = [pattern[index * (len(pattern) - 1) // max(layers - 1, 1)] for index in range(layers)]
    if 0 in pattern and 0 not in small:
        small[0] = 0
    if 1 in pattern and 1 not in small:
        small[-1] = 1
    return small


def _latent(model: Model, shrink: float) -> dict[str, Any]:
    return {
        "q_lora_rank": _scaled(model.q_lora_rank, shrink),
        "kv_lora_rank": _scaled(model.kv_lora_rank, shrink),
        "qk_head_dim": min(model.qk_head_dim, MAX_HEAD_CHANNELS),
        "qk_pos_emb_head_dim": min(model.qk_pos_emb_head_dim, MAX_ROTATED_CHANNELS),
        "v_head_dim": min(model.v_head_dim, MAX_HEAD_CHANNELS),
    }


def _sequence(length: int, parallel: Parallelism) -> int:
    """At most `MAX_SEQUENCE` tokens that context- and sequence-parallel ranks can share."""
    contexts = parallel.context_parallel_size
    shares = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    step = math.lcm(2 * contexts if contexts > 1 else 1, contexts * shares)
    return max(step, min(length, MAX_SEQUENCE) // step * step)


def _yarn(model: Model, sequence: int, parallel: Parallelism) -> dict[str, Any]:
    """The context before YaRN: as many times shorter as the sequence, in two chunks for each context-parallel rank."""
    step = 2 * parallel.context_parallel_size
    return {
        name: max(step, length * sequence // model.seq_length // step * step)
        for name, used in (
            ("yarn_original_max_position_embeddings", model.position_embedding_type == "yarn"),
            ("original_max_position_embeddings", model.multi_latent_attention and model.rope_type == "yarn"),
        )
        if used and (length := getattr(model, name)) is not None
    }


def _rotary_percent(model: Model, channels: int) -> float:
    """The recipe's share, or the nearest one that rotates a whole number of pairs of the smaller head."""
    rotated = int(channels * model.rotary_percent)
    rotates = model.position_embedding_type != "learned_absolute"
    if not rotates or model.multi_latent_attention or (rotated >= 2 and rotated % 2 == 0):
        return model.rotary_percent
    return max(2, 2 * (rotated // 2)) / channels


def _scaled(width: int | None, shrink: float) -> int | None:
    return None if width is None else max(8, round(width * shrink / 8) * 8)


def _even(width: float, limit: int) -> int:
    return max(8, min(MAX_HIDDEN, limit, round(width / 8) * 8))
