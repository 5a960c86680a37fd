"""The order in which a rank runs forward and backward passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from llmrecipes.dryrun.spec import Pass
from llmrecipes.dryrun.storages import Storages


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
