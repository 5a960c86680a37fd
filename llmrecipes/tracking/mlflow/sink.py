"""The training process's side of MLflow."""

from __future__ import annotations

import json
from collections.abc import Callable

from llmrecipes.nested import leaves
from llmrecipes.recipe.schema import Recipe
from llmrecipes.tracking.mirror_sink import MirrorSink
from llmrecipes.tracking.mlflow.config import MlflowConfig
from llmrecipes.tracking.store import process_environment, redact

LONGEST_PARAM = 6000  # MLflow's limits, in characters
CUT = " ... [cut: the whole value is in the artifact recipe.yaml]"


class MlflowSink(MirrorSink):
    """Mirrors the run into MLflow.

    Raises:
        OSError: the process could not be started.
    """

    def __init__(self, config: MlflowConfig, show: Callable[[str], None]) -> None:
        super().__init__(
            "llmrecipes.tracking.mlflow.mirror",
            f"MLflow at {redact(config.uri)}",
            "mlflow.log",
            config,
            process_environment(),
            show=show,
        )


def flatten(recipe: Recipe) -> dict[str, str]:
    """Recipe as MLflow parameters: dotted keys, list items by number, values as JSON (text as it is), visibly cut.

    Without the section `search`, which a training ignores.
    """
    flat = {}
    values = recipe.model_dump(mode="json", exclude={"search"})
    for name, value in leaves(values, enter=lambda items: isinstance(items[0], dict)):
        text = value if isinstance(value, str) else json.dumps(value)
        flat[name] = text if len(text) <= LONGEST_PARAM else text[: LONGEST_PARAM - len(CUT)] + CUT
    return flat
