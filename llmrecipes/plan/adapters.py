"""Parameters of low-rank adapters, in total and on a rank, and what they keep for the backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from llmrecipes.plan.layout import Layout
from llmrecipes.plan.parameters import RankParameters
from llmrecipes.recipe.adapters import Matrix, adapted, is_target
from llmrecipes.recipe.lora import Lora
from llmrecipes.recipe.schema import Model, Recipe
from llmrecipes.recipe.shape import Shape


def count(lora: Lora | None, model: Model, s: Shape) -> tuple[int, int]:
    """Parameters of all adapters, and those that one token uses; none without the section."""
    total = active = 0
    if lora is None:
        return total, active
    for number in range(s.num_layers):
        for each in adapted(lora, model, s, experts=s.moe_layers(number, number + 1) > 0):
            size = lora.rank * (each.width + each.height)
            total += size * (s.num_moe_experts if each.of_experts else 1)
            active += size * (model.moe_router_topk if each.of_experts else 1)
    return total, active


def count_on_rank(lora: Lora, model: Model, s: Shape, layout: Layout, stage: int) -> RankParameters:
    """Parameters of the adapters of a rank of one pipeline stage."""
    dense = experts = 0
    for each in on_stage(lora, model, s, layout, stage):
        if each.of_experts:
            number = s.num_moe_experts // layout.expert_model_parallel_size
            experts += number * sum(_sides(each, lora.rank, layout.expert_tensor_parallel_size))
        else:
            dense += sum(_sides(each, lora.rank, layout.tensor_model_parallel_size))
    return RankParameters(dense=dense, experts=experts)


def whole(lora: Lora, found: Iterable[Matrix]) -> int:
    """Parameters of adapters that each of the ranks that share their matrices has all of."""
    return sum(lora.rank * (each.width if each.by_columns else each.height) for each in found)


def on_stage(lora: Lora, model: Model, s: Shape, layout: Layout, stage: int) -> Iterator[Matrix]:
    """Adapted matrices of the layers of a stage."""
    for chunk, layers in enumerate(layout.layers_per_stage[stage]):
        first = layout.first_layer(stage, chunk)
        for number in range(first, first + layers):
            yield from adapted(lora, model, s, experts=s.moe_layers(number, number + 1) > 0)


def keeps_input(recipe: Recipe, name: str) -> int:
    """1 if the input of the matrices of a name is kept, for their gradient or that of their adapter, else 0."""
    return int(recipe.lora is None or is_target(recipe.lora, name))


def kept_by_adapters(recipe: Recipe, s: Shape, layout: Layout, device: str, *, experts: bool) -> float:
    """Bytes per token that the adapters of a layer keep besides their inputs: what is between A and B, and masks."""
    lora, found = recipe.lora, 0.0
    if lora is None:
        return found
    element = 4 if recipe.train.precision == "fp32" else 2
    tensor = layout.tensor_model_parallel_size
    tokens = tensor if layout.sequence_parallel else 1
    for each in adapted(lora, recipe.model, s, experts=experts):
        visits = recipe.model.moe_router_topk if each.of_experts else 1
        found += visits * element * lora.rank / tokens
        if lora.dropout:
            # The input is kept after dropout; attention keeps its output, the input of linear_proj, itself.
            size = (element if device == "cpu" else 1) + (element if each.name == "linear_proj" else 0)
            found += visits * size * each.width / (tokens if each.by_columns or each.of_experts else tensor)
    return found


def own_layers(recipe: Recipe, device: str) -> bool:
    """Whether layers are megatron-core's own, with our attention: on a CPU, and with adapters everywhere."""
    return device == "cpu" or recipe.lora is not None


def _sides(matrix: Matrix, rank: int, ranks: int) -> tuple[int, int]:
    """Parameters of A and B on one of the ranks that share a matrix."""
    cut = (1, ranks) if matrix.by_columns else (ranks, 1)
    return rank * matrix.width // cut[0], rank * matrix.height // cut[1]
