"""Keys of the sections `optimizer` and `scheduler`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmrecipes.recipe.section import Beta, NonNegFloat, NonNegInt, PosFloat, PosInt, Probability, Section


class ParameterGroup(Section):
    """Parameters with another learning rate or weight decay."""

    pattern: Annotated[str, Field(min_length=1)]
    """Names of parameters in the whole model, with `*`, `?` and `[...]`: `embedding.*`, `decoder.layers.[01].*`."""
    lr_mult: NonNegFloat = 1.0
    """Factor of `optimizer.lr` and `optimizer.min_lr`; with 0 the parameters stay as they are."""
    wd_mult: NonNegFloat = 1.0
    """Factor of `optimizer.weight_decay`; norms and biases have none whatever this is."""


class Optimizer(Section):
    """AdamW (arXiv 1711.05101) or another update of megatron-core; norms and biases have no weight decay."""

    optimizer: Literal["adam", "sgd", "muon", "lion"] = "adam"
    """`adam`: AdamW. `sgd`: with momentum. `muon` (arXiv 2502.16982): the momentum of each matrix between hidden layers
    is orthogonalized; embeddings, output layer, norms and biases have AdamW. `lion` (arXiv 2302.06675): signs, for the
    same matrices, with `adam_beta1` and `adam_beta2`. The last two need megatron-core 0.19 and emerging-optimizers."""
    lr: PosFloat
    """Peak learning rate."""
    min_lr: NonNegFloat = 0.0
    """Learning rate at the end of the decay."""
    weight_decay: NonNegFloat = 0.1
    """Decoupled weight decay; with `sgd` it is added to the gradient (L2 regularisation)."""
    groups: Annotated[tuple[ParameterGroup, ...], Field(strict=False)] = ()
    """Parameters by patterns of their names, each of which belongs to the first that it matches."""
    adam_beta1: Beta = 0.9
    """Decay of the first moment."""
    adam_beta2: Beta = 0.95
    """Decay of the second moment."""
    adam_eps: PosFloat = 1e-8
    """Added to the root of the second moment."""
    sgd_momentum: Probability = 0.9
    """Decay of the sum of gradients with `sgd`; 0: none is kept."""
    muon_momentum: Probability = 0.95
    """Decay of the mean of gradients with `muon`."""
    muon_nesterov: bool = False
    """Look one step ahead: the gradient has its part of the momentum once more."""
    muon_num_ns_steps: PosInt = 5
    """Newton-Schulz iterations that orthogonalize the momentum."""
    muon_coefficient_type: Literal["simple", "quintic", "polar_express", "cans", "aol", "deepseekv4"] = "quintic"
    """Coefficients of these iterations, by emerging-optimizers' names."""
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    """Factor of an orthogonalized matrix [out, in]: √max(out, in) (arXiv 2502.16982), √(out / in) (arXiv 2502.07529),
    or √max(1, out / in)."""
    muon_extra_scale_factor: PosFloat = 1.0
    """Another factor; 0.2 gives updates the size of AdamW's with `spectral`, so that they can share a learning rate."""
    muon_split_qkv: bool = True
    """Orthogonalize queries, keys and values apart; without effect on latent attention."""
    muon_fp32_matmul_prec: Literal["medium", "high", "highest"] = "medium"
    """Precision of the iterations' products; `medium`: in bf16."""
    muon_tp_mode: Literal["duplicated", "distributed"] = "duplicated"
    """How tensor-parallel ranks orthogonalize a matrix that they share: each gathers and computes all of it, or each
    keeps its part and the products are summed in every iteration. Megatron's `blockwise`, each its part by itself, is
    not offered: the update would depend on the layout."""
    clip_grad: NonNegFloat = 1.0
    """Global gradient norm above which gradients are scaled down; 0 disables clipping."""
    qk_clip: bool = False
    """After an update, scale queries and keys down where a logit of the step was above `qk_clip_threshold`, so that it
    would have been that (QK-clip, arXiv 2507.20534)."""
    qk_clip_alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the queries in the scaling, as an exponent; keys have the rest."""
    qk_clip_threshold: PosFloat = 100.0
    """Largest logit of a head: the scaled product of a query and a key, before the softmax."""
    ema_decay: Beta | None = None
    """Keep a moving average of the weights in fp32, which has this weight after each update, and the new weights the
    rest; saved in checkpoints, for `export --ema` and `generate --ema`. Unset: none."""
    use_precision_aware_optimizer: bool = False
    """Use TransformerEngine's FusedAdam with moments of the types below, and gradients as they were reduced."""
    exp_avg_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the first moment, with `use_precision_aware_optimizer`."""
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the second moment, with `use_precision_aware_optimizer`."""


class Scheduler(Section):
    """Learning rate over steps: warm-up, then decay (megatron-core `OptimizerParamScheduler`)."""

    lr_decay_style: Literal["cosine", "linear", "constant", "WSD", "inverse-square-root", "polynomial"] = "cosine"
    """Shape of the decay; WSD (arXiv 2404.06395) holds the peak and decays in the last `lr_wsd_decay_iters`. The
    inverse square root (arXiv 1706.03762) is `optimizer.lr` · √(`lr_warmup_iters` / steps), and `optimizer.min_lr` at
    least; the polynomial is (1 - x)^`lr_polynomial_power` of the way to `optimizer.min_lr`."""
    lr_warmup_iters: NonNegInt = 0
    """Steps of warm-up from `lr_warmup_init`."""
    lr_warmup_init: NonNegFloat = 0.0
    """Learning rate of the first step, with a warm-up."""
    lr_warmup_style: Literal["linear", "exponential"] = "linear"
    """Shape of the warm-up; `exponential` multiplies the learning rate by the same factor in each step."""
    lr_decay_iters: PosInt | None = None
    """Step at which `optimizer.min_lr` is reached; unset: `train.train_iters`."""
    lr_wsd_decay_iters: PosInt | None = None
    """Length of WSD's final decay; needed for WSD."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "minus_sqrt"
    """Shape of WSD's final decay."""
    lr_polynomial_power: PosFloat = 2.0
    """Power of the polynomial decay; 1 is linear."""
