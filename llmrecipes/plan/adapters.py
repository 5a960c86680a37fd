"""Parameters of low-rank adapters: of a layer, of the model, on a rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from llmrecipes.plan.layout import Layout
from llmrecipes.plan.parameters import RankParameters
from llmrecipes.recipe.adapters import Matrix, adapted
from llmrecipes.recipe.lora import Lora
from llmrecipes.recipe.schema import Model
from llmrecipes.recipe.shape import Shape


def count(lora: Lora | None, model: Model, s: Shape) -> tuple[int, int]:
    """Parameters of all adapters, and those that one token uses; none without the section."""
    found = [0, 0]
    for number in range(s.num_layers if lora is not None else 0):
        assert lora is not None
        for each in adapted(lora, model, s, experts=s.moe_layers(number, number + 1) > 0):
            size = lora.rank * (each.width + each.height)
            found[0] += size * (s.num_moe_experts if each.of_experts else 1)
            found[1] += size * (model.moe_router_topk if each.of_experts else 1)
    return found[0], found[1]


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


def _sides(matrix: Matrix, rank: int, ranks: int) -> tuple[int, int]:
    """Parameters of A and B on one of the ranks that share a matrix."""
    cut = (1, ranks) if matrix.by_columns else (ranks, 1)
    return rank * matrix.width // cut[0], rank * matrix.height // cut[1]
