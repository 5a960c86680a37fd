"""Weights, gradients and optimizer state of a rank that shards them with ZeRO, and what it offloads.

The shares are those of the paper (arXiv 1910.02054, section 5); copies and buffers are those of DeepSpeed's
stage_1_and_2.py and stage3.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.zero import Zero

# Two moments and the fp32 weights that are updated; in fp32 these are a copy, at every stage.
_STATE = 12
# Sub-groups of optimizer state that are in host memory at a time with NVMe: DeepSpeed's `buffer_count`.
_NVME_BUFFERS = 4


@dataclass(frozen=True)
class States:
    """Bytes of model states and of the buffers that reduce gradients, in one kind of memory."""

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


def sharded(recipe: Recipe, zero: Zero, parameters: int, share: int, layer: int, device: str) -> tuple[States, States]:
    """The states of a rank on its device, and in host memory.

    Args:
        recipe: for types and accumulation.
        zero: its section `zero`, with stage 1, 2 or 3.
        parameters: of the rank's tensor- and expert-parallel share of the model.
        share: those of them whose state is this rank's.
        layer: parameters of the largest part that is gathered at once.
        device: `cuda` or `cpu`; a CPU's buffer takes what is written to it, a GPU's its full size.
    """
    half = recipe.train.precision != "fp32"
    element = 2 if half else 4
    reduced = 4 if recipe.parallelism.grad_reduce_in_fp32 or not half else element
    on_host = zero.offload_optimizer != "none"
    device_states = States(
        weights=_weights(zero, element, parameters, layer, share),
        gradients=_gradients(zero, reduced, parameters, share),
        optimizer=0 if on_host else _STATE * share,
        buffers=_buffers(zero, element, reduced, parameters, device),
    )
    return device_states, _host(recipe, zero, element, reduced, parameters, share)


def _gradients(zero: Zero, reduced: int, parameters: int, share: int) -> int:
    if zero.stage >= 2:
        return 0 if zero.offload_optimizer != "none" else reduced * share
    return reduced * parameters


def _weights(zero: Zero, element: int, parameters: int, layer: int, share: int) -> int:
    if zero.stage < 3:
        return element * parameters
    # Gathered: at least what one layer needs; what is prefetched (up to max_live) or soon used again stays gathered.
    live = max(
        layer + zero.stage3_prefetch_bucket_size, zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance
    )
    own = share + _second_copy(zero, parameters) if zero.offload_param == "none" else 0
    return element * (own + min(parameters, live))


def _second_copy(zero: Zero, parameters: int) -> int:
    """Parameters of hpZ's copy, which lies beside those that are sharded over all ranks."""
    size = zero.zero_hpz_partition_size
    return -(-parameters // size) if size > 1 else 0


def _buffers(zero: Zero, element: int, reduced: int, parameters: int, device: str) -> int:
    """The bucket that gradients are collected in, a second one to overlap, and a copy in the type of the reduction."""
    size = zero.reduce_bucket_size if device == "cuda" else min(zero.reduce_bucket_size, parameters)
    if zero.stage == 3:
        return reduced * size
    copy = reduced if reduced != element else 0
    return size * (element * (1 + zero.overlap_comm) + copy)


def _host(recipe: Recipe, zero: Zero, element: int, reduced: int, parameters: int, share: int) -> States:
    gradients = optimizer = weights = 0
    if zero.offload_optimizer != "none":
        accumulated = recipe.train.global_batch_size > recipe.train.micro_batch_size
        # fp32 gradients of the update; besides them, those that are summed over micro-batches.
        gradients = 4 * share + (reduced if zero.stage == 3 else element * accumulated) * share
        in_memory = share if zero.offload_optimizer == "cpu" else min(share, _NVME_BUFFERS * zero.sub_group_size)
        optimizer = _STATE * in_memory + (
            element * share if zero.stage < 3 else 0
        )  # and the updated weights, on their way
    if zero.offload_param != "none":
        weights = element * (share + _second_copy(zero, parameters))
    return States(weights, gradients, optimizer)
