"""Bytes that the output layer and the losses take on the last stage, whole or in chunks of tokens."""

from __future__ import annotations

from llmrecipes.plan.layout import Layout
from llmrecipes.plan.machine_features import expected
from llmrecipes.recipe.derived.shape import Shape
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.speedups.features import value_of


def logits(recipe: Recipe, s: Shape, layout: Layout, device: str) -> int:
    """Bytes that the loss takes at its peak."""
    return kept_and_most(recipe, s, layout, device)[1]


def in_kernels(recipe: Recipe, device: str) -> bool:
    """Whether the loss is computed in compiled kernels."""
    return bool(value_of("cross_entropy_loss_fusion", recipe, expected(recipe, device)))


def frees_its_input(recipe: Recipe, device: str) -> bool:
    """Whether the loss takes the most when the output layer has freed its input, in the backward pass."""
    return not recipe.layout.loss_chunk_tokens and recipe.distill is None and in_kernels(recipe, device)


def kept_and_most(recipe: Recipe, s: Shape, layout: Layout, device: str) -> tuple[int, int]:
    """Bytes that the loss keeps for its backward pass, and at its peak.

    Kept are the logits of every prediction in compiled kernels, which overwrite them with their gradient; else the
    log-softmax in fp32. In the backward pass torch has the gradients on both of its sides too; megatron-core, on logits
    that are split over ranks, computes in place and has a gradient in 16 bits; the output layer's gradients come after.
    """
    fused = in_kernels(recipe, device)
    if recipe.layout.loss_chunk_tokens:
        return _of_chunks(recipe, s, layout, recipe.layout.loss_chunk_tokens, fused)
    rows = s.vocab_size // layout.tensor_model_parallel_size
    logits = tokens_of_a_micro_batch(recipe, layout) * rows
    if recipe.distill is not None:
        # Kept is the gradient; before it, the logits of both, and in fp32 both distributions and the shares of one.
        element = _element(recipe)
        return int(element * logits), int((12 + 2 * element + 4 * (element == 2)) * logits)
    # With sequence parallelism the input of all ranks is gathered again, and a rank's part of its gradient is new.
    tensor, whole = layout.tensor_model_parallel_size, tokens_of_a_micro_batch(recipe, layout) * s.hidden_size
    gathered = _element(recipe) * whole * layout.sequence_parallel
    kept = (_element(recipe) if fused else 4) * logits * (1 + s.mtp_num_layers)
    if not fused and tensor == 1:
        return int(kept), int(kept + 8 * logits)
    if not fused and recipe.train.precision != "fp32":
        return int(kept), int(kept + 2 * logits + gathered)
    return int(kept), int(kept + gathered * (1 + 1 / tensor) + _of_output(recipe, s, layout))


def _of_chunks(recipe: Recipe, s: Shape, layout: Layout, chunk: int, fused: bool) -> tuple[int, int]:
    """`kept_and_most` of a loss in chunks: gradients of the output layer's input and weight (in fp32) are kept.

    In fp16, and for further predictions, gradients are computed in the backward pass only.
    """
    tokens = tokens_of_a_micro_batch(recipe, layout)
    gradients, temporary = _gradients_of_chunks(recipe, s, layout, chunk, fused)
    later = recipe.train.precision == "fp16"
    kept = 4 * tokens * (s.mtp_num_layers + later) + (0 if later else gradients)
    return int(kept), int(kept + temporary + (gradients if later else 0))


def of_a_prediction(recipe: Recipe, s: Shape, layout: Layout, device: str) -> tuple[int, int] | None:
    """`kept_and_most` in the backward pass of a further prediction; None where that of the main loss takes more.

    It comes after that of the main loss, whose gradients of the hidden states and the weight, in the precision of both,
    wait for those of the prediction.
    """
    fused = in_kernels(recipe, device)
    chunk = recipe.layout.loss_chunk_tokens
    tokens = tokens_of_a_micro_batch(recipe, layout)
    waiting = _of_output(recipe, s, layout)
    if not s.mtp_num_layers or not (fused or chunk):
        return None
    if not chunk:
        rows = s.vocab_size // layout.tensor_model_parallel_size
        kept = _element(recipe) * tokens * rows * (s.mtp_num_layers - 1)
        # Both, and the sum of those of the weight; with sequence parallelism a rank's parts, and the gathered input.
        hidden = _element(recipe) * tokens * s.hidden_size
        shares = 2 / layout.tensor_model_parallel_size + 1 if layout.sequence_parallel else 2
        return int(kept), int(kept + 3 * (waiting - hidden) + shares * hidden)
    gradients, temporary = _gradients_of_chunks(recipe, s, layout, chunk, fused)
    kept = 4 * tokens * s.mtp_num_layers
    return int(kept), int(kept + gradients + temporary + waiting)


def _gradients_of_chunks(recipe: Recipe, s: Shape, layout: Layout, chunk: int, fused: bool) -> tuple[float, float]:
    """Bytes of the gradients that the chunks of a loss add up to, and of what exists while one is computed."""
    tokens = tokens_of_a_micro_batch(recipe, layout)
    trained = recipe.lora is None
    element = _element(recipe)
    weight = s.vocab_size // layout.tensor_model_parallel_size * s.hidden_size
    gradients = element * tokens * s.hidden_size + 4 * weight * trained
    # The logits of a chunk, or their gradients, and exponentials in fp32 unless there are kernels, in whose place they
    # are in fp32; the weight's gradient from a chunk, or in the end, in 16 bits; and the tokens of all ranks.
    each = element + (4 if element == 2 and not fused else 0)
    temporary = min(chunk, tokens) * s.vocab_size / layout.tensor_model_parallel_size * each
    temporary += element * weight * trained if element == 2 else 0
    temporary += element * tokens * s.hidden_size if layout.sequence_parallel else 0
    return gradients, temporary


def _of_output(recipe: Recipe, s: Shape, layout: Layout) -> float:
    """Bytes of the gradients that the output layer's backward pass returns, of its input and its weight."""
    weight = s.vocab_size // layout.tensor_model_parallel_size * s.hidden_size * (recipe.lora is None)
    return _element(recipe) * (tokens_of_a_micro_batch(recipe, layout) * s.hidden_size + weight)


def _element(recipe: Recipe) -> int:
    return 4 if recipe.train.precision == "fp32" else 2


def tokens_of_a_micro_batch(recipe: Recipe, layout: Layout) -> float:
    """Tokens of a micro-batch on one rank."""
    return recipe.layout.micro_batch_size * recipe.model.seq_length / layout.context_parallel_size
