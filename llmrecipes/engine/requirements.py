"""Whether an engine can run on this machine. Imports neither the engine nor torch."""

from __future__ import annotations

from pkgutil import resolve_name

from llmrecipes.errors import UserError
from llmrecipes.hardware.builds import require_gpu_build
from llmrecipes.packages import find_spec
from llmrecipes.plan.derive import Plan
from llmrecipes.recipe.engines import ENGINES, engine_name
from llmrecipes.recipe.schema import Recipe


def require_packages(recipe: Recipe) -> None:
    """Refuse a recipe whose engine cannot run here; called for what is about to run here, not for what is planned.

    Raises:
        UserError: a package is missing, torch is a CPU build on a machine with GPUs, or something else that the engine
            needs for this recipe.
    """
    require_gpu_build()
    require_installed(recipe)
    engine = ENGINES[engine_name(recipe)]
    if engine.requirements is not None:
        resolve_name(engine.requirements)(recipe)


def require_installed(recipe: Recipe) -> None:
    """Refuse a recipe whose engine is not installed.

    Raises:
        UserError: a package is missing.
    """
    name = engine_name(recipe)
    engine = ENGINES[name]
    missing = [package for package in engine.packages if find_spec(package) is None]
    if missing:
        raise UserError(
            f"engine {name} needs the package {', '.join(missing)}, which is not installed",
            where="layout.engine",
            rule=f"the engine {name} is optional: its packages are in the extra {engine.extra}",
            fix=f"make setup-{engine.extra} in the checkout, or pip install 'llmrecipes[{engine.extra}]'",
        )


def require_fields(plan: Plan) -> None:
    """Refuse what megatron-core refuses of `model.extra`, where it does not take a GPU to know: ranks check again.

    Raises:
        UserError: see `transformer_config` and `require_in_local_layers`.
    """
    if plan.recipe.model.extra and plan.device == "cpu":
        from llmrecipes.engine.core.model.config import require_in_local_layers, transformer_config

        require_in_local_layers(plan.recipe.model)
        transformer_config(plan, on_gpu=False, transformer_engine=False)
