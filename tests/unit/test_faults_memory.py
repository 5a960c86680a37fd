"""Out of memory: recognised for real, and answered for the recipe at hand."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from llmrecipes.errors import ExitCode
from llmrecipes.faults.memory import describe_oom, memory_hints, out_of_memory
from llmrecipes.recipe.schema import Recipe


def recipe(**train: Any) -> Recipe:
    document: dict[str, Any] = {
        "name": "tiny",
        "model": {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 64, "vocab_size": 64},
        "train": {"train_iters": 4, "micro_batch_size": 4, "global_batch_size": 32, "precision": "bf16"} | train,
        "optimizer": {"lr": 1e-3},
    }
    return Recipe.model_validate(document)


def keys(hints: list[str]) -> list[str]:
    return [hint.split("=")[0] for hint in hints]


def test_the_ladder_starts_with_the_cheapest_change() -> None:
    scores = recipe()
    scores = scores.model_copy(update={"model": scores.model.model_copy(update={"attention_dropout": 0.1})})
    hints = memory_hints(scores, data_parallel_size=2, device="cpu")
    assert hints[0].startswith("train.micro_batch_size=2 (now 4)")
    assert "8 accumulated micro-batches" in hints[0]
    assert keys(hints) == [
        "train.micro_batch_size",
        "train.recompute_granularity",
        "train.recompute_granularity",
        "parallelism.grad_reduce_in_fp32",
        "model.seq_length",
    ]
    fused = [memory_hints(recipe(), data_parallel_size=2, device="cpu")]
    fused.append(memory_hints(scores, data_parallel_size=2, device="cuda"))
    assert not any("selective" in hint for found in fused for hint in found), "these kernels keep no scores"


def test_rungs_already_taken_are_left_out() -> None:
    tight = recipe(micro_batch_size=1, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    assert keys(memory_hints(tight, data_parallel_size=1, device="cpu")) == [
        "parallelism.grad_reduce_in_fp32",
        "model.seq_length",
    ]


def test_precision_and_the_distributed_optimizer_are_offered_where_they_help() -> None:
    base = recipe(precision="fp32", micro_batch_size=9, global_batch_size=36)
    plain = base.model_copy(
        update={"parallelism": base.parallelism.model_copy(update={"use_distributed_optimizer": False})}
    )
    hints = memory_hints(plain, data_parallel_size=4, device="cpu")
    assert hints[0].startswith("train.micro_batch_size=3 (now 9)"), "a divisor, so that the batch still divides"
    assert any(hint.startswith("parallelism.use_distributed_optimizer=true") for hint in hints)
    assert any(hint.startswith("train.precision=bf16") for hint in hints)
    assert not any(
        "use_distributed_optimizer" in hint for hint in memory_hints(plain, data_parallel_size=1, device="cpu")
    )


def test_each_rung_is_a_valid_recipe() -> None:
    """What the memory_hints advises can be typed on the command line: keys exist and values pass the schema."""
    for hint in memory_hints(recipe(), data_parallel_size=2, device="cuda"):
        document = recipe().model_dump()
        for assignment in hint.split(" (")[0].split(": ")[0].split():
            key, value = assignment.split("=")
            section, name = key.split(".")
            assert name in document[section]
            document[section][name] = {"true": True, "false": False}.get(
                value, int(value) if value.isdigit() else value
            )
        Recipe.model_validate(document)


def test_a_real_failed_allocation_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    described = describe_oom(caught.value)
    assert described is not None
    assert described.startswith("host memory")
    error = out_of_memory(caught.value, recipe(), data_parallel_size=1, where="rank 0, step 3")
    assert error is not None
    assert error.code is ExitCode.STOP
    assert "1. train.micro_batch_size=2" in str(error)
    assert "rank 0, step 3" in str(error)


def test_other_errors_are_not_about_memory() -> None:
    assert describe_oom(MemoryError()) == "host memory"
    assert describe_oom(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")) == (
        "GPU memory: CUDA out of memory. Tried to allocate 2 GiB"
    )
    assert describe_oom(RuntimeError("shape mismatch")) is None
    assert out_of_memory(ValueError("memory"), recipe(), data_parallel_size=1) is None


def test_pages_between_blocks_in_use_return_to_the_kernel() -> None:
    """In a process of its own, whose heap keeps all freed memory, as that of a CPU rank does."""
    code = """
import ctypes, psutil
from llmrecipes.faults.memory import trim_heap
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.mallopt(-4, 0), libc.mallopt(-1, 2**31 - 1)
resident = lambda: psutil.Process().memory_info().rss >> 20
blocks = []
for _ in range(32):
    blocks.append(libc.malloc(1 << 20))
    ctypes.memset(blocks[-1], 1, 1 << 20)
    libc.malloc(1000)
for block in blocks:
    libc.free(block)
before = resident()
trim_heap()
print(before - resident())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 24
