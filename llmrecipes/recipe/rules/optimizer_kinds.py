"""The optimizers besides AdamW: what each keeps of a parameter, and what it goes with."""

from __future__ import annotations

from collections.abc import Iterator

from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.engines import MEGATRON, engine_name
from llmrecipes.recipe.schema import Optimizer, Recipe
from llmrecipes.recipe.sections.optimizer_section import MUON_STEPS

KEY = "optimizer.optimizer"
OF_MATRICES = ("muon", "lion")
"""Those that update matrices between hidden layers only, and leave the other parameters to AdamW."""
_MOMENT_BYTES = {"fp32": 4, "bf16": 2}


def named(optimizer: Optimizer) -> str:
    """The optimizer and its momenta, as a sentence has them."""
    adam = f"AdamW, betas {optimizer.adam_beta1:g} and {optimizer.adam_beta2:g}"
    match optimizer.optimizer:
        case "sgd":
            return f"SGD, momentum {optimizer.sgd_momentum:g}"
        case "muon":
            return f"Muon, momentum {optimizer.muon_momentum:g}, for matrices and {adam} for the rest"
        case "lion":
            return f"Lion for matrices and {adam}"
        case _:
            return adam


def matrix_bytes(optimizer: Optimizer) -> int:
    """Bytes of what is kept of a parameter of a matrix between hidden layers, besides its master weight."""
    match optimizer.optimizer:
        case "sgd":
            return 4 if optimizer.sgd_momentum else 0
        case "muon" | "lion":
            return 4
        case _:
            return _MOMENT_BYTES[optimizer.exp_avg_dtype] + _MOMENT_BYTES[optimizer.exp_avg_sq_dtype]


def other_bytes(optimizer: Optimizer) -> int:
    """As `matrix_bytes`, of a parameter of an embedding, the output layer, a norm or a bias."""
    return 8 if optimizer.optimizer in OF_MATRICES else matrix_bytes(optimizer)


def state_names(optimizer: Optimizer, *, of_matrix: bool) -> tuple[str, ...]:
    """Names in a checkpoint of what is kept of a parameter, besides its master weight.

    Args:
        optimizer: section of the recipe.
        of_matrix: the parameter is a matrix between hidden layers.
    """
    match optimizer.optimizer:
        case "sgd":
            return ("momentum_buffer",) if optimizer.sgd_momentum else ()
        case "muon" if of_matrix:
            return ("momentum_buffer",)
        case "lion" if of_matrix:
            return ("exp_avg",)
        case _:
            return ("exp_avg", "exp_avg_sq")


def rules(recipe: Recipe) -> Iterator[Problem]:
    """What an optimizer goes with."""
    optimizer = recipe.optimizer
    kind = recipe.optimizer.optimizer
    yield from _keys_of_others(optimizer)
    if kind == "adam":
        return
    if engine_name(recipe) != MEGATRON:
        yield Problem(
            KEY,
            f"{kind} with engine {engine_name(recipe)}",
            "only the engine megatron has optimizers other than adam",
            "optimizer.optimizer adam, or layout.zero.stage 0 without offload",
        )
    elif recipe.layout.use_distributed_optimizer:
        yield Problem(
            "layout.use_distributed_optimizer",
            f"true with optimizer.optimizer {kind}",
            "megatron-core's distributed optimizer splits parameters at arbitrary places and supports AdamW only",
            "layout.use_distributed_optimizer false, or optimizer.optimizer adam",
        )
    if recipe.model.use_mup:
        yield Problem(
            "model.use_mup",
            f"true with optimizer.optimizer {kind}",
            "the scaling rules of the maximal-update parametrisation are for AdamW",
            "model.use_mup false, or optimizer.optimizer adam",
        )
    if kind not in OF_MATRICES:
        return
    if kind == "muon":
        yield from _iterations(optimizer)
    if kind == "muon" and recipe.train.keep_zeros:
        yield Problem(
            "train.keep_zeros",
            "true with optimizer.optimizer muon",
            "muon's update of a weight depends on the gradient of the whole matrix",
            "train.keep_zeros false, or optimizer.optimizer adam",
        )
    if recipe.train.precision == "fp16":
        yield Problem(
            "train.precision",
            f"fp16 with optimizer.optimizer {kind}",
            f"megatron-core supports {kind} in fp32 and bf16 only",
            "train.precision bf16",
        )
    if recipe.lora is not None:
        yield Problem(
            KEY,
            f"{kind} with lora",
            f"{kind} is for matrices between hidden layers, not for the factors of adapters",
            "optimizer.optimizer adam or sgd",
        )


def _iterations(optimizer: Optimizer) -> Iterator[Problem]:
    chosen = optimizer.muon_coefficient_type
    number = optimizer.muon_num_ns_steps
    length = MUON_STEPS[chosen]
    if chosen == "aol":
        # Its first polynomial is negative above 0.884, and megatron-core divides by the Frobenius norm: a matrix whose
        # largest singular value has that share is moved uphill along it.
        yield Problem(
            "optimizer.muon_coefficient_type",
            chosen,
            "aol needs a normalization that megatron-core does not have; without it, the update of a nearly "
            "rank-one matrix has the wrong sign",
            "muon_coefficient_type quintic",
        )
    elif chosen not in ("simple", "polar_express") and number != length:
        yield Problem(
            "optimizer.muon_num_ns_steps",
            f"{number} with muon_coefficient_type {chosen}",
            f"{chosen} has the coefficients of {length} iterations, each for the result of the one before",
            f"muon_num_ns_steps {length}, or muon_coefficient_type simple or polar_express",
        )


def _keys_of_others(optimizer: Optimizer) -> Iterator[Problem]:
    for name, field in Optimizer.model_fields.items():
        of, separator, _ = name.partition("_")
        if not separator or of not in ("sgd", "muon") or of == optimizer.optimizer:
            continue
        default = field.get_default(call_default_factory=True, validated_data=dict(optimizer))
        if (value := getattr(optimizer, name)) != default:
            yield Problem(
                f"optimizer.{name}",
                f"{value} with optimizer.optimizer {optimizer.optimizer}",
                f"{name} is only used with optimizer.optimizer {of}",
                f"remove {name} (the override optimizer='{{lr: ...}}' replaces the section), or "
                f"optimizer.optimizer {of}",
            )
