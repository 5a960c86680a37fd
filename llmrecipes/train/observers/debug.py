"""Debugging a run: anomaly mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from llmrecipes.errors import ExitCode, UserError
from llmrecipes.train.observers.base import Observer
from llmrecipes.train.spec import RunSpec


class AnomalyMode(Observer):
    """Names the first module whose output, or backward function whose gradient, is not finite.

    Forward hooks check every module's output; autograd's anomaly detection checks the backward pass (NaN only) and
    points to the forward call. Both are slow.
    """

    @classmethod
    def wanted(cls, spec: RunSpec) -> bool:
        """With --anomaly."""
        return spec.anomaly

    def begin(self) -> None:
        """From here on, the first such output is a UserError."""
        self.stack.enter_context(torch.autograd.set_detect_anomaly(True))
        for module in self.loop.engine.modules:
            for name, part in module.named_modules():
                if name:
                    self.stack.callback(part.register_forward_hook(_checker(name)).remove)


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
