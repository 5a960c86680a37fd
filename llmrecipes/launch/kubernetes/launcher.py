"""Kubernetes: objects created with kubectl apply, queried with kubectl get.

A Job tokenizes a run's data before its pods ask for GPUs. A Job cannot wait for another one, and unsuspending it from a
pod would take an API token. So `submit` creates the run only when this Job has completed.
"""

from __future__ import annotations

import json
import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from llmrecipes.errors import ExitCode, UserError
from llmrecipes.hardware.profile import Profile
from llmrecipes.launch.base import (
    JobHandle,
    JobRef,
    JobState,
    JobStatus,
    Launcher,
    LauncherOptions,
    Logs,
    PlannedForCluster,
    Rendering,
    Submission,
)
from llmrecipes.launch.job import Job
from llmrecipes.launch.kubernetes import objects, pod, preparation, site
from llmrecipes.launch.kubernetes.bases import Object
from llmrecipes.launch.kubernetes.pod import PodRun
from llmrecipes.launch.kubernetes.settings import FLAVORS, KubernetesOptions, object_name, parse_secrets
from llmrecipes.launch.launcher_options import K8S, fields, options_of
from llmrecipes.launch.programs import ask, require_program, run, tell
from llmrecipes.launch.run_options import RunOptions
from llmrecipes.recipe.load import recipe_hash, to_yaml

logger = logging.getLogger(__name__)

DRY_RUN = "--dry-run prints the objects"
TOKENIZE = "tokenizes the data first if it is missing, then the run is created (--prepared: at once)"
NO_DRY_RUN = "does not support dry run"
"""What the API server says of a webhook of the site."""
JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
"""Label of the Jobs of a JobSet, which has the name of its TrainJob."""
NAMES_AT_ONCE = 100
"""Maximum names in one selector, which is part of a URL."""
FAILED_WITH = re.compile(r"failed with exit code (\d+)")
RAY_JOB = "rayjob"
SUCCEEDED, FAILED, SUSPENDED = {"Complete", "Completed"}, {"Failed"}, {"Suspended"}
"""Condition types of Jobs, JobSets and TrainJobs."""


RUN_OPTIONS = RunOptions()


class KubernetesLauncher:
    """`--to k8s`. A job's id is NAMESPACE/KIND/NAME."""

    takes: ClassVar = options_of(K8S)
    needs_cluster: ClassVar = True
    shares_disk: ClassVar = False
    poll_seconds: ClassVar = 10.0

    def render(self, submission: Submission, chosen: LauncherOptions) -> Rendering:
        """The objects, as YAML; and those of the Job which tokenizes, if GPUs would wait for it."""
        options = _options(chosen)
        run = _run(submission.planned_for_cluster, submission.run_id, submission.options)
        rendered = objects.render(run, options)
        workload = rendered[-1]["metadata"]
        level, reasons = pod.security_level(objects.pod_spec(rendered[-1]))
        apply = ("kubectl", "apply", "--filename", "-")
        text = objects.to_yaml(rendered)
        first: list[Object] = []
        if run.profile.gpus_per_node and not submission.prepared and not options.prepared:
            first = [rendered[0], *preparation.render(run, options)]  # both read the recipe from its ConfigMap
        kind = first[-1]["kind"] if first else ""
        waits = (
            f"# First the {kind} {preparation.name_of(run.name)} and its ConfigMap; the rest when it has completed.\n"
        )
        return Rendering(
            apply,
            text=text,
            first=apply if first else (),
            first_text=objects.to_yaml(first) if first else "",
            shown=waits + objects.to_yaml([*first, *rendered[1:]]) if first else text,
            notes={"tokenize": f"{preparation.described(options)} {TOKENIZE}"} if first else {},
            details={
                "prepare_objects": first or None,
                "name": workload["name"],
                "namespace": options.namespace,
                "flavor": options.flavor,
                "objects": rendered,
                "pod_security": {"level": level, "reasons": list(reasons)},
            },
            place={
                "namespace": options.namespace,
                **({} if options.queue is None else {"queue": options.queue}),
                "security": f"{level} ({', '.join(reasons)})" if reasons else level,
            },
            time_limit=options.time or "none",
            has_token="HF_TOKEN" in options.secrets,  # pods only have what --secret gives them
            warnings=_warnings(submission.planned_for_cluster.profile, options),
        )

    def require(self) -> None:
        """Requires kubectl."""
        require_program("kubectl", f"{DRY_RUN}; make train runs the recipe on this machine")

    def submit(self, submission: Submission, rendering: Rendering) -> JobHandle:
        """kubectl apply, after the cluster has accepted all objects without creating them.

        If the data may be missing, this waits until it is prepared.

        Raises:
            UserError: the namespace admits no such pods, kubectl fails, or the data cannot be prepared.
        """
        _require_admission(rendering.details["namespace"], rendering.details["pod_security"])
        _require_accepted(rendering.command, rendering.text)
        if rendering.first:
            _require_accepted(rendering.first, rendering.first_text)
            name = preparation.name_of(rendering.details["name"])
            kind = rendering.details["prepare_objects"][-1]["kind"].lower()
            ref = JobRef("k8s", f"{rendering.details['namespace']}/{kind}/{name}", submission.run_dir)
            finish_preparation(self, ref, rendering.first, rendering.first_text, submission.run_id)
        tell(rendering.command, rendering.text, DRY_RUN)
        place = (rendering.details[key] for key in ("namespace", "flavor", "name"))
        return Job(self, JobRef("k8s", "/".join(place), submission.run_dir))

    def statuses(self, refs: Sequence[JobRef]) -> dict[JobRef, JobStatus]:
        """One kubectl get for each namespace and kind, with a selector for the runs' labels.

        The conditions of JobSets and TrainJobs name no exit code: one more asks for the Jobs of those that failed.
        """
        groups: dict[tuple[str, str], dict[str, JobRef]] = defaultdict(dict)
        for ref in refs:
            namespace, kind, name = ref.job_id.split("/")
            groups[namespace, kind][name] = ref
        by_ref = {}
        for (namespace, kind), named in groups.items():
            for thing in _get(namespace, kind, list(named)):
                name = thing["metadata"]["name"]
                if name in named:
                    by_ref[named[name]] = status_of(thing)
            failed = [name for name, ref in named.items() if ref in by_ref and by_ref[ref].state is JobState.FAILED]
            if kind not in ("job", RAY_JOB) and failed:
                for thing in _get(namespace, "job", failed, JOBSET_NAME):
                    if (status := status_of(thing)).exit_code:
                        by_ref[named[thing["metadata"]["labels"][JOBSET_NAME]]] = status
        return by_ref

    def cancel(self, ref: JobRef) -> None:
        """Delete the workload: its pods get SIGTERM and their grace period to save. Other objects stay for a resume."""
        namespace, kind, name = ref.job_id.split("/")
        tell(("kubectl", "delete", kind, name, "--namespace", namespace, "--ignore-not-found", "--wait=false"))

    def logs(self, ref: JobRef) -> Logs:
        """The command that follows all pods."""
        namespace, _, name = ref.job_id.split("/")
        selector = f"{pod.INSTANCE}={name}"
        return Logs(
            command=("kubectl", "logs", "--namespace", namespace, "--selector", selector, "--follow", "--prefix")
        )

    def names_job(self, text: str) -> bool:
        """NAMESPACE/KIND/NAME."""
        parts = text.split("/")
        return len(parts) == 3 and parts[1] in FLAVORS and all(parts)


def objects_of(
    planned: PlannedForCluster, options: KubernetesOptions, run_id: str, run: RunOptions = RUN_OPTIONS
) -> list[Object]:
    """The objects of a run, the workload last.

    Raises:
        UserError: a value that Kubernetes would reject.
    """
    return objects.render(_run(planned, run_id, run), options)


def _run(planned: PlannedForCluster, run_id: str, options: RunOptions) -> PodRun:
    return PodRun(
        name=object_name(planned.recipe.name, run_id),
        run_id=run_id,
        nodes=planned.nodes,
        plan=planned.plan,
        profile=planned.profile,
        recipe_yaml=to_yaml(planned.recipe),
        recipe_hash=recipe_hash(planned.recipe),
        options=options,
    )


def _warnings(profile: Profile, options: KubernetesOptions) -> tuple[str, ...]:
    names = site.left_out(profile, options.host_network)
    what = f"{', '.join(names)} of {profile.name} is not passed to pods, because it names interfaces of its nodes"
    return (f"{what}; set kubernetes.environment for pods",) if names else ()


def _require_admission(namespace: str, needed: Mapping[str, Any]) -> None:
    """UserError if the namespace enforces a stricter Pod Security Standard: its Job would never get a pod.

    A namespace that may not be read is left to the admission of the cluster.
    """
    if needed["level"] == "restricted":
        return
    label = "jsonpath={.metadata.labels.pod-security\\.kubernetes\\.io/enforce}"
    code, enforced, _ = run(("kubectl", "get", "namespace", namespace, "--output", label))
    if code == 0 and not pod.admits(enforced.strip(), needed["level"]):
        raise UserError(
            f"{namespace} enforces {enforced.strip()}",
            where="--namespace",
            rule=f"these pods need {needed['level']}: {', '.join(needed['reasons'])}",
            fix=f"kubectl label namespace {namespace} --overwrite pod-security.kubernetes.io/enforce={needed['level']}",
        )


def _require_accepted(command: Sequence[str], text: str) -> None:
    """UserError if the cluster rejects an object: the workload is created last, and the others would stay."""
    code, _, words = run((*command, "--dry-run=server"), text)
    if code and NO_DRY_RUN not in words:
        raise UserError(f"failed:\n{words}", where=command[0], fix=DRY_RUN)


def status_of(workload: Object) -> JobStatus:
    """The status of a Job, a JobSet, a TrainJob or a RayJob; their conditions differ only in a few types."""
    status: Object = workload.get("status") or {}
    if workload.get("kind") == "RayJob":
        status = _as_job(status)
    held = {
        condition["type"]: condition
        for condition in status.get("conditions") or ()
        if condition.get("status") == "True"
    }
    if SUCCEEDED & held.keys():
        return JobStatus(JobState.COMPLETED, int(ExitCode.DONE))
    if failed := FAILED & held.keys():
        condition = held[failed.pop()]
        message = str(condition.get("message", ""))
        code = FAILED_WITH.search(message)
        reason = f"{condition.get('reason', '')}: {message}".strip(": ")
        return JobStatus(JobState.FAILED, int(code[1]) if code else None, reason)
    if SUSPENDED & held.keys():
        return JobStatus(JobState.PENDING, reason="suspended")
    restarts = int(status.get("restarts") or 0)  # of a JobSet
    return JobStatus(JobState.RUNNING if any(_ready(status)) else JobState.PENDING, restarts=restarts)


def _as_job(status: Object) -> Object:
    """The status of a RayJob in the words of a Job's."""
    phase = status.get("jobDeploymentStatus", "")
    if phase == "ValidationFailed" or (phase == "Complete" and status.get("jobStatus") != "SUCCEEDED"):
        phase = "Failed"
    condition = {"type": phase, "status": "True", **{key: status.get(key, "") for key in ("reason", "message")}}
    return {"conditions": [condition], "ready": int(phase == "Running")}


def _ready(status: Object) -> Iterator[int]:
    """Numbers of ready pods, or pod groups, of a Job, a JobSet or a TrainJob."""
    yield int(status.get("ready") or 0)
    for group in (*(status.get("replicatedJobsStatus") or ()), *(status.get("jobsStatus") or ())):
        yield int(group.get("ready") or 0)


def _get(namespace: str, kind: str, names: list[str], label: str = pod.INSTANCE) -> Iterator[dict[str, Any]]:
    for first in range(0, len(names), NAMES_AT_ONCE):
        selector = f"{label} in ({','.join(names[first : first + NAMES_AT_ONCE])})"
        answer = ask(("kubectl", "get", kind, "--namespace", namespace, "--selector", selector, "--output", "json"))
        yield from json.loads(answer)["items"]


def _options(chosen: LauncherOptions) -> KubernetesOptions:
    image = chosen.get("image")
    if image is None:
        raise UserError(
            "not set", where="--image", fix="--image REGISTRY/llmrecipes@sha256:DIGEST; make image builds one"
        )
    values = fields(chosen, ("secret", "image"))
    return KubernetesOptions(image=image, secrets=parse_secrets(chosen.get("secret") or ()), **values)


def finish_preparation(launcher: Launcher, ref: JobRef, apply: tuple[str, ...], text: str, run_id: str) -> None:
    """Create the Job unless there is one, and wait until the data is prepared.

    Args:
        launcher: Kubernetes.
        ref: of the Job.
        apply: the command that creates it.
        text: its objects, the command's input.
        run_id: of the run that waits.

    Raises:
        UserError: it failed, or was deleted.
    """
    namespace, kind, name = ref.job_id.split("/")
    known = launcher.statuses([ref]).get(ref)
    if known is not None and known.state is JobState.COMPLETED:
        return
    if known is not None and known.state.ended:  # the same Job would stay failed
        tell(("kubectl", "delete", kind, name, "--namespace", namespace, "--ignore-not-found"))
    if known is None or known.state.ended:
        tell(apply, text)
    logs = " ".join(launcher.logs(ref).command)
    logger.info("tokenizing on CPUs before the run requests GPUs: job %s; %s", ref.job_id, logs)
    logger.info("Ctrl-C leaves it running; run the same command with --run-id %s to wait for it again", run_id)

    def tell_state(status: JobStatus) -> None:
        logger.info("tokenizing: %s%s", status.state, f" ({status.reason})" if status.reason else "")

    state = Job(launcher, ref).wait(changed=tell_state)
    if state is not JobState.COMPLETED:
        raise UserError(
            f"the tokenizing job {ref.job_id} has {state}", where="kubectl", rule="the run was not created", fix=logs
        )
