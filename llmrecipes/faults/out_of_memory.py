"""Out of memory: recognise it, and suggest changes to the recipe, in order; and keep a CPU rank's heap from growing."""

from __future__ import annotations

import ctypes
import os

from llmrecipes.errors import ExitCode, UserError
from llmrecipes.hardware.cluster import detect
from llmrecipes.plan.derive import Plan
from llmrecipes.plan.run_plan import derive_run
from llmrecipes.plan.speed import ladder
from llmrecipes.recipe.schema import Recipe

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


def memory_hints(plan: Plan, *, allocator: str = "") -> list[str]:
    """What to change for less memory, the cheapest kind first, with predicted memory and time.

    The prediction was too low for a run that ran out of memory, but its differences hold.

    Args:
        plan: plan of the run.
        allocator: the value of PYTORCH_ALLOC_CONF.

    Returns:
        One line per hint, with a key and its new value; without those the recipe already has.
    """
    hints = ladder.lines(plan, ladder.ladder(plan, allocator), fits=False)
    train = plan.recipe.train
    model = plan.recipe.model
    if train.precision == "fp32":
        hints.append("train.precision=bf16: activations take half the memory (a different training: start a new run)")
    elif plan.recipe.train.grad_reduce_in_fp32:
        hints.append("train.grad_reduce_in_fp32=false: gradients take 2 bytes a parameter instead of 4")
    if model.seq_length > 1:
        hints.append(
            f"model.seq_length={model.seq_length // 2} (now {model.seq_length}): a different training (start a new run)"
        )
    return hints


def out_of_memory(error: BaseException, recipe: Recipe, *, ranks: int, nodes: int, where: str = "") -> UserError | None:
    """The error to end a run with, or None if `error` is not about memory.

    Args:
        ranks: ranks of the run.
        nodes: that they are on, all like this one.
        where: rank and step.
    """
    described = describe_oom(error)
    if described is None:
        return None
    machine = detect().times(nodes).emptied()  # as before the run
    try:
        if described.startswith(_GPU_MEMORY) or not machine.gpus:
            variables = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
            allocator = next((os.environ[name] for name in variables if name in os.environ), "")
            hints = memory_hints(derive_run(recipe, ranks, machine).largest, allocator=allocator)
        else:
            hints = _of_the_host(recipe)
    except UserError:  # there is no plan for these ranks, as in a measurement of one layer
        hints = ["layout.micro_batch_size=1, layout.recompute_granularity=auto, or more ranks"]
    steps = "\n".join(f"    {number}. {hint}" for number, hint in enumerate(hints, 1))
    return UserError(
        f"out of {described}",
        where=where,
        fix=f"change the recipe, in this order, until it fits; each is predicted as the only change:\n{steps}",
        code=ExitCode.STOP,
    )


def _of_the_host(recipe: Recipe) -> list[str]:
    """What a run on GPUs keeps in main memory."""
    hints = []
    if recipe.data.num_workers:
        hints.append(f"data.num_workers=0 (now {recipe.data.num_workers}): each is a process with its own memory")
    if recipe.checkpoint.non_persistent_save_interval is not None:
        hints.append("checkpoint.non_persistent_save_interval=null: local checkpoints have a copy of their own")
    if recipe.layout.zero is not None and (recipe.layout.zero.offload_optimizer, recipe.layout.zero.offload_param) != (
        "none",
        "none",
    ):
        hints.append("more nodes, each of which then keeps a smaller share of what zero offloads")
    return hints or ["more main memory for the job: --mem of Slurm, or the limit of the pod"]
