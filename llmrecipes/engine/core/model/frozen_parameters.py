"""Parameters that are not trained (`train.freeze`), in every layout."""

from __future__ import annotations

from llmrecipes.engine.core.checkpoint.slices import sharded_parameters
from llmrecipes.engine.core.model.groups import names_of
from llmrecipes.engine.core.model.lora import with_gradient
from llmrecipes.recipe.derived.freezing import is_frozen
from llmrecipes.recipe.schema import Recipe


def freeze(module: object, recipe: Recipe) -> None:
    """Freeze the parameters of one chunk that the recipe's patterns match.

    Below the lowest layer that is trained no backward pass is computed, unless it has to be: a recomputed layer has
    gradients only if its input has, and a pipeline stage waits for those that the next one sends back.

    Args:
        module: a `RecipeModel`.
    """
    state = module.sharded_state()  # type: ignore[attr-defined]
    parameters = sharded_parameters(state)
    names = names_of(parameters)
    for parameter in parameters:
        if is_frozen(names[id(parameter.parameter)], recipe.train.freeze):
            parameter.parameter.requires_grad_(False)
    embedding = getattr(module, "embedding", None)
    if embedding is None or any(parameter.requires_grad for parameter in embedding.parameters()):
        return
    if recipe.layout.recompute_granularity or recipe.layout.pipeline_model_parallel_size > 1:
        embedding.register_forward_hook(with_gradient)
