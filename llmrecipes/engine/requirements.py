"""Whether an engine can run on this machine. Imports neither the engine nor torch."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from llmrecipes.errors import UserError
from llmrecipes.hardware.operators import ASYNC_IO, CPU_ADAM, obstacle
from llmrecipes.recipe.engines import DEEPSPEED, ENGINES, engine_name
from llmrecipes.recipe.schema import Recipe, Zero


def require_packages(recipe: Recipe) -> None:
    """Refuse a recipe whose engine cannot run here; called for what is about to run here, not for what is planned.

    Raises:
        UserError: a package is missing, or an operator that offload needs can neither be loaded nor compiled.
    """
    name = engine_name(recipe)
    extra = ENGINES[name].extra
    missing = [package for package in ENGINES[name].packages if find_spec(package) is None]
    if missing:
        raise UserError(
            f"{name}, but the package {', '.join(missing)} is not installed",
            where="engine",
            rule=f"the engine {name} is optional: its packages are in the extra {extra}",
            fix=f"make setup-{extra} in the checkout, or pip install 'llmrecipes[{extra}]'",
        )
    if name == DEEPSPEED and recipe.zero is not None:
        for key, operator in _operators(recipe.zero):
            _require_operator(key, operator)


def _operators(zero: Zero) -> Iterator[tuple[str, str]]:
    if zero.offload_optimizer != "none":
        yield "zero.offload_optimizer", CPU_ADAM
    for key in ("offload_optimizer", "offload_param"):
        if getattr(zero, key) == "nvme":
            yield f"zero.{key}", ASYNC_IO
            return


def _require_operator(key: str, operator: str) -> None:
    found = obstacle(operator)
    if found is not None:
        raise UserError(
            f"needs DeepSpeed's {operator}, but {found.what}",
            where=key,
            rule="DeepSpeed compiles this operator at its first use",
            fix=found.fix,
        )
