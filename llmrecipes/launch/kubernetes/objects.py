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

from llmrecipes.errors import UserError
from llmrecipes.launch.kubernetes import bases, pod
from llmrecipes.launch.kubernetes.bases import ManifestPart, Object
from llmrecipes.launch.kubernetes.pod import PodRun
from llmrecipes.launch.kubernetes.settings import KubernetesOptions, check
from llmrecipes.launch.programs import require_program, run
from llmrecipes.recipe import document
from llmrecipes.recipe.sections.section import JsonObject

MOST_CONFIG_BYTES = 1 << 20
BASES = {"job": "job", "jobset": "jobset", "trainjob": "trainjob/run"}
"""Folder in k8s/ of each flavor."""
AMBIGUOUS = re.compile(r"[-+]?\.?\d|[-+]?\.(inf|nan)|[yYnN]$", re.IGNORECASE)
"""Plain scalars that some YAML parsers do not read as strings."""
FIRST_SUCCEEDS: Object = {"successPolicy": {"rules": [{"succeededIndexes": "0"}]}}
"""Pods that have no node never succeed: an elastic run has ended when its first pod has."""
GROUP = "node"
"""Name of the only replicated Job of a JobSet or a TrainJob."""
PATCH = f"spec.runtimePatches.0.trainingRuntimeSpec.template.spec.replicatedJobs.{GROUP}.template.spec.template"
"""Pod template of a TrainJob: what it adds to that of its runtime."""
TIME_LIMIT: Object = {"name": "timeLimit", "action": "FailJobSet", "onJobFailureReasons": ["DeadlineExceeded"]}
"""Rule that ends a JobSet at its time limit; without the rule, it would start its Jobs again."""


def render(run: PodRun, options: KubernetesOptions) -> list[Object]:
    """All objects of a run, in the order of their creation.

    Raises:
        UserError: a value that Kubernetes would reject.
    """
    check(options)
    if len(run.recipe_yaml.encode()) + len(_profile(run, options).encode()) > MOST_CONFIG_BYTES:
        where = f"recipe {run.plan.recipe.name}"
        rule = "pods read it from a ConfigMap, which holds at most 1 MiB"
        raise UserError("larger than 1 MiB", where=where, rule=rule)
    objects = [_recipe(run, options)]
    if run.channel is not None:
        objects.append(_compute_domain(run, options, run.channel))
    workload, others = bases.load(BASES[options.flavor], run.name)
    unwanted = {"NetworkPolicy": options.host_network, "Service": run.nodes == 1}
    objects += [placed(other, options) for other in others if not unwanted.get(other.get("kind"), False)]
    _fill(workload, run, options)
    return [*objects, workload.content]


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


def placed(part: ManifestPart, options: KubernetesOptions) -> Object:
    """An object of a base in the namespace of the run."""
    metadata = dict(part.get("metadata"))
    part.content["metadata"] = {"name": part.get("metadata.name"), "namespace": options.namespace, **metadata}
    return part.content


def queued(part: ManifestPart, options: KubernetesOptions) -> Object:
    """The same for a workload, which Kueue unsuspends when there is quota for all of its pods."""
    if options.queue:
        part.part("metadata.labels").add({"kueue.x-k8s.io/queue-name": options.queue})
        part.part("spec").add({"suspend": True})
    return placed(part, options)


def _metadata(run: PodRun, options: KubernetesOptions, name: str | None = None) -> Object:
    return {"name": name or run.name, "namespace": options.namespace, "labels": pod.labels(run)}


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


def _fill(workload: ManifestPart, run: PodRun, options: KubernetesOptions) -> None:
    """Fill in the Job, JobSet or TrainJob of a base."""
    workload.part("metadata").add({"labels": pod.labels(run), "annotations": pod.notes(run, options)})
    queued(workload, options)
    match options.flavor:
        case "job":
            # Counts pods: when one fails, its peers fail too.
            workload.set("spec.backoffLimit", options.max_restarts * run.nodes)
            _fill_job(workload, run, options)
        case "jobset":
            _fill_jobset(workload, run, options)
        case "trainjob":
            _fill_trainjob(workload, run, options)


def _fill_job(job: ManifestPart, run: PodRun, options: KubernetesOptions) -> None:
    job.set("spec.completions", run.nodes)
    job.set("spec.parallelism", run.nodes)
    _set_deadline(job, options)
    template = job.part("spec.template")
    pod.fill(template, run, options)
    job.set("spec.template", patched(template.content, run.profile.kubernetes.patch, run.profile.name))


def _fill_jobset(jobset: ManifestPart, run: PodRun, options: KubernetesOptions) -> None:
    is_elastic = pod.least_nodes(run, options) is not None
    if is_elastic and run.channel is not None:
        raise UserError(
            f"{run.profile.name} has kubernetes.compute_domain",
            where="train.elastic",
            rule="the IMEX domain of a run needs all of its nodes",
            fix="--flavor job, which always starts all nodes, or train.elastic=null",
        )
    jobset.set("spec.failurePolicy.maxRestarts", options.max_restarts)
    if options.time_limit_seconds is not None:
        jobset.get("spec.failurePolicy.rules").insert(0, TIME_LIMIT)
    job = jobset.part(f"spec.replicatedJobs.{GROUP}.template")
    if is_elastic:
        job.part("spec").add(FIRST_SUCCEEDS)
    _fill_job(job, run, options)


def _fill_trainjob(trainjob: ManifestPart, run: PodRun, options: KubernetesOptions) -> None:
    """What is specific to the run; restarts and permissions come from the runtime in k8s/trainjob/runtime."""
    _require_patchable(run, options)
    _set_deadline(trainjob, options)
    trainer = trainjob.part("spec.trainer")
    trainer.set("image", options.image)
    trainer.set("command", pod.command(trainer))
    trainer.set("args", pod.arguments(trainer, run))
    trainer.set("env", pod.variables(trainer, run, options))
    trainer.set("numNodes", run.nodes)
    trainer.set("numProcPerNode", run.ranks_per_node)
    trainer.set("resourcesPerNode", pod.resources(run))
    template = trainjob.part(PATCH)
    pod.describe(template, run, options)
    spec = template.part("spec")
    placement = pod.placement(run.profile, options)
    spec.add({key: value for key, value in placement.items() if key in PATCHABLE})
    spec.add({"terminationGracePeriodSeconds": options.grace_seconds})
    pod.add_mounts(spec.part(f"containers.{pod.CONTAINER}"), run.profile.kubernetes)
    pod.add_volumes(spec, run, options)


def pod_spec(workload: Object) -> Object:
    """The pods of a Job or a JobSet; of a TrainJob what its runtime in k8s/trainjob/runtime makes of it."""
    part = ManifestPart("", workload)
    template = f"spec.replicatedJobs.{GROUP}.template.spec.template.spec"
    if workload["kind"] != "TrainJob":
        return part.part("spec.template.spec" if workload["kind"] == "Job" else template).content
    runtime, _ = bases.load("trainjob/runtime")
    shared = runtime.part(f"spec.template.{template}")
    added = part.get(f"{PATCH}.spec")
    container = shared.get(f"containers.{pod.CONTAINER}")
    return {**shared.content, **added, "containers": [{**container, **more} for more in added["containers"]]}


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


def _set_deadline(part: ManifestPart, options: KubernetesOptions) -> None:
    """At its time limit the pods get SIGTERM and save, and the run fails; a JobSet counts from its last restart."""
    if options.time_limit_seconds is not None:
        part.part("spec").add({"activeDeadlineSeconds": options.time_limit_seconds})


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
