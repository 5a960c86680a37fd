"""DeepSpeed's process-wide state: its accelerator, communication layer, logger and groups."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from llmrecipes.engine.base import Platform
from llmrecipes.hardware.builds import search_path

_SHARED_MEMORY = "deepspeed_shm_comm"
_MPU = {
    "model_parallel": "tensor_model_parallel",  # DeepSpeed's older name of the same group
    "tensor_model_parallel": "tensor_model_parallel",
    "pipeline_model_parallel": "pipeline_model_parallel",
    "data_parallel": "data_parallel",
}


@contextmanager
def communication(platform: Platform) -> Iterator[None]:
    """A block in which DeepSpeed uses the device and the process group of this process."""
    # Read at DeepSpeed's first import, which would otherwise guess.
    os.environ["DS_ACCELERATOR"] = "cpu" if platform.name == "meta" else platform.name
    os.environ.setdefault("LOCAL_RANK", "0")  # a single process without a launcher
    os.environ["PATH"] = search_path()
    _import_without_mlflow()
    import deepspeed
    from deepspeed.runtime import bf16_optimizer
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.utils import groups, logger

    if platform.name == "meta":
        from llmrecipes.engine.deepspeed import meta_accelerator

        meta_accelerator.install()
    if platform.name == "cpu":
        # It asks for fast fp16; torch computes in fp16 on every CPU.
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    # Its all-reduce in shared memory is for inference on one node, and would be compiled here first, for minutes.
    deepspeed.ops.__compatible_ops__[_SHARED_MEMORY] = False
    # It reports every stage of its construction at level INFO, on the terminal.
    logger.setLevel(logging.WARNING)
    # It prints the memory in use six times while it is constructed.
    bf16_optimizer.see_memory_usage = lambda *_, **__: None
    deepspeed.init_distributed(dist_backend=platform.backend, dist_init_required=False, verbose=False)
    linear = torch.nn.functional.linear
    try:
        yield
    finally:
        torch.nn.functional.linear = linear  # stage 3 replaces it for good
        FWD_MODULE_STACK.clear()  # keeps the model
        # All of these refer to groups that end with the process group.
        deepspeed.comm.comm.cdb = None
        groups._WORLD_GROUP = groups.mpu = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
        for registered in (groups._ALL_TO_ALL_GROUP, groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_DATA_PARALLEL_GROUP):
            registered.clear()


def _import_without_mlflow() -> None:
    """Import DeepSpeed in an eighth of the time: only its autotuner, which is not used, uses MLflow."""
    if "mlflow" in sys.modules:
        return
    sys.modules["mlflow"] = None  # type: ignore[assignment]  # what the import system raises ImportError for
    try:
        import_module("deepspeed")
    finally:
        del sys.modules["mlflow"]


def mpu() -> Any:
    """megatron-core's groups under the names that DeepSpeed asks a `model parallel unit` for."""
    functions = {
        f"get_{name}_{what}": getattr(parallel_state, f"get_{megatron}_{what}")
        for name, megatron in _MPU.items()
        for what in ("rank", "world_size", "group")
    }
    return SimpleNamespace(**functions, get_model_parallel_src_rank=parallel_state.get_tensor_model_parallel_src_rank)


def tensor_parallel_group() -> dist.ProcessGroup:
    """Ranks that share every layer."""
    return parallel_state.get_tensor_model_parallel_group()
