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
MOST_DIFF = 256 << 10
"""Characters of the largest diff that is recorded."""
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
    """`PACKAGES`, None for what is missing, and everything else that is installed."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    # From the names of folders: reading the metadata of hundreds of packages takes a fifth of a second. Of two folders
    # the first on the path wins, as at import. `_vendor` are private copies, which setuptools adds when it is imported.
    folders = (Path(folder) for folder in reversed(sys.path) if not folder.endswith("_vendor"))
    installed = (path.stem.rpartition("-") for folder in folders for path in folder.glob("*.dist-info"))
    others = {name.lower().replace("_", "-"): version for name, _, version in installed}
    return {**versions, **{name: others[name] for name in sorted(others.keys() - versions.keys())}}


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
    """Commit, whether tracked files differ from it, and how, unless that is too long; None without a commit."""
    commit = _run("git", "-C", str(root), "rev-parse", "--verify", "HEAD")
    if not commit:
        return None
    changed = _run("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    state = {"commit": commit.strip(), "dirty": None if changed is None else bool(changed.strip())}
    if not state["dirty"]:
        return state
    diff = _run("git", "-C", str(root), "diff", "--no-color", "--no-ext-diff", "HEAD")
    return {**state, "diff": None if diff is None or len(diff) > MOST_DIFF else diff}


def _run(*command: str) -> str | None:
    """Output of a program; None if it is missing, fails or times out."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
