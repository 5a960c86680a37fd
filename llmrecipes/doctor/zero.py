"""Whether recipes with ZeRO can run here: DeepSpeed, which is optional, and its operators for offload."""

from __future__ import annotations

from collections.abc import Iterator

from llmrecipes.doctor.finding import Finding, fail, ok, skip, warn
from llmrecipes.engine.requirements import require_packages
from llmrecipes.errors import UserError
from llmrecipes.hardware.builds import ASYNC_IO, CPU_ADAM, operator_obstacle
from llmrecipes.recipe.schema import Recipe

OPERATORS = {
    CPU_ADAM: "offload of the optimizer",
    ASYNC_IO: "offload to NVMe",
}


def check(version: str | None, recipe: Recipe | None) -> Iterator[Finding]:
    """Check DeepSpeed and its operators.

    Args:
        version: of DeepSpeed; None if it is not installed.
        recipe: it fails if its engine cannot run here; None: nothing is required.
    """
    if version is None:
        yield skip("zero", "deepspeed is not installed; make setup-zero installs it")
    else:
        yield ok("zero", f"deepspeed {version}")
        for operator, purpose in OPERATORS.items():
            found = operator_obstacle(operator)
            if found is None:
                yield ok(f"zero {operator}", f"can be compiled or loaded, for {purpose}")
            else:
                yield warn(f"zero {operator}", f"no {purpose}: {found.what}", found.fix)
    if recipe is not None:
        try:
            require_packages(recipe)
        except UserError as error:
            yield fail("zero", f"recipe {recipe.name}: {error.where}: {error.what}", error.fix)
