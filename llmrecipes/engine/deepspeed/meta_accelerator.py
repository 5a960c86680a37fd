"""An accelerator of DeepSpeed that answers for torch's `meta` device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

from llmrecipes.engine.core.platform.patching import replace, resolve

META = torch.device("meta")


def _tensors(dtype: torch.dtype) -> property:
    return property(lambda _: partial(torch.tensor, dtype=dtype, device=META))


class MetaAccelerator(CUDA_Accelerator):
    """A GPU's answers, but for the name of the device: streams, events and waits are those of `torch.cuda`."""

    FloatTensor = _tensors(torch.float)
    ByteTensor = _tensors(torch.uint8)

    def __init__(self) -> None:
        super().__init__()
        self._name = "meta"

    def device_name(self, device_index: object = None) -> str:
        """Name of the device, which has no index."""
        return "meta"

    current_device_name = device_name

    def device(self, device_index: object = None) -> torch.device:
        """The device."""
        return META

    current_device = device

    def is_available(self) -> bool:
        """Without a GPU too."""
        return True

    def device_count(self) -> int:
        """This rank's."""
        return 1

    def available_memory(self, device_index: object = None) -> int:
        """Enough for everything: what does not fit is to be seen."""
        return 1 << 62

    total_memory = available_memory

    def _nothing(self, *_args: Any, **_options: Any) -> int:
        return 0

    empty_cache = reset_peak_memory_stats = set_device = range_push = range_pop = memory_allocated = _nothing

    @property
    def synchronize(self) -> Callable[..., None]:
        """torch's, so that DeepSpeed's line is the innermost one of a wait."""
        wait: Callable[..., None] = torch.cuda.synchronize
        return wait

    def default_stream(self, device_index: object = None) -> Any:
        """A queue of the device."""
        return torch.cuda.current_stream()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the device."""
        return tensor.is_meta


_ASKED = (
    ("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer", "has_overflow"),
    ("deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3", "has_overflow"),
    ("deepspeed.runtime.zero.stage_1_and_2", "is_invalid_grad_norm"),
    ("deepspeed.runtime.zero.stage3", "is_invalid_grad_norm"),
    ("deepspeed.runtime.bf16_optimizer", "is_invalid_grad_norm"),
)
"""What DeepSpeed asks before an update."""
_ZERO = "deepspeed.runtime.zero"
_COMPARING = (f"{_ZERO}.partitioned_param_coordinator", f"{_ZERO}.partition_parameters", f"{_ZERO}.stage3")
"""Modules that compare the first rank's order of parameters with their own, the first time."""


def install() -> None:
    """Let DeepSpeed use the `meta` device, and find all gradients finite, for the rest of the process."""
    if isinstance(deepspeed.accelerator.get_accelerator(), MetaAccelerator):
        return
    deepspeed.accelerator.set_accelerator(MetaAccelerator())
    for owner, name in _ASKED:
        replace(owner, name, _finite(getattr(resolve(owner), name)))
    for module in _COMPARING:
        replace(module, "assert_ints_same_as_other_ranks", lambda *_args, **_options: None)


def _finite(plain: Any) -> Any:
    @wraps(plain)
    def answer(*args: Any, **options: Any) -> bool:
        plain(*args, **options)  # for what it reads and sends
        return False

    return answer
