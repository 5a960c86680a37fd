"""What prepares a run's data on CPUs: a Job of a pod, or a RayJob, for which KubeRay starts a cluster of several."""

from __future__ import annotations

from llmrecipes.launch.kubernetes import bases, objects, pod
from llmrecipes.launch.kubernetes.bases import ManifestPart, Object
from llmrecipes.launch.kubernetes.pod import PodRun
from llmrecipes.launch.kubernetes.settings import KubernetesOptions

MOST_CORES, MOST_MEMORY_GIB = 16, 64
"""Requests: what most nodes without GPUs have."""
PLACEMENT = ("tolerations", "serviceAccountName", "imagePullSecrets")
"""Of the fields that say where a pod of the run goes."""


def name_of(run: str) -> str:
    """Name of what prepares the data of a run's objects."""
    return f"{run}-prepare"


def described(options: KubernetesOptions) -> str:
    """What prepares the data, in words."""
    return "a CPU Job" if options.prepare_nodes == 1 else f"a Ray cluster of {options.prepare_nodes:,} CPU pods"


def render(run: PodRun, options: KubernetesOptions) -> list[Object]:
    """The Job of k8s/prepare or the objects of k8s/prepare-ray, with the run's recipe and claim.

    The profile's node selector, its patch and paths of its nodes are left out, because they belong to GPU nodes; its
    tolerations are kept, for clusters that have no others.
    """
    base = "prepare" if options.prepare_nodes == 1 else "prepare-ray"
    workload, others = bases.load(base, name_of(run.name))
    if options.prepare_nodes == 1:
        container = _fill(workload.part("spec.template.spec"), run, options)
        container.set("command", pod.command(container))
    else:
        _fill_ray_job(workload, run, options)
    return [*(objects.placed(other, options) for other in others), objects.queued(workload, options)]


def _fill_ray_job(job: ManifestPart, run: PodRun, options: KubernetesOptions) -> None:
    job.set("spec.entrypoint", " ".join([*job.get("spec.entrypoint").split()[:-1], str(pod.RECIPE)]))
    submitter = job.part("spec.submitterPodTemplate.spec")
    _place(submitter, run, options)
    submitter.set("containers.submit.image", options.image)
    head = job.part("spec.rayClusterSpec.headGroupSpec")
    workers = job.part("spec.rayClusterSpec.workerGroupSpecs.0")
    for count in ("replicas", "minReplicas", "maxReplicas"):
        workers.set(count, options.prepare_nodes - 1)
    for group in (head, workers):
        container = _fill(group.part("template.spec"), run, options)
        container.set("resources.limits.memory", container.get("resources.requests.memory"))


def _fill(spec: ManifestPart, run: PodRun, options: KubernetesOptions) -> ManifestPart:
    """Fill in a pod that prepares data; returns its container."""
    _place(spec, run, options)
    claims = [volume for volume in run.profile.kubernetes.volumes if volume.claim is not None]
    without_host = run.profile.kubernetes.model_copy(update={"volumes": tuple(claims)})
    pod.add_data(spec, run, options, without_host)
    container = spec.part("containers.prepare")
    cores = min(MOST_CORES, max(1, int(run.profile.cpu_cores * pod.NODE_SHARE)))
    memory = min(MOST_MEMORY_GIB, max(1, int(run.profile.memory_gib * pod.NODE_SHARE)))
    container.set("image", options.image)
    container.set("env", pod.variables(container, run, options))
    container.set("resources.requests", {"cpu": str(cores), "memory": f"{memory}Gi"})
    pod.add_mounts(container, without_host)
    return container


def _place(spec: ManifestPart, run: PodRun, options: KubernetesOptions) -> None:
    spec.set("terminationGracePeriodSeconds", options.grace_seconds)
    placement = pod.placement(run.profile, options)
    spec.add({key: placement[key] for key in PLACEMENT if key in placement})
