"""The pod of a node: container, environment, resources, volumes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from llmrecipes.hardware.profile import Profile
from llmrecipes.launch.environment import environment
from llmrecipes.launch.kubernetes.options import Options
from llmrecipes.plan.derive import Plan
from llmrecipes.recipe.schema import Recipe

Object = dict[str, Any]

CONTAINER = "node"
"""The container that Kubeflow Trainer sets its variables on."""
DOCTOR = "doctor"
PORT = 29500
USER = 10001
"""The user of the images in docker/."""
WORKSPACE = PurePosixPath("/workspace")
RECIPE = PurePosixPath("/etc/llmrecipes/recipe.yaml")
NODE_SHARE = 0.9
"""Share of a node's CPU and memory; the rest is for the kubelet and the system."""
SHM_SHARE, SHM_MOST_GIB = 1 / 8, 64


@dataclass(frozen=True)
class Run:
    """A run to render: `name` is the name of its objects, `recipe_yaml` its resolved recipe."""

    name: str
    run_id: str
    nodes: int
    plan: Plan
    profile: Profile
    recipe_yaml: str
    recipe_hash: str
    accept_changes: bool = False

    @property
    def ranks_per_node(self) -> int:
        return self.plan.layout.world_size // self.nodes


def labels(run: Run) -> dict[str, str]:
    """Labels that select the pods of a run."""
    return {"app.kubernetes.io/name": "llmrecipes", "app.kubernetes.io/instance": run.name}


def notes(run: Run, options: Options) -> dict[str, str]:
    """Annotations: what the pod runs, and where Kueue should place it."""
    told = {
        "llmrecipes/recipe": run.plan.recipe.name,
        "llmrecipes/recipe-hash": run.recipe_hash,
        "llmrecipes/run-id": run.run_id,
    }
    if options.topology:
        told["kueue.x-k8s.io/podset-preferred-topology"] = options.topology
    return told


def template(run: Run, options: Options, master: str) -> Object:
    """The pod template of a Job.

    Args:
        run: the run.
        options: the options of `submit`.
        master: host name of the first node, empty where a controller sets it.
    """
    return {
        "metadata": {"labels": labels(run), "annotations": notes(run, options)},
        "spec": {
            **frame(options.grace_seconds),
            **placement(run.profile, options),
            "initContainers": [
                {
                    "name": DOCTOR,
                    "command": ["llmrecipes", "doctor", str(RECIPE)],
                    "args": ["--quiet"],
                    **_container(run, options, master),
                }
            ],
            "containers": [
                {
                    "name": CONTAINER,
                    "command": command(),
                    "args": arguments(run, options),
                    "ports": [{"name": "rendezvous", "containerPort": PORT}],
                    **_container(run, options, master),
                }
            ],
            "volumes": [*volumes(run, options), {"name": "tmp", "emptyDir": {}}],
        },
    }


def _container(run: Run, options: Options, master: str) -> Object:
    """What training and the check of the node before it share: the check needs the same GPUs and adapters."""
    return {
        "image": options.image,
        "env": variables(run, options, master),
        "resources": resources(run),
        "securityContext": container_security(needs_rdma(run)),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [*mounts(), {"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108 - the pod's own
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


def container_security(rdma: bool) -> Object:
    """Capabilities of the container: none, or IPC_LOCK for RDMA, which pins memory."""
    capabilities = {"drop": ["ALL"], **({"add": ["IPC_LOCK"]} if rdma else {})}
    return {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": capabilities}


def placement(profile: Profile, options: Options) -> Object:
    """Node selection, service account, pull secret and host network."""
    found: Object = {}
    if profile.kubernetes.node_selector:
        found["nodeSelector"] = dict(profile.kubernetes.node_selector)
    if profile.gpus_per_node:
        found["tolerations"] = [{"key": profile.kubernetes.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}]
    if options.service_account:
        found["serviceAccountName"] = options.service_account
    if options.pull_secret:
        found["imagePullSecrets"] = [{"name": options.pull_secret}]
    if options.host_network:
        found |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return found


def command() -> list[str]:
    return ["llmrecipes", "train", str(RECIPE)]


def arguments(run: Run, options: Options) -> list[str]:
    """The same for all pods; each reads its node rank from the environment that its controller sets."""
    more = ["--nnodes", str(run.nodes)] if run.nodes > 1 else []
    more += ["--allow-socket"] if options.allow_socket else []
    more += ["--accept-changes"] if run.accept_changes else []
    return [
        literal(word)
        for word in ("--run-id", run.run_id, "--nproc", str(run.plan.layout.world_size), "--no-sample", *more)
    ]


def variables(run: Run, options: Options, master: str) -> list[Object]:
    """Environment of the container: plain values, then those from Secrets."""
    runs = WORKSPACE / "runs"
    logs = runs / run.plan.recipe.name / run.run_id / "logs"
    values = {
        # The home is on the shared workspace, and DeepSpeed compiles operators for the processor of a node.
        **({"TORCH_EXTENSIONS_DIR": "/tmp/torch_extensions"} if _offloads(run.plan.recipe) else {}),  # noqa: S108
        **environment(run.profile, run.plan, run.ranks_per_node, Path(logs)),
        "HOME": str(WORKSPACE),
        "LLMRECIPES_RUNS": str(runs),
        "LLMRECIPES_DATA": str(WORKSPACE / "data"),
        "LLMRECIPES_IMAGE_DIGEST": options.image.partition("@")[2],
    }
    if options.tracking_uri:
        values["MLFLOW_TRACKING_URI"] = options.tracking_uri
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


def needs_rdma(run: Run) -> bool:
    return bool(run.profile.kubernetes.rdma_resource)


def resources(run: Run) -> Object:
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
    requests = {"cpu": str(max(1, int(profile.cpu_cores * NODE_SHARE * share))), "memory": memory, **devices}
    return {"requests": requests, "limits": {"memory": memory, **devices}}


def volumes(run: Run, options: Options) -> list[Object]:
    """The recipe, the shared workspace, and /dev/shm, whose default of 64 MiB is too small for data loaders."""
    size = max(1, min(SHM_MOST_GIB, int(run.profile.memory_gib * SHM_SHARE)))
    return [
        {"name": "recipe", "configMap": {"name": recipe_map(run)}},
        {"name": "workspace", "persistentVolumeClaim": {"claimName": options.claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{size}Gi"}},
    ]


def mounts() -> list[Object]:
    return [
        {"name": "recipe", "mountPath": str(RECIPE.parent), "readOnly": True},
        {"name": "workspace", "mountPath": str(WORKSPACE)},
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - the pod's own
    ]


def recipe_map(run: Run) -> str:
    """Name of the ConfigMap with the resolved recipe."""
    return f"{run.name}-recipe"
