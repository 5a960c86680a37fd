"""The recipe of `--overfit-batch`."""

from __future__ import annotations

from llmrecipes.recipe.schema import Recipe

STEPS = 200


def one_batch_recipe(recipe: Recipe) -> Recipe:
    """The recipe with a constant learning rate, no weight decay to work against it, and at most `STEPS` steps.

    It has a different name, which keeps its runs separate.
    """
    iters = min(recipe.train.train_iters, STEPS)
    return recipe.model_copy(
        update={
            "name": f"{recipe.name}.overfit",
            "train": recipe.train.model_copy(update={"train_iters": iters, "eval_interval": iters}),
            "optimizer": recipe.optimizer.model_copy(update={"weight_decay": 0.0}),
            "scheduler": recipe.scheduler.model_copy(
                update={"lr_decay_style": "constant", "lr_warmup_iters": min(10, iters - 1), "lr_decay_iters": None}
            ),
            "checkpoint": recipe.checkpoint.model_copy(update={"save_interval": iters}),
        }
    )
