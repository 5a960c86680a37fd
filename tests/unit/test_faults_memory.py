"""Out of memory: recognised for real, and answered for the recipe at hand."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from llmrecipes.errors import ExitCode
from llmrecipes.faults.out_of_memory import describe_oom, memory_hints, out_of_memory
from llmrecipes.hardware.cluster import Cluster, DetectedGpu
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.speedups.recompute import ALL_LAYERS
from llmrecipes.units import GIB


def recipe(layout: dict[str, Any] | None = None, **train: Any) -> Recipe:
    document: dict[str, Any] = {
        "name": "tiny",
        "model": {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 512, "vocab_size": 4096},
        "train": {"train_iters": 4, "global_batch_size": 32, "precision": "bf16"} | train,
        "layout": {"micro_batch_size": 4} | (layout or {}),
        "optimizer": {"lr": 1e-3},
    }
    return Recipe.model_validate(document)


MACHINE = Cluster((), 2, 8 * GIB, 8 * GIB, GIB)


def hints(made: Recipe, ranks: int = 2) -> list[str]:
    return memory_hints(derive(made, ranks, MACHINE))


def test_hints_have_the_keys_and_their_predicted_memory_in_order() -> None:
    made = hints(recipe())
    assert [hint.split("=")[0] for hint in made] == [
        "layout.micro_batch_size",
        "layout.recompute_granularity",
        "layout.tensor_model_parallel_size",
        "layout.pipeline_model_parallel_size",
        "train.grad_reduce_in_fp32",
        "model.seq_length",
    ]
    assert made[0].startswith("layout.micro_batch_size=2: ")
    assert "a rank (-" in made[0]
    assert not any(hint.endswith("fits") for hint in made), "the plan said so before"


def test_rungs_already_taken_are_left_out() -> None:
    tight = recipe({"micro_batch_size": 1, **ALL_LAYERS})
    keys = [hint.split("=")[0] for hint in hints(tight, ranks=1)]
    assert keys == ["train.grad_reduce_in_fp32", "model.seq_length"]


def test_precision_and_the_distributed_optimizer_are_offered_where_they_help() -> None:
    base = recipe({"micro_batch_size": 9}, precision="fp32", global_batch_size=36)
    plain = base.with_layout(use_distributed_optimizer=False)
    for ranks, offered in ((4, True), (1, False)):
        made = hints(plain, ranks)
        assert any(hint.startswith("layout.use_distributed_optimizer=true") for hint in made) == offered
        assert any(hint.startswith("train.precision=bf16") for hint in made)


def test_each_hint_is_a_valid_recipe() -> None:
    """What is advised can be typed on the command line: keys exist and values pass the schema."""
    for hint in hints(recipe()):
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
    error = out_of_memory(caught.value, recipe(), ranks=1, nodes=1, where="rank 0, step 3")
    assert error is not None
    assert error.code is ExitCode.STOP
    assert "1. layout.micro_batch_size=" in str(error)
    assert "rank 0, step 3" in str(error)


def test_other_errors_are_not_about_memory() -> None:
    assert describe_oom(MemoryError()) == "host memory"
    assert describe_oom(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")) == (
        "GPU memory: CUDA out of memory. Tried to allocate 2 GiB"
    )
    assert describe_oom(RuntimeError("shape mismatch")) is None
    assert out_of_memory(ValueError("memory"), recipe(), ranks=1, nodes=1) is None


def test_pages_between_blocks_in_use_return_to_the_kernel() -> None:
    """In a process of its own, whose heap keeps all freed memory, as that of a CPU rank does."""
    code = """
import ctypes, psutil
from llmrecipes.faults.out_of_memory import trim_heap
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


def test_main_memory_of_a_run_on_gpus_has_other_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = DetectedGpu("NVIDIA H100 80GB HBM3", 79 * GIB, GIB, 989.4)
    monkeypatch.setattr("llmrecipes.faults.out_of_memory.detect", lambda: Cluster((gpu,) * 2, 2, 8 * GIB, GIB, GIB))
    error = out_of_memory(MemoryError(), recipe(), ranks=2, nodes=1)
    assert error is not None
    assert "data.num_workers=0" in error.fix
    assert "micro_batch" not in error.fix
    full = out_of_memory(torch.OutOfMemoryError("CUDA out of memory."), recipe(), ranks=2, nodes=1)
    assert full is not None
    assert "layout.micro_batch_size=" in full.fix
