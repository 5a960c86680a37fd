"""What offload needs of this machine: a compiler or compiled operators, and a fast disk. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from llmrecipes.commandline import command_line
from llmrecipes.errors import UserError
from llmrecipes.hardware.builds import ASYNC_IO, CPU_ADAM, operator_obstacle
from llmrecipes.hardware.disk import unfit_for_offload
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.zero import QUANTIZED, Zero


def require_offload(recipe: Recipe) -> None:
    """Refuse offload that cannot run here.

    Raises:
        UserError: an operator can neither be loaded nor compiled, or `layout.zero.nvme_path` is
            not on a fast local disk.
    """
    zero = recipe.layout.zero
    if zero is None:
        return
    for key, operator in _operators(zero):
        _require_operator(key, operator)
    if zero.nvme_path is not None and (problem := unfit_for_offload(Path(zero.nvme_path))):
        raise UserError(
            problem,
            where="layout.zero.nvme_path",
            rule="nvme_path must be a folder on a fast disk of each node: every step reads and writes all of it",
            fix="use a folder on a local NVMe disk, or offload to cpu",
        )


def require_no_data(recipe: Recipe) -> None:
    """Refuse what DeepSpeed computes outside of torch, which needs data.

    Raises:
        UserError: the recipe offloads or quantizes.
    """
    zero = recipe.layout.zero
    if zero is None:
        return
    for key in ("offload_optimizer", "offload_param"):
        if getattr(zero, key) != "none":
            raise UserError(
                f"{getattr(zero, key)} cannot run on tensors without data",
                where=f"layout.zero.{key}",
                rule="DeepSpeed offloads with its own operators, which read and write host memory",
                fix=f"layout.zero.{key}=none; the plan of both memories: {command_line('show', recipe.name)}",
            )
    for key in QUANTIZED:
        if getattr(recipe.train, key):
            raise UserError(
                "true",
                where=f"train.{key}",
                rule="DeepSpeed quantizes with CUDA kernels, which need data",
                fix=f"train.{key}=false",
            )


def _operators(zero: Zero) -> Iterator[tuple[str, str]]:
    if zero.offload_optimizer != "none":
        yield "layout.zero.offload_optimizer", CPU_ADAM
    if zero.offload_optimizer == "nvme":
        yield "layout.zero.offload_optimizer", ASYNC_IO


def _require_operator(key: str, operator: str) -> None:
    obstacle = operator_obstacle(operator)
    if obstacle is not None:
        raise UserError(
            f"needs DeepSpeed's {operator}, but {obstacle.what}",
            where=key,
            rule="DeepSpeed compiles this operator at its first use",
            fix=obstacle.fix,
        )
