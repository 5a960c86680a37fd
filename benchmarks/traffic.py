"""Collectives of a step: counted where torch hands them to the process group, and what the layout says they should be.

Payload is what a call is given on one rank: the tensor of an all-reduce, broadcast or message, the input of a
reduce-scatter or all-to-all, the output of an all-gather. Volume is what a rank then has to send, by the ring
algorithms (Thakur, Rabenseifner and Gropp, 2005): 2(N−1)/N of the payload for an all-reduce, (N−1)/N for the other
collectives among N ranks, all of it for a message. Messages are counted at their sender; groups of one rank are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmrecipes.plan.derive import Plan
from llmrecipes.plan.parameters import count_on_rank
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.shape import shape

SMALL = 4096
"""Payload in bytes up to which a call is bookkeeping: token counts, norms, losses, tokens of each expert."""
FP32 = 4
# Operators of torch.distributed, with the argument that is the payload.
OPERATORS = {
    "allreduce_": ("all-reduce", 0),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "_allgather_base_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "allreduce_coalesced_": ("all-reduce", 0),
    "allgather_into_tensor_coalesced_": ("all-gather", 0),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "alltoall_base_": ("all-to-all", 1),
    "send": ("message", 0),
}
IGNORED = {"recv_", "barrier"}


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


class Recorder(TorchDispatchMode):
    """Records every call inside the block, of the forward and the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        name = name.partition(".")[0]
        if namespace == "c10d" and name not in IGNORED:
            if name not in OPERATORS:
                raise NotImplementedError(f"c10d::{name} is not counted yet")
            self._record(name, func, args)
        return func(*args, **(kwargs or {}))

    def _record(self, name: str, func: Any, args: Any) -> None:
        kind, position = OPERATORS[name]
        names = [argument.name for argument in func._schema.arguments]
        group = torch.distributed.ProcessGroup.unbox(args[names.index("process_group")])
        tensors = args[position]
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if group.size() > 1:
            self.calls.append(Call(kind, group.size(), sum(tensor.nbytes for tensor in tensors)))


def expected(recipe: Recipe, plan: Plan) -> Counter[Call]:
    """Every rank's calls of one step in fp32, without bookkeeping, summed over all ranks.

    Holds for models without latent attention, multi-token prediction, shared experts, capacity, recomputation and label
    smoothing. Sources: tensor parallelism arXiv 1909.08053, section 3; sequence parallelism arXiv 2205.05198, section
    4.2.2 (with the gather that its backward pass repeats instead of keeping the result); pipeline arXiv 2104.04473,
    section 2.2; sharded optimizer arXiv 1910.02054, section 7.2; experts arXiv 2006.16668, section 3.2; context arXiv
    2407.21783, section 3.3.2.
    """
    layout = plan.layout
    replicas = layout.tensor_model_parallel_size * layout.context_parallel_size * layout.data_parallel_size
    calls: Counter[Call] = Counter()
    for stage in range(layout.pipeline_model_parallel_size):
        for call in _of_rank(recipe, plan, stage):
            if call.ranks > 1:
                calls[call] += replicas
    return calls


def _of_rank(recipe: Recipe, plan: Plan, stage: int) -> Iterator[Call]:
    layout, model = plan.layout, recipe.model
    last = stage == layout.pipeline_model_parallel_size - 1
    for _ in range(plan.num_microbatches):
        for chunk, layers in enumerate(layout.layers_per_stage[stage]):
            first = layout.first_layer(stage, chunk)
            with_experts = shape(model).moe_layers(first, first + layers)
            for _ in range(layers):
                yield from _context(recipe, plan)
            # Attention and MLP each have a matrix cut by columns and one cut by rows; experts have none.
            for _ in range(2 * layers - with_experts):
                yield from _tensor(recipe, plan)
            for _ in range(with_experts):
                yield from _experts(recipe, plan)
        if stage == 0:
            yield from _embedding(recipe, plan)
        if last:
            yield from _output(recipe, plan)
        yield from _messages(recipe, plan, stage)
    yield from _gradients(recipe, plan, stage)


def _activations(recipe: Recipe, plan: Plan) -> int:
    """Bytes of the residual stream of a micro-batch on one context-parallel rank."""
    tokens = recipe.train.micro_batch_size * recipe.model.seq_length // plan.layout.context_parallel_size
    return FP32 * tokens * recipe.model.hidden_size


def _tensor(recipe: Recipe, plan: Plan) -> Iterator[Call]:
    ranks, size = plan.layout.tensor_model_parallel_size, _activations(recipe, plan)
    if plan.layout.sequence_parallel:
        yield from [Call("all-gather", ranks, size)] * 3 + [Call("reduce-scatter", ranks, size)] * 2
    else:
        yield from [Call("all-reduce", ranks, size)] * 2


def _embedding(recipe: Recipe, plan: Plan) -> Iterator[Call]:
    ranks, size = plan.layout.tensor_model_parallel_size, _activations(recipe, plan)
    if not plan.layout.sequence_parallel:
        yield Call("all-reduce", ranks, size)
    elif recipe.model.position_embedding_type == "learned_absolute":
        # Positions are added to whole sequences, which are cut afterwards.
        yield from (Call("all-reduce", ranks, size), Call("all-gather", ranks, size))
    else:
        yield from (Call("reduce-scatter", ranks, size), Call("all-gather", ranks, size))


def _output(recipe: Recipe, plan: Plan) -> Iterator[Call]:
    ranks, size = plan.layout.tensor_model_parallel_size, _activations(recipe, plan)
    if plan.layout.sequence_parallel:
        yield from [Call("all-gather", ranks, size)] * 2 + [Call("reduce-scatter", ranks, size)]
    else:
        yield Call("all-reduce", ranks, size)
    # Largest logit, logit of the label, and sum of the exponentials, for each token.
    yield from [Call("all-reduce", ranks, size // recipe.model.hidden_size)] * 3


def _context(recipe: Recipe, plan: Plan) -> Iterator[Call]:
    s, ranks = shape(recipe.model), plan.layout.context_parallel_size
    tokens = recipe.train.micro_batch_size * recipe.model.seq_length
    for width in (s.key_size, s.value_size):
        size = FP32 * tokens * width // plan.layout.tensor_model_parallel_size
        yield from (Call("all-gather", ranks, size), Call("reduce-scatter", ranks, size))


def _experts(recipe: Recipe, plan: Plan) -> Iterator[Call]:
    layout, model = plan.layout, recipe.model
    ranks = layout.expert_model_parallel_size * layout.expert_tensor_parallel_size
    size = _activations(recipe, plan) // (layout.tensor_model_parallel_size if layout.sequence_parallel else 1)
    if model.moe_token_dispatcher_type == "allgather":  # noqa: S105 - no password
        # Tokens and their probabilities for all experts there, results back; the backward pass the other way round.
        probabilities = size // model.hidden_size * (model.num_moe_experts or 0)
        for part in (ranks * size, ranks * probabilities):
            yield from (Call("all-gather", ranks, part), Call("reduce-scatter", ranks, part))
        yield from (Call("reduce-scatter", ranks, ranks * size), Call("all-gather", ranks, ranks * size))
        yield Call("all-gather", ranks, ranks * probabilities // FP32)  # which experts, one byte each
        return
    sent = size * model.moe_router_topk
    # Tokens there and results back, forward and backward; each token's probability there, and its gradient back.
    yield from [Call("all-to-all", ranks, sent)] * 4 + [Call("all-to-all", ranks, sent // model.hidden_size)] * 2


def _messages(recipe: Recipe, plan: Plan, stage: int) -> Iterator[Call]:
    layout, stages = plan.layout, plan.layout.pipeline_model_parallel_size
    size = _activations(recipe, plan) // (layout.tensor_model_parallel_size if layout.sequence_parallel else 1)
    chunks = layout.virtual_pipeline_model_parallel_size
    # Every chunk sends its output on, but for the very last, and a gradient back, but for the very first.
    forward, backward = chunks - (stage == stages - 1), chunks - (stage == 0)
    yield from [Call("message", stages, size)] * (forward + backward)


def _gradients(recipe: Recipe, plan: Plan, stage: int) -> Iterator[Call]:
    layout, s = plan.layout, shape(recipe.model)
    parameters = count_on_rank(recipe.model, plan.shape, layout, stage, plan.device)
    chunks = layout.virtual_pipeline_model_parallel_size
    for number, ranks in (
        (parameters.dense, layout.data_parallel_size * layout.context_parallel_size),
        (parameters.experts, layout.expert_data_parallel_size),
    ):
        if number == 0:
            continue
        size = FP32 * number // chunks
        sharded = recipe.parallelism.use_distributed_optimizer
        kinds = ("reduce-scatter", "all-gather") if sharded else ("all-reduce",)
        yield from (Call(kind, ranks, size) for kind in kinds for _ in range(chunks))
    stages, tensor = layout.pipeline_model_parallel_size, layout.tensor_model_parallel_size
    if stages > 1 and recipe.model.share_embeddings_and_output_weights and stage in (0, stages - 1):
        yield Call("all-reduce", 2, FP32 * s.vocab_size * s.hidden_size // tensor)
    if layout.sequence_parallel:
        # Norms and the router saw only this rank's tokens, and so did the biases of matrices cut by rows.
        layers = sum(layout.layers_per_stage[stage])
        norm = s.hidden_size * (2 if recipe.model.normalization == "LayerNorm" else 1)
        each = 2 * norm + (2 * s.hidden_size if recipe.model.add_bias_linear else 0) + s.num_moe_experts * s.hidden_size
        yield Call("all-reduce", tensor, FP32 * (layers * each + (norm if stage == stages - 1 else 0)))
