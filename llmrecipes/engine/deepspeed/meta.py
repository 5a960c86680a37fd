"""DeepSpeed on tensors without data: an accelerator that answers for torch's `meta` device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, wraps
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

from llmrecipes.engine.deepspeed.build import zero
from llmrecipes.engine.deepspeed.engine import DeepSpeedEngine
from llmrecipes.engine.deepspeed.partition import own_partition
from llmrecipes.engine.deepspeed.placement import full_shape
from llmrecipes.engine.megatron.platform.patching import replace, resolve

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
    def asked(*args: Any, **options: Any) -> bool:
        plain(*args, **options)  # for what it reads and sends
        return False

    return asked


class MetaDeepSpeedEngine(DeepSpeedEngine):
    """See `engine.base.MetaEngine`; arguments as `DeepSpeedEngine`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for group in getattr(self.optimizer, "round_robin_bit16_meta", ()):
            # DeepSpeed's own tensors without data, of which it wants the shapes.
            group[:] = [torch.empty(1, device=META).expand(each.shape) for each in group]
        # In the first one stage 3 records in which order parameters are used, to gather them ahead afterwards.
        self.first_steps = int(zero(self.recipe).stage == 3)

    def model_states(self) -> dict[str, list[torch.Tensor]]:
        """See `MetaEngine`."""
        parameters = list(self.module.parameters())
        partitioned = [each for each in parameters if hasattr(each, "ds_tensor")]
        return {
            "weights": [own_partition(each).values for each in partitioned] or [each.data for each in parameters],
            "gradients": _kept_gradients(self.optimizer),
            "optimizer": list(self.partition.states()),
        }

    def watch_states(self, see: Callable[[str, Iterable[torch.Tensor]], None]) -> None:
        """See `MetaEngine`."""
        optimizer = self.optimizer
        buckets = getattr(optimizer, "ipg_buckets", {})
        _before(optimizer, "step", lambda *_, **__: see("gradients", _gradients(optimizer)))
        if hasattr(optimizer, "setup_buckets"):  # stages 1 and 2, which allocate them in each backward pass
            _before(optimizer, "reduce_ipg_grads", lambda *_, **__: see("communication", _buffers(buckets)))
            if not optimizer.partition_gradients:
                reduce = "reduce_ready_partitions_and_remove_grads"
                _before(optimizer, reduce, lambda each, _group: see("gradients", _gradient(optimizer, each)))
        else:
            see("communication", _buffers(buckets))

            def used(module: torch.nn.Module, *_: Any) -> None:
                # Autograd refers to gathered weights, and does not keep them.
                see("communication", _gathered(module))
                see("weights", _second_copies(module))

            for module in self.module.modules():
                module.register_forward_hook(used, prepend=True)  # DeepSpeed's own one releases them


def _before(optimizer: Any, name: str, call: Callable[..., None]) -> None:
    """Make a method of an optimizer call something first, with its arguments."""
    plain = getattr(optimizer, name)

    def seen(*args: Any, **options: Any) -> Any:
        call(*args, **options)
        return plain(*args, **options)

    setattr(optimizer, name, seen)


def _kept_gradients(optimizer: Any) -> list[torch.Tensor]:
    """Gradients in buffers that stay: all of them without ZeRO 2, this rank's with ZeRO 3."""
    if (own := getattr(optimizer, "grad_partitions_flat_buffer", None)) is not None:
        return [own]
    return list(getattr(optimizer, "fp32_groups_gradients_flat", ()))


def _gradient(optimizer: Any, parameter: torch.nn.Parameter) -> list[torch.Tensor]:
    found = optimizer.get_gradient_for_reduction(parameter)
    return [] if found is None else [found]


def _gathered(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Weights of other ranks that a module has just used; its own, and a tied one."""
    for parameter in (*module.parameters(recurse=False), *getattr(module, "_external_params", {}).values()):
        if hasattr(parameter, "ds_tensor") and parameter.shape == full_shape(parameter):
            yield parameter.data


def _second_copies(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """hpZ's, of the weights of a module."""
    for parameter in module.parameters(recurse=False):
        if (copy := getattr(parameter, "ds_secondary_tensor", None)) is not None:
            yield copy


def _gradients(optimizer: Any) -> Iterator[torch.Tensor]:
    """Those that the update reads; without ZeRO the parameters'."""
    if isinstance(optimizer, torch.optim.Optimizer):
        yield from (each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None)
    elif hasattr(optimizer, "setup_buckets"):
        for group in optimizer.averaged_gradients.values():
            yield from group or ()


def _buffers(buckets: Mapping[Any, Any]) -> Iterator[torch.Tensor]:
    for bucket in buckets.values():
        yield from bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]
