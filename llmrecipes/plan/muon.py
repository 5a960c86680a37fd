"""What an update of Muon takes, sends and multiplies: it orthogonalizes each matrix between hidden layers as a whole,
one by one.

Counted tensor by tensor after megatron-core's `TensorParallelMuon` (optimizer/emerging_optimizers.py) and the
iterations of emerging-optimizers (orthogonalized_optimizers/muon_utils.py). Routers are smaller than the matrices of a
layer and are left out.
"""

from __future__ import annotations

from collections.abc import Iterator

from llmrecipes.plan.kernels import own_layers
from llmrecipes.plan.layout import Layout
from llmrecipes.plan.parameters import layers_of
from llmrecipes.recipe.derived.adapters import Matrix, matrices
from llmrecipes.recipe.derived.shape import Shape
from llmrecipes.recipe.rules.optimizer_kinds import OF_MATRICES
from llmrecipes.recipe.schema import Recipe

_FP32 = 4


def update_bytes(recipe: Recipe, s: Shape, layout: Layout, device: str) -> int:
    """Most bytes that a rank takes for its update, besides model states and copies of gradients; 0 with optimizers that
    compute in place.

    Lion interpolates a copy of a matrix' momentum and takes its signs (scalar_optimizers/lion.py).
    """
    kind = recipe.optimizer.optimizer
    if kind not in OF_MATRICES:
        return 0
    most = 0
    for experts in {s.moe_layers(number, number + 1) > 0 for number in range(s.num_layers)}:
        # The order of megatron-core's modules. The result for a matrix is kept until the next one has its own.
        ordered = sorted(matrices(recipe.model, s, experts=experts), key=lambda matrix: matrix.name != "linear_proj")
        for previous, matrix in zip([ordered[-1], *ordered], ordered, strict=False):
            kept, mine = (
                _FP32 * each.width * each.height // _ranks(recipe, layout, each, device) for each in (previous, matrix)
            )
            own = 2 * mine if kind == "lion" else _of_matrix(recipe, s, matrix, _ranks(recipe, layout, matrix, device))
            most = max(most, kept + own)
    return most


def _on_stage(recipe: Recipe, s: Shape, layout: Layout, stage: int) -> Iterator[Matrix]:
    """Matrices of a stage's layers, with those of multi-token prediction, whose layers are like the last one."""
    numbers = layers_of(layout, stage)
    if stage == layout.pipeline_model_parallel_size - 1:
        numbers += [s.num_layers - 1] * s.mtp_num_layers
        yield from [Matrix("eh_proj", 2 * s.hidden_size, s.hidden_size, by_columns=True)] * s.mtp_num_layers
    for number in numbers:
        yield from matrices(recipe.model, s, experts=s.moe_layers(number, number + 1) > 0)


def collectives(
    recipe: Recipe, s: Shape, layout: Layout, device: str, stage: int
) -> Iterator[tuple[Matrix, int, str, int]]:
    """Collectives of tensor-parallel ranks in the update of one stage: the matrix, ranks, kind, bytes."""
    for matrix in _on_stage(recipe, s, layout, stage):
        ranks = _ranks(recipe, layout, matrix, device)
        for rows in _pieces(recipe, s, matrix):
            if recipe.optimizer.muon_tp_mode == "duplicated":
                yield matrix, ranks, "all-gather", _FP32 * rows * matrix.width
                continue
            product = _FP32 * (matrix.width if matrix.by_columns else rows) ** 2
            for _ in range(recipe.optimizer.muon_num_ns_steps):
                yield matrix, ranks, "all-reduce", product


def products(recipe: Recipe, s: Shape, layout: Layout, device: str, stage: int) -> Iterator[tuple[int, int, int, int]]:
    """Products of matrices in the update of a rank of one stage: rows, columns, inner dimension, and how many.

    An iteration multiplies X [side, length] and its transpose, the result by itself, and the result of that by X.
    """
    if recipe.optimizer.optimizer != "muon":
        return
    local = (s.num_moe_experts or 0) // layout.expert_model_parallel_size
    for matrix in _on_stage(recipe, s, layout, stage):
        ranks = _ranks(recipe, layout, matrix, device)
        times = recipe.optimizer.muon_num_ns_steps * (local if matrix.of_experts else 1)
        for rows in _pieces(recipe, s, matrix):
            if recipe.optimizer.muon_tp_mode == "duplicated":
                side, length = sorted((rows, matrix.width))
            elif matrix.by_columns:
                side = matrix.width
                length = rows // ranks
            else:
                side = rows
                length = matrix.width // ranks
            yield side, side, length, times
            yield side, side, side, times
            yield side, length, side, times


def elements_and_bytes(recipe: Recipe, s: Shape, layout: Layout, device: str, stage: int) -> tuple[int, int]:
    """Elements of the matrices of a rank of one stage, and the bytes that their update reads and writes, but for the
    operands of its products and what copies gradients and weights for any optimizer."""
    if recipe.optimizer.optimizer != "muon":
        return 0, 0
    local = (s.num_moe_experts or 0) // layout.expert_model_parallel_size
    elements = moved = 0
    for matrix in _on_stage(recipe, s, layout, stage):
        ranks = _ranks(recipe, layout, matrix, device)
        mine = matrix.width * matrix.height // ranks
        pieces = _pieces(recipe, s, matrix)
        times = local if matrix.of_experts else 1
        # The new momentum from the old one and the gradient, and the weight, of which a part decays before.
        each = _FP32 * mine * (3 + 3 + 2 * bool(recipe.optimizer.weight_decay) + 3 * recipe.optimizer.muon_nesterov)
        if len(pieces) > 1:  # cut out, where there are several groups of heads, and put together
            each += _FP32 * mine * (2 * (s.num_query_groups > ranks) + 2)
        each += sum(_moved_of_piece(recipe, matrix, rows, ranks) for rows in pieces)
        elements += times * mine
        moved += times * each
    return elements, moved


def _moved_of_piece(recipe: Recipe, matrix: Matrix, rows: int, ranks: int) -> int:
    whole = rows * matrix.width
    mine = whole // ranks
    scaled = 2 * 2 * _FP32 * mine  # by two factors
    if recipe.optimizer.muon_tp_mode == "duplicated":
        # Copied from the buffer of the all-gather, which one rank has too, and put together; a norm, and a quotient.
        size, side = whole, min(rows, matrix.width)
        scaled += _FP32 * (2 + 2 + 1 + 2) * whole
    else:
        size, side = mine, matrix.width if matrix.by_columns else rows
        scaled += _FP32 * (2 + 1 + 2) * mine  # squares, their sum, and a quotient
    element = _FP32
    if recipe.optimizer.muon_fp32_matmul_prec == "medium":
        element = 2
        scaled += 2 * (_FP32 + element) * size
    # Two products of an iteration add to a copy of a matrix.
    return scaled + recipe.optimizer.muon_num_ns_steps * 3 * element * (side * side + size)


def _of_matrix(recipe: Recipe, s: Shape, matrix: Matrix, ranks: int) -> int:
    mine = _FP32 * matrix.width * matrix.height // ranks
    pieces = _pieces(recipe, s, matrix)
    held = mine if recipe.optimizer.muon_nesterov else 0
    if len(pieces) > 1 and s.num_query_groups > ranks:
        held += mine  # queries, keys and values of several groups are copied apart
    most = done = 0
    for rows in pieces:
        most = max(most, held + done + _of_piece(recipe, matrix, rows, ranks))
        done += _FP32 * rows * matrix.width // ranks
    return max(most, held + 2 * mine if len(pieces) > 1 else 0)


def _of_piece(recipe: Recipe, matrix: Matrix, rows: int, ranks: int) -> int:
    whole = _FP32 * rows * matrix.width
    mine = whole // ranks
    if recipe.optimizer.muon_tp_mode == "duplicated":
        # The shards, put together, orthogonalized; then the whole result while its own part is scaled twice.
        copies = 2 * whole
        size = whole
        side = min(rows, matrix.width)
        scaled = whole + 2 * mine
    else:
        copies = 0
        size = mine
        side = matrix.width if matrix.by_columns else rows
        scaled = 3 * mine
    square = _FP32 * side**2
    if recipe.optimizer.muon_fp32_matmul_prec == "medium":
        return max(copies + size + max(size // 2, square), scaled)
    return max(copies + 2 * size + 2 * square, scaled)


def _pieces(recipe: Recipe, s: Shape, matrix: Matrix) -> list[int]:
    """Heights of what is orthogonalized by itself."""
    if matrix.name == "linear_qkv" and recipe.optimizer.muon_split_qkv:
        return [s.query_size, s.key_size, s.value_size]
    return [matrix.height]


def _ranks(recipe: Recipe, layout: Layout, matrix: Matrix, device: str) -> int:
    """Tensor-parallel ranks that share a matrix."""
    if matrix.of_experts:
        return layout.expert_tensor_parallel_size
    if matrix.name.endswith("_down_proj") and device == "cuda" and not own_layers(recipe, device):
        return 1
    return layout.tensor_model_parallel_size
