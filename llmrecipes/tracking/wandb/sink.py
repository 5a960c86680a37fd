"""The training process's side of W&B."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

from llmrecipes.errors import UserError
from llmrecipes.recipe.schema import Recipe
from llmrecipes.redact import redacted
from llmrecipes.tracking.mirror_sink import MirrorSink
from llmrecipes.tracking.wandb.mirror import WandbConfig


class WandbSink(MirrorSink):
    """Mirrors the run into W&B.

    Raises:
        OSError: the process could not be started.
    """

    def __init__(self, config: WandbConfig, show: Callable[[str], None]) -> None:
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        super().__init__("llmrecipes.tracking.wandb.mirror", "W&B", "wandb.log", config, environment, show=show)


def require_library(recipe: Recipe) -> None:
    """Refuse a recipe with W&B if its library is not installed.

    Raises:
        UserError: the library is missing.
    """
    if recipe.tracking.wandb and find_spec("wandb") is None:
        raise UserError(
            "true, but the package wandb is not installed",
            where="tracking.wandb",
            rule="W&B is optional: its library is in the extra wandb",
            fix="pip install -e '.[wandb]' in the checkout, or tracking.wandb=false",
        )


def wandb_config(
    recipe: Recipe, run_dir: Path, tags: Mapping[str, str], artifacts: list[str], resumed_step: int, total_steps: int
) -> WandbConfig:
    """Configuration of the mirror, without the API key: W&B's library reads that from the environment or ~/.netrc."""
    settings = recipe.tracking
    return WandbConfig(
        run_dir=str(run_dir.resolve()),
        run_name=settings.wandb_exp_name or run_dir.name,
        log_interval=recipe.train.log_interval,
        resumed_step=resumed_step,
        total_steps=total_steps,
        system_metrics_interval=settings.system_metrics_interval,
        tags=dict(tags),
        artifacts=artifacts,
        project=settings.wandb_project or recipe.name,
        entity=settings.wandb_entity,
        save_dir=str(Path(settings.wandb_save_dir or run_dir).resolve()),
        pid=os.getpid(),
        recipe=redacted(recipe.model_dump(mode="json")),
    )
