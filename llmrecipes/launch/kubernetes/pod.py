"""The pod of a node: container, environment, resources, volumes, and the Pod Security level that it meets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from llmrecipes.hardware.nics import CHOICE
from llmrecipes.hardware.profile import COSTS, Profile
from llmrecipes.launch.environment import environment
from llmrecipes.launch.kubernetes import site
from llmrecipes.launch.kubernetes.settings import KubernetesOptions
from llmrecipes.launch.rendezvous import TOKEN
from llmrecipes.launch.run_options import RunOptions
from llmrecipes.plan.derive import Plan
from llmrecipes.recipe.degrees import elastic_nodes
from llmrecipes.recipe.schema import Recipe
from llmrecipes.runfiles import LOGS

Object = dict[str, Any]

INSTANCE = "app.kubernetes.io/instance"
CONTAINER = "node"
"""The container that Kubeflow Trainer sets its variables on."""
DOCTOR = "doctor"
PORT = 29500
USER = 10001
"""The user of the images in docker/."""
WORKSPACE = PurePosixPath("/workspace")
RECIPE = PurePosixPath("/etc/llmrecipes/recipe.yaml")
CLUSTER_KEY = "cluster.yaml"
CLUSTERS = PurePosixPath("/etc/llmrecipes/clusters")
LOCAL_DISK = "/tmp/llmrecipes"  # noqa: S108 - the pod's own
RENDEZVOUS_TOKEN: Object = {
    "name": TOKEN,
    "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}},
}
"""The uid of the pod's Job: random (122 bits), new for every Job, the same in all of its pods, and in no manifest."""
PATIENCE_SECONDS = 600
"""How long the check of the nodes waits for pods that still pull their image."""
NODE_SHARE = 0.9
"""Share of a node's CPU and memory; the rest is for the kubelet and the system."""
SHM_SHARE, SHM_MOST_GIB = 1 / 8, 64


@dataclass(frozen=True)
class PodRun:
    """A run to render: `name` is the name of its objects, `recipe_yaml` its resolved recipe."""

    name: str
    run_id: str
    nodes: int
    plan: Plan
    profile: Profile
    recipe_yaml: str
    recipe_hash: str
    options: RunOptions = field(default_factory=RunOptions)

    @property
    def ranks_per_node(self) -> int:
        return self.plan.layout.world_size // self.nodes

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


def metadata(run: PodRun, options: KubernetesOptions) -> Object:
    """Labels and annotations of the pods."""
    return {"labels": labels(run), "annotations": {**run.profile.kubernetes.annotations, **notes(run, options)}}


def seen(run: PodRun, options: KubernetesOptions) -> Profile:
    """The site as the pods of a run see it."""
    return site.as_seen(run.profile, run.ranks_per_node, options.host_network)


def template(run: PodRun, options: KubernetesOptions, stem: str) -> Object:
    """The pod template of a Job.

    Args:
        run: the run.
        options: the options of `submit`.
        stem: host name of a pod without `-INDEX`.
    """
    kubernetes, master = run.profile.kubernetes, f"{stem}-0.{run.name}"
    checked = _container(run, options, master)
    # In the profile already; as a variable it would be the user's own choice.
    checked["env"] = [variable for variable in checked["env"] if variable["name"] != CHOICE]
    training = _container(run, options, master)
    needs_token = () if run.nodes == 1 or TOKEN in options.secrets else (checked, training)
    for container in needs_token[: 2 if least_nodes(run, options) else 1]:
        container["env"].append(RENDEZVOUS_TOKEN)
    claims = site.claims(kubernetes, run.channel)
    return {
        "metadata": metadata(run, options),
        "spec": {
            **frame(options.grace_seconds),
            **placement(run.profile, options),
            **({"priorityClassName": kubernetes.priority_class} if kubernetes.priority_class else {}),
            **({"resourceClaims": claims} if claims else {}),
            "initContainers": [
                {
                    "name": DOCTOR,
                    "command": ["llmrecipes", "doctor", str(RECIPE)],
                    "args": _examination(run, options, stem),
                    **checked,
                },
                *site.sidecars(kubernetes),  # after the check, which wants idle GPUs
            ],
            "containers": [
                {
                    "name": CONTAINER,
                    "command": command(),
                    "args": arguments(run, least_nodes(run, options)),
                    "ports": [{"name": "rendezvous", "containerPort": PORT}],
                    **training,
                }
            ],
            "volumes": [*volumes(run, options), {"name": "tmp", "emptyDir": {}}],
        },
    }


def least_nodes(run: PodRun, options: KubernetesOptions) -> int | None:
    """Pods with which a start goes on; None: all of them. Only a JobSet starts all pods again when one fails."""
    counts = elastic_nodes(run.plan.run_recipe, run.nodes, run.ranks_per_node)
    return counts[0] if options.flavor == "jobset" and len(counts) > 1 else None


def _examination(run: PodRun, options: KubernetesOptions, stem: str) -> list[str]:
    """Arguments of the check of the nodes; the range keeps them short on thousands of nodes.

    Where pods may be missing, each node is checked by itself.
    """
    words = ["--quiet", "--cluster", str(CLUSTERS / f"{run.profile.name}.yaml"), "--run-id", run.run_id]
    if run.nodes > 1 and least_nodes(run, options) is None:
        words += [
            "--nodes",
            f"{stem}-[0-{run.nodes - 1}].{run.name}",
            "--patience",
            str(PATIENCE_SECONDS),
        ]
    return [literal(word) for word in words]


def _container(run: PodRun, options: KubernetesOptions, master: str) -> Object:
    """What training and the check of the node before it share: the check needs the same GPUs and adapters."""
    return {
        "image": options.image,
        "env": variables(run, options, master),
        "resources": resources(run),
        "securityContext": container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [*mounts(run), {"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108 - the pod's own
    }


def frame(grace_seconds: int) -> Object:
    """Fields of every pod: no API token, not root, and time to save after SIGTERM."""
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_seconds,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def container_security() -> Object:
    """No rights. RDMA pins memory, but IPC_LOCK has no effect without root: the container runtime allows it."""
    return {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


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


def command() -> list[str]:
    return ["llmrecipes", "train", str(RECIPE)]


def arguments(run: PodRun, least: int | None = None) -> list[str]:
    """The same for all pods; each reads its node rank from the environment that its controller sets.

    Args:
        least: pods with which a start goes on; None: all.
    """
    more = ["--nnodes", str(run.nodes)] if run.nodes > 1 else []
    more += [] if least is None else ["--min-nodes", str(least)]
    more += run.options.words()
    return [
        literal(word)
        for word in ("--run-id", run.run_id, "--nproc", str(run.plan.layout.world_size), "--no-sample", *more)
    ]


def variables(run: PodRun, options: KubernetesOptions, master: str) -> list[Object]:
    """Environment of the container: plain values, then those from Secrets."""
    runs = WORKSPACE / "runs"
    logs = runs / run.plan.recipe.name / run.run_id / LOGS
    values = {
        # The home is on the shared workspace, and DeepSpeed compiles operators for the processor of a node.
        **({"TORCH_EXTENSIONS_DIR": "/tmp/torch_extensions"} if _offloads(run.plan.recipe) else {}),  # noqa: S108
        **environment(seen(run, options), run.plan, run.ranks_per_node, Path(logs)),
        "HOME": str(WORKSPACE),
        "LLMRECIPES_RUNS": str(runs),
        "LLMRECIPES_DATA": str(WORKSPACE / "data"),
        "LLMRECIPES_IMAGE_DIGEST": options.image.partition("@")[2],
    }
    if run.profile.costs is not None:
        # Pods plan for the machine they find, without the profile.
        values[COSTS] = run.profile.costs.model_dump_json(exclude_unset=True)
    if options.tracking_uri:
        values["MLFLOW_TRACKING_URI"] = options.tracking_uri
    else:
        values["LLMRECIPES_LOCAL_DISK"] = LOCAL_DISK
    if master and run.nodes > 1:
        values |= {"MASTER_ADDR": master, "MASTER_PORT": str(PORT)}
    plain = [{"name": name, "value": literal(value)} for name, value in values.items()]
    secret = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": place.name, "key": place.key}}}
        for name, place in options.secrets.items()
    ]
    return [*plain, *secret]


def _offloads(recipe: Recipe) -> bool:
    zero = recipe.zero
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


def volumes(run: PodRun, options: KubernetesOptions) -> list[Object]:
    """The recipe, the shared workspace, /dev/shm, whose default of 64 MiB is too small for data loaders, and more."""
    size = max(1, min(SHM_MOST_GIB, int(run.profile.memory_gib * SHM_SHARE)))
    items = [
        {"key": RECIPE.name, "path": RECIPE.name},
        # A profile has the name of its file.
        {"key": CLUSTER_KEY, "path": f"{CLUSTERS.name}/{run.profile.name}.yaml"},
    ]
    return [
        {"name": "recipe", "configMap": {"name": recipe_map(run), "items": items}},
        {"name": "workspace", "persistentVolumeClaim": {"claimName": options.claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{size}Gi"}},
        *site.volumes(run.profile.kubernetes),
    ]


def mounts(run: PodRun) -> list[Object]:
    return [
        {"name": "recipe", "mountPath": str(RECIPE.parent), "readOnly": True},
        {"name": "workspace", "mountPath": str(WORKSPACE)},
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - the pod's own
        *site.mounts(run.profile.kubernetes),
    ]


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
    pod = spec.get("securityContext") or {}
    for volume in spec.get("volumes") or ():
        if kinds := volume.keys() - VOLUMES - {"name"}:
            yield f"{', '.join(sorted(kinds))} volume {volume['name']}"
    for name, security in _containers(spec):
        capabilities = security.get("capabilities") or {}
        if security.get("allowPrivilegeEscalation") is not False:
            yield f"allowPrivilegeEscalation of {name}"
        if (
            not security.get("runAsNonRoot", pod.get("runAsNonRoot"))
            or security.get("runAsUser", pod.get("runAsUser")) == 0
        ):
            yield f"root in {name}"
        if "ALL" not in (capabilities.get("drop") or ()):
            yield f"capabilities of {name} that are not dropped"
        if added := set(capabilities.get("add") or ()) - {"NET_BIND_SERVICE"}:
            yield f"capability {', '.join(sorted(added))} of {name}"
        if (security.get("seccompProfile") or pod.get("seccompProfile") or {}).get("type") not in PROFILES:
            yield f"no seccomp profile of {name}"
