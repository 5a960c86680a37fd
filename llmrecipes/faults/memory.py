"""Out of memory: recognise it, and suggest changes to the recipe, in order; and keep a CPU rank's heap from growing."""

from __future__ import annotations

import ctypes

from llmrecipes.errors import ExitCode, UserError
from llmrecipes.plan.kernels import keeps_scores
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.shape import shape

_GPU_MEMORY = "GPU memory"
_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"


def describe_oom(error: BaseException) -> str | None:
    """Which memory ran out, in one line; None for any other error.

    Args:
        error: any exception; torch's GPU and CPU allocators and Python's own are known.
    """
    import torch

    first_line = str(error).strip().split("\n")[0]
    if isinstance(error, torch.OutOfMemoryError):
        return f"{_GPU_MEMORY}: {first_line}"
    if isinstance(error, MemoryError):
        return f"host memory: {first_line}" if first_line else "host memory"
    if isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error):
        return f"host memory: {str(error)[str(error).index(_CPU_ALLOCATOR) :].splitlines()[0]}"
    return None


def trim_heap() -> None:
    """Return the free pages of glibc's heap to the kernel; nothing with another C library.

    Tensors on the CPU are page-aligned blocks of the heap (`engine/core/platform/cpu.py`). Before glibc 2.38 such a
    block is cut out of a larger one, and when a small object has taken what was cut off, the freed block is too small
    for the next tensor of its size: the heap grows by that tensor, and its pages stay resident although nothing uses
    them.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def memory_hints(recipe: Recipe, *, data_parallel_size: int, device: str) -> list[str]:
    """What to change for less memory, cheapest first.

    Args:
        data_parallel_size: ranks that share the batch.

    Returns:
        One line per hint, with a key and its new value; without those the recipe already has.
    """
    train, parallelism = recipe.train, recipe.parallelism
    hints = []
    if (smaller := _largest_proper_divisor(train.micro_batch_size)) is not None:
        accumulation = train.global_batch_size // (smaller * data_parallel_size)
        hints.append(
            f"train.micro_batch_size={smaller} (now {train.micro_batch_size}): less activation memory, the same "
            f"training with {accumulation} accumulated micro-batches"
        )
    if train.recompute_granularity is None and keeps_scores(recipe, shape(recipe.model), device):
        hints.append(
            "train.recompute_granularity=selective: attention is recomputed in the backward pass, a few % slower"
        )
    if train.recompute_granularity != "full":
        hints.append(
            "train.recompute_granularity=full train.recompute_method=uniform train.recompute_num_layers=1: only layer "
            "inputs are kept, about a third slower"
        )
    if data_parallel_size > 1 and not parallelism.use_distributed_optimizer:
        hints.append(
            "parallelism.use_distributed_optimizer=true: optimizer state is divided by "
            f"{data_parallel_size} data-parallel ranks"
        )
    if train.precision == "fp32":
        hints.append("train.precision=bf16: activations take half the memory (a different training: start a new run)")
    elif parallelism.grad_reduce_in_fp32:
        hints.append("parallelism.grad_reduce_in_fp32=false: gradients take 2 bytes a parameter instead of 4")
    if recipe.model.seq_length > 1:
        hints.append(
            f"model.seq_length={recipe.model.seq_length // 2} (now {recipe.model.seq_length}): a different training "
            "(start a new run)"
        )
    return hints


def out_of_memory(
    error: BaseException, recipe: Recipe, *, data_parallel_size: int, where: str = ""
) -> UserError | None:
    """The error to end a run with, or None if `error` is not about memory.

    Args:
        where: rank and step.
    """
    described = describe_oom(error)
    if described is None:
        return None
    device = "cuda" if described.startswith(_GPU_MEMORY) else "cpu"
    hints = memory_hints(recipe, data_parallel_size=data_parallel_size, device=device)
    steps = "\n".join(f"    {number}. {hint}" for number, hint in enumerate(hints, 1))
    return UserError(
        f"out of {described}",
        where=where,
        fix=f"change the recipe, in this order, until it fits:\n{steps}",
        code=ExitCode.STOP,
    )


def _largest_proper_divisor(number: int) -> int | None:
    # A divisor keeps the global batch divisible.
    return next((number // factor for factor in range(2, number + 1) if number % factor == 0), None)
