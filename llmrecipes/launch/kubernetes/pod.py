"""The pod of a node: what a run sets in the pod of a base, and the Pod Security level that it meets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from llmrecipes.hardware.nics import CHOICE
from llmrecipes.hardware.profile import COSTS, Kubernetes, Profile
from llmrecipes.launch.environment import environment
from llmrecipes.launch.kubernetes import site
from llmrecipes.launch.kubernetes.bases import ManifestPart, Object
from llmrecipes.launch.kubernetes.settings import KubernetesOptions
from llmrecipes.launch.rendezvous import TOKEN
from llmrecipes.launch.run_options import RunOptions
from llmrecipes.plan.run_plan import RunPlan
from llmrecipes.recipe.derived.degrees import elastic_nodes
from llmrecipes.recipe.schema import Recipe
from llmrecipes.runfiles import LOGS

INSTANCE = "app.kubernetes.io/instance"
CONTAINER = "node"
"""The container that Kubeflow Trainer sets its variables on."""
DOCTOR = "doctor"
RECIPE = PurePosixPath("/etc/llmrecipes/recipe.yaml")
CLUSTER_KEY = "cluster.yaml"
CLUSTERS = PurePosixPath("/etc/llmrecipes/clusters")
THREADS = "OMP_NUM_THREADS"
"""In a base for a laptop; plans have their own."""
RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
INDICES = re.compile(r"\[0-\d+\]")
"""Of the nodes of a base."""
RENDEZVOUS_TOKEN: Object = {
    "name": TOKEN,
    "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}},
}
"""The uid of the pod's Job: random (122 bits), new for every Job, the same in all of its pods, and in no manifest."""
NODE_SHARE = 0.9
"""Share of a node's CPU and memory; the rest is for the kubelet and the system."""
SHM_SHARE, SHM_MOST_GIB = 1 / 8, 64


@dataclass(frozen=True)
class PodRun:
    """A run to render: `name` is the name of its objects, `recipe_yaml` its resolved recipe."""

    name: str
    run_id: str
    nodes: int
    plan: RunPlan
    profile: Profile
    recipe_yaml: str
    recipe_hash: str
    options: RunOptions = field(default_factory=RunOptions)

    @property
    def ranks_per_node(self) -> int:
        return self.plan.world_size // self.nodes

    @property
    def channel(self) -> str | None:
        """ResourceClaimTemplate of its IMEX channel; None on one node, and on sites without NVLink between nodes."""
        return f"{self.name}-imex" if self.profile.kubernetes.compute_domain and self.nodes > 1 else None


def labels(run: PodRun) -> dict[str, str]:
    """Labels that select the pods of a run."""
    return {"app.kubernetes.io/name": "llmrecipes", INSTANCE: run.name}


def notes(run: PodRun, options: KubernetesOptions) -> dict[str, str]:
    """Annotations: what the pod runs, and where Kueue should place it."""
    annotations = {
        "llmrecipes/recipe": run.plan.recipe.name,
        "llmrecipes/recipe-hash": run.recipe_hash,
        "llmrecipes/run-id": run.run_id,
    }
    if options.topology:
        annotations["kueue.x-k8s.io/podset-preferred-topology"] = options.topology
    return annotations


def describe(template: ManifestPart, run: PodRun, options: KubernetesOptions) -> None:
    """Labels and annotations of the pods; the site's, too."""
    annotations = {**run.profile.kubernetes.annotations, **notes(run, options)}
    template.part("metadata").add({"labels": labels(run), "annotations": annotations})


def seen(run: PodRun, options: KubernetesOptions) -> Profile:
    """The site as the pods of a run see it."""
    return site.as_seen(run.profile, run.ranks_per_node, options.host_network)


def fill(template: ManifestPart, run: PodRun, options: KubernetesOptions) -> None:
    """Fill in the pod template of a Job."""
    kubernetes = run.profile.kubernetes
    spec = template.part("spec")
    describe(template, run, options)
    spec.set("terminationGracePeriodSeconds", options.grace_seconds)
    least = least_nodes(run, options)
    doctor = spec.part(f"initContainers.{DOCTOR}")
    node = spec.part(f"containers.{CONTAINER}")
    doctor.set("args", _examination(doctor, run, meets=run.nodes > 1 and least is None))
    node.set("args", arguments(node, run, least))
    for container in (doctor, node):
        container.set("image", options.image)
        container.set("command", command(container))
        container.set("env", variables(container, run, options))
        container.set("resources", resources(run))
        add_mounts(container, kubernetes)
    # In the profile already; as a variable it would be the user's own choice.
    doctor.set("env", [variable for variable in doctor.get("env") if variable["name"] != CHOICE])
    needs_token = () if run.nodes == 1 or TOKEN in options.secrets else (doctor, node)
    for container in needs_token[: 1 if least is None else 2]:
        container.get("env").append(RENDEZVOUS_TOKEN)
    spec.add({"initContainers": site.sidecars(kubernetes)})  # after the check, which wants idle GPUs
    add_volumes(spec, run, options)
    spec.add(placement(run.profile, options))
    if kubernetes.priority_class:
        spec.add({"priorityClassName": kubernetes.priority_class})
    if claims := site.claims(kubernetes, run.channel):
        spec.add({"resourceClaims": claims})


def least_nodes(run: PodRun, options: KubernetesOptions) -> int | None:
    """Pods with which a start goes on; None: all of them. Only a JobSet starts all pods again when one fails."""
    counts = elastic_nodes(run.plan.recipe, run.nodes, run.ranks_per_node)
    return counts[0] if options.flavor == "jobset" and len(counts) > 1 else None


def _examination(doctor: ManifestPart, run: PodRun, *, meets: bool) -> list[str]:
    """Arguments of the check of the nodes; the range keeps them short on thousands of nodes.

    Where pods may be missing, each node is checked by itself.
    """
    left_out: dict[str, str | None] = {} if meets else {"--nodes": None, "--patience": None}
    words = doctor.words("args", {"--run-id": literal(run.run_id), **left_out})
    words = [INDICES.sub(f"[0-{run.nodes - 1}]", word) for word in words]
    return ["--cluster", literal(str(CLUSTERS / f"{run.profile.name}.yaml")), *words]


def placement(profile: Profile, options: KubernetesOptions) -> Object:
    """Node selection, service account, pull secret and host network."""
    fields: Object = {}
    if profile.kubernetes.node_selector:
        fields["nodeSelector"] = dict(profile.kubernetes.node_selector)
    if tolerations := site.tolerations(profile):
        fields["tolerations"] = tolerations
    if options.service_account:
        fields["serviceAccountName"] = options.service_account
    if options.pull_secret:
        fields["imagePullSecrets"] = [{"name": options.pull_secret}]
    if options.host_network:
        fields |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return fields


def command(container: ManifestPart) -> list[str]:
    """The command of a base, whose last word is the recipe."""
    return [*container.get("command")[:-1], str(RECIPE)]


def arguments(container: ManifestPart, run: PodRun, least: int | None = None) -> list[str]:
    """The same for all pods; each reads its node rank from the environment that its controller sets.

    Args:
        least: pods with which a start goes on; None: all.
    """
    values: dict[str, str | None] = {
        "--run-id": literal(run.run_id),
        "--nproc": str(run.plan.world_size),
        "--nnodes": str(run.nodes) if run.nodes > 1 else None,
    }
    more = [] if least is None else ["--min-nodes", str(least)]
    return [*container.words("args", values), *more, *map(literal, run.options.words())]


def variables(container: ManifestPart, run: PodRun, options: KubernetesOptions) -> list[Object]:
    """Environment of a container: what plan and site ask for, that of the base, and what the options add."""
    logs = PurePosixPath(container.get("env.LLMRECIPES_RUNS.value")) / run.plan.recipe.name / run.run_id / LOGS
    values = {
        # The home is on the shared workspace, and DeepSpeed compiles operators for the processor of a node.
        **({"TORCH_EXTENSIONS_DIR": "/tmp/torch_extensions"} if _offloads(run.plan.recipe) else {}),  # noqa: S108
        **environment(seen(run, options), run.plan, run.ranks_per_node, Path(logs)),
    }
    base = {variable["name"]: variable for variable in container.get("env") if variable["name"] != THREADS}
    if options.tracking_uri:
        base.pop("LLMRECIPES_LOCAL_DISK", None)
    if run.nodes == 1:
        base = {name: variable for name, variable in base.items() if name not in RENDEZVOUS}
    chosen = {"LLMRECIPES_IMAGE_DIGEST": options.image.partition("@")[2]}
    if run.profile.costs is not None:
        # Pods plan for the machine they find, without the profile.
        chosen[COSTS] = run.profile.costs.model_dump_json(exclude_unset=True)
    if options.tracking_uri:
        chosen["MLFLOW_TRACKING_URI"] = options.tracking_uri
    secret = {
        name: {"name": name, "valueFrom": {"secretKeyRef": {"name": place.name, "key": place.key}}}
        for name, place in options.secrets.items()
    }
    return [*{**_plain(values), **base, **_plain(chosen), **secret}.values()]


def _plain(values: dict[str, str]) -> dict[str, Object]:
    return {name: {"name": name, "value": literal(value)} for name, value in values.items()}


def _offloads(recipe: Recipe) -> bool:
    zero = recipe.layout.zero
    return zero is not None and zero.offload_optimizer != "none"


def literal(text: str) -> str:
    """Escaped so that the kubelet passes the text on unchanged: it expands `$(NAME)`."""
    return text.replace("$", "$$")


def resources(run: PodRun) -> Object:
    """GPUs and adapters of the ranks, and their share of the node's CPU and memory.

    CPU is requested and not limited: all ranks wait for one that is throttled.
    """
    profile = run.profile
    share = min(1.0, run.ranks_per_node / profile.ranks_per_node)
    memory = f"{max(1, int(profile.memory_gib * NODE_SHARE * share))}Gi"
    devices = {}
    if profile.gpus_per_node:
        devices[profile.kubernetes.gpu_resource] = str(run.ranks_per_node)
    if profile.kubernetes.rdma_resource:
        devices[profile.kubernetes.rdma_resource] = str(max(1, int(profile.kubernetes.rdma_count * share)))
    devices |= site.hugepages(profile.kubernetes, share)
    requests = {"cpu": str(max(1, int(profile.cpu_cores * NODE_SHARE * share))), "memory": memory, **devices}
    claims = [{"name": claim["name"]} for claim in site.claims(profile.kubernetes, run.channel)]
    return {"requests": requests, "limits": {"memory": memory, **devices}, **({"claims": claims} if claims else {})}


def add_volumes(spec: ManifestPart, run: PodRun, options: KubernetesOptions) -> None:
    """The recipe, the claim, the size of /dev/shm, and the profile's own volumes."""
    size = max(1, min(SHM_MOST_GIB, int(run.profile.memory_gib * SHM_SHARE)))
    spec.set("volumes.shm.emptyDir.sizeLimit", f"{size}Gi")
    add_data(spec, run, options, run.profile.kubernetes)


def add_data(spec: ManifestPart, run: PodRun, options: KubernetesOptions, kubernetes: Kubernetes) -> None:
    """The recipe, the claim, and volumes of a profile."""
    spec.set("volumes.workspace.persistentVolumeClaim.claimName", options.claim)
    items = [
        {"key": RECIPE.name, "path": RECIPE.name},
        # A profile has the name of its file.
        {"key": CLUSTER_KEY, "path": f"{CLUSTERS.name}/{run.profile.name}.yaml"},
    ]
    recipe = {"name": "recipe", "configMap": {"name": recipe_map(run), "items": items}}
    spec.set("volumes", [recipe, *spec.get("volumes"), *site.volumes(kubernetes)])


def add_mounts(container: ManifestPart, kubernetes: Kubernetes) -> None:
    """Where the recipe and volumes of a profile are."""
    recipe = {"name": "recipe", "mountPath": str(RECIPE.parent), "readOnly": True}
    container.set("volumeMounts", [recipe, *container.get("volumeMounts"), *site.mounts(kubernetes)])


def recipe_map(run: PodRun) -> str:
    """Name of the ConfigMap with the resolved recipe."""
    return f"{run.name}-recipe"


LEVELS = ("restricted", "baseline", "privileged")
"""Of the Pod Security Standards, from the strictest: https://kubernetes.io/docs/concepts/security/pod-security-standards/"""
BASELINE = frozenset(
    {
        "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "SETFCAP",
        "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
    }
)  # fmt: skip
VOLUMES = frozenset(
    {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "image",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
)
PROFILES = ("RuntimeDefault", "Localhost")


def security_level(spec: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """The strictest level of the Pod Security Standards that admits a pod, and what the next stricter one would reject.

    Args:
        spec: of the pod.
    """
    if violations := tuple(dict.fromkeys(_privileged(spec))):
        return "privileged", violations
    if violations := tuple(dict.fromkeys(_baseline(spec))):
        return "baseline", violations
    return "restricted", ()


def admits(enforced: str, needed: str) -> bool:
    """Whether a namespace that enforces one level admits a pod that needs another; unknown levels admit all."""
    return enforced not in LEVELS or LEVELS.index(enforced) >= LEVELS.index(needed)


def _containers(spec: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for container in (*(spec.get("initContainers") or ()), *spec["containers"]):
        yield container["name"], container.get("securityContext") or {}


def _privileged(spec: dict[str, Any]) -> Iterator[str]:
    """Fields that `baseline` rejects."""
    yield from (key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key))
    yield from (f"hostPath volume {volume['name']}" for volume in spec.get("volumes") or () if "hostPath" in volume)
    for name, security in _containers(spec):
        if security.get("privileged"):
            yield f"privileged container {name}"
        added = set((security.get("capabilities") or {}).get("add") or ()) - BASELINE
        yield from (f"capability {capability} of {name}" for capability in sorted(added))
    for name, security in (("the pod", spec.get("securityContext") or {}), *_containers(spec)):
        if (security.get("seccompProfile") or {}).get("type") == "Unconfined":
            yield f"unconfined seccomp profile of {name}"


def _baseline(spec: dict[str, Any]) -> Iterator[str]:
    """Further fields that `restricted` rejects."""
    for volume in spec.get("volumes") or ():
        if kinds := volume.keys() - VOLUMES - {"name"}:
            yield f"{', '.join(sorted(kinds))} volume {volume['name']}"
    pod = spec.get("securityContext") or {}
    for name, own in _containers(spec):
        yield from _container_baseline(name, pod | {key: value for key, value in own.items() if value is not None})


def _container_baseline(name: str, security: dict[str, Any]) -> Iterator[str]:
    """Of one container, whose fields come before those of the pod."""
    capabilities = security.get("capabilities") or {}
    if security.get("allowPrivilegeEscalation") is not False:
        yield f"allowPrivilegeEscalation of {name}"
    if not security.get("runAsNonRoot") or security.get("runAsUser") == 0:
        yield f"root in {name}"
    if "ALL" not in (capabilities.get("drop") or ()):
        yield f"capabilities of {name} that are not dropped"
    if added := set(capabilities.get("add") or ()) - {"NET_BIND_SERVICE"}:
        yield f"capability {', '.join(sorted(added))} of {name}"
    if (security.get("seccompProfile") or {}).get("type") not in PROFILES:
        yield f"no seccomp profile of {name}"
