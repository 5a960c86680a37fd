"""Patches that let unmodified megatron-core run on a CPU over gloo.

megatron-core accesses the CUDA device in four ways, each of which is replaced here:

- `torch.cuda.<function>()`: the functions it calls are replaced on `torch.cuda`;
- `device="cuda"` in a factory call: the few modules that do so see a `torch` whose factories map it to the CPU
  (a `TorchFunctionMode` would do it everywhere, but slows down each operation and interferes with torch.compile);
- `tensor.cuda()` and `tensor.type() == "torch.cuda.FloatTensor"`: methods of `torch.Tensor`;
- its random-state helpers, which access the CUDA generators.

The patches are process-wide and refuse to install if a GPU is present.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch

from llmrecipes.engine.core.platform.gloo import share_device
from llmrecipes.engine.core.platform.patching import replace, resolve
from llmrecipes.engine.core.platform.process_group import connect
from llmrecipes.engine.core.platform.substitutes import install_substitutes
from llmrecipes.hardware import process

CPU = torch.device("cpu")

FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like", "ones_like", "as_tensor")

MODULES_THAT_NAME_CUDA = (
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.grad_scaler",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.dist_checkpointing.exchange_utils",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.utils",
    "megatron.core.transformer.moe.moe_utils",
    "megatron.core.transformer.moe.token_dispatcher",
    "megatron.core.models.common.embeddings.rope_utils",
)


class CpuPlatform:
    """A rank on the CPU."""

    name = "cpu"
    backend = "gloo"
    device = CPU

    def install(self) -> None:
        if getattr(torch.cuda, "_llmrecipes_stand_in", False):
            return
        if torch.cuda.is_available():
            raise RuntimeError("the CPU platform must not be installed where torch sees a GPU")
        _keep_freed_memory()
        share_device()
        patch_cuda(CPU)
        _patch_experts()
        install_substitutes()
        torch.cuda._llmrecipes_stand_in = True  # type: ignore[attr-defined]

    def connect(self, timeout: timedelta) -> None:
        connect(self, timeout)

    def peak_memory(self) -> int:
        return process.peak_memory()

    def synchronize(self) -> None:
        return None


class CpuTorch(ModuleType):
    """The module torch, with factories that map `device="cuda"` (or an index) to another device."""

    def __init__(self, real: ModuleType, device: torch.device = CPU) -> None:
        super().__init__(real.__name__, real.__doc__)
        self._real = real
        for name in FACTORIES:
            setattr(self, name, _on(device, getattr(real, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _CpuStream:
    """CUDA streams and events on a device where every call is synchronous."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def _done(self, *_args: Any, **_kwargs: Any) -> None: ...

    wait_stream = wait_event = record = synchronize = wait = _done

    def record_event(self, *_args: Any) -> _CpuStream:
        return self

    def query(self) -> bool:
        return True


def patch_cuda(device: torch.device) -> None:
    """Replace what megatron-core asks of a GPU, so that it uses another device, for the rest of the process.

    A later call replaces the device.
    """
    _patch_torch_cuda(device)
    _patch_tensor(device)
    _patch_random_state()
    for module in MODULES_THAT_NAME_CUDA:
        replace(module, "torch", CpuTorch(resolve(module).torch, device))


def _keep_freed_memory() -> None:
    """Let glibc keep the memory of freed tensors instead of returning it to the kernel.

    Every step frees and allocates the same activations; by default each large one is a new mapping whose pages the
    kernel has to clear, which costs a third of a bf16 step (docs/development/notes.md). Huge pages reduce the cost
    further.
    There is an arena for each thread of torch, and the threads of gloo and the saver share these: they would spread
    over up to 8 arenas a core, each of which keeps its own freed memory (benchmarks/RESULTS.md, resident memory over a
    long run). In fewer arenas torch's threads would wait for each other: attention's backward pass in bf16 allocates in
    all of them, and takes three times as long in one.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read by torch at its first allocation
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # only in glibc
        m_trim_threshold = -1
        m_top_pad = -2
        m_mmap_max = -4
        m_arena_max = -8
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)
        mallopt(m_top_pad, 256 * 2**20)
        mallopt(m_arena_max, torch.get_num_threads())
        _allocate_in_all_threads()


def _allocate_in_all_threads() -> None:
    """Start torch's threads and let each allocate, so that they have the arenas before any other thread takes one."""
    states = torch.zeros(torch.get_num_threads(), 1, 32, 32, dtype=torch.bfloat16, requires_grad=True)
    torch.nn.functional.scaled_dot_product_attention(states, states, states).sum().backward()


def _on(device: torch.device, factory: Any) -> Any:
    @functools.wraps(factory)
    def call(*args: Any, **kwargs: Any) -> Any:
        if names_cuda(kwargs.get("device")):
            kwargs["device"] = device
        kwargs.pop("pin_memory", None)  # pinned memory is for copies to a GPU
        return factory(*args, **kwargs)

    return call


def names_cuda(device: Any) -> bool:
    """Whether a `device=` argument means a GPU (an integer is a GPU's index)."""
    if device is None or isinstance(device, bool):
        return False
    return isinstance(device, int) or torch.device(device).type == "cuda"


def _patch_torch_cuda(device: torch.device) -> None:
    stand_ins: dict[str, Any] = {
        "current_device": lambda: device,
        "synchronize": lambda *_a, **_k: None,
        "get_rng_state": lambda *_a, **_k: torch.get_rng_state(),
        "set_rng_state": lambda state, *_a, **_k: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        "_lazy_call": lambda call, **_k: call(),
        "Stream": _CpuStream,
        "Event": _CpuStream,
        "stream": lambda *_a, **_k: contextlib.nullcontext(),
        "current_stream": lambda *_a, **_k: _CpuStream(),
    }
    for name, value in stand_ins.items():
        replace("torch.cuda", name, value)
    for name in ("range_push", "range_pop"):  # marks for a profiler of GPUs
        replace("torch.cuda.nvtx", name, lambda *_a, **_k: 0)


def _patch_tensor(device: torch.device) -> None:
    real_type = torch.Tensor.type

    def type_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = real_type(tensor, *args, **kwargs)
        return f"torch.cuda.{answer.rpartition('.')[2]}" if not args and not kwargs else answer

    replace("torch.Tensor", "type", type_)
    replace("torch.Tensor", "cuda", lambda tensor, *_a, **_k: tensor.to(device))
    replace("torch.Tensor", "record_stream", lambda *_a: None)


def _patch_experts() -> None:
    # Split sizes of the all-to-all are read on the host; they are only copied there from a GPU.
    replace("megatron.core.transformer.moe.token_dispatcher", "maybe_move_tensor_to_cpu", _as_host_numbers)


def _as_host_numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _patch_random_state() -> None:
    # Device and CPU share one generator here, so the tracker would detect at every fork that the other one has changed.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    module = "megatron.core.tensor_parallel.random"
    replace(module, "_get_cuda_rng_state", lambda *_a, **_k: torch.get_rng_state())
    replace(module, "_set_cuda_rng_state", lambda state, *_a, **_k: torch.set_rng_state(state))
