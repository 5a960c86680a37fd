"""The options of launchers, declared once.

`submit` shows them (`cli/shared_options.py`), the Python API and searches take them by the same names, and each
launcher has those with its name (`options_of`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

SLURM = "slurm"
K8S = "k8s"
LOCAL = "local"
SKYPILOT = "skypilot"


@dataclass(frozen=True)
class LauncherOption:
    """An option of `submit`; without it, its value is None."""

    launchers: tuple[str, ...]
    """Names for `--to` of those that have it."""
    help: str
    metavar: str | None = None
    kind: type = str
    """bool: a flag; list: a word that may be repeated."""
    least: int | None = None
    most: int | None = None

    @property
    def text(self) -> str:
        """The help, with the launchers."""
        return self.help if LOCAL in self.launchers else f"{', '.join(self.launchers)}: {self.help}"


_SLURM, _K8S = (SLURM,), (K8S,)
OPTIONS: dict[str, LauncherOption] = {
    "partition": LauncherOption(_SLURM, "submit to this partition; default: the profile's.", "NAME"),
    "account": LauncherOption(_SLURM, "charge this account; default: the profile's.", "NAME"),
    "qos": LauncherOption(_SLURM, "use this quality of service; default: the profile's.", "NAME"),
    "time": LauncherOption((SLURM, K8S), "time limit, such as 8:00:00; default on Slurm: the profile's.", "LIMIT"),
    "image": LauncherOption((SLURM, K8S, SKYPILOT), "run in this container image; for k8s, NAME@sha256:DIGEST.", "REF"),
    "runtime": LauncherOption(
        _SLURM, "run containers with pyxis or apptainer, or none; default: the profile's.", "WHAT"
    ),
    "python": LauncherOption(_SLURM, "start ranks with this Python; default: the current one, or the image's.", "PATH"),
    "warning": LauncherOption(
        _SLURM,
        "save and requeue S seconds before the time limit; default: twice the time of a step and a save.",
        "S",
        int,
        1,
        65535,
    ),
    "max-restarts": LauncherOption(
        (SLURM, K8S, LOCAL, SKYPILOT), "Restart at most N times after failures, then exit with code 93.", "N", int, 0
    ),
    "prepare-partition": LauncherOption(_SLURM, "tokenize missing data in this partition.", "NAME"),
    "prepare-nodes": LauncherOption(
        (SLURM, K8S), "tokenize missing data on N nodes, as a Ray cluster; default: 1, without Ray.", "N", int, 1, 1000
    ),
    "sbatch": LauncherOption(_SLURM, "pass an option to sbatch, repeatable: --sbatch=--reservation=x", "OPTION", list),
    "flavor": LauncherOption(_K8S, "create a job (default), jobset or trainjob.", "KIND"),
    "namespace": LauncherOption(_K8S, "create objects in this namespace; default: default.", "NAME"),
    "claim": LauncherOption(_K8S, "keep runs and data on this PersistentVolumeClaim.", "NAME"),
    "volume": LauncherOption((SKYPILOT,), "keep runs and data on this volume of SkyPilot.", "NAME"),
    "queue": LauncherOption(_K8S, "submit to this LocalQueue of Kueue.", "NAME"),
    "topology": LauncherOption(_K8S, "prefer nodes that share this label's value.", "LABEL"),
    "secret": LauncherOption(_K8S, "set a variable from a Secret.", "VAR=NAME[:KEY]", list),
    "tracking-uri": LauncherOption(_K8S, "log to this MLflow server.", "URL"),
    "service-account": LauncherOption(_K8S, "run pods under this service account.", "NAME"),
    "pull-secret": LauncherOption(_K8S, "pull the image with this Secret.", "NAME"),
    "host-network": LauncherOption(_K8S, "use the host network, if RDMA needs it.", kind=bool),
    "prepared": LauncherOption(_K8S, "skip the data preparation Job; the data is already on the claim.", kind=bool),
}
"""By their names on the command line, without dashes."""


def options_of(launcher: str) -> frozenset[str]:
    """The names of a launcher's options."""
    return frozenset(name for name, option in OPTIONS.items() if launcher in option.launchers)


def fields(chosen: Mapping[str, Any], special: Collection[str] = ()) -> dict[str, Any]:
    """Values that are set by the names of fields; those of `special` options are left to the launcher."""
    return {
        name.replace("-", "_"): value for name, value in chosen.items() if value is not None and name not in special
    }
