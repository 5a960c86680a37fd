"""Every storage of the device: when it is made and freed, for what, and in which module."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

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
        found = self._alive.get(tensor.untyped_storage()._cdata)
        if found is not None and found[0].category in (OTHER, "communication"):
            found[0].category = category

    def label(self, category: Category, tensors: Iterable[torch.Tensor]) -> None:
        """What storages are for, whatever an operation has made of them, from their allocation on."""
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
        found = []
        for when in sorted(changes):
            total.update(changes[when])
            found.append((when, Counter(total)))
        return found

    def modules_at(self, when: int) -> Counter[tuple[str, Category]]:
        """Bytes by module and category after one operation, without model states."""
        found: Counter[tuple[str, Category]] = Counter()
        for life in self._lives:
            if life.made <= when and (life.freed is None or life.freed > when):
                found[life.module, life.category] += life.size
        return found

    def _free(self, key: int) -> None:
        life, _ = self._alive.pop(key)
        # Before the next operation: at the end of this one both its inputs and its results were there.
        life.freed = self.now + 1
