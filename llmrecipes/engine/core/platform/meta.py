"""A rank of any world on tensors without data: torch's `meta` device and its `fake` process group.

Shapes, types and the order of operations are those of the real code, and no memory is used: torch's FakeTensorMode
computes with the same device. Unlike with its fake CPU tensors, device and host stay apart, so that each place where
the host waits for a result of the device is seen. The caller gives the host the values that it asks for.
"""

from __future__ import annotations

from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.testing._internal.distributed.fake_pg import FakeStore

from llmrecipes.engine.core.platform.cpu import patch_cuda
from llmrecipes.engine.core.platform.meta_kernels import install_kernels, install_routing
from llmrecipes.engine.core.platform.patching import replace, resolve
from llmrecipes.engine.core.platform.substitutes import install_substitutes

META = torch.device("meta")
GROUPS = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP": "dp-cp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "expert_tp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "expert_tp-ep",
    "EXPERT_DATA_PARALLEL_GROUP": "expert_dp",
    "EMBEDDING_GROUP": "embedding",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "optimizer",
}
"""megatron-core's groups by the names that `llmrecipes plan --placement` has."""
_MIXED = "megatron.core.optimizer.optimizer.MixedPrecisionOptimizer"
_PLAIN_UNSCALE = resolve(_MIXED)._unscale_main_grads_and_check_for_nan
_COALESCED = ("allreduce_coalesced_", "allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_")


class MetaPlatform:
    """One rank of a world that does not exist.

    Args:
        rank: from 0.
        world_size: ranks of the world.
        kernels: see `install_kernels`.
        skew: see `install_routing`.
    """

    library: torch.library.Library | None = None
    """Operators of the first instance that was installed; they end with it."""
    name = "meta"
    backend = "cpu:fake,meta:fake"
    device = META

    def __init__(self, rank: int, world_size: int, kernels: str, skew: float) -> None:
        self._rank = rank
        self._world_size = world_size
        self._kernels = kernels
        self._skew = skew

    def install(self) -> None:
        install_kernels(self._kernels)
        install_routing(self._skew)
        if MetaPlatform.library is not None:
            return
        patch_cuda(META)
        install_substitutes()
        replace("torch.nn.Module", "to", _keeping_marks(torch.nn.Module.to))
        replace(_MIXED, "_unscale_main_grads_and_check_for_nan", _without_overflow(_PLAIN_UNSCALE))
        _answer_locally()
        MetaPlatform.library = _register_coalesced()

    def connect(self, timeout: timedelta) -> None:
        dist.init_process_group(
            self.backend, store=FakeStore(), rank=self._rank, world_size=self._world_size, timeout=timeout
        )

    def peak_memory(self) -> int:
        return 0

    def synchronize(self) -> None:
        return None


class _Event:
    """An event that the host can wait for: it then reads from the device, which is how a wait is seen."""

    def __init__(self, *_args: Any, **_options: Any) -> None: ...

    def record(self, *_args: Any) -> None: ...

    wait = record

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        torch.empty((), device=META).item()


class _MetaStream:
    """A queue of the device."""

    def __init__(self, *_args: Any, **_options: Any) -> None: ...

    def wait_stream(self, *_args: Any) -> None: ...

    wait_event = wait_stream

    def record_event(self, *_args: Any) -> _Event:
        return _Event()

    def synchronize(self) -> None:
        _Event().synchronize()


def _keeping_marks(plain: Any) -> Any:
    """`Module.to`, which here makes new parameters: megatron-core marks them, for sequence parallelism for one."""

    @wraps(plain)
    def to(module: torch.nn.Module, *args: Any, **options: Any) -> torch.nn.Module:
        before = dict(module.named_parameters(remove_duplicate=False))
        moved: torch.nn.Module = plain(module, *args, **options)
        for name, parameter in moved.named_parameters(remove_duplicate=False):
            vars(parameter).update(vars(before[name]))
        return moved

    return to


def _without_overflow(plain: Any) -> Any:
    """The check of fp16's gradients, which says that they are finite: else there would be no update."""

    @wraps(plain)
    def unscale(optimizer: Any) -> bool:
        plain(optimizer)
        return False

    return unscale


def _register_coalesced() -> torch.library.Library:
    """Give the collectives that torch has no version of without data one that does nothing."""
    library = torch.library.Library("c10d", "IMPL", "Meta")
    for name in _COALESCED:
        library.impl(name, lambda *_args, **_options: FakeWork().boxed())
    return library


def _answer_locally() -> None:
    """Groups of any backend are fake ones, and objects of other ranks are equal to this rank's."""
    real = dist.new_group

    def new_group(ranks: list[int] | None = None, *_args: Any, **options: Any) -> Any:
        # Groups of other ranks: thousands in a large world, each with a store of its own.
        if ranks is not None and dist.get_rank() not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        described = options.get("group_desc") or "group"
        return real(ranks, backend=MetaPlatform.backend, group_desc=GROUPS.get(described, described.lower()))

    def all_gather_object(gathered: list[Any], item: Any, group: Any = None) -> None:
        gathered[:] = [item] * len(gathered)

    def gather_object(item: Any, gathered: list[Any] | None = None, *_args: Any, **_options: Any) -> None:
        if gathered is not None:
            gathered[:] = [item] * len(gathered)

    replace("torch.cuda", "Event", _Event)
    replace("torch.cuda", "Stream", _MetaStream)
    replace("torch.cuda", "current_stream", lambda *_args, **_options: _MetaStream())
    replace("torch.cuda", "synchronize", lambda *_args, **_options: _Event().synchronize())
    # Other ranks' parts, which it would compare, are not there.
    replace("megatron.core.dist_checkpointing.state_dict_utils", "validate_sharding_integrity", lambda *_a, **_o: None)
    replace("torch.distributed", "new_group", new_group)
    replace("torch.distributed", "all_gather_object", all_gather_object)
    replace("torch.distributed", "gather_object", gather_object)
    replace("torch.distributed", "broadcast_object_list", lambda *_args, **_options: None)
