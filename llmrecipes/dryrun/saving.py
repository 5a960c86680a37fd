"""A checkpoint of a rank without data: what it holds in host memory, and what it would write."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llmrecipes.dryrun.spec import Save
from llmrecipes.dryrun.storages import Storages
from llmrecipes.engine.base import Engine, Progress

_META = torch.device("meta")
_FACTORIES = {"empty", "empty_strided", "zeros", "ones", "full"}


def plan_save(engine: Engine) -> Save:
    """Take the engine's state and plan its files, as a saver does; nothing is written but small plain values.

    Args:
        engine: after a step.
    """
    memory = _HostWithoutData()
    gc.freeze()  # megatron-core collects garbage for each bucket, and the operations so far have left many objects
    try:
        with tempfile.TemporaryDirectory() as folder, memory:
            files = engine.checkpoint_format()
            with engine.params_synced():
                taken = files.snapshot(engine.state(Progress()))
            prepared = files.prepare(taken, Path(folder) / "checkpoint", 0)
            written = files.planned_bytes(prepared)
    finally:
        gc.unfreeze()
    return Save(held_bytes=memory.host.peak(), written_bytes=written)


class _HostWithoutData(TorchDispatchMode):
    """Host tensors that are made in the block have no data either; they are tracked as the host's."""

    def __init__(self) -> None:
        super().__init__()
        self.host = Storages()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        self.host.now += 1
        name = func._schema.name.partition("::")[2]
        device = options.get("device")
        to_host = device is not None and torch.device(device).type == "cpu"
        if name in _FACTORIES and (device is None or to_host) and 0 not in args[0]:  # storages are copied in empty ones
            return self._made(func(*args, **{**options, "device": _META, "pin_memory": None}))
        if name == "_to_copy" and to_host and args[0].is_meta:
            return self._made(func(*args, **{**options, "device": _META}))
        if name == "copy_" and not args[0].is_meta and args[1].is_meta:
            return args[0]
        if name == "_local_scalar_dense" and args[0].is_meta:
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **options)

    def _made(self, result: Any) -> Any:
        for tensor in tree_leaves(result):
            self.host.seen(tensor)
        return result
