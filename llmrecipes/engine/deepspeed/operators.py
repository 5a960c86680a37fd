"""DeepSpeed's C++ operators, compiled once on each node before they are used."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

from llmrecipes.recipe.zero import Zero


def load_operators(zero: Zero) -> None:
    """Load the operators that offload needs; whichever rank of a node comes first compiles them.

    torch guards a compilation with a file that stays when the process is killed, and every later process would wait for
    its end. The kernel releases this lock, so whoever holds it may remove such a file.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder

    builders = [CPUAdamBuilder()] if zero.offload_optimizer != "none" else []
    builders += [AsyncIOBuilder()] if zero.offload_optimizer == "nvme" else []
    for builder in builders:
        _load(builder)


def _load(builder: Any) -> None:
    from torch.utils.cpp_extension import _get_build_directory

    folder = Path(_get_build_directory(builder.name, False))
    with folder.with_name(f"{folder.name}.flock").open("w") as mutex:
        fcntl.flock(mutex, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        builder.load()
