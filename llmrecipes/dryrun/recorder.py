"""Sees every operation: storages, collectives, and where the host waits for the device."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from llmrecipes.dryrun.dry_run_spec import Pass

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
_OURS = (Path(__file__).parent, Path(__file__).parents[1] / "engine" / "core" / "platform")
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
        namespace = func.namespace
        name = func._schema.name.partition("::")[2]
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
        """Record that the host waits for the device."""
        self.waits[_place()] += 1

    def _collective(self, func: Any, name: str, args: Any, options: Any) -> Any:
        if name in COLLECTIVES:
            kind, sent, received = COLLECTIVES[name]
            names = [argument.name for argument in func._schema.arguments]
            group = dist.ProcessGroup.unbox(args[names.index("process_group")])
            if group.size() > 1:
                tensors = [leaf for leaf in tree_leaves(args[sent]) if isinstance(leaf, torch.Tensor)]
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

    plain = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        recorder.storages.resized(storage, size)
        return plain(storage, size)

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with recorder, _Construction(recorder), hooks:
        # No operation tells of it: it is how recomputation discards and restores results.
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]


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
    raise NotImplementedError(f"{name}: the number of its results depends on data")


def _place() -> str:
    """File and innermost running function outside of torch; lines would change with each version of a file."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "torch" not in path.parts and path.parent not in _OURS:
            return f"{'/'.join(path.parts[-2:])}:{frame.f_code.co_qualname}"
        frame = frame.f_back
    return "torch"


Category = str
"""One of `spec.PARTS`."""

OTHER = "temporary"


@dataclass(slots=True)
class _Life:
    """One storage; times are numbers of operations."""

    size: int
    made: int
    module: str
    category: Category = OTHER
    freed: int | None = None


class Storages:
    """The life of every storage. Times are set from outside (`now`), as is the running module (`module`)."""

    def __init__(self) -> None:
        self.now = 0
        self.module = ""
        self._lives: list[_Life] = []
        self._alive: dict[int, tuple[_Life, object]] = {}
        self._states: Counter[Category] = Counter()

    def seen(self, tensor: torch.Tensor) -> None:
        """A result of an operation; its storage may be new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        life = _Life(storage.nbytes(), self.now, self.module)
        self._lives.append(life)
        self._alive[key] = life, weakref.ref(storage, lambda _: self._free(key))

    def mark(self, tensor: torch.Tensor, category: Category) -> None:
        """What a storage is for. Kept for the backward pass is stronger than made for communication."""
        life = self._alive.get(tensor.untyped_storage()._cdata)
        if life is not None and life[0].category in (OTHER, "communication"):
            life[0].category = category

    def label(self, category: Category, tensors: Iterable[torch.Tensor]) -> None:
        """Set the purpose of storages from their allocation on, whatever operations have recorded."""
        for tensor in tensors:
            self.seen(tensor)
            self._alive[tensor.untyped_storage()._cdata][0].category = category

    def hold(self, states: Mapping[Category, Iterable[torch.Tensor]]) -> None:
        """Model states. Storages are counted by the tensors in them; what pads a buffer is for communication."""
        for category, tensors in states.items():
            for tensor in tensors:
                self.seen(tensor)
                life, _ = self._alive[tensor.untyped_storage()._cdata]
                life.category = "communication"
                life.size -= tensor.nbytes
                self._states[category] += tensor.nbytes

    def resized(self, storage: torch.UntypedStorage, size: int) -> None:
        """Record a new size of a storage: another life of the same storage."""
        known = self._alive.get(storage._cdata)
        if known is None:
            return
        life, reference = known
        life.freed = self.now + 1
        following = _Life(size, self.now + 1, life.module, life.category)
        self._lives.append(following)
        self._alive[storage._cdata] = following, reference

    def peak(self) -> int:
        """Most bytes at a time, of all storages."""
        return max((parts.total() for _, parts in self.timeline(0)), default=0)

    def timeline(self, start: int) -> list[tuple[int, Counter[Category]]]:
        """Bytes by category after each operation since `start` that changed them."""
        changes: dict[int, Counter[Category]] = {}
        for life in self._lives:
            changes.setdefault(max(life.made, start), Counter())[life.category] += life.size
            if life.freed is not None:
                changes.setdefault(max(life.freed, start), Counter())[life.category] -= life.size
        total = Counter(self._states)
        moments = []
        for when in sorted(changes):
            total.update(changes[when])
            moments.append((when, Counter(total)))
        return moments

    def modules_at(self, when: int) -> Counter[tuple[str, Category]]:
        """Bytes by module and category after one operation, without model states."""
        sizes: Counter[tuple[str, Category]] = Counter()
        for life in self._lives:
            if life.made <= when and (life.freed is None or life.freed > when):
                sizes[life.module, life.category] += life.size
        return sizes

    def _free(self, key: int) -> None:
        life, _ = self._alive.pop(key)
        # Before the next operation: at the end of this one both its inputs and its results were there.
        life.freed = self.now + 1


class Passes:
    """Passes of this rank's chunks in the order in which they start, and the module that is running.

    Args:
        modules: chunks of the model on this rank.
        storages: learns which module is running, and has the time.
        begun: called with the number of passes that have begun.
    """

    def __init__(
        self, modules: Sequence[torch.nn.Module], storages: Storages, begun: Callable[[int], None] = lambda count: None
    ) -> None:
        self._begun = begun
        self.order: list[Pass] = []
        self._chunks = {id(module): number for number, module in enumerate(modules)}
        self._names = {
            id(module): pattern(name) for chunk in modules for name, module in chunk.named_modules(prefix="model")
        }
        self._storages = storages
        self._stack: list[str] = []
        self._numbers: Counter[tuple[str, int]] = Counter()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A block in which every module is followed."""
        hooks = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: torch.nn.Module, _inputs: Any) -> None:
        self._stack.append(self._storages.module)
        self._storages.module = self._names.get(id(module), self._storages.module)
        chunk = self._chunks.get(id(module))
        if chunk is not None:
            self._begin("forward", chunk)

    def _leave(self, module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        self._storages.module = self._stack.pop() if self._stack else ""
        chunk = self._chunks.get(id(module))
        if chunk is not None and isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(self._backward(chunk))

    def _backward(self, chunk: int) -> Callable[[torch.Tensor], None]:
        def begin(_gradient: torch.Tensor) -> None:
            self._storages.module = ""
            self._begin("backward", chunk)

        return begin

    def _begin(self, kind: str, chunk: int) -> None:
        number = self._numbers[kind, chunk]
        self._numbers[kind, chunk] += 1
        self.order.append(Pass(kind=kind, chunk=chunk, micro_batch=number, begin=self._storages.now))
        self._begun(len(self.order))


def pattern(name: str) -> str:
    """A module's name with a star for each number: `model.decoder.layers.*.mlp`."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))
