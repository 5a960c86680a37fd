"""All launchers. A new one is a folder and one line here."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from llmrecipes.errors import UserError
from llmrecipes.launch.base import Launcher

LAUNCHERS = {
    "local": "llmrecipes.launch.local.launcher:LocalLauncher",
    "slurm": "llmrecipes.launch.slurm.launcher:SlurmLauncher",
    "k8s": "llmrecipes.launch.kubernetes.launcher:KubernetesLauncher",
    "skypilot": "llmrecipes.launch.skypilot.launcher:SkypilotLauncher",
}
"""Name for `--to`, and the class, imported on demand."""


def launcher(name: str) -> Launcher:
    """The launcher with this name.

    Raises:
        UserError: there is none of that name.
    """
    if name not in LAUNCHERS:
        raise UserError(f"{name!r}", where="--to", rule=f"one of {', '.join(LAUNCHERS)}")
    module, _, kind = LAUNCHERS[name].partition(":")
    return cast(Launcher, getattr(import_module(module), kind)())
