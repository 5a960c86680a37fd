"""The Job that tokenizes a run's data before its pods ask for GPUs.

A Job cannot wait for another one, and unsuspending it from a pod would take an API token. So `submit` creates the run
only when this Job has completed.
"""

from __future__ import annotations

import logging

from llmrecipes.errors import ExitCode, UserError
from llmrecipes.launch.base import JobRef, JobState, JobStatus, Launcher
from llmrecipes.launch.job import Job
from llmrecipes.launch.kubernetes import pod, site
from llmrecipes.launch.kubernetes.pod import Object, PodRun
from llmrecipes.launch.kubernetes.settings import KubernetesOptions
from llmrecipes.launch.programs import tell

logger = logging.getLogger(__name__)

CONTAINER = "prepare"
MOST_CORES, MOST_MEMORY_GIB = 16, 64
"""Requests, not limits: what most nodes without GPUs have. Tokenizing uses all cores that its node has left."""
RETRIES = 3
PLACEMENT = ("tolerations", "serviceAccountName", "imagePullSecrets")
"""Of the fields that say where a pod of the run goes."""
KEEP_SECONDS = 7 * 24 * 3600


def name_of(run: str) -> str:
    """Name of the Job that prepares the data of a run's objects."""
    return f"{run}-prepare"


def job(run: PodRun, options: KubernetesOptions) -> Object:
    """One pod on CPUs, with the run's recipe and claim. It does nothing if the data is prepared.

    The profile's node selector, its patch and paths of its nodes are left out, because they belong to GPU nodes; its
    tolerations are kept, for clusters that have no others.
    """
    name = name_of(run.name)
    labels = {"app.kubernetes.io/name": "llmrecipes", "app.kubernetes.io/instance": name}
    queue = {"kueue.x-k8s.io/queue-name": options.queue} if options.queue else {}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": options.namespace, "labels": {**labels, **queue}},
        "spec": {
            **({"suspend": True} if options.queue else {}),
            "backoffLimit": RETRIES,
            "podReplacementPolicy": "Failed",
            "ttlSecondsAfterFinished": KEEP_SECONDS,
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",
                        "onExitCodes": {
                            "containerName": CONTAINER,
                            "operator": "In",
                            "values": [int(ExitCode.BAD_INPUT)],
                        },
                    },
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": {"metadata": {"labels": dict(labels)}, "spec": _pod(run, options)},
        },
    }


def _pod(run: PodRun, options: KubernetesOptions) -> Object:
    claims = [each for each in run.profile.kubernetes.volumes if each.claim is not None]
    own = run.profile.kubernetes.model_copy(update={"volumes": tuple(claims)})
    kept = {"recipe", "workspace", *(each.name for each in claims)}
    placement = pod.placement(run.profile, options)
    cores = min(MOST_CORES, max(1, int(run.profile.cpu_cores * pod.NODE_SHARE)))
    memory = f"{min(MOST_MEMORY_GIB, max(1, int(run.profile.memory_gib * pod.NODE_SHARE)))}Gi"
    return {
        **pod.frame(options.grace_seconds),
        **{key: placement[key] for key in PLACEMENT if key in placement},
        "containers": [
            {
                "name": CONTAINER,
                "image": options.image,
                "command": ["llmrecipes", "prepare", str(pod.RECIPE)],
                "env": pod.variables(run, options, master=""),
                "resources": {"requests": {"cpu": str(cores), "memory": memory}},
                "securityContext": pod.container_security(),
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "volumeMounts": [
                    *(each for each in pod.mounts(run) if each["name"] in ("recipe", "workspace")),
                    *site.mounts(own),
                    {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - the pod's own
                ],
            }
        ],
        "volumes": [
            *(each for each in pod.volumes(run, options) if each["name"] in kept),
            {"name": "tmp", "emptyDir": {}},
        ],
    }


def finish(launcher: Launcher, ref: JobRef, apply: tuple[str, ...], text: str, run_id: str) -> None:
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
    logger.info("tokenizing on CPUs before the run asks for GPUs: job %s; %s", ref.job_id, logs)
    logger.info("Ctrl-C leaves it running; the same command with --run-id %s waits for it again", run_id)

    def tell_state(status: JobStatus) -> None:
        logger.info("tokenizing: %s%s", status.state, f" ({status.reason})" if status.reason else "")

    state = Job(launcher, ref).wait(changed=tell_state)
    if state is not JobState.COMPLETED:
        raise UserError(
            f"job {ref.job_id}, which tokenizes, has {state}", where="kubectl", rule="the run was not created", fix=logs
        )
