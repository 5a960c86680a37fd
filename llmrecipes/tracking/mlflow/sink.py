"""The training process's side of MLflow."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from llmrecipes.recipe.schema import Recipe
from llmrecipes.tracking.mirror_sink import MirrorSink
from llmrecipes.tracking.mlflow.mirror import MlflowConfig
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
    """Recipe as MLflow parameters: dotted keys, list items by number, values as JSON (text as it is), visibly cut."""
    flat: dict[str, str] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, item in value.items():
                walk(f"{prefix}.{key}" if prefix else key, item)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for index, item in enumerate(value):
                walk(f"{prefix}.{index}", item)
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            flat[prefix] = text if len(text) <= LONGEST_PARAM else text[: LONGEST_PARAM - len(CUT)] + CUT

    walk("", recipe.model_dump(mode="json"))
    return flat
