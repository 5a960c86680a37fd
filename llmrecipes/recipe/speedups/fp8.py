"""Matrix products in 8 bits (`train.fp8`): what they need of a recipe and of a GPU, and which scaling a rule chooses.

Weights, gradients, optimizer and checkpoints are those of a bf16 run: TransformerEngine rounds the inputs of each
product of a layer when it computes it. Scalings without a history are resumed exactly. The output layer, embeddings,
norms, routers and attention's scores stay in bf16 and fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmrecipes.recipe.derived.adapters import matrices
from llmrecipes.recipe.derived.freezing import frozen_weights
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.engines import MEGATRON, engine_name
from llmrecipes.recipe.schema import Recipe

if TYPE_CHECKING:
    from llmrecipes.recipe.speedups.features import Default, SpeedTarget

VERSION = (2, 6)
"""Of TransformerEngine: the first in which megatron-core's recomputed norms and activations go with fp8; blockwise
scaling has been there since 2.3."""
HOPPER, BLACKWELL = (9, 0), (10, 0)
"""Compute capabilities of the first GPUs with products in fp8 that training uses, and with MXFP8."""
BLOCKWISE_CUDA = (12, 9)
"""The first CUDA whose cuBLAS multiplies with a scale for each block."""
MULTIPLES = {"mxfp8": 32}
"""Of which tokens and widths of a product have to be multiples, by scaling; 16 for the others."""
_REPLICATED = ("linear_q_down_proj", "linear_kv_down_proj")
"""Matrices of latent attention that TransformerEngine's layers have whole on each tensor-parallel rank."""


@dataclass(frozen=True)
class Fp8Key:
    """A key of `train` that belongs to fp8; attributes as in `features.Feature`."""

    gain: str
    recipe: Callable[[Recipe], str | None]
    default: Callable[[Recipe, SpeedTarget], Default]
    of_value: Callable[[Any, Recipe, SpeedTarget], str | None] | None = None


def obstacle_of_gpu(target: SpeedTarget) -> str | None:
    """Why there is no GPU that multiplies in fp8."""
    if target.device != "cuda":
        return "needs a GPU"
    if target.capability is None or target.capability >= HOPPER:
        return None
    return f"needs a GPU of compute capability 9.0 (Hopper) or later; this one has {_dotted(target.capability)}"


def bf16_layers(recipe: Recipe) -> tuple[int, int]:
    """Layers at the beginning and at the end of the decoder that stay in bf16 although `fp8` is set."""
    train = recipe.train
    if not train.first_last_layers_bf16:
        return 0, 0
    first = train.num_layers_at_start_in_bf16
    last = train.num_layers_at_end_in_bf16
    return 1 if first is None else first, 1 if last is None else last


def in_bf16(recipe: Recipe, layer: int) -> bool:
    """Whether one of the decoder's layers, from 0, stays in bf16 although `fp8` is set."""
    first, last = bf16_layers(recipe)
    return not first <= layer < recipe.model.num_layers - last


def _recipe(recipe: Recipe) -> str | None:
    if recipe.train.precision != "bf16":
        return f"needs weights and gradients in bf16 (train.precision is {recipe.train.precision})"
    if engine_name(recipe) != MEGATRON:
        return "needs the engine megatron: DeepSpeed replaces weights of which TransformerEngine keeps fp8 copies"
    if key := frozen_weights(recipe):
        return f"frozen weights stay in bf16 ({key})"
    if recipe.layout.tp_comm_overlap:
        return "the user buffers of tp_comm_overlap are 16-bit"
    return _uneven(recipe, _multiple(recipe.train.fp8_recipe))


def _multiple(scaling: str | None) -> int:
    return MULTIPLES.get(scaling or "", 16)


def _uneven(recipe: Recipe, multiple: int) -> str | None:
    """The first size of a product on a rank that is not a multiple."""
    for what, size in _sizes(recipe):
        if size % multiple:
            return f"fp8 GEMMs need multiples of {multiple}, but {what} is {size} on a rank"
    return None


def _sizes(recipe: Recipe) -> Iterator[tuple[str, int]]:
    """Tokens and widths of the products of a layer on one rank."""
    model = recipe.model
    parallel = recipe.layout
    s = shape(recipe.model)
    tensor = parallel.tensor_model_parallel_size
    of_experts = parallel.expert_tensor_parallel_size or tensor
    shared = parallel.context_parallel_size * (tensor if parallel.sequence_parallel else 1)
    yield "tokens of a micro-batch", recipe.layout.micro_batch_size * s.seq_length // shared
    for experts in sorted({s.moe_layers(number, number + 1) > 0 for number in range(s.num_layers)}):
        for matrix in matrices(model, s, experts=experts):
            ranks = of_experts if matrix.of_experts else 1 if matrix.name in _REPLICATED else tensor
            yield f"the input of {matrix.name}", matrix.width // (1 if matrix.by_columns else ranks)
            yield f"the output of {matrix.name}", matrix.height // (ranks if matrix.by_columns else 1)


def _belongs(recipe: Recipe) -> str | None:
    return "only used with fp8" if recipe.train.fp8 is None else None


def _scaling(recipe: Recipe) -> str | None:
    if (reason := _belongs(recipe)) is None and recipe.train.fp8_recipe == "delayed":
        return (
            "TransformerEngine pickles its history of maxima; checkpoints do not load pickles, "
            "and without the history a resumed run would differ"
        )
    return reason


def _scaling_on(scaling: str, _recipe: Recipe, target: SpeedTarget) -> str | None:
    if scaling == "mxfp8" and target.capability is not None and target.capability < BLACKWELL:
        return f"mxfp8 needs compute capability 10.0 (Blackwell); this GPU has {_dotted(target.capability)}"
    if scaling == "blockwise" and target.cuda is not None and target.cuda < BLOCKWISE_CUDA:
        return f"blockwise needs CUDA 12.9; torch was built with {_dotted(target.cuda)}"
    return None


def _ends(recipe: Recipe) -> str | None:
    if (reason := _belongs(recipe)) is not None:
        return reason
    if not recipe.train.first_last_layers_bf16:
        return "only used with first_last_layers_bf16"
    most = recipe.model.num_layers // recipe.layout.pipeline_model_parallel_size
    if max(bf16_layers(recipe)) > most:
        return f"at most num_layers / pipeline_model_parallel_size = {most}"
    return None


def _by_name(_recipe: Recipe, _target: SpeedTarget) -> Default:
    return None, "it rounds GEMM inputs to 8 bits, so only if set explicitly"


def _stateless(recipe: Recipe, target: SpeedTarget) -> Default:
    if target.capability is not None and target.capability >= BLACKWELL and not _uneven(recipe, _multiple("mxfp8")):
        return "mxfp8", "supported by Blackwell in hardware; keeps no history, so a run resumes exactly"
    if lacking := _scaling_on("blockwise", recipe, target):
        return "tensorwise", lacking
    return "blockwise", "one scale per block of 128; keeps no history, so a run resumes exactly"


def _all_layers(_recipe: Recipe, _target: SpeedTarget) -> Default:
    return False, "all layers are in fp8"


def _one(_recipe: Recipe, _target: SpeedTarget) -> Default:
    return None, "megatron-core's: 1"


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


FP8: Mapping[str, Fp8Key] = {
    "fp8": Fp8Key(
        "GEMMs at up to twice the rate of bf16 (1,979 against 989 TFLOP/s on an H100), inputs kept in one "
        "byte; 2 more bytes per layer weight",
        _recipe, _by_name,
    ),
    "fp8_recipe": Fp8Key(
        "blockwise preserves small values best, tensorwise costs least", _scaling, _stateless, _scaling_on,
    ),
    "first_last_layers_bf16": Fp8Key("no gain: keeps some layers in higher precision for stability", _belongs,
                                     _all_layers),
    "num_layers_at_start_in_bf16": Fp8Key("no gain: as first_last_layers_bf16", _ends, _one),
    "num_layers_at_end_in_bf16": Fp8Key("no gain: as first_last_layers_bf16", _ends, _one),
}  # fmt: skip
"""Keys of `train` by name."""
