"""The training process's side of W&B."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

from llmrecipes.redact import redacted
from llmrecipes.tracking.events import RunStart
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

    @classmethod
    def of(cls, start: RunStart) -> Self:
        return cls(wandb_config(start), start.messages.put)


def wandb_config(start: RunStart) -> WandbConfig:
    """Configuration of the mirror, without the API key: W&B's library reads that from the environment or ~/.netrc."""
    recipe, settings = start.recipe, start.recipe.tracking
    return WandbConfig(
        run_dir=str(start.run_dir.resolve()),
        run_name=settings.wandb_exp_name or start.run_dir.name,
        log_interval=recipe.train.log_interval,
        resumed_step=start.resumed_step,
        total_steps=start.total_steps,
        system_metrics_interval=settings.system_metrics_interval,
        tags=dict(start.tags),
        artifacts=list(start.documents),
        project=settings.wandb_project or recipe.name,
        entity=settings.wandb_entity,
        save_dir=str(Path(settings.wandb_save_dir or start.run_dir).resolve()),
        pid=os.getpid(),
        recipe=redacted(recipe.model_dump(mode="json")),
    )
