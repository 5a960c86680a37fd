"""Whether the installed torch can use this machine's GPUs, without importing it."""

from __future__ import annotations

from importlib import metadata

from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import visible_gpus


def require_gpu_build() -> None:
    """Refuse a CPU build of torch on a machine with GPUs, before anything else is done.

    Raises:
        UserError: it is one.
    """
    version = metadata.version("torch")
    if version.endswith("+cpu") and (gpus := visible_gpus()):
        raise unusable(f"{len(gpus)} × {gpus[0].name}, and torch {version} is a CPU build")


def unusable(what: str) -> UserError:
    """The error about GPUs that torch cannot use.

    Args:
        what: the GPUs, and why.
    """
    return UserError(
        f"this machine has {what}",
        where="torch.cuda",
        rule="a machine with a GPU trains on the CPU only if CUDA_VISIBLE_DEVICES is empty",
        fix="llmrecipes doctor; make setup LOCK=py311-cuda where torch is a CPU build; or CUDA_VISIBLE_DEVICES= in "
        "front of the command, to train on the CPU",
    )
