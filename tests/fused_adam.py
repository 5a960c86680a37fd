"""TransformerEngine's FusedAdam in plain torch, where megatron-core looks for it: for moments and gradients of other
types than the weights on a CPU.

Its interface is that of the published one (`tests/stub_te` has its signature); its arithmetic is Adam's in fp32, whose
moments are rounded to their types when they are stored.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch


class TorchFusedAdam(torch.optim.Optimizer):
    """Master weights are in its state, its parameters are the model's weights."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        *,
        adam_w_mode: bool = True,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        capturable: bool = False,
    ) -> None:
        assert not capturable
        assert adam_w_mode and master_weights and use_decoupled_grad and not store_param_remainders
        assert master_weight_dtype == torch.float32
        self.types = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        assert not store_param_remainders
        moments = {name: torch.zeros_like(param, dtype=kind) for name, kind in self.types.items()}
        self.state[param] = {**moments, "master_param": param.detach().clone().float()}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (first, second), time = group["betas"], group["step"]
            for param in group["params"]:
                state, gradient = self.state[param], param.decoupled_grad.float()
                mean = state["exp_avg"].float().lerp(gradient, 1 - first)
                square = state["exp_avg_sq"].float().lerp(gradient.square(), 1 - second)
                root = (square / (1 - second**time)).sqrt() + group["eps"]
                master = state["master_param"]
                master.mul_(1 - group["lr"] * group["weight_decay"])
                master.sub_(group["lr"] * mean / (1 - first**time) / root)
                state["exp_avg"].copy_(mean)
                state["exp_avg_sq"].copy_(square)
                param.copy_(master)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put it where megatron-core and the engine look, on a machine that a plan refuses."""
    optimizers = ModuleType("transformer_engine.pytorch.optimizers")
    vars(optimizers)["FusedAdam"] = TorchFusedAdam
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, optimizers.__name__, optimizers)
    for module in ("optimizer", "optimizer.distrib_optimizer"):
        monkeypatch.setattr(f"megatron.core.{module}.Adam", TorchFusedAdam)
    monkeypatch.setattr("megatron.core.optimizer.is_te_min_version", lambda *_args: True)
    # It asks there whether remainders can be stored.
    monkeypatch.setattr("megatron.core.optimizer.optimizer_config.is_te_min_version", lambda *_args: True)
    monkeypatch.setattr("llmrecipes.plan.derive.require_fused_adam", lambda *_args: None)
