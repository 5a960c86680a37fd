"""Environment of a run: versions, machine, code. Written to env.json in the run directory."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from llmrecipes.hardware import nvidia
from llmrecipes.hardware.cluster import cpu_cores
from llmrecipes.redact import HIDDEN, is_secret, redacted

PACKAGES = (
    "llmrecipes",
    "torch",
    "megatron-core",
    "numpy",
    "transformer-engine",
    "flash-attn",
    "datasets",
    "tokenizers",
    "transformers",
    "mlflow",
    "pydantic",
)
VARIABLES = re.compile(r"(NCCL|TORCH|GLOO|CUDA|NVTE|OMP|MKL|SLURM)_\w+|PYTORCH_\w+|CUDA_VISIBLE_DEVICES|WORLD_SIZE")
TIMEOUT_SECONDS = 5.0


def capture(root: Path | None) -> dict[str, Any]:
    """Describe interpreter, packages, machine, code and command, as JSON values.

    Args:
        root: the checkout whose git commit is recorded; None, or a directory that is not one, gives `git: null`.

    Values of variables and arguments whose names look like secrets are not recorded, and what is recorded is redacted.
    `LLMRECIPES_IMAGE_DIGEST` names
    the container image, which a container cannot determine itself.
    """
    return redacted(
        {
            "python": platform.python_version(),
            "packages": _packages(),
            "platform": platform.platform(),
            "hostname": socket.gethostname(),
            "cpu": _cpu_model(),
            "cores": {"present": os.cpu_count(), "usable": cpu_cores()},
            "memory_bytes": psutil.virtual_memory().total,
            "gpus": _gpus(),
            "git": None if root is None else _git(root),
            "image_digest": os.environ.get("LLMRECIPES_IMAGE_DIGEST"),
            "command": _command(sys.orig_argv),
            "variables": {
                name: HIDDEN if is_secret(name) else value
                for name, value in sorted(os.environ.items())
                if VARIABLES.fullmatch(name)
            },
        }
    )


def _packages() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _command(arguments: Sequence[str]) -> list[str]:
    """The command line without the values of options like `--api-token=abc` or `--password abc`.

    Recipe overrides (`data.tokenizer.path=...`) are kept: they are not options, and recipes hold no secrets.
    """
    shown: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        name, equals, _ = argument.partition("=")
        if equals and name.startswith("-") and is_secret(name):
            argument = f"{name}={HIDDEN}"
        elif before.startswith("-") and "=" not in before and is_secret(before) and not argument.startswith("-"):
            argument = HIDDEN
        shown.append(argument)
    return shown


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    model = re.search(r"^(?:model name|Processor)\s*:\s*(.+)$", text, re.MULTILINE)
    return model[1].strip() if model else platform.machine()


def _gpus() -> list[dict[str, Any]]:
    return [
        {
            "name": gpu["name"],
            "memory_mib": int(gpu["memory.total"]) if gpu["memory.total"].isdecimal() else None,
            "driver": gpu["driver_version"],
            "uuid": gpu["uuid"],
        }
        for gpu in nvidia.query("name", "memory.total", "driver_version", "uuid", timeout=TIMEOUT_SECONDS)
    ]


def _git(root: Path) -> dict[str, Any] | None:
    """Commit and whether tracked files differ from it; None outside a checkout with a commit."""
    commit = _run("git", "-C", str(root), "rev-parse", "--verify", "HEAD")
    if not commit:
        return None
    changed = _run("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit.strip(), "dirty": None if changed is None else bool(changed.strip())}


def _run(*command: str) -> str | None:
    """Output of a program; None if it is missing, fails or times out."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
