"""The RayJob that prepares data on several nodes: KubeRay starts a Ray cluster, runs `prepare --on ray`, and ends it.

Its image has this program and the package ray. Pods of the cluster need a token to talk to each other, which KubeRay
makes; only they and KubeRay itself may connect to them.
"""

from __future__ import annotations

from llmrecipes.launch.kubernetes import pod
from llmrecipes.launch.kubernetes.pod import Object

KIND = "rayjob"
VERSION = "2.60.0"
RETRIES = 1
"""Of the whole cluster: KubeRay does not tell a wrong recipe from a lost node. Lost workers are replaced anyway."""
START = {"object-store-memory": "100000000"}
"""Options of `ray start`. Shards are files: Ray's own memory, by default a third of a pod's, can be small."""
DASHBOARD = 8265
SUBMITTER = {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "1Gi"}}


def render(metadata: Object, spec: Object, pods: int, suspended: Object) -> list[Object]:
    """The RayJob, behind the NetworkPolicy of its pods.

    Args:
        metadata: of the RayJob.
        spec: the pod that prepares data on one node.
        pods: of the cluster.
        suspended: the field that has Kueue start it.
    """
    labels = {pod.INSTANCE: metadata["name"]}
    [container] = spec["containers"]
    words = " ".join([*container["command"], "--on", "ray"])
    node = {key: value for key, value in container.items() if key != "command"}
    node["env"] = [*container["env"], {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"}]
    node["resources"] = {**container["resources"], "limits": {"memory": container["resources"]["requests"]["memory"]}}
    submitter = {
        **{key: value for key, value in container.items() if key not in ("command", "volumeMounts")},
        "name": "submit",
        "env": [{"name": "HOME", "value": "/tmp"}],  # noqa: S108 - the pod's own
        "resources": SUBMITTER,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108
    }
    without_data = {**spec, "containers": [submitter], "volumes": [{"name": "tmp", "emptyDir": {}}]}

    def template(its_spec: Object) -> Object:
        return {"metadata": {"labels": dict(labels)}, "spec": its_spec}

    def group() -> Object:
        return {"rayStartParams": dict(START), "template": template({**spec, "containers": [node]})}

    count = pods - 1
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": metadata,
        "spec": {
            **suspended,
            "entrypoint": words,
            "submissionMode": "K8sJobMode",
            "submitterPodTemplate": template(without_data),
            "backoffLimit": RETRIES,
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {
                "rayVersion": VERSION,
                "authOptions": {"mode": "token"},
                "headGroupSpec": group(),
                "workerGroupSpecs": [
                    {"groupName": "more", "replicas": count, "minReplicas": count, "maxReplicas": count, **group()}
                ],
            },
        },
    }
    return [_network_policy(metadata, labels), job]


def _network_policy(metadata: Object, labels: dict[str, str]) -> Object:
    ours = {"podSelector": {"matchLabels": labels}}
    operator = {"matchLabels": {"app.kubernetes.io/component": "kuberay-operator"}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {key: metadata[key] for key in ("name", "namespace")} | {"labels": labels},
        "spec": {
            **ours,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [ours]},
                {"from": [{"namespaceSelector": {}, "podSelector": operator}], "ports": [{"port": DASHBOARD}]},
            ],
        },
    }


def as_job(status: Object) -> Object:
    """The status of a RayJob in the words of a Job's."""
    phase = status.get("jobDeploymentStatus", "")
    if phase == "ValidationFailed" or (phase == "Complete" and status.get("jobStatus") != "SUCCEEDED"):
        phase = "Failed"
    condition = {"type": phase, "status": "True", **{key: status.get(key, "") for key in ("reason", "message")}}
    return {"conditions": [condition], "ready": int(phase == "Running")}
