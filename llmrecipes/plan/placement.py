"""Shares of each rank: stage, layers, heads, vocabulary rows, tokens, experts and sequences of the batch."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from llmrecipes.hardware.cluster import Cluster, DetectedGpu
from llmrecipes.plan.derive import num_microbatches
from llmrecipes.plan.layout import Layout, layout
from llmrecipes.recipe.derived.shape import Shape, shape
from llmrecipes.recipe.schema import Recipe

Range = tuple[int, int]
"""Start and end, the end excluded."""


@dataclass(frozen=True)
class Placement:
    """Shares of one rank; all indices start at 0, and the end of a `Range` is excluded.

    `layers` has one range for each chunk of virtual stages. `vocabulary` are the rows of the padded embedding, on ranks
    with the embedding (`has_embedding`) or the output layer (`has_output`); empty on the others. `tokens` are the parts
    of every sequence whose attention queries are on this rank, `residual_tokens` those whose residual stream is: fewer
    under sequence parallelism. `experts` are those of each MoE layer; a dense model has none. `sequences` are those of
    the first global batch, one range for each micro-batch.
    """

    rank: int
    tensor: int
    context: int
    data: int
    stage: int
    expert: int
    expert_tensor: int
    expert_data: int
    layers: tuple[Range, ...]
    query_heads: Range
    query_groups: Range
    has_embedding: bool
    has_output: bool
    vocabulary: Range
    tokens: tuple[Range, ...]
    residual_tokens: tuple[Range, ...]
    experts: Range
    sequences: tuple[Range, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def place(recipe: Recipe, world_size: int, cluster: Cluster | None = None) -> tuple[Layout, tuple[Placement, ...]]:
    """The layout on a number of GPUs, of a cluster or regardless of this machine, and every rank's share.

    Ranks are in Megatron's order `tp-cp-ep-dp-pp`: tensor-parallel ranks are adjacent, stages are farthest apart.
    Experts divide the ranks of a stage separately, in the same order (arXiv 2504.14960).

    Raises:
        UserError: the degrees do not make up that number of ranks, or the batch does not divide over them.
    """
    tensor = recipe.layout.tensor_model_parallel_size
    gpus = (DetectedGpu("any", 0, 0, None),) * (
        -(-world_size // tensor) * tensor
    )  # a node that tensor-parallel ranks fill
    somewhere = Cluster(gpus, cpu_cores=0, memory_bytes=0, memory_available_bytes=0, disk_free_bytes=0)
    laid_out = layout(recipe, world_size, cluster or somewhere)
    micro_batches = num_microbatches(recipe, laid_out)
    sizes = shape(recipe.model)
    return laid_out, tuple(_share_of(recipe, sizes, laid_out, micro_batches, rank) for rank in range(world_size))


def groups(laid_out: Layout) -> dict[str, list[tuple[int, ...]]]:
    """The ranks of each process group, by Megatron's group name.

    Gradients of dense parameters are reduced over `dp-cp`, those of experts over `expert_dp`.
    """
    ranks = [_coordinates(laid_out, rank) for rank in range(laid_out.world_size)]
    free = {
        "tp": ("tensor",),
        "cp": ("context",),
        "dp": ("data",),
        "dp-cp": ("data", "context"),
        "pp": ("stage",),
    }
    free_of_experts = {"ep": ("expert",), "expert_tp": ("expert_tensor",), "expert_dp": ("expert_data",)}
    dense = ("tensor", "context", "data", "stage")
    experts = ("expert_tensor", "expert", "expert_data", "stage")
    members = {name: _same(ranks, [axis for axis in dense if axis not in axes]) for name, axes in free.items()}
    for name, axes in free_of_experts.items():
        members[name] = _same(ranks, [axis for axis in experts if axis not in axes])
    return members


def _same(ranks: list[dict[str, int]], axes: list[str]) -> list[tuple[int, ...]]:
    """Ranks grouped by their coordinates on these axes."""
    together = defaultdict(list)
    for rank, at in enumerate(ranks):
        together[tuple(at[axis] for axis in axes)].append(rank)
    return sorted(tuple(group) for group in together.values())


def _coordinates(laid_out: Layout, rank: int) -> dict[str, int]:
    dense = {
        "tensor": laid_out.tensor_model_parallel_size,
        "context": laid_out.context_parallel_size,
        "data": laid_out.data_parallel_size,
        "stage": laid_out.pipeline_model_parallel_size,
    }
    experts = {
        "expert_tensor": laid_out.expert_tensor_parallel_size,
        "expert": laid_out.expert_model_parallel_size,
        "expert_data": laid_out.expert_data_parallel_size,
    }
    return {**_digits(rank, dense), **_digits(rank, experts)}


def _digits(rank: int, sizes: dict[str, int]) -> dict[str, int]:
    """A rank's coordinates; the first varies fastest."""
    digits = {}
    for name, size in sizes.items():
        rank, digits[name] = divmod(rank, size)
    return digits


def _share_of(recipe: Recipe, s: Shape, laid_out: Layout, micro_batches: int, rank: int) -> Placement:
    at = _coordinates(laid_out, rank)
    tensor = laid_out.tensor_model_parallel_size
    stage = at["stage"]
    micro = recipe.layout.micro_batch_size
    starts = [laid_out.first_layer(stage, chunk) for chunk in range(laid_out.virtual_pipeline_model_parallel_size)]
    last = stage == laid_out.pipeline_model_parallel_size - 1
    embedding = stage == 0 or (last and s.mtp_num_layers > 0)
    output = last
    tokens = _tokens(s.seq_length, laid_out.context_parallel_size, at["context"])
    return Placement(
        rank=rank,
        **at,
        layers=tuple(
            (start, start + number) for start, number in zip(starts, laid_out.layers_per_stage[stage], strict=True)
        ),
        query_heads=_share(s.num_attention_heads, tensor, at["tensor"]),
        query_groups=_share(s.num_query_groups, tensor, at["tensor"]),
        has_embedding=embedding,
        has_output=output,
        vocabulary=_share(s.vocab_size, tensor, at["tensor"]) if embedding or output else (0, 0),
        tokens=tokens,
        residual_tokens=_slice(tokens, tensor, at["tensor"]) if laid_out.sequence_parallel else tokens,
        experts=_share(s.num_moe_experts, laid_out.expert_model_parallel_size, at["expert"]),
        sequences=tuple(
            (number * micro, (number + 1) * micro)
            for number in range(at["data"], micro_batches * laid_out.data_parallel_size, laid_out.data_parallel_size)
        ),
    )


def _share(size: int, ranks: int, rank: int) -> Range:
    """A rank's even, contiguous share of `size` items."""
    return size * rank // ranks, size * (rank + 1) // ranks


def _tokens(length: int, ranks: int, rank: int) -> tuple[Range, ...]:
    """Positions of a context-parallel rank: chunks `rank` and 2·`ranks` − 1 − `rank` (arXiv 2407.21783, 3.3.2)."""
    if ranks == 1:
        return ((0, length),)
    return _share(length, 2 * ranks, rank), _share(length, 2 * ranks, 2 * ranks - 1 - rank)


def _slice(parts: tuple[Range, ...], ranks: int, rank: int) -> tuple[Range, ...]:
    """A rank's even share of the concatenated parts."""
    first, last = _share(sum(end - start for start, end in parts), ranks, rank)
    cut, passed = [], 0
    for start, end in parts:
        low, high = max(first - passed, 0), min(last - passed, end - start)
        if low < high:
            cut.append((start + low, start + high))
        passed += end - start
    return tuple(cut)
