"""Sees every operation: storages, collectives, and where the host waits for the device."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from llmrecipes.dryrun.storages import Storages

# Collectives by torch's name: ours, and the arguments with what is sent (the first) and what is received.
COLLECTIVES = {
    "allreduce_": ("all-reduce", 0, 0),
    "broadcast_": ("broadcast", 0, 0),
    "reduce_": ("reduce", 0, 0),
    "_allgather_base_": ("all-gather", 0, 0),
    "allgather_": ("all-gather", 0, 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1, 0),
    "reduce_scatter_": ("reduce-scatter", 1, 0),
    "alltoall_base_": ("all-to-all", 1, 0),
    "allreduce_coalesced_": ("all-reduce", 0, 0),
    "allgather_into_tensor_coalesced_": ("all-gather", 0, 0),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1, 0),
    "gather_": ("gather", 1, 0),
    "scatter_": ("scatter", 1, 0),
    "send": ("send", 0, 0),
    "recv_": ("receive", 0, 0),
}
_HOST = torch.device("cpu")
_OURS = (Path(__file__).parent, Path(__file__).parents[1] / "engine" / "megatron" / "platform")
"""Folders whose lines do not wait by themselves."""


class Recorder(TorchDispatchMode):
    """Records operations on a device without data, and gives the host plausible numbers where it asks for some.

    Args:
        storages: of the device.
        chosen: share of elements that a mask selects; masks are those of routers.
    """

    def __init__(self, storages: Storages, chosen: float = 1.0) -> None:
        super().__init__()
        self._chosen = chosen
        self.storages = storages
        self.collectives: Counter[tuple[tuple[int, ...], str, str]] = Counter()
        self.sent: Counter[tuple[tuple[int, ...], str, str]] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        self.storages.now += 1
        namespace, name = func.namespace, func._schema.name.partition("::")[2]
        if namespace == "c10d":
            result = self._collective(func, name, args, options)
        elif name == "masked_select" and args[0].is_meta:
            self.waited()  # for the number of results
            result = args[0].new_empty(round(args[1].numel() * self._chosen))
        elif _reads_device(name, args, options):
            if not options.get("non_blocking"):
                self.waited()
            return _plausible(name, args, options)
        else:
            result = func(*args, **options)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                self.storages.seen(tensor)
        return result

    def clear(self) -> None:
        """Forget collectives and waits."""
        self.collectives.clear()
        self.sent.clear()
        self.waits.clear()

    def waited(self) -> None:
        """The host waits for the device here."""
        self.waits[_place()] += 1

    def _collective(self, func: Any, name: str, args: Any, options: Any) -> Any:
        if name in COLLECTIVES:
            kind, sent, received = COLLECTIVES[name]
            names = [argument.name for argument in func._schema.arguments]
            group = dist.ProcessGroup.unbox(args[names.index("process_group")])
            if group.size() > 1:
                tensors = [each for each in tree_leaves(args[sent]) if isinstance(each, torch.Tensor)]
                key = tuple(dist.get_process_group_ranks(group)), group.group_desc, kind
                self.collectives[key] += 1
                self.sent[key] += sum(tensor.nbytes for tensor in tensors)
                for tensor in tree_leaves(args[received]):
                    if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                        self.storages.mark(tensor, "communication")
        return func(*args, **options)


class _Construction(TorchFunctionMode):
    """`torch.tensor([a device's scalar])` reads each scalar, without an operation that a dispatch mode would see."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], torch.Tensor):
            args = (tree_map_only(torch.Tensor, self._read, args[0]), *args[1:])
        return func(*args, **(kwargs or {}))

    def _read(self, tensor: torch.Tensor) -> Any:
        if tensor.is_meta:
            self._recorder.waited()
            return 1.0 if tensor.is_floating_point() else 1
        return tensor


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """A block whose operations are recorded, and what autograd keeps in it."""

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            recorder.storages.mark(tensor, "activations")
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with recorder, _Construction(recorder), hooks:
        yield


def _reads_device(name: str, args: Any, options: Any) -> bool:
    if not args or not isinstance(args[0], torch.Tensor):
        return False
    if name in ("_local_scalar_dense", "nonzero", "equal"):
        return args[0].is_meta
    if name == "_to_copy":
        return args[0].is_meta and options.get("device") == _HOST
    return name == "copy_" and not args[0].is_meta and args[1].is_meta


def _plausible(name: str, args: Any, options: Any) -> Any:
    """Ones, of the type and shape that the host expects."""
    tensor: torch.Tensor = args[0]
    if name == "_local_scalar_dense":
        return 1.0 if tensor.is_floating_point() else (True if tensor.dtype == torch.bool else 1)
    if name == "equal":
        return True
    if name == "copy_":
        return tensor.fill_(1)
    if name == "_to_copy":
        return torch.ones(tensor.shape, dtype=options.get("dtype") or tensor.dtype)
    raise NotImplementedError(f"{name}: the number of its results is data")


def _place() -> str:
    """File and innermost running function outside of torch; lines would change with each version of a file."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "torch" not in path.parts and path.parent not in _OURS:
            return f"{'/'.join(path.parts[-2:])}:{frame.f_code.co_qualname}"
        frame = frame.f_back
    return "torch"
