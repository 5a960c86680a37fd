"""Containerized LLM-training recipes on Megatron-core: one file runs on a laptop CPU, a GPU, Slurm and Kubernetes.

The Python API (docs/reference/python.md) is imported from `llmrecipes.api` and `llmrecipes.api_commands` on first use,
so that `import llmrecipes` stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmrecipes.api import Checkpoint, Run, TrainResult, load_recipe, open_run, plan_recipe, train_recipe
    from llmrecipes.api_commands import (
        compare_runs,
        import_model,
        layout_recipe,
        list_runs,
        merge_models,
        prepare_recipe,
        report_run,
        search_recipe,
        submit_recipe,
    )
    from llmrecipes.errors import UserError

__version__ = "0.1.0"

__all__ = [
    "Checkpoint", "Run", "TrainResult", "UserError", "compare_runs", "import_model", "layout_recipe", "list_runs",
    "load_recipe", "merge_models", "open_run", "plan_recipe", "prepare_recipe", "report_run", "search_recipe",
    "submit_recipe", "train_recipe",
]  # fmt: skip

_MODULES = {
    "UserError": "llmrecipes.errors",
    **dict.fromkeys(
        ("Checkpoint", "Run", "TrainResult", "load_recipe", "open_run", "plan_recipe", "train_recipe"), "llmrecipes.api"
    ),
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES.get(name, "llmrecipes.api_commands")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
