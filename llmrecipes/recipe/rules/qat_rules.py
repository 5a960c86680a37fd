"""The rules of the section `qat`, and that of a rehearsal."""

from __future__ import annotations

from collections.abc import Iterator

from llmrecipes.recipe.derived.adapters import Matrix, matrices
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.engines import MEGATRON, engine_name
from llmrecipes.recipe.schema import LayoutKeys, Model, Recipe
from llmrecipes.recipe.sections.qat import Qat

GROUPS = (128, 64, 32, 16, 8)
"""Sizes of groups that are suggested."""


def needs_local_layers(recipe: Recipe) -> str | None:
    """Why the layers are megatron-core's own; None without `qat`."""
    return None if recipe.qat is None else "quantisation-aware training needs megatron-core's own layers"


def rules(recipe: Recipe) -> Iterator[Problem]:
    """What goes with `qat`."""
    qat = recipe.qat
    if qat is None:
        return
    if qat.scheme == "int8" and qat.group_size is not None:
        yield Problem(
            "qat.group_size",
            f"{qat.group_size} with int8",
            "int8 has one scale per row",
            "remove group_size, or scheme int4",
        )
    if qat.start_step >= recipe.train.train_iters:
        yield Problem(
            "qat.start_step",
            f"{qat.start_step} of {recipe.train.train_iters} steps",
            "start_step must be less than train.train_iters, or no step rounds",
            "a smaller start_step",
        )
    for key, (wrong, rule, fix) in _obstacles(recipe).items():
        if wrong:
            yield Problem(key, "set with qat", rule, fix)
    yield from _groups(recipe, qat.group)


def _obstacles(recipe: Recipe) -> dict[str, tuple[bool, str, str]]:
    return {
        "layout.engine": (
            engine_name(recipe) != MEGATRON,
            "quantisation-aware training needs the engine megatron",
            "engine megatron without layout.zero.stage 2, 3 and offload",
        ),
        "lora": (
            recipe.lora is not None,
            "matrices with adapters are frozen and cannot adapt to rounding",
            "remove lora or qat",
        ),
        "layout.torch_compile": (
            recipe.layout.torch_compile,
            "weights are rounded once per step, which compiled layers would miss",
            "remove torch_compile",
        ),
        "model.transformer_impl": (
            recipe.model.transformer_impl == "transformer_engine",
            f"{needs_local_layers(recipe)}",
            "model.transformer_impl auto or local",
        ),
    }


def _groups(recipe: Recipe, group: int | None) -> Iterator[Problem]:
    """Rows that a rank has a part of: the part is whole groups."""
    if group is None:
        return
    for matrix, ranks in _shared(recipe.model, recipe.layout):
        if matrix.width % (group * ranks):
            near = next((size for size in GROUPS if matrix.width % (size * ranks) == 0), None)
            shared = f", on {ranks} ranks" if ranks > 1 else ""
            yield Problem(
                "qat.group_size",
                f"{group}, but {matrix.name} has rows of {matrix.width} weights{shared}",
                "group_size must divide a row, or a tensor-parallel rank's shard of it",
                f"group_size {near}" if near else "scheme int8",
            )
            return


def _shared(model: Model, parallel: LayoutKeys) -> Iterator[tuple[Matrix, int]]:
    """Rounded matrices, and the ranks that share a row of each."""
    s = shape(model)
    tensor = parallel.tensor_model_parallel_size
    for experts in sorted({s.moe_layers(number, number + 1) > 0 for number in range(s.num_layers)}):
        for matrix in matrices(model, s, experts=experts):
            ranks = (parallel.expert_tensor_parallel_size or tensor) if matrix.of_experts else tensor
            yield matrix, 1 if matrix.by_columns else ranks


def rehearsed(qat: Qat | None, model: Model, parallel: LayoutKeys) -> Qat | None:
    """The section of a rehearsal with this small model: groups that its rows divide into, from the first step on."""
    if qat is None:
        return None
    group = qat.group_size
    if qat.group is not None:
        shared = list(_shared(model, parallel))
        fitting = (size for size in (qat.group, *GROUPS) if all(m.width % (size * ranks) == 0 for m, ranks in shared))
        group = next(fitting, group)
    return qat.model_copy(update={"group_size": group, "start_step": 0})
