"""Collectives of a step that the layout needs, on one rank.

Payload is what a call is given on one rank: the tensor of an all-reduce, broadcast or message, the input of a
reduce-scatter or all-to-all, the output of an all-gather. Volume is what a rank then has to send, by the ring
algorithms (Thakur, Rabenseifner and Gropp, 2005): 2(N−1)/N of the payload for an all-reduce, (N−1)/N for the other
collectives among N ranks, all of it for a message. Messages are counted at their sender; groups of one rank are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from llmrecipes.plan.derive import Plan
from llmrecipes.plan.kernels import keeps_gathered, own_layers, recomputed_layers
from llmrecipes.plan.losses import in_kernels
from llmrecipes.plan.muon import collectives
from llmrecipes.plan.parameters import (
    WORDS,
    adapted_on_stage,
    count_adapters_on_rank,
    count_frozen_whole,
    count_trained_on_rank,
    layers_of,
    unsharded_adapters,
)
from llmrecipes.plan.sharding import OWNERS
from llmrecipes.recipe.derived.adapters import adapted, matrices
from llmrecipes.recipe.derived.freezing import frozen
from llmrecipes.recipe.engines import ENGINES, engine_name
from llmrecipes.recipe.sections.adversarial import passes
from llmrecipes.recipe.sections.zero import Zero

SMALL = 4096
"""Payload in bytes up to which a call is bookkeeping: token counts, norms, losses, tokens of each expert."""
_FP32 = 4


GroupName = Literal[
    "tensor", "context", "data", "pipeline", "embedding", "expert", "expert_tensor", "experts", "expert_data"
]
"""Who takes part: `data` are those that sum gradients, context-parallel ranks among them, `experts` all that share a
layer's experts, `embedding` the first and the last stage."""


class Call(NamedTuple):
    """A collective, or a message, of one rank."""

    kind: str
    ranks: int
    payload: int

    @property
    def volume(self) -> float:
        """Bytes that the rank sends."""
        share = (self.ranks - 1) / self.ranks
        return self.payload * {"message": 1.0, "all-reduce": 2 * share}.get(self.kind, share)


def calls(plan: Plan, stage: int) -> Iterator[Call]:
    """Calls of a step of a rank of one pipeline stage, without bookkeeping.

    Holds without the layers of multi-token prediction, capacity and label smoothing. Recomputed layers repeat the calls
    of their forward pass.

    Sources: tensor parallelism arXiv 1909.08053, section 3; sequence parallelism arXiv 2205.05198, section 4.2.2 (with
    the gather that its backward pass repeats instead of keeping the result); pipeline arXiv 2104.04473, section 2.2;
    sharded optimizer arXiv 1910.02054, section 7.2; experts arXiv 2006.16668, section 3.2; context arXiv 2407.21783,
    section 3.3.2.

    Args:
        stage: from 0.
    """
    once, at_end = list(_of_micro_batch(plan, stage)), list(_gradients(plan, stage))
    times = plan.num_microbatches * passes(plan.recipe.train)
    yield from (call for _, call in once * times + at_end if call.ranks > 1)


def counted(plan: Plan, stage: int) -> Counter[tuple[GroupName, Call]]:
    """How often each of `calls` happens in a step, with who takes part; as quick for many micro-batches as for one."""
    calls = Counter(call for call in _of_micro_batch(plan, stage) if call[1].ranks > 1)
    for call in calls:
        calls[call] *= plan.num_microbatches * passes(plan.recipe.train)
    calls.update(gradient for gradient in _gradients(plan, stage) if gradient[1].ranks > 1)
    return calls


def _of_micro_batch(plan: Plan, stage: int) -> Iterator[tuple[GroupName, Call]]:
    layout, s = plan.layout, plan.shape
    last = stage == layout.pipeline_model_parallel_size - 1
    modules = plan.recompute_modules
    for chunk, layers in enumerate(layout.layers_per_stage[stage]):
        first = layout.first_layer(stage, chunk)
        again = recomputed_layers(plan.recipe, layers)
        for number in range(layers):
            experts = s.moe_layers(first + number, first + number + 1) > 0
            # A full recomputation begins with the first layers of a chunk.
            twice = number < again
            yield from _in("context", _context(plan, again=twice or "core_attn" in modules))
            yield from _in("tensor", _attention(plan, again=twice, projected="mla_up_proj" in modules))
            if not experts:
                yield from _in("tensor", _split(plan, s.hidden_size, again=twice or "mlp" in modules))
                yield from _adapters(plan, experts=experts, again=twice)
                continue
            routed = twice or "moe" in modules
            if plan.shape.moe_shared_ffn_hidden_size:
                once = keeps_gathered(plan.recipe, plan.device)
                shared = _split(plan, s.hidden_size, again=routed or "shared_experts" in modules, once=once)
                yield from _in("tensor", shared)
            yield from _experts(plan, again=routed)
            yield from _adapters(plan, experts=experts, again=twice)
    if stage == 0:
        yield from _in("tensor", _embedding(plan))
    if last:
        yield from _in("tensor", _output(plan))
    yield from _in("pipeline", _messages(plan, stage))


def _in(group: GroupName, calls: Iterable[Call]) -> Iterator[tuple[GroupName, Call]]:
    yield from ((group, call) for call in calls)


def _element(plan: Plan) -> int:
    return 4 if plan.recipe.train.precision == "fp32" else 2


def _tokens(plan: Plan) -> int:
    """Tokens of a micro-batch on one context-parallel rank."""
    recipe = plan.recipe
    return recipe.layout.micro_batch_size * recipe.model.seq_length // plan.layout.context_parallel_size


def _activations(plan: Plan, width: int | None = None) -> int:
    """Bytes of a micro-batch on one context-parallel rank: of the residual stream, or of another width."""
    return _element(plan) * _tokens(plan) * (width or plan.shape.hidden_size)


def _attention(plan: Plan, *, again: bool, projected: bool) -> Iterator[Call]:
    """Products into and out of attention; `projected`: queries, keys and values of latent attention are recomputed."""
    s = plan.shape
    model = plan.recipe.model
    layout = plan.layout
    if not model.multi_latent_attention:
        yield from _split(plan, s.hidden_size, again=again)
        return
    # On a GPU the down-projections are whole on each rank, and so is the shared key; its positions are gathered.
    yield from _columns(plan, model.q_lora_rank or s.hidden_size, again=again or projected)
    yield from _rows(plan, again=again)
    yield from _columns(plan, model.kv_lora_rank, again=again or projected)
    if own_layers(plan.recipe, plan.device):
        yield from _split_down(plan, again=again)
    if layout.sequence_parallel:
        size = _activations(plan, model.qk_pos_emb_head_dim)
        yield from [Call("all-gather", layout.tensor_model_parallel_size, size)] * (1 + again)
        yield Call("reduce-scatter", layout.tensor_model_parallel_size, size)


def _split_down(plan: Plan, *, again: bool) -> Iterator[Call]:
    """Down-projections of latent attention that are cut by columns: their inputs, and their results put together."""
    model = plan.recipe.model
    ranks = plan.layout.tensor_model_parallel_size
    for width in (model.q_lora_rank, model.kv_lora_rank + model.qk_pos_emb_head_dim):
        if width:
            yield from _columns(plan, plan.shape.hidden_size, again=again)
            # Cut by tokens afterwards under sequence parallelism: gathered on the way back.
            number = 1 + again + plan.layout.sequence_parallel
            yield from [Call("all-gather", ranks, _activations(plan, width))] * number
    if not plan.layout.sequence_parallel:
        yield Call("all-reduce", ranks, _activations(plan, model.qk_pos_emb_head_dim))


def _split(plan: Plan, width: int, *, again: bool, once: bool = False) -> Iterator[Call]:
    """A matrix cut by columns, of inputs of some width that may be gathered only once, and one cut by rows, back to the
    residual stream."""
    yield from _columns(plan, width, again=again, trained=False if once else None)
    yield from _rows(plan, again=again)


def _rows(plan: Plan, *, again: bool) -> Iterator[Call]:
    ranks = plan.layout.tensor_model_parallel_size
    size = _activations(plan)
    if plan.layout.sequence_parallel:
        yield from [Call("reduce-scatter", ranks, size)] * (1 + again)
        yield Call("all-gather", ranks, size)
    else:
        yield from [Call("all-reduce", ranks, size)] * (1 + again)


def _columns(plan: Plan, width: int, *, again: bool, trained: bool | None = None) -> Iterator[Call]:
    ranks = plan.layout.tensor_model_parallel_size
    size = _activations(plan, width)
    # For the gradient of the matrix inputs are gathered once more.
    trained = plan.recipe.lora is None if trained is None else trained
    if plan.layout.sequence_parallel:
        yield from [Call("all-gather", ranks, size)] * (1 + trained + again)
        yield Call("reduce-scatter", ranks, size)
    else:
        yield Call("all-reduce", ranks, size)


def _adapters(plan: Plan, *, experts: bool, again: bool) -> Iterator[tuple[GroupName, Call]]:
    """Adapters of a layer: what is between their two matrices, as wide as their rank."""
    lora = plan.recipe.lora
    layout = plan.layout
    if lora is None:
        return
    ranks = layout.tensor_model_parallel_size
    size = _activations(plan, lora.rank)
    for matrix in adapted(lora, plan.recipe.model, plan.shape, experts=experts):
        if matrix.of_experts:
            # Experts exchange tokens outside: gradients of what their ranks have all of are summed.
            number = plan.shape.num_moe_experts // layout.expert_model_parallel_size
            whole = _element(plan) * unsharded_adapters(lora, [matrix])
            summed = Call("all-reduce", layout.expert_tensor_parallel_size, whole)
            yield from _in("expert_tensor", [summed] * number)
        elif matrix.by_columns:
            yield from _in("tensor", _columns(plan, lora.rank, again=again, trained=True))
        elif layout.sequence_parallel:
            yield from _in("tensor", [Call("reduce-scatter", ranks, size)] * (1 + again))
            yield "tensor", Call("all-gather", ranks, size)
        else:
            yield from _in("tensor", [Call("all-reduce", ranks, size)] * (1 + again))


def _embedding(plan: Plan) -> Iterator[Call]:
    ranks = plan.layout.tensor_model_parallel_size
    size = _activations(plan)
    if plan.recipe.lora is not None:
        # A frozen one has no gradient.
        whole = plan.recipe.model.position_embedding_type == "learned_absolute" or not plan.layout.sequence_parallel
        yield Call("all-reduce" if whole else "reduce-scatter", ranks, size)
    elif not plan.layout.sequence_parallel:
        yield Call("all-reduce", ranks, size)
    elif plan.recipe.model.position_embedding_type == "learned_absolute":
        # Positions are added to whole sequences, which are cut afterwards.
        yield from (Call("all-reduce", ranks, size), Call("all-gather", ranks, size))
    else:
        yield from (Call("reduce-scatter", ranks, size), Call("all-gather", ranks, size))


def _output(plan: Plan) -> Iterator[Call]:
    ranks = plan.layout.tensor_model_parallel_size
    size = _activations(plan)
    if plan.loss_chunk_tokens:
        yield from _output_in_chunks(plan)
        return
    if plan.layout.sequence_parallel:
        yield from [Call("all-gather", ranks, size)] * (1 + (plan.recipe.lora is None))
        yield Call("reduce-scatter", ranks, size)
    else:
        yield Call("all-reduce", ranks, size)
    if in_kernels(plan.recipe, plan.device):
        yield Call("all-gather", ranks, 2 * _FP32 * ranks * _tokens(plan))
        return
    # Largest logit, logit of the label, and sum of the exponentials, for each token.
    yield from [Call("all-reduce", ranks, _FP32 * _tokens(plan))] * 3


def _output_in_chunks(plan: Plan) -> Iterator[Call]:
    """Tokens are gathered once; in fp16, whose gradients are computed in the backward pass, once more."""
    ranks = plan.layout.tensor_model_parallel_size
    size = _activations(plan)
    tokens = _tokens(plan)
    if plan.layout.sequence_parallel:
        yield from [Call("all-gather", ranks, size)] * (1 + (plan.recipe.train.precision == "fp16"))
        yield Call("reduce-scatter", ranks, size)
    else:
        yield Call("all-reduce", ranks, size)
    # Each rank's log-sum-exp and logit of the label, for each token.
    for start in range(0, tokens, plan.loss_chunk_tokens):
        yield Call("all-gather", ranks, 2 * _FP32 * ranks * min(plan.loss_chunk_tokens, tokens - start))


def _context(plan: Plan, *, again: bool) -> Iterator[Call]:
    s = plan.shape
    ranks = plan.layout.context_parallel_size
    if not own_layers(plan.recipe, plan.device):
        # TransformerEngine's ring: keys and values go round, and in the backward pass their gradients too.
        width = (s.key_size + s.value_size) // plan.layout.tensor_model_parallel_size
        size = _element(plan) * _tokens(plan) * width
        yield from [Call("message", ranks, size)] * ((3 + again) * (ranks - 1))
        return
    tokens = plan.recipe.layout.micro_batch_size * s.seq_length
    for width in (s.key_size, s.value_size):
        size = _element(plan) * tokens * width // plan.layout.tensor_model_parallel_size
        yield from [Call("all-gather", ranks, size)] * (1 + again)
        yield Call("reduce-scatter", ranks, size)


def _experts(plan: Plan, *, again: bool) -> Iterator[tuple[GroupName, Call]]:
    layout = plan.layout
    model = plan.recipe.model
    inner = layout.expert_tensor_parallel_size
    ranks = layout.expert_model_parallel_size * inner
    share = layout.tensor_model_parallel_size if layout.sequence_parallel else 1
    size = _activations(plan) // share
    tokens = _tokens(plan) // share
    score = {"fp32": 4, "fp64": 8, None: _element(plan)}[model.moe_router_dtype]
    weighted = tokens * plan.shape.hidden_size * score  # results are summed in the precision of the scores
    if model.moe_token_dispatcher_type == "allgather":  # noqa: S105 - no password
        # Tokens and their probabilities for all experts there, results back; the backward pass the other way round.
        probabilities = ranks * tokens * (model.num_moe_experts or 0)
        for part in (ranks * size, score * probabilities):
            yield from _in("experts", [Call("all-gather", ranks, part)] * (1 + again))
            yield "experts", Call("reduce-scatter", ranks, part)
        yield from _in("experts", [Call("reduce-scatter", ranks, ranks * weighted)] * (1 + again))
        yield "experts", Call("all-gather", ranks, ranks * weighted)
        # Which experts, one byte each.
        yield from _in("experts", [Call("all-gather", ranks, probabilities)] * (1 + again))
        return
    # How many tokens each rank has for each expert, as 64-bit integers.
    yield from _in("experts", [Call("all-gather", ranks, 8 * ranks * (model.num_moe_experts or 0))] * (1 + again))
    visits = model.moe_router_topk
    # Tokens there and results back, forward and backward; each token's probability there, and its gradient back.
    for part, number in ((size, 4 + 2 * again), (score * tokens, 2 + again)):
        yield from _in("expert", [Call("all-to-all", layout.expert_model_parallel_size, part * visits)] * number)
    # Ranks that share an expert have each other's tokens, and sum the results.
    for part in (size, score * tokens):
        yield from _in("expert_tensor", [Call("all-gather", inner, inner * part * visits)] * (1 + again))
        yield "expert_tensor", Call("reduce-scatter", inner, inner * part * visits)
    yield from _in("expert_tensor", [Call("reduce-scatter", inner, inner * weighted * visits)] * (1 + again))
    yield "expert_tensor", Call("all-gather", inner, inner * weighted * visits)


def _messages(plan: Plan, stage: int) -> Iterator[Call]:
    layout = plan.layout
    stages = plan.layout.pipeline_model_parallel_size
    size = _activations(plan) // (layout.tensor_model_parallel_size if layout.sequence_parallel else 1)
    chunks = layout.virtual_pipeline_model_parallel_size
    # Every chunk sends its output on, but for the very last, and a gradient back, but for the very first.
    forward = chunks - (stage == stages - 1)
    backward = chunks - (stage == 0)
    yield from [Call("message", stages, size)] * (forward + backward)


def _gradients(plan: Plan, stage: int) -> Iterator[tuple[GroupName, Call]]:
    layout = plan.layout
    s = plan.shape
    model = plan.recipe.model
    parallel = plan.recipe.layout
    lora = plan.recipe.lora
    parameters = count_trained_on_rank(plan.recipe, s, layout, stage, plan.device)
    if lora is not None:
        parameters = count_adapters_on_rank(lora, model, s, layout, stage)
    reduced = 4 if plan.recipe.train.grad_reduce_in_fp32 else _element(plan)
    zero = plan.recipe.layout.zero if ENGINES[engine_name(plan.recipe)].all_of_zero else None
    replicas: tuple[tuple[GroupName, int, int], ...] = (
        ("data", parameters.dense, layout.data_parallel_size * layout.context_parallel_size),
        ("expert_data", parameters.experts, layout.expert_data_parallel_size),
    )
    for group, number, ranks in replicas:
        if number and zero is not None and zero.stage:
            yield from _in(group, _sharded(plan, zero, ranks, number, max(reduced, _element(plan))))
        elif number and parallel.use_distributed_optimizer:
            yield group, Call("reduce-scatter", ranks, reduced * number)
            yield group, Call("all-gather", ranks, _element(plan) * number)
        elif number:
            yield group, Call("all-reduce", ranks, reduced * number)
    yield from _rounding(plan, stage)
    yield from _orthogonalized(plan, stage)
    stages = layout.pipeline_model_parallel_size
    tensor = layout.tensor_model_parallel_size
    if lora is not None:
        if layout.sequence_parallel:
            dense = (matrix for matrix in adapted_on_stage(lora, model, s, layout, stage) if not matrix.of_experts)
            yield "tensor", Call("all-reduce", tensor, reduced * unsharded_adapters(lora, dense))
        return
    shared = (model.share_embeddings_and_output_weights or s.mtp_num_layers) and WORDS not in frozen(plan.recipe)
    if stages > 1 and shared and stage in (0, stages - 1):
        yield "embedding", Call("all-reduce", 2, reduced * s.vocab_size * s.hidden_size // tensor)
    # DeepSpeed cuts gradients once a backward pass has them: they are summed before, in each micro-batch, as they are.
    times, width = (1, reduced) if zero is None else (plan.num_microbatches, _element(plan))
    if layout.sequence_parallel:
        # What saw only this rank's tokens: norms and the router, and the biases of matrices cut by rows.
        layers = sum(layout.layers_per_stage[stage])
        final = _norm(plan, s.hidden_size) if stage == layout.final_norm(s.mtp_num_layers)[0] else 0
        whole = layers * _whole(plan) + _whole_of_mlps(plan, stage) + final
        whole -= count_frozen_whole(plan.recipe, s, layout, stage)
        yield from _in("tensor", [Call("all-reduce", tensor, width * whole)] * times)
    elif model.qk_layernorm and not model.multi_latent_attention:
        heads = 2 * _norm(plan, s.query_channels)
        whole = sum(layout.layers_per_stage[stage]) * heads
        whole -= count_frozen_whole(plan.recipe, s, layout, stage, ("q_layernorm.", "k_layernorm."))
        yield from _in("tensor", [Call("all-reduce", tensor, width * whole)] * times)


def _rounding(plan: Plan, stage: int) -> Iterator[tuple[GroupName, Call]]:
    """Largest values of the rows that ranks have parts of (`qat`), once a step; groups of int4 are not split."""
    recipe, layout, s = plan.recipe, plan.layout, plan.shape
    if recipe.qat is None or recipe.qat.group is not None:
        return
    local = (s.num_moe_experts or 0) // layout.expert_model_parallel_size
    for number in layers_of(layout, stage):
        for matrix in matrices(recipe.model, s, experts=s.moe_layers(number, number + 1) > 0):
            if matrix.by_columns:
                continue
            if matrix.of_experts:
                one = Call("all-reduce", layout.expert_tensor_parallel_size, _FP32 * matrix.height)
                yield from _in("expert_tensor", [one] * local)
            else:
                yield "tensor", Call("all-reduce", layout.tensor_model_parallel_size, _FP32 * matrix.height)


def _orthogonalized(plan: Plan, stage: int) -> Iterator[tuple[GroupName, Call]]:
    """Matrices that tensor-parallel ranks put together, or multiply together, for the update of Muon."""
    recipe, layout, s = plan.recipe, plan.layout, plan.shape
    if recipe.optimizer.optimizer != "muon":
        return
    local = (s.num_moe_experts or 0) // layout.expert_model_parallel_size
    for matrix, ranks, kind, payload in collectives(recipe, s, layout, plan.device, stage):
        group: GroupName = "expert_tensor" if matrix.of_experts else "tensor"
        yield from _in(group, [Call(kind, ranks, payload)] * (local if matrix.of_experts else 1))


def _sharded(plan: Plan, zero: Zero, ranks: int, number: int, reduced: int) -> Iterator[Call]:
    """ZeRO by DeepSpeed: stages 2 and 3 reduce after each micro-batch, stage 3 gathers before each pass.

    What stage 3 keeps for its next use (`stage3_max_reuse_distance`) it gathers less often.
    """
    weights = Call("all-gather", ranks, _element(plan) * number)
    if zero.stage == 3:
        yield from [weights, weights, Call("reduce-scatter", ranks, reduced * number)] * plan.num_microbatches
        return
    whole = ranks > OWNERS or (zero.stage == 1 and plan.recipe.train.precision == "bf16" and reduced == _FP32)
    gradients = Call("all-reduce" if whole else "reduce", ranks, reduced * number)
    yield from [gradients] * (plan.num_microbatches if zero.stage == 2 else 1)
    yield weights


def _norm(plan: Plan, width: int) -> int:
    return width * (2 if plan.recipe.model.normalization == "LayerNorm" else 1)


def _whole(plan: Plan) -> int:
    """Parameters of a layer that each tensor-parallel rank has all of, without its MLP."""
    s = plan.shape
    model = plan.recipe.model
    size = 2 * _norm(plan, s.hidden_size) + (s.hidden_size if model.add_bias_linear else 0)
    if not model.multi_latent_attention:
        return size + (2 * _norm(plan, s.query_channels) if model.qk_layernorm else 0)
    ranks = [rank for rank in (model.q_lora_rank, model.kv_lora_rank) if rank]
    down = s.hidden_size * (sum(ranks) + model.qk_pos_emb_head_dim)
    return size + down + (sum(_norm(plan, rank) for rank in ranks) if model.qk_layernorm else 0)


def _whole_of_mlps(plan: Plan, stage: int) -> int:
    """The same of a stage's MLPs: routers, and biases of those without experts."""
    layout, s = plan.layout, plan.shape
    with_experts = 0
    for chunk, layers in enumerate(layout.layers_per_stage[stage]):
        first = layout.first_layer(stage, chunk)
        with_experts += s.moe_layers(first, first + layers)
    bias = plan.recipe.model.add_bias_linear
    dense = sum(layout.layers_per_stage[stage]) - with_experts
    return with_experts * s.num_moe_experts * (s.hidden_size + bias) + dense * bias * s.hidden_size
