"""SkyPilot: a run as a task, https://docs.skypilot.co/en/stable/reference/yaml-spec.html, for `sky jobs launch`.

Tasks are printed only: which clouds may be used, and by whom, is a matter of the user's `sky`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any, ClassVar

from llmrecipes.errors import ExitCode, UserError
from llmrecipes.hardware.profile import Profile
from llmrecipes.launch.base import (
    JobHandle,
    JobRef,
    JobStatus,
    LauncherOptions,
    Logs,
    PlannedForCluster,
    Rendering,
    Submission,
)
from llmrecipes.launch.kubernetes.objects import to_yaml
from llmrecipes.launch.kubernetes.settings import SUBDOMAIN, object_name
from llmrecipes.launch.launcher_options import SKYPILOT, options_of
from llmrecipes.recipe.load import DEFAULTS_NOTE, short

MOUNT = "/llmrecipes"
RECIPE = "/tmp/llmrecipes/recipe.yaml"  # noqa: S108 - the node's own
PORT = 29500
MAX_RESTARTS = 3
END = "END_OF_RECIPE"
"""No line of a recipe begins with it: it is a mapping in YAML."""
SETUP = """\
export PATH="$HOME/.local/bin:$PATH"  # where SkyPilot has uv
uv python install 3.12
make setup
"""
NODE = (
    '--nnodes "$SKYPILOT_NUM_NODES" --node-rank "$SKYPILOT_NODE_RANK" '
    f"""--rdzv "$(head -n 1 <<< "$SKYPILOT_NODE_IPS"):{PORT}\""""
)
HOW = "--dry-run > task.yaml, then: sky jobs launch task.yaml"
_VENDOR = re.compile(r"^(NVIDIA|AMD)( GeForce| Instinct)? ")


class SkypilotLauncher:
    """`--to skypilot`, only with `--dry-run`."""

    takes: ClassVar = options_of(SKYPILOT)
    needs_cluster: ClassVar = True
    shares_disk: ClassVar = False
    poll_seconds: ClassVar = 60.0

    def render(self, submission: Submission, chosen: LauncherOptions) -> Rendering:
        """The task, as YAML."""
        planned = submission.planned_for_cluster
        volume = chosen.get("volume")
        if volume is not None and not SUBDOMAIN.fullmatch(volume):
            raise UserError(f"{volume!r}", where="--volume", rule="lowercase letters, digits, - and .")
        if volume is None and planned.nodes > 1:
            raise UserError(
                "not set",
                where="--volume",
                rule="nodes share runs and data, and those of SkyPilot share no disk without a volume",
                fix="--volume NAME, a volume of sky volumes apply",
            )
        task = _task(submission, planned, chosen)
        text = to_yaml([task])
        lost = "runs and data are lost with the node; --volume NAME keeps them"
        return Rendering(
            ("sky", "jobs", "launch", "-"),
            shown=text,
            details={"task": task},
            place={"start": HOW.rpartition(": ")[2]},
            time_limit="none",
            warnings=() if volume else (lost,),
        )

    def require(self) -> None:
        """Always refused."""
        raise UserError("only printed", where="--to skypilot", rule="SkyPilot starts the task by itself", fix=HOW)

    def submit(self, submission: Submission, rendering: Rendering) -> JobHandle:
        """Not reached: see `require`."""
        raise NotImplementedError

    def statuses(self, refs: Sequence[JobRef]) -> dict[JobRef, JobStatus]:
        """None: `sky jobs queue` knows them."""
        return {}

    def cancel(self, ref: JobRef) -> None:
        """No job is known here."""

    def logs(self, ref: JobRef) -> Logs:
        """No job is known here."""
        return Logs()

    def names_job(self, text: str) -> bool:
        """No job is known here."""
        return False


def accelerator(gpu: str) -> str:
    """SkyPilot's name of a GPU, from that of nvidia-smi: `H100` of `NVIDIA H100 80GB HBM3`."""
    name = _VENDOR.sub("", gpu)
    if name.startswith("A100") and "80GB" in name:
        return "A100-80GB"
    return "".join(name.split()[:2]) if name.startswith("RTX ") else re.split("[ -]", name)[0]


def _task(submission: Submission, planned: PlannedForCluster, chosen: LauncherOptions) -> dict[str, Any]:
    image, volume = chosen.get("image"), chosen.get("volume")
    restarts = chosen.get("max-restarts")
    return {
        "name": object_name(planned.recipe.name, submission.run_id),
        **({} if image else {"workdir": "."}),
        "num_nodes": planned.nodes,
        "resources": {
            **_hardware(planned.profile, planned.plan.world_size // planned.nodes),
            **({"image_id": f"docker:{image}"} if image else {}),
            **({"network_tier": "best"} if planned.nodes > 1 else {}),
            "job_recovery": {
                "max_restarts_on_errors": MAX_RESTARTS if restarts is None else restarts,
                "recover_on_exit_codes": [int(ExitCode.REQUEUE)],
            },
        },
        **({"volumes": {MOUNT: volume}} if volume else {}),
        **({} if image else {"setup": SETUP}),
        "run": _script(submission, planned, program="llmrecipes" if image else ".venv/bin/llmrecipes", volume=volume),
    }


def _hardware(profile: Profile, ranks: int) -> dict[str, Any]:
    if profile.gpu is None:
        return {"cpus": f"{profile.cpu_cores}+", "memory": f"{int(profile.memory_gib)}+"}
    return {"accelerators": {accelerator(profile.gpu.name): ranks}}


def _script(submission: Submission, planned: PlannedForCluster, *, program: str, volume: str | None) -> str:
    """The script of each node. It has the run's id, so a restarted task resumes its run."""
    folders = ("--runs-dir", f"{MOUNT}/runs", "--data-dir", f"{MOUNT}/data") if volume else ()
    ranks = ("--nproc", str(planned.plan.world_size))
    words = (program, "train", RECIPE, "--run-id", submission.run_id, *ranks, "--no-sample", *folders)
    command = shlex.join((*words, *submission.options.words()))
    recipe = short(planned.recipe, header=DEFAULTS_NOTE)
    return (
        f"mkdir -p {RECIPE.rpartition('/')[0]}\ncat > {RECIPE} << '{END}'\n{recipe}{END}\n"
        f"exec {command}{' ' + NODE if planned.nodes > 1 else ''}\n"
    )
