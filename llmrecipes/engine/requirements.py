"""Whether an engine can run on this machine. Imports neither the engine nor torch."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from llmrecipes.errors import UserError
from llmrecipes.hardware.disk import unfit_for_offload
from llmrecipes.hardware.operators import ASYNC_IO, CPU_ADAM, obstacle
from llmrecipes.recipe.engines import DEEPSPEED, ENGINES, engine_name
from llmrecipes.recipe.schema import Recipe, Zero


def require_packages(recipe: Recipe) -> None:
    """Refuse a recipe whose engine cannot run here; called for what is about to run here, not for what is planned.

    Raises:
        UserError: a package is missing, an operator that offload needs can neither be loaded nor compiled, or
            `zero.nvme_path` is not on a fast local disk.
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
        if recipe.zero.nvme_path is not None and (problem := unfit_for_offload(Path(recipe.zero.nvme_path))):
            raise UserError(
                problem,
                where="zero.nvme_path",
                rule="nvme_path is a folder on a fast disk of each node: every step reads and writes all of it",
                fix="a folder on a local NVMe disk, or offload to cpu",
            )


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
