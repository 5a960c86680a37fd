"""The objects of a run: an Indexed Job, a JobSet or a TrainJob, and the objects each depends on.

Elastic runs (`train.elastic`) are JobSets whose pods may be missing. Whatever ends one pod ends its Job, and the JobSet
creates all pods again, the first one first; those that get a node agree on the world (`launch.gathering`). An Elastic
Indexed Job (a smaller `completions`) would need an API token in a pod or a person, and PyTorchJob's elastic policy
torchrun's agent, whose restarts have no exit code that says whether to restart.

Restarts. A pod that saved after a signal exits with 75, one that was evicted or whose node failed is marked
`DisruptionTarget`: both restart without being counted. 2 and 93 mean that a restart would fail the same way, so the run
fails immediately. Anything else counts against `max_restarts`.
"""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from llmrecipes.errors import ExitCode, UserError
from llmrecipes.launch.kubernetes import pod
from llmrecipes.launch.kubernetes.pod import Object, PodRun
from llmrecipes.launch.kubernetes.settings import RUNTIME, KubernetesOptions, check
from llmrecipes.launch.programs import require_program, run
from llmrecipes.recipe import document
from llmrecipes.recipe.section import JsonObject

MOST_CONFIG_BYTES = 1 << 20
KEEP_SECONDS = 7 * 24 * 3600
"""How long a finished run's objects are kept, for their logs."""
FAILING = [int(ExitCode.BAD_INPUT), int(ExitCode.STOP)]
SAVED = [int(ExitCode.REQUEUE)]
AMBIGUOUS = re.compile(r"[-+]?\.?\d|[-+]?\.(inf|nan)|[yYnN]$", re.IGNORECASE)
"""Plain scalars that some YAML parsers do not read as strings."""
FIRST_SUCCEEDS: Object = {"successPolicy": {"rules": [{"succeededIndexes": "0"}]}}
"""Pods that have no node never succeed: an elastic run has ended when its first pod has."""
GROUP = "node"
"""Name of the only replicated Job of a JobSet or a TrainJob."""


def render(run: PodRun, options: KubernetesOptions) -> list[Object]:
    """All objects of a run, in the order of their creation.

    Raises:
        UserError: a value that Kubernetes would reject.
    """
    check(options)
    if len(run.recipe_yaml.encode()) + len(_profile(run, options).encode()) > MOST_CONFIG_BYTES:
        where, rule = f"recipe {run.plan.recipe.name}", "pods read it from a ConfigMap, which holds at most 1 MiB"
        raise UserError("larger than 1 MiB", where=where, rule=rule)
    objects = [_recipe(run, options)]
    if run.channel is not None:
        objects.append(_compute_domain(run, options, run.channel))
    if not options.host_network:
        objects.append(_network_policy(run, options))
    match options.flavor:
        case "job":
            objects += [*([_service(run, options)] if run.nodes > 1 else []), _job(run, options)]
        case "jobset":
            objects.append(_jobset(run, options))
        case "trainjob":
            objects.append(_trainjob(run, options))
    return objects


def to_yaml(objects: list[Object]) -> str:
    """The objects as one stream of YAML documents."""
    return yaml.dump_all(objects, Dumper=_ObjectDumper, sort_keys=False, allow_unicode=True, width=1_000)


class _ObjectDumper(yaml.SafeDumper):
    """Repeats shared objects instead of using aliases, indents lists, and writes long strings as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, indentless=False)


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    # Kubernetes reads `1e3` as a number and `y` as true; PyYAML leaves both unquoted.
    style = "'" if AMBIGUOUS.match(value) else None
    if "\n" in value and not any(line != line.rstrip() for line in value.split("\n")):
        style = "|"
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_ObjectDumper.add_representer(str, _text)


def _metadata(run: PodRun, options: KubernetesOptions, name: str | None = None) -> Object:
    return {"name": name or run.name, "namespace": options.namespace, "labels": pod.labels(run)}


def _workload(run: PodRun, options: KubernetesOptions) -> Object:
    """Metadata of the object that Kueue queues."""
    metadata = _metadata(run, options)
    if options.queue:
        metadata["labels"] = {**metadata["labels"], "kueue.x-k8s.io/queue-name": options.queue}
    return {**metadata, "annotations": pod.notes(run, options)}


def _suspended(options: KubernetesOptions) -> Object:
    """Kueue unsuspends a workload when there is quota for all of its pods."""
    return {"suspend": True} if options.queue else {}


def _recipe(run: PodRun, options: KubernetesOptions) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(run, options, pod.recipe_map(run)),
        "immutable": True,
        "data": {pod.RECIPE.name: run.recipe_yaml, pod.CLUSTER_KEY: _profile(run, options)},
    }


def _profile(run: PodRun, options: KubernetesOptions) -> str:
    return document.dump(pod.seen(run, options).model_dump(mode="json", exclude_defaults=True))


def _compute_domain(run: PodRun, options: KubernetesOptions, channel: str) -> Object:
    """Makes NVIDIA's DRA driver create the ResourceClaimTemplate of the run's IMEX channel."""
    return {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": "ComputeDomain",
        "metadata": _metadata(run, options),
        "spec": {"numNodes": run.nodes, "channel": {"resourceClaimTemplate": {"name": channel}}},
    }


def _network_policy(run: PodRun, options: KubernetesOptions) -> Object:
    """Ranks do not authenticate each other: only pods of the same run may connect."""
    ours = {"matchLabels": pod.labels(run)}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(run, options),
        "spec": {"podSelector": ours, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": ours}]}]},
    }


def _service(run: PodRun, options: KubernetesOptions) -> Object:
    """Gives every pod a host name, even before it is ready: ranks look up the first pod while it starts."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(run, options),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": pod.labels(run),
            "ports": [{"name": "rendezvous", "port": pod.PORT}],
        },
    }


def _job(run: PodRun, options: KubernetesOptions) -> Object:
    template = pod.template(run, options, stem=run.name)
    template["spec"]["subdomain"] = run.name
    template = patched(template, run.profile.kubernetes.patch, run.profile.name)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _workload(run, options),
        "spec": {
            **_suspended(options),
            **_deadline(options),
            **_indexed(run.nodes),
            # Counts pods: when one fails, its peers fail too.
            "backoffLimit": options.max_restarts * run.nodes,
            "podReplacementPolicy": "Failed",
            "ttlSecondsAfterFinished": KEEP_SECONDS,
            "podFailurePolicy": {
                "rules": [_on_exit("FailJob", FAILING), _on_exit("Ignore", SAVED), _on_disruption("Ignore")]
            },
            "template": template,
        },
    }


def _jobset(run: PodRun, options: KubernetesOptions) -> Object:
    is_elastic = pod.least_nodes(run, options) is not None
    if is_elastic and run.channel is not None:
        raise UserError(
            f"{run.profile.name} has kubernetes.compute_domain",
            where="train.elastic",
            rule="the IMEX domain of a run needs all of its nodes",
            fix="--flavor job, which always starts all nodes, or train.elastic=null",
        )
    template = pod.template(run, options, stem=f"{run.name}-{GROUP}-0")
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _workload(run, options),
        "spec": {
            **_suspended(options),
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": options.max_restarts, "rules": _rules(options)},
            "ttlSecondsAfterFinished": KEEP_SECONDS,
            "replicatedJobs": [
                {
                    "name": GROUP,
                    "replicas": 1,
                    "template": {
                        "spec": {
                            **_deadline(options),
                            **_indexed(run.nodes),
                            **(FIRST_SUCCEEDS if is_elastic else {}),
                            **all_or_nothing(),
                            "template": patched(template, run.profile.kubernetes.patch, run.profile.name),
                        }
                    },
                }
            ],
        },
    }


def _trainjob(run: PodRun, options: KubernetesOptions) -> Object:
    """What is specific to the run; restarts and permissions come from the runtime in k8s/trainjob/runtime."""
    _require_patchable(run, options)
    container: Object = {"name": pod.CONTAINER, "volumeMounts": pod.mounts(run)}
    spec = {
        **{key: value for key, value in pod.placement(run.profile, options).items() if key in PATCHABLE},
        "terminationGracePeriodSeconds": options.grace_seconds,
        "containers": [container],
        "volumes": pod.volumes(run, options),
    }
    template = {"metadata": pod.metadata(run, options), "spec": spec}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _workload(run, options),
        "spec": {
            **_suspended(options),
            **_deadline(options),
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": RUNTIME},
            "trainer": {
                "image": options.image,
                "command": pod.command(),
                "args": pod.arguments(run),
                "env": pod.variables(run, options, master=""),
                "numNodes": run.nodes,
                "numProcPerNode": run.ranks_per_node,
                "resourcesPerNode": pod.resources(run),
            },
            "runtimePatches": [
                {
                    "manager": "llmrecipes",
                    "trainingRuntimeSpec": {
                        "template": {
                            "spec": {"replicatedJobs": [{"name": GROUP, "template": {"spec": {"template": template}}}]}
                        }
                    },
                }
            ],
        },
    }


def _require_patchable(run: PodRun, options: KubernetesOptions) -> None:
    """UserError for what a TrainJob can only take from its runtime."""
    fix = "--flavor jobset"
    if options.host_network:
        rule = "host networking of a TrainJob is set by its runtime"
        raise UserError("set with --flavor trainjob", where="--host-network", rule=rule, fix=fix)
    kubernetes = run.profile.kubernetes
    wanted = {
        "sidecars": kubernetes.sidecars,
        "compute_domain": run.channel,
        "resource_claims": kubernetes.resource_claims,
        "priority_class": kubernetes.priority_class,
        "patch": kubernetes.patch,
    }
    if unsupported := [f"kubernetes.{name}" for name, value in wanted.items() if value]:
        what = f"{run.profile.name} has {', '.join(unsupported)}"
        raise UserError(what, where="--flavor trainjob", rule="the runtime of a TrainJob sets these", fix=fix)


PATCHABLE = {"nodeSelector", "tolerations", "serviceAccountName", "imagePullSecrets"}
"""Pod fields that a TrainJob may add to its runtime."""


def jobset_rules() -> list[Object]:
    """What a JobSet does when its Job fails, by the reason and message that the Job controller sets."""
    codes = "|".join(map(str, FAILING))
    saved = "|".join(map(str, SAVED))
    failed_by_policy = ["PodFailurePolicy"]
    return [
        {
            "name": "wouldFailAgain",
            "action": "FailJobSet",
            "onJobFailureReasons": failed_by_policy,
            "onJobFailureMessagePatterns": [f"failed with exit code ({codes}) matching"],
        },
        {
            "name": "savedOrDisrupted",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": failed_by_policy,
            "onJobFailureMessagePatterns": [
                f"failed with exit code ({saved}) matching",
                "has condition DisruptionTarget matching",
            ],
        },
    ]


def all_or_nothing() -> Object:
    """A pod that fails fails its Job, and the JobSet restarts all pods; the policy records the reason."""
    rules = [_on_exit("FailJob", FAILING), _on_exit("FailJob", SAVED), _on_disruption("FailJob")]
    return {"backoffLimit": 0, "podReplacementPolicy": "Failed", "podFailurePolicy": {"rules": rules}}


def _deadline(options: KubernetesOptions) -> Object:
    """At its time limit the pods get SIGTERM and save, and the run fails; a JobSet counts from its last restart."""
    seconds = options.time_limit_seconds
    return {} if seconds is None else {"activeDeadlineSeconds": seconds}


def _rules(options: KubernetesOptions) -> list[Object]:
    ended = {"name": "timeLimit", "action": "FailJobSet", "onJobFailureReasons": ["DeadlineExceeded"]}
    return jobset_rules() if options.time_limit_seconds is None else [ended, *jobset_rules()]


def _indexed(nodes: int) -> Object:
    return {"completionMode": "Indexed", "completions": nodes, "parallelism": nodes}


def _on_exit(action: str, codes: list[int]) -> Object:
    return {"action": action, "onExitCodes": {"containerName": pod.CONTAINER, "operator": "In", "values": codes}}


def _on_disruption(action: str) -> Object:
    return {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def patched(template: dict[str, Any], patch: JsonObject, cluster: str) -> dict[str, Any]:
    """A pod template after a site's strategic merge patch, by a local kubectl; no cluster is needed.

    Args:
        template: `metadata` and `spec` of a pod.
        patch: the same keys.
        cluster: name of the profile, for messages.

    Raises:
        UserError: no kubectl on this machine, or it rejects the patch.
    """
    if not patch:
        return template
    where = f"kubernetes.patch of {cluster}"
    require_program(
        "kubectl", f"{where} is applied by kubectl: run this where kubectl is installed, or remove the patch"
    )
    pod = {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {"name": "pod", **template["metadata"]}}
    command = ("kubectl", "patch", "--local", "--filename", "-", "--type", "strategic", "--output", "json")
    code, answer, words = run((*command, "--patch", json.dumps(patch)), json.dumps(pod))
    if code:
        raise UserError(
            f"rejected by kubectl:\n{words}", where=where, rule="must be a strategic merge patch of a pod template"
        )
    merged = json.loads(answer)
    if missing := _containers(template["spec"]) - _containers(merged["spec"]):
        rule = "a patch cannot remove the containers of a run"
        raise UserError(f"removes the container {', '.join(sorted(missing))}", where=where, rule=rule)
    # kubectl sorts keys; those of the template keep their order.
    return {key: _in_order(merged[key], template[key]) for key in template} | {
        "metadata": _patched_metadata(merged, template)
    }


def _containers(spec: dict[str, Any]) -> set[str]:
    """Names of all containers; kubectl does not check that a patch leaves a valid pod."""
    listed = [spec.get(key) for key in ("initContainers", "containers")]
    return {item["name"] for part in listed if isinstance(part, list) for item in part if "name" in item}


def _patched_metadata(merged: dict[str, Any], template: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in merged["metadata"].items() if key not in ("name", "creationTimestamp")}
    ordered: dict[str, Any] = _in_order(kept, template["metadata"])
    return ordered


def _in_order(value: Any, like: Any) -> Any:
    if isinstance(value, dict) and isinstance(like, dict):
        keys = [*(key for key in like if key in value), *(key for key in value if key not in like)]
        return {key: _in_order(value[key], like.get(key)) for key in keys}
    if isinstance(value, list) and isinstance(like, list):
        named = {item["name"]: item for item in like if isinstance(item, dict) and "name" in item}
        return [
            _in_order(item, named.get(item["name"]) if isinstance(item, dict) and "name" in item else None)
            for item in value
        ]
    return value
