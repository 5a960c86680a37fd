"""Patches of megatron-core for both CPUs and GPUs.

AdamW, if neither TransformerEngine nor Apex provides a fused one: megatron-core then falls back to `torch.optim.AdamW`,
which keeps a `step` tensor per parameter; its distributed optimizer cannot load or reshard that. The fused optimizers
that it was written for keep one `step` per parameter group, and so does this one. The arithmetic is torch's fused
kernel, on both CPU and GPU.

Input noise of routers is for training only; megatron-core also adds it in evaluation and generation.

megatron-core's row-parallel layers ask for the default tensor-parallel group in every forward pass, and rank 0 warns of
it. torch.compile cannot trace the warning and would cut every layer into pieces, on that rank only.

megatron-core's own linear layers add a weight's gradient to its buffer with APEX only, and raise without it; with
TransformerEngine's layers the output layer is one of them (`gradient_accumulation_fusion`).

megatron-core also counts how often multi-token prediction is right, in each micro-batch: nothing reads it, and a loss
in chunks has no logits that could be counted.

Routers call a function that megatron-core compiles, although all it does is to count the tokens of each expert, and
nothing without expert biases: each rank would start torch's compiler, which on a CPU needs a C++ compiler. It counts
experts that are padded to their capacity as if all were equally busy, so that their bias would never move.

torch's optimizers import its compiler at the first call of some of their methods, to except them from what it compiles:
a quarter of the processor time that a rank takes to import everything.

Recomputation that discards a result (`recompute_modules`) asks TransformerEngine for its fp8 state also where there is
none, and megatron-core compiles a C++ function on each rank at the first backward pass to restore the result without a
copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from copy import copy
from functools import wraps
from inspect import unwrap
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch.optim.adamw import adamw

from llmrecipes.engine.core.platform.gelu import install_gelu
from llmrecipes.engine.core.platform.patching import replace, resolve
from llmrecipes.engine.core.platform.rope import install_rope
from llmrecipes.hardware.builds import transformer_engine_obstacle


def install_substitutes() -> None:
    """Fix evaluation, and provide what megatron-core imports from TransformerEngine if that is not installed."""
    install_jitter()
    install_adam()
    install_lion()
    replace("megatron.core.tensor_parallel.layers", "get_tensor_model_parallel_group_if_none", default_group)
    install_restoring()
    install_rope()
    install_gelu()
    replace("megatron.core.tensor_parallel", "ColumnParallelLinear", OutputLayer)
    install_uncounted()
    install_uncompiled_optimizers()
    install_counts()
    if transformer_engine_obstacle() is not None:  # it may be installed and not run here
        replace("megatron.core.transformer.multi_latent_attention", "HAVE_TE", False)


class OutputLayer(ColumnParallelLinear):
    """megatron-core's, whose gradient is added by autograd where only APEX could add it in the kernel.

    It looks the class up in this package only for the output layer.
    """

    def __init__(self, *args: Any, config: Any, **options: Any) -> None:
        if config.gradient_accumulation_fusion and not layers._grad_accum_fusion_available:
            config = copy(config)
            config.gradient_accumulation_fusion = False
        super().__init__(*args, config=config, **options)


RANDOM = "megatron.core.tensor_parallel.random"


def install_restoring() -> None:
    """Let discarded results be restored without TransformerEngine and without a compiler."""
    module = resolve(RANDOM)
    resolve(f"{RANDOM}.CheckpointWithoutOutput")
    replace(RANDOM, "_get_share_storage", lambda: _copy_storage)
    if not hasattr(module, "FP8GlobalStateManager"):
        module.FP8GlobalStateManager = _NoFp8
        module.activation_recompute_forward = module.fp8_autocast = lambda **_options: nullcontext()


PREDICTION = "megatron.core.transformer.multi_token_prediction"


def install_uncounted() -> None:
    """Do not count the right predictions of multi-token prediction."""
    replace(PREDICTION, "_compute_mtp_acceptance_counts", _uncounted)


def _uncounted(_logits: torch.Tensor, _labels: torch.Tensor, mask: torch.Tensor, *_options: Any) -> Any:
    return mask.new_zeros(2).float().unbind()


class _NoFp8:
    """TransformerEngine's state where it is not installed."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


def _copy_storage(discarded: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Restore a tensor whose storage was emptied, without a new version of it for autograd."""
    storage = recomputed.untyped_storage()
    discarded.untyped_storage().resize_(storage.size())
    discarded.untyped_storage().copy_(storage)


def default_group(tp_group: Any, is_expert: bool = False, check_initialized: bool = True) -> Any:
    """megatron-core's `get_tensor_model_parallel_group_if_none` without its deprecation warning; arguments as there."""
    if not dist.is_initialized():
        return None
    if tp_group is not None or not parallel_state.is_initialized():
        return tp_group
    group = (
        parallel_state.get_expert_tensor_parallel_group if is_expert else parallel_state.get_tensor_model_parallel_group
    )
    return group(check_initialized=check_initialized)


ROUTER = "megatron.core.transformer.moe.router.TopKRouter"
METHOD = "apply_input_jitter"
COUNT, ROUTING = "_apply_expert_bias", "routing"
"""Of `ROUTER`: adds to the tokens of each expert; chooses experts, and then counts."""


def install_jitter() -> None:
    """Disable `moe_input_jitter_eps` outside of training."""
    plain = resolve(f"{ROUTER}.{METHOD}")
    if hasattr(plain, "__wrapped__"):  # already installed
        return

    @wraps(plain)
    def in_training(router: Any, values: Any) -> Any:
        return plain(router, values) if router.training else values

    replace(ROUTER, METHOD, in_training)


def install_counts() -> None:
    """Count the tokens of each expert for its bias without a compiler, and only those that chose the expert."""
    routing = resolve(f"{ROUTER}.{ROUTING}")
    if hasattr(routing, "__wrapped__"):  # already installed
        return
    count = unwrap(resolve(f"{ROUTER}.{COUNT}"))

    def unless_padded(router: Any, chosen: Any, *options: Any, **named: Any) -> None:
        if not router.config.moe_pad_expert_input_to_capacity:
            count(router, chosen, *options, **named)

    @wraps(routing)
    def counted(router: Any, *args: Any, **options: Any) -> Any:
        probabilities, chosen = routing(router, *args, **options)
        if router.config.moe_pad_expert_input_to_capacity:
            count(router, chosen & (probabilities > 0))  # tokens that fill an expert up have probability 0
        return probabilities, chosen

    replace(ROUTER, COUNT, unless_padded)
    replace(ROUTER, ROUTING, counted)


class GroupStepAdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) with the step count in the parameter group, as TransformerEngine's and Apex' FusedAdam.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        adam_w_mode: must be true; L2 regularisation in the gradient is not offered.
        capturable: must be false; the step count is a Python number, which a CUDA graph cannot capture.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        if not adam_w_mode or capturable:
            raise ValueError("GroupStepAdamW supports only decoupled weight decay, and no capture in a CUDA graph")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            group["step"] = int(group.get("step", 0)) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if not self.state[p]:
                    self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            # The kernel increments each entry itself, so every parameter needs its own.
            steps = torch.full((len(params),), float(group["step"] - 1), device=params[0].device)
            adamw(
                params,
                [p.grad for p in params],
                [self.state[p]["exp_avg"] for p in params],
                [self.state[p]["exp_avg_sq"] for p in params],
                [],
                list(steps.unbind()),
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
        return loss


def install_uncompiled_optimizers() -> None:
    """Let torch's optimizers, which nothing here compiles, do without its compiler."""
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        plain = unwrap(resolve(f"torch.optim.Optimizer.{name}"))
        plain.__dynamo_disable = plain  # what `torch._disable_dynamo` looks for


def install_lion() -> None:
    """Let emerging-optimizers' Lion update without torch.compile, which would need a compiler where there is no GPU."""
    if torch.cuda.is_available():
        return
    lion = "emerging_optimizers.scalar_optimizers.lion"
    compiled = resolve(lion).calculate_lion_update
    replace(lion, "calculate_lion_update", getattr(compiled, "_torchdynamo_orig_callable", compiled))


def install_adam() -> None:
    """Patch `GroupStepAdamW` into megatron-core if it found no fused Adam."""
    if not resolve("megatron.core.optimizer").USING_PYTORCH_OPTIMIZER:
        return
    replace("megatron.core.optimizer", "USING_PYTORCH_OPTIMIZER", False)
    replace("megatron.core.optimizer", "Adam", GroupStepAdamW)
    replace("megatron.core.optimizer.distrib_optimizer", "Adam", GroupStepAdamW)
    # It behaves like Apex' FusedAdam, also in the checkpoint code.
    replace("megatron.core.optimizer.distrib_optimizer", "HAVE_APEX_OR_TE", True)
    replace("megatron.core.optimizer.distrib_optimizer", "USING_APEX_OPTIMIZER", True)
