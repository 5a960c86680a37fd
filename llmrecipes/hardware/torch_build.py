"""Whether the installed torch can use this machine's GPUs, without importing it."""

from __future__ import annotations

import ast
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from llmrecipes.errors import UserError
from llmrecipes.hardware.cluster import visible_gpus


def cuda_version() -> str | None:
    """`torch.version.cuda` of the installed torch, such as `13.0`; None for a build without CUDA, or without torch.

    The version of the package does not tell: NVIDIA's own builds are called `2.13.0a0+8145d630e8.nv26.06`.
    """
    spec = find_spec("torch")
    return None if spec is None or spec.origin is None else cuda_of(Path(spec.origin).with_name("version.py"))


def cuda_of(version_file: Path) -> str | None:
    """The value of `cuda` in torch's `version.py`, which is generated at build time; None if it has none."""
    try:
        tree = ast.parse(version_file.read_text("utf-8"))
    except (OSError, SyntaxError):
        return None
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        if any(isinstance(target, ast.Name) and target.id == "cuda" for target in targets):
            return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None
    return None


def require_gpu_build() -> None:
    """Refuse a CPU build of torch on a machine with GPUs, before anything else is done.

    Raises:
        UserError: it is one.
    """
    if cuda_version() is None and find_spec("torch") is not None and (gpus := visible_gpus()):
        raise unusable(f"{len(gpus)} × {gpus[0].name}, and torch {metadata.version('torch')} is a CPU build")


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
