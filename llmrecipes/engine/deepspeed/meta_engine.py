"""DeepSpeed on tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from llmrecipes.engine.deepspeed.build import zero
from llmrecipes.engine.deepspeed.engine import DeepSpeedEngine
from llmrecipes.engine.deepspeed.meta_accelerator import META
from llmrecipes.engine.deepspeed.partition import full_shape, own_partition
from llmrecipes.engine.deepspeed.state import rehearse_load


class MetaDeepSpeedEngine(DeepSpeedEngine):
    """Implements `engine.base.MetaEngine`; arguments as `DeepSpeedEngine`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for group in getattr(self.optimizer, "round_robin_bit16_meta", ()):
            # DeepSpeed's own tensors without data, of which it wants the shapes.
            group[:] = [torch.empty(1, device=META).expand(tensor.shape) for tensor in group]
        # In the first one stage 3 records in which order parameters are used, to gather them ahead afterwards.
        self.first_steps = int(zero(self.recipe).stage == 3)

    def model_states(self) -> dict[str, list[torch.Tensor]]:
        parameters = list(self.module.parameters())
        partitioned = [parameter for parameter in parameters if hasattr(parameter, "ds_tensor")]
        return {
            "weights": [own_partition(parameter).values for parameter in partitioned]
            or [parameter.data for parameter in parameters],
            "gradients": _kept_gradients(self.optimizer),
            "optimizer": list(self.partition.states()),
        }

    def rehearse_load(self) -> list[int]:
        return rehearse_load(self)

    def watch_states(self, see: Callable[[str, Iterable[torch.Tensor]], None]) -> None:
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
    if (buffer := getattr(optimizer, "grad_partitions_flat_buffer", None)) is not None:
        return [buffer]
    return list(getattr(optimizer, "fp32_groups_gradients_flat", ()))


def _gradient(optimizer: Any, parameter: torch.nn.Parameter) -> list[torch.Tensor]:
    gradient = optimizer.get_gradient_for_reduction(parameter)
    return [] if gradient is None else [gradient]


def _gathered(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Weights of other ranks that a module has just used; its own, and a tied one."""
    for parameter in (*module.parameters(recurse=False), *getattr(module, "_external_params", {}).values()):
        if hasattr(parameter, "ds_tensor") and parameter.shape == full_shape(parameter):
            yield parameter.data


def _second_copies(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """hpZ's secondary partitions of the weights of a module."""
    for parameter in module.parameters(recurse=False):
        if (copy := getattr(parameter, "ds_secondary_tensor", None)) is not None:
            yield copy


def _gradients(optimizer: Any) -> Iterator[torch.Tensor]:
    """Those that the update reads; without ZeRO the parameters'."""
    if isinstance(optimizer, torch.optim.Optimizer):
        yield from (
            parameter.grad
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        )
    elif hasattr(optimizer, "setup_buckets"):
        for group in optimizer.averaged_gradients.values():
            yield from group or ()


def _buffers(buckets: Mapping[Any, Any]) -> Iterator[torch.Tensor]:
    for bucket in buckets.values():
        yield from bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]
