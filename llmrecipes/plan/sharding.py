"""Weights, gradients and optimizer state of a rank that shards them with ZeRO, and what it offloads.

The shares are those of the paper (arXiv 1910.02054, section 5); copies and buffers are those of DeepSpeed's
stage_1_and_2.py and stage3.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import Cluster
from llmrecipes.recipe.derived.degrees import divisors
from llmrecipes.recipe.derived.weight_names import weights
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.zero import Zero

# Two moments and the fp32 weights that are updated; in fp32 these are a copy, at every stage.
_STATE = 12
# Sub-groups of optimizer state that are in host memory at a time with NVMe: DeepSpeed's `buffer_count`.
_NVME_BUFFERS = 4
# Elements that stage 1 in bf16 with fp32 gradients copies to reduce them together: `MEMORY_OPT_ALLREDUCE_SIZE`.
_REDUCED_TOGETHER = 500_000_000
OWNERS = 64
"""Data-parallel ranks up to which stages 1 and 2 reduce each gradient to its owner, half the bytes of an all-reduce.

That is a collective for every owner, and each passes through all ranks: its latency grows with the square of their
number, while the bytes saved do not.
"""


@dataclass(frozen=True)
class States:
    """Bytes of model states in one kind of memory, and of the buffers that gather weights and reduce gradients."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.buffers

    def __add__(self, other: States) -> States:
        return States(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.buffers + other.buffers,
        )


def sharded(
    recipe: Recipe, zero: Zero, parameters: int, share: int, layer: int, ranks: int, device: str
) -> tuple[States, States]:
    """The states of a rank on its device, and in host memory.

    Args:
        recipe: for types and accumulation.
        zero: its section `zero`, with stage 1, 2 or 3.
        parameters: of the rank's tensor- and expert-parallel share of the model.
        share: those of them whose state is this rank's.
        layer: parameters of the largest part that is gathered at once.
        ranks: that have the same dense parameters.
        device: `cuda` or `cpu`; a CPU's buffer takes what is written to it, a GPU's its full size.
    """
    half = recipe.train.precision != "fp32"
    element = 2 if half else 4
    reduced = 4 if recipe.train.grad_reduce_in_fp32 or not half else element
    on_host = zero.offload_optimizer != "none"
    parameter_bytes = share + _second_copy(recipe, zero, parameters)
    device_states = States(
        weights=element * (parameters if zero.stage < 3 else parameter_bytes if zero.offload_param == "none" else 0),
        gradients=_gradients(zero, element, reduced, parameters, share, layer),
        optimizer=0 if on_host else _STATE * share,
        buffers=_gathered(zero, element, parameters, layer)
        + _buffers(recipe, zero, element, reduced, parameters, share, ranks, device),
    )
    return device_states, _host(recipe, zero, element, reduced, parameters, share)


def _gradients(zero: Zero, element: int, reduced: int, parameters: int, share: int, layer: int) -> int:
    if zero.stage < 2:
        return reduced * parameters
    if zero.offload_optimizer != "none":
        return 0
    if zero.stage == 2 and reduced == element:
        # Without a sum of another type, every parameter of which the rank has a part is kept whole.
        return reduced * min(share + layer, parameters)
    return reduced * share


def _gathered(zero: Zero, element: int, parameters: int, layer: int) -> int:
    """At least what one layer needs; what is prefetched (up to max_live) or soon used again stays gathered."""
    if zero.stage < 3:
        return 0
    live = max(
        layer + zero.stage3_prefetch_bucket_size, zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance
    )
    return element * min(parameters, live)


def _second_copy(recipe: Recipe, zero: Zero, parameters: int) -> int:
    """Parameters of hpZ's copy, which lies beside those that are sharded over all ranks: not of small weights, which
    every rank keeps whole."""
    if zero.zero_hpz_partition_size == 1:
        return 0
    sizes = map(
        prod, weights(recipe.model).values()
    )  # of each rank: hpZ goes with neither tensor nor expert parallelism
    small = sum(size for size in sizes if size <= zero.stage3_param_persistence_threshold)
    return -(-(parameters - small) // zero.zero_hpz_partition_size)


def _buffers(
    recipe: Recipe, zero: Zero, element: int, reduced: int, parameters: int, share: int, ranks: int, device: str
) -> int:
    """The bucket that gradients are collected in, a second one to overlap, and what is made of it to reduce it."""
    size = zero.reduce_bucket_size if device == "cuda" else min(zero.reduce_bucket_size, parameters)
    if zero.stage == 3:
        return 2 * reduced * size  # in the order of parameters, and in that of their owners
    if zero.stage == 1 and recipe.train.precision == "bf16" and reduced > element and zero.offload_optimizer == "none":
        return reduced * parameters if parameters <= _REDUCED_TOGETHER else 0  # a larger sum is reduced where it is
    collected = reduced if zero.stage == 1 else element
    # Up to OWNERS ranks it is reduced in parts, one for each owner; only those that are added to a sum are copied.
    if ranks > OWNERS:
        copied = size * (collected + (reduced if reduced > collected else 0))
    else:
        copied = min(size, share) * (reduced if reduced > collected else 0)
    return size * collected * (1 + zero.overlap_comm) + copied


def _host(recipe: Recipe, zero: Zero, element: int, reduced: int, parameters: int, share: int) -> States:
    gradients = optimizer = weights = 0
    if zero.offload_optimizer != "none":
        accumulated = recipe.train.global_batch_size > recipe.layout.micro_batch_size
        # fp32 gradients of the update; besides them, those that are summed over micro-batches.
        gradients = 4 * share + (reduced if zero.stage == 3 else element * accumulated) * share
        in_memory = share if zero.offload_optimizer == "cpu" else min(share, _NVME_BUFFERS * zero.sub_group_size)
        optimizer = _STATE * in_memory + (
            element * share if zero.stage < 3 else 0
        )  # and the updated weights, on their way
    if zero.offload_param != "none":
        weights = element * (share + _second_copy(recipe, zero, parameters))
    return States(weights, gradients, optimizer)


def check_zeropp(recipe: Recipe, world_size: int, cluster: Cluster) -> None:
    """Refuse ZeRO++ where it cannot work.

    Raises:
        UserError: quantization on a CPU, hpZ groups that do not divide the ranks, or quantized gradients on fewer than
            two whole nodes.
    """
    zero = recipe.layout.zero
    if zero is None:
        return
    quantized = [key for key in ("zero_quantized_weights", "zero_quantized_gradients") if getattr(recipe.train, key)]
    if quantized and not cluster.gpus:
        raise UserError(
            "true on a CPU",
            where=f"train.{quantized[0]}",
            rule="DeepSpeed quantizes with CUDA kernels",
            fix=f"remove {' and '.join(quantized)}",
        )
    size = zero.zero_hpz_partition_size
    if world_size % size:
        raise UserError(
            f"{size} with {world_size} {'rank' if world_size == 1 else 'ranks'}",
            where="layout.zero.zero_hpz_partition_size",
            rule="zero_hpz_partition_size must divide the number of ranks: that many adjacent ranks share a copy of "
            "the parameters",
            fix=f"zero_hpz_partition_size {divisors(world_size, size)}",
        )
    if recipe.train.zero_quantized_gradients:
        node = len(cluster.gpus) // cluster.nodes
        if world_size % node or world_size < 2 * node:
            raise UserError(
                f"true with {world_size} ranks on nodes of {node} GPUs",
                where="train.zero_quantized_gradients",
                rule="DeepSpeed quantizes gradients between nodes: needs two or more nodes, with a rank on every GPU",
                fix=f"{2 * node} ranks or another multiple of {node}, or remove zero_quantized_gradients",
            )
