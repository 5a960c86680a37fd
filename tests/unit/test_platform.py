"""Patches of megatron-core, the CPU stand-ins and Adam."""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from llmrecipes.engine.core.platform import cpu, select
from llmrecipes.engine.core.platform.cpu import CpuPlatform, CpuTorch, names_cuda
from llmrecipes.engine.core.platform.patching import MissingPatchTarget, replace, resolve
from llmrecipes.engine.core.platform.substitutes import GroupStepAdamW
from llmrecipes.hardware import nvidia
from llmrecipes.hardware.builds import compiled_at_first_call
from llmrecipes.hardware.cluster import DetectedGpu
from tests.helpers import tiny_on, write_recipe
from tests.refusals import refused

# -- patching --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "attribute", "named"),
    [
        ("torch.cuda", "no_such_function", "torch.cuda has no no_such_function"),
        ("torch.Tensor", "no_such_method", "torch.Tensor has no no_such_method"),
        ("torch.NoSuchClass", "x", "torch has no NoSuchClass"),
        ("no_such_package", "x", "no_such_package is not installed"),
    ],
)
def test_a_patch_of_a_name_that_is_gone_is_refused_by_name(module: str, attribute: str, named: str) -> None:
    with pytest.raises(MissingPatchTarget, match=named):
        replace(module, attribute, None)


def test_a_megatron_core_that_moved_a_patched_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("megatron.core.tensor_parallel.random")
    monkeypatch.delattr(module, "_get_cuda_rng_state")
    with pytest.raises(MissingPatchTarget, match=r"megatron\.core\.tensor_parallel\.random has no _get_cuda_rng_state"):
        cpu._patch_random_state()


def test_every_module_whose_torch_is_replaced_has_one() -> None:
    for name in cpu.MODULES_THAT_NAME_CUDA:
        assert resolve(name).torch.__name__ == "torch"


# -- import of megatron-core ------------------------------------------------------------------------------------------


@pytest.mark.rotating
def test_an_engine_and_an_optimizer_are_made_without_the_compiler_and_sinks_of_metrics() -> None:
    code = """
import importlib, sys
from llmrecipes.hardware.builds import import_megatron
import_megatron()
import torch
from llmrecipes.engine.core.platform import select
from llmrecipes.engine.core.platform.substitutes import GroupStepAdamW
from llmrecipes.engine.megatron.engine import MegatronEngine
from megatron.core.fusions.fused_bias_geglu import geglu
select().install()
optimizer = GroupStepAdamW([torch.nn.Parameter(torch.ones(2))])
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
print([name for name in ("torch._dynamo", "torch._inductor", "wandb", "tensorboard") if name in sys.modules])
print(torch.compile.__module__, bool(importlib.import_module("torch.utils.tensorboard")))
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    assert subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout == "[]\ntorch True\n"


@pytest.mark.rotating
def test_a_run_trains_and_ends_without_the_compiler(corpus: Path, tmp_path: Path) -> None:
    """It takes a second to import, also of the time that a run has to stop."""
    path = write_recipe(tiny_on(corpus, train={"train_iters": 2}), tmp_path)
    words = ["train", path, "--run-id", "r", "--no-sample", "--runs-dir", str(tmp_path), "--data-dir", str(tmp_path)]
    code = f"import sys; from llmrecipes.cli.app import run; print(run({words!r}), 'torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False"


def test_a_function_is_compiled_at_its_first_call() -> None:
    compiled: list[dict[str, Any]] = []

    def compile_(function: Any, **options: Any) -> Any:
        compiled.append(options)
        return torch.compile(function, backend="eager")

    @partial(compiled_at_first_call, compile_)(dynamic=True)
    def double(values: torch.Tensor) -> torch.Tensor:
        """Twice."""
        return 2 * values

    outer = torch.compile(lambda values: double(values) + 1, backend="eager", fullgraph=True)
    assert outer(torch.ones(2)).tolist() == [3, 3]
    assert compiled == []
    assert double(torch.ones(2)).tolist() == double(torch.ones(2)).tolist() == [2, 2]
    assert compiled == [{"dynamic": True}]
    assert double.__doc__ == "Twice."


# -- CPU stand-ins ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cuda", "cuda:3", 0, torch.device("cuda", 1)])
def test_factories_that_name_a_gpu_give_cpu_tensors(device: Any) -> None:
    stand_in = CpuTorch(torch)
    made = [
        stand_in.zeros(2, device=device),
        stand_in.tensor([1.0], device=device),
        stand_in.empty_like(torch.ones(3), device=device),
        stand_in.full((2,), 7, device=device, dtype=torch.int32),
    ]
    assert {tensor.device.type for tensor in made} == {"cpu"}
    assert made[3].tolist() == [7, 7]
    assert made[3].dtype is torch.int32


def test_other_devices_and_names_are_left_alone() -> None:
    stand_in = CpuTorch(torch)
    assert stand_in.empty(2, device="meta").device.type == "meta"
    assert stand_in.ones(2).tolist() == [1.0, 1.0]
    assert stand_in.nn is torch.nn
    assert stand_in.float32 is torch.float32
    with pytest.raises(AttributeError, match="no_such_name"):
        stand_in.no_such_name  # noqa: B018 - the access is the test


def test_what_names_cuda() -> None:
    assert [names_cuda(device) for device in ("cuda", "cuda:0", 2)] == [True] * 3
    assert [names_cuda(device) for device in (None, "cpu", True, torch.device("meta"))] == [False] * 4


def test_the_cpu_platform_refuses_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "_llmrecipes_stand_in", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.cuda.synchronize
    with pytest.raises(RuntimeError, match="must not be installed where torch sees a GPU"):
        CpuPlatform().install()
    assert torch.cuda.synchronize is before


ARENAS = """
import ctypes, os, sys, tempfile, threading
import torch
from llmrecipes.hardware.builds import import_megatron
import_megatron()
from llmrecipes.engine.core.platform import cpu

torch.set_num_threads(2)
cpu._keep_freed_memory()
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p

def arenas():
    with tempfile.NamedTemporaryFile() as file:
        stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
        libc.malloc_info(0, stream)
        libc.fclose(stream)
        return file.read().count(b"<heap nr=")

before = arenas()
allocated = threading.Barrier(7)

def other():
    kept = torch.ones(1000)
    allocated.wait()

threads = [threading.Thread(target=other) for _ in range(6)]
for thread in threads:
    thread.start()
allocated.wait()
print(before, arenas())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="glibc's allocator is not here")
def test_each_thread_of_torch_has_an_arena_and_other_threads_add_none() -> None:
    done = subprocess.run([sys.executable, "-c", ARENAS], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split() == ["2", "2"]


def test_gpus_that_torch_cannot_use_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("llmrecipes.engine.core.platform.select")
    monkeypatch.setattr(
        module, "visible_gpus", lambda: (DetectedGpu("NVIDIA H100 80GB HBM3", 80 << 30, 79 << 30, None),) * 8
    )
    monkeypatch.setattr(torch.version, "cuda", None)
    with refused("torch.cuda", rule=("8", "H100", "CPU", "TORCH=cuda", "CUDA_VISIBLE_DEVICES")):
        select()

    def too_old() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nUpdate it.")

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "init", too_old)
    with refused("torch.cuda", rule=("H100", "11040")):
        select()


def test_a_rank_without_a_gpu_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 7)
    assert select(6).device == torch.device("cuda", 6)
    with refused("torch.cuda", rule=("7", "--gpus-per-task")):
        select(7)


def test_a_gpu_whose_driver_does_not_answer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho NVIDIA-SMI has failed, driver 535.54\nexit 9\n")
    program.chmod(0o755)
    device = tmp_path / "devices" / "0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(nvidia, "_PCI_DEVICES", device.parent)
    assert select().name == "cpu", "CUDA_VISIBLE_DEVICES is empty"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with refused("torch.cuda", rule="535.54"):
        select()
    (device / "class").write_text("0x020000\n")  # a network adapter
    assert select().name == "cpu", "a login node with the driver's programs"


@pytest.mark.usefixtures("world")
def test_megatron_cores_ways_to_the_gpu_end_on_the_cpu() -> None:
    tensor = torch.ones(2)
    assert tensor.cuda() is tensor
    assert tensor.type() == "torch.cuda.FloatTensor"
    assert tensor.type(torch.float64).dtype is torch.float64
    assert torch.zeros(1, device=torch.cuda.current_device()).device.type == "cpu"
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)


# -- Adam ------------------------------------------------------------------------------------------------------------

GROUPS = ({"weight_decay": 0.1}, {"weight_decay": 0.0, "lr": 3e-3})


def parameters() -> list[torch.nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(*shape, generator=random)) for shape in ((7, 5), (11,), (3, 3))]


def grouped(weights: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": weights[:2], **GROUPS[0]}, {"params": weights[2:], **GROUPS[1]}]


def train(optimizer: torch.optim.Optimizer, weights: list[torch.nn.Parameter], first: int, last: int) -> None:
    for step in range(first, last):
        random = torch.Generator().manual_seed(step)
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=random)
        optimizer.step()


@pytest.mark.parametrize(("fused", "tolerance"), [(True, 0.0), (False, 1e-7)])
def test_adam_is_torchs(fused: bool, tolerance: float) -> None:
    ours, theirs = parameters(), parameters()
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
    train(GroupStepAdamW(grouped(ours), **options), ours, 0, 5)
    train(torch.optim.AdamW(grouped(theirs), fused=fused, **options), theirs, 0, 5)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
    assert not torch.equal(ours[0], parameters()[0])


def test_adam_keeps_its_step_in_the_group_and_leaves_parameters_without_gradient() -> None:
    weights = parameters()
    optimizer = GroupStepAdamW(grouped(weights))
    train(optimizer, weights[:2], 0, 3)
    assert [group["step"] for group in optimizer.param_groups] == [3, 3]
    assert sorted(optimizer.state[weights[0]]) == ["exp_avg", "exp_avg_sq"]
    assert torch.equal(weights[2], parameters()[2])


def test_adam_resumes_from_a_saved_state_exactly() -> None:
    whole, cut = parameters(), parameters()
    train(GroupStepAdamW(grouped(whole), lr=1e-2), whole, 0, 6)
    first = GroupStepAdamW(grouped(cut), lr=1e-2)
    train(first, cut, 0, 3)
    second = GroupStepAdamW(grouped(cut), lr=5.0)
    second.load_state_dict(first.state_dict())
    train(second, cut, 3, 6)
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))


@pytest.mark.parametrize("option", [{"adam_w_mode": False}, {"capturable": True}])
def test_adam_refuses_what_it_cannot_do(option: dict[str, bool]) -> None:
    with pytest.raises(ValueError, match="GroupStepAdamW"):
        GroupStepAdamW(parameters(), **option)  # type: ignore[arg-type]
