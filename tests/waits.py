"""What would make the host wait for a GPU, counted on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

_READS = {
    getattr(torch.Tensor, name): name
    for name in (
        "item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__", "nonzero", "masked_select",
        "is_nonzero", "equal",
    )
} | {torch.nonzero: "nonzero", torch.equal: "equal", torch.masked_select: "masked_select"}  # fmt: skip

_ON_THE_HOST = "megatron/core/tensor_parallel/random.py"
"""Compares states of the CPU's generator."""


class _Count(TorchFunctionMode):
    def __init__(self, found: list[str], package: str) -> None:
        super().__init__()
        self._found = found
        # By its folder: that of a clone may have the same name.
        self._folder = f"{Path(import_module(package).__path__[0])}/" if package else ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        caller = sys._getframe(1).f_code.co_filename
        if caller.startswith(self._folder) and not caller.endswith(_ON_THE_HOST):
            if func in _READS:
                self._found.append(_READS[func])
            elif func in (torch.tensor, torch.as_tensor) and _holds_tensors(args[0]):
                self._found.append("tensor of tensors")
        return func(*args, **(kwargs or {}))


def _holds_tensors(data: Any) -> bool:
    if isinstance(data, list | tuple):
        return any(isinstance(each, torch.Tensor) or _holds_tensors(each) for each in data)
    return False


@contextmanager
def waits(package: str = "") -> Iterator[list[str]]:
    """A block whose reads of tensors, and synchronisations of the device, are listed in what it yields.

    Args:
        package: whose reads count; empty: all code.
    """
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch, _Count(found, package):
        patch.setattr(torch.cuda, "synchronize", lambda *_: found.append("synchronize"))
        yield found
