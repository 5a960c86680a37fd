"""Debugging a run: anomaly mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from llmrecipes.errors import ExitCode, UserError


@contextmanager
def anomaly_mode(module: torch.nn.Module) -> Iterator[None]:
    """Name the first module whose output, or backward function whose gradient, is not finite.

    Forward hooks check every module's output; autograd's anomaly detection checks the backward pass (NaN only) and
    points to the forward call. Both are slow.

    Raises:
        UserError: inside the block, at the first such output.
    """
    handles = [part.register_forward_hook(_checker(name)) for name, part in module.named_modules() if name]
    try:
        with torch.autograd.set_detect_anomaly(True):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _checker(name: str) -> Callable[[torch.nn.Module, Any, Any], None]:
    def check(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        tensors = output if isinstance(output, tuple) else (output,)
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise UserError(
                    "the output is not finite",
                    where=name,
                    rule="anomaly mode stops at the first module whose output has a NaN or an infinity",
                    fix="check this module's inputs and weights",
                    code=ExitCode.STOP,
                )

    return check
