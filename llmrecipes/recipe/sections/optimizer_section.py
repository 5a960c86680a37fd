"""Keys of the sections `optimizer` and `scheduler`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmrecipes.recipe.sections.only_with import OnlyWith
from llmrecipes.recipe.sections.section import (
    EXECUTION,
    Beta,
    NonNegFloat,
    NonNegInt,
    PosFloat,
    PosInt,
    Probability,
    Section,
)

MUON_STEPS = {"simple": 5, "quintic": 5, "polar_express": 8, "cans": 5, "aol": 4, "deepseekv4": 10}
"""Iterations of Newton-Schulz by `muon_coefficient_type`: the length of the set in emerging-optimizers, except for
`simple`, which repeats one row (modded-nanogpt: 5)."""


class ParameterGroup(Section):
    """Parameters with a different learning rate or weight decay."""

    pattern: Annotated[str, Field(min_length=1)]
    """Pattern of parameter names in the whole model, with `*`, `?` and `[...]`: `embedding.*`,
    `decoder.layers.[01].*`."""
    lr_mult: NonNegFloat = 1.0
    """Factor of `optimizer.lr` and `optimizer.min_lr`; 0 leaves the parameters unchanged."""
    wd_mult: NonNegFloat = 1.0
    """Factor of `optimizer.weight_decay`; norms and biases are never decayed."""


class Optimizer(Section):
    """AdamW (arXiv 1711.05101) or another optimizer of megatron-core; norms and biases have no weight decay."""

    optimizer: Literal["adam", "sgd", "muon", "lion"] = "adam"
    """`adam`: AdamW. `sgd`: SGD with momentum. `muon` (arXiv 2502.16982): orthogonalizes the momentum of each matrix
    between hidden layers; embeddings, output layer, norms and biases use AdamW. `lion` (arXiv 2302.06675): updates
    the same matrices by sign, with `adam_beta1` and `adam_beta2`."""
    lr: PosFloat
    """Peak learning rate."""
    min_lr: NonNegFloat = 0.0
    """Learning rate at the end of the decay."""
    weight_decay: NonNegFloat = 0.1
    """Decoupled weight decay; with `sgd` it is added to the gradient (L2 regularisation)."""
    groups: Annotated[tuple[ParameterGroup, ...], Field(strict=False)] = ()
    """Parameter groups by name pattern; a parameter belongs to the first group whose pattern it matches."""
    adam_beta1: Beta = 0.9
    """Decay rate of the first moment."""
    adam_beta2: Beta = 0.95
    """Decay rate of the second moment."""
    adam_eps: PosFloat = 1e-8
    """Added to the root of the second moment."""
    sgd_momentum: Probability = 0.9
    """Momentum of `sgd`: decay of the sum of gradients; 0: no momentum."""
    muon_momentum: Probability = 0.95
    """Momentum of `muon`: decay of the mean of gradients."""
    muon_nesterov: bool = False
    """Use Nesterov momentum with `muon`."""
    muon_coefficient_type: Literal["simple", "quintic", "polar_express", "cans", "aol", "deepseekv4"] = "quintic"
    """Coefficients of the Newton-Schulz iterations, as named by emerging-optimizers. `aol` is refused."""
    muon_num_ns_steps: PosInt = Field(
        default_factory=lambda keys: MUON_STEPS[keys.get("muon_coefficient_type", "quintic")],
        json_schema_extra={"default": MUON_STEPS["quintic"]},
    )
    """Newton-Schulz iterations that orthogonalize the momentum. Default: 5, with `polar_express` 8, with
    `deepseekv4` 10; others only with `simple` and `polar_express`."""
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    """Factor of an orthogonalized matrix [out, in]: √max(out, in) (arXiv 2502.16982), √(out / in) (arXiv 2502.07529),
    or √max(1, out / in)."""
    muon_extra_scale_factor: PosFloat = 1.0
    """Additional factor; 0.2 with `spectral` gives updates the size of AdamW's."""
    muon_split_qkv: bool = True
    """Orthogonalize queries, keys and values separately; no effect on latent attention."""
    muon_fp32_matmul_prec: Literal["medium", "high", "highest"] = "medium"
    """Precision of the GEMMs in the iterations; `medium`: bf16."""
    muon_tp_mode: Annotated[Literal["duplicated", "distributed"], EXECUTION] = "duplicated"
    """How tensor-parallel ranks orthogonalize a sharded matrix: each gathers and computes all of it (`duplicated`),
    or each keeps its shard and the products are summed in every iteration (`distributed`)."""
    clip_grad: NonNegFloat = 1.0
    """Global gradient norm above which gradients are scaled down; 0 disables clipping."""
    qk_clip: bool = False
    """After an update, scale queries and keys down where a logit of the step exceeded `qk_clip_threshold` (QK-clip,
    arXiv 2507.20534)."""
    qk_clip_alpha: Annotated[float, Field(ge=0, le=1), OnlyWith("qk_clip")] = 0.5
    """Exponent of the scaling that queries get; keys get 1 - `qk_clip_alpha`."""
    qk_clip_threshold: Annotated[PosFloat, OnlyWith("qk_clip")] = 100.0
    """Largest attention logit of a head: the scaled product of a query and a key, before the softmax."""
    ema_decay: Beta | None = None
    """Decay of a moving average of the weights in fp32, saved in checkpoints for `export --ema` and `generate
    --ema`. Unset: none."""
    use_precision_aware_optimizer: bool = False
    """Use TransformerEngine's FusedAdam, with moments of the types below and gradients in the type in which they were
    reduced."""
    exp_avg_dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of the first moment, with `use_precision_aware_optimizer`."""
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of the second moment, with `use_precision_aware_optimizer`."""


class Scheduler(Section):
    """Learning rate over steps: warm-up, then decay (megatron-core `OptimizerParamScheduler`)."""

    lr_decay_style: Literal["cosine", "linear", "constant", "WSD", "inverse-square-root", "polynomial"] = "cosine"
    """Shape of the decay. WSD (arXiv 2404.06395) holds the peak and decays over the last `lr_wsd_decay_iters` steps.
    The inverse square root (arXiv 1706.03762) is `optimizer.lr` · √(`lr_warmup_iters` / steps), but at least
    `optimizer.min_lr`. The polynomial decays from `optimizer.lr` to `optimizer.min_lr` as (1 -
    x)^`lr_polynomial_power`."""
    lr_warmup_iters: NonNegInt = 0
    """Warm-up steps, from `lr_warmup_init`."""
    lr_warmup_init: Annotated[NonNegFloat, OnlyWith("lr_warmup_iters")] = 0.0
    """Learning rate at the first step of a warm-up."""
    lr_warmup_style: Annotated[Literal["linear", "exponential"], OnlyWith("lr_warmup_iters")] = "linear"
    """Shape of the warm-up; `exponential` multiplies the learning rate by the same factor in each step."""
    lr_decay_iters: PosInt | None = None
    """Step at which `optimizer.min_lr` is reached; unset: `train.train_iters`."""
    lr_wsd_decay_iters: PosInt | None = None
    """Steps of WSD's final decay; required for WSD."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "minus_sqrt"
    """Shape of WSD's final decay."""
    lr_polynomial_power: PosFloat = 2.0
    """Exponent of the polynomial decay; 1 is linear."""
