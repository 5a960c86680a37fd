"""Pipeline stages that would train nothing: without an adapter, or in fp16 with all of their weights frozen."""

from __future__ import annotations

from llmrecipes.errors import UserError
from llmrecipes.plan.kernels import own_layers
from llmrecipes.plan.layout import Layout
from llmrecipes.plan.parameters import count_adapters_on_rank, count_trained_on_rank
from llmrecipes.recipe.derived.freezing import KEY
from llmrecipes.recipe.derived.shape import Shape
from llmrecipes.recipe.schema import Recipe


def require_trained(recipe: Recipe, s: Shape, laid_out: Layout, device: str) -> None:
    """Refuse a layout with a stage that would train nothing.

    Raises:
        UserError: with the stage.
    """
    lora, model = recipe.lora, recipe.model
    for stage in range(laid_out.pipeline_model_parallel_size):
        if lora is not None and not count_adapters_on_rank(lora, model, s, laid_out, stage).total:
            raise UserError(
                f"pipeline stage {stage} has none of these matrices",
                where="lora.target_modules",
                rule="every pipeline stage must train some parameters",
                fix="fewer stages, or target_modules that every layer has",
            )
        local = own_layers(recipe, device)
        if (
            recipe.train.precision == "fp16"
            and not count_trained_on_rank(recipe, s, laid_out, stage, device, local=local).total
        ):
            raise UserError(
                f"all parameters of pipeline stage {stage} are frozen",
                where=KEY,
                rule="in fp16, every pipeline stage must train some parameters: its optimizer keeps the loss scale",
                fix="train.precision bf16, fewer stages, or fewer patterns",
            )
