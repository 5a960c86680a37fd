"""Runs as Kubernetes objects: valid by the strictest schemas there are, and nothing in them but what was meant."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from llmrecipes.hardware.load import load_profile
from llmrecipes.hardware.profile import COSTS, Costs
from llmrecipes.launch.base import PlannedForCluster
from llmrecipes.launch.kubernetes.bases import Object
from llmrecipes.launch.kubernetes.launcher import objects_of
from llmrecipes.launch.kubernetes.objects import render, to_yaml
from llmrecipes.launch.kubernetes.pod import PodRun
from llmrecipes.launch.kubernetes.settings import FLAVORS, KubernetesOptions, Secret, object_name, parse_secrets
from llmrecipes.launch.run_options import RunOptions
from llmrecipes.recipe.load import load
from llmrecipes.workflow.submit import plan_for
from tests.kubernetes_schemas import require_valid
from tests.refusals import refused

IMAGE = f"registry.example.com:5000/llmrecipes:0.1.0@sha256:{'0' * 64}"
HOSTILE = [
    '"; rm -rf / #',
    "$(touch pwned)",
    "$(HOSTNAME)",
    "`id`",
    "${HOME}",
    "$$(x)",
    "'a' \"b\"",
    "{{ x }}",
    "- a: b",
    "é✓",
]


@cache
def planned_for(recipe: str, cluster: str, nodes: int, *changes: str) -> PlannedForCluster:
    return plan_for(recipe, list(changes), cluster, nodes)


def rendered(
    flavor: str, recipe: str = "gpt-1b", cluster: str = "h100-ib", nodes: int = 2, **options: Any
) -> list[Object]:
    planned = planned_for(recipe, cluster, nodes)
    wanted = KubernetesOptions(**{"image": IMAGE, "flavor": flavor, "namespace": "llmrecipes", **options})
    return objects_of(planned, wanted, "run-1")


def of_kind(applied: list[Object], kind: str) -> dict[str, Any]:
    return next(thing for thing in applied if thing["kind"] == kind)


def pod_of(applied: list[Object]) -> dict[str, Any]:
    """The pod template, or for a TrainJob what it has of one."""
    workload = applied[-1]
    if workload["kind"] == "Job":
        return workload["spec"]["template"]
    if workload["kind"] == "JobSet":
        return workload["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    patch = workload["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]
    return patch["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]


def container_of(applied: list[Object]) -> dict[str, Any]:
    workload = applied[-1]
    return workload["spec"]["trainer"] if workload["kind"] == "TrainJob" else pod_of(applied)["spec"]["containers"][0]


def as_kubelet(text: str) -> str:
    """What the kubelet makes of an argument or a value where no variable has the name (its expansion.go)."""
    return re.sub(r"\$(\$|\([^)]*\))", lambda found: "$" if found[1] == "$" else found[0], text)


@pytest.mark.parametrize("cluster", ["h100-ib", "aws-p5-efa", "laptop"])
@pytest.mark.parametrize("flavor", FLAVORS)
def test_every_object_is_valid(flavor: str, cluster: str) -> None:
    recipe = "gpt-tiny" if cluster == "laptop" else "gpt-1b"
    everything: dict[str, Any] = {
        "queue": "research",
        "topology": "topology.kubernetes.io/rack",
        "service_account": "trainer",
        "pull_secret": "registry",
        "secrets": {"HF_TOKEN": Secret("huggingface", "token")},
        "tracking_uri": "http://mlflow:5000",
        "time": "1-02:00",
    }
    for options in ({}, everything):
        for thing in rendered(flavor, recipe, cluster, **options):
            require_valid(thing)


@pytest.mark.parametrize("flavor", FLAVORS)
def test_a_run_ends_at_its_time_limit(flavor: str) -> None:
    def spec(**options: Any) -> dict[str, Any]:
        return dict(rendered(flavor, **options)[-1]["spec"])

    limited = spec(time="8:00:00")
    limited_job = limited["replicatedJobs"][0]["template"]["spec"] if flavor == "jobset" else limited
    assert limited_job.pop("activeDeadlineSeconds") == 8 * 3600
    if flavor == "jobset":  # or it would start again, with the time limit of its own
        rule = limited["failurePolicy"]["rules"].pop(0)
        assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["DeadlineExceeded"])
    assert limited == spec() == spec(time="UNLIMITED")
    with refused("--time"):
        spec(time="soon")


@pytest.mark.parametrize("flavor", FLAVORS)
def test_the_check_is_strict(flavor: str) -> None:
    for thing in rendered(flavor)[1:]:
        thing["spec"]["misspelt"] = 1
        with pytest.raises(Exception, match="misspelt"):
            require_valid(thing)


@pytest.mark.parametrize("flavor", FLAVORS)
def test_yaml_round_trips(flavor: str) -> None:
    applied = rendered(flavor)
    assert list(yaml.safe_load_all(to_yaml(applied))) == applied
    assert "&id" not in to_yaml(applied)


@pytest.mark.parametrize(
    ("name", "flavor", "cluster", "nodes"),
    [
        ("job-laptop", "job", "laptop", 2),
        ("jobset-h100", "jobset", "h100-ib", 4),
        ("trainjob-efa", "trainjob", "aws-p5-efa", 2),
    ],
)
def test_golden(golden: Callable[[str, Any], None], name: str, flavor: str, cluster: str, nodes: int) -> None:
    recipe = "gpt-tiny" if cluster == "laptop" else "gpt-1b"
    applied = rendered(flavor, recipe, cluster, nodes, secrets={"HF_TOKEN": Secret("huggingface", "HF_TOKEN")})
    golden(f"k8s-{name}.yaml", to_yaml(applied))


def test_golden_of_an_elastic_run(golden: Callable[[str, Any], None]) -> None:
    applied = elastic("jobset", "h100-ib")
    for thing in applied:
        require_valid(thing)
    workload = applied[-1]["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert workload["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    words = container_of(applied)["args"]
    assert words[words.index("--min-nodes") + 1] == "2"
    assert "LLMRECIPES_RENDEZVOUS_TOKEN" in {each["name"] for each in container_of(applied)["env"]}
    (check,) = pod_of(applied)["spec"]["initContainers"]
    assert "--nodes" not in check["args"], "it would wait for pods that have no node"
    hashed = applied[-1]["metadata"]["annotations"]["llmrecipes/recipe-hash"]
    text = to_yaml(applied[-1:]).replace(f"'{hashed}'", hashed)  # it is quoted if it begins with a digit
    golden("k8s-jobset-elastic.yaml", text.replace(hashed, "0" * 64))


def test_pods_may_be_missing_only_where_all_start_again() -> None:
    for flavor in ("job", "trainjob"):
        applied = elastic(flavor, "h100-ib")
        assert "--min-nodes" not in container_of(applied)["args"]
        assert "successPolicy" not in to_yaml(applied)
    with refused("train.elastic", rule="--flavor"):
        elastic("jobset", "gb200-nvl72")


def elastic(flavor: str, cluster: str) -> list[Object]:
    """Two or four nodes."""
    each = load_profile(cluster).gpus_per_node
    planned = plan_for("gpt-1b", [f"train.elastic=[{2 * each},{4 * each}]"], cluster, 4)
    return objects_of(planned, KubernetesOptions(image=IMAGE, flavor=flavor, namespace="llmrecipes"), "run-1")


def test_devices_and_memory_follow_the_profile() -> None:
    container = container_of(rendered("job", cluster="aws-p5-efa"))
    limits = container["resources"]["limits"]
    assert (limits["nvidia.com/gpu"], limits["vpc.amazonaws.com/efa"], limits["memory"]) == ("8", "32", "1843Gi")
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert variables["FI_PROVIDER"] == "efa"
    assert variables["LLMRECIPES_IMAGE_DIGEST"] == f"sha256:{'0' * 64}"
    assert container["args"][container["args"].index("--nproc") + 1] == "16"
    assert pod_of(rendered("job", cluster="aws-p5-efa"))["spec"]["nodeSelector"]


def test_half_a_node_takes_half_of_it() -> None:
    planned = plan_for("gpt-1b", [], "h100-ib", 2, ranks_per_node=4)
    limits = container_of(objects_of(planned, KubernetesOptions(image=IMAGE), "r"))["resources"]["limits"]
    assert limits == {"memory": "900Gi", "nvidia.com/gpu": "4", "rdma/ib": "4"}


def test_without_gpus_nothing_of_them_is_left() -> None:
    applied = rendered("job", "gpt-tiny", "laptop")
    assert "nvidia" not in to_yaml(applied)
    assert "NCCL" not in to_yaml(applied)
    assert container_of(applied)["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_one_node_needs_no_rendezvous() -> None:
    applied = rendered("job", "gpt-tiny", "laptop", nodes=1)
    assert "Service" not in [thing["kind"] for thing in applied]
    assert "MASTER_ADDR" not in to_yaml(applied)
    assert not {"--nnodes", "--accept-changes"} & set(container_of(applied)["args"])


def test_operators_are_compiled_on_the_node_and_not_in_the_shared_home() -> None:
    planned = planned_for("gpt-1b", "h100-ib", 2, "layout=offload-24gb")
    applied = objects_of(planned, KubernetesOptions(image=IMAGE, flavor="job", namespace="llmrecipes"), "run-1")
    variables = {entry["name"]: entry.get("value") for entry in container_of(applied)["env"]}
    inside = PurePosixPath(variables["TORCH_EXTENSIONS_DIR"])
    [volume] = [each for each in container_of(applied)["volumeMounts"] if inside.is_relative_to(each["mountPath"])]
    assert {"name": volume["name"], "emptyDir": {}} in pod_of(applied)["spec"]["volumes"]
    assert "TORCH_EXTENSIONS_DIR" not in to_yaml(rendered("job"))


def test_the_costs_of_the_site_reach_the_pods() -> None:
    run, options = _run(), KubernetesOptions(image=IMAGE)
    priced = run.profile.model_copy(update={"costs": Costs(pue=1.2, kg_co2_per_kwh=0.35)})
    assert COSTS not in to_yaml(render(run, options))
    container = container_of(render(replace(run, profile=priced), options))
    given = {variable["name"]: variable["value"] for variable in container["env"]}
    assert Costs.model_validate_json(given[COSTS]) == priced.costs


def test_accepted_changes_reach_the_pods() -> None:
    options = KubernetesOptions(image=IMAGE)
    applied = objects_of(planned_for("gpt-tiny", "laptop", 1), options, "run-1", RunOptions(accept_changes=True))
    assert "--accept-changes" in container_of(applied)["args"]


def test_the_first_pod_is_found_by_its_name() -> None:
    for flavor, host in (("job", "{0}-0.{0}"), ("jobset", "{0}-node-0-0.{0}")):
        applied = rendered(flavor)
        variables = {entry["name"]: entry.get("value") for entry in container_of(applied)["env"]}
        assert variables["MASTER_ADDR"] == host.format(applied[-1]["metadata"]["name"])
    applied = rendered("job")
    service = of_kind(applied, "Service")
    assert service["metadata"]["name"] == pod_of(applied)["spec"]["subdomain"] == applied[-1]["metadata"]["name"]
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"].items() <= pod_of(applied)["metadata"]["labels"].items()
    assert "MASTER_ADDR" not in to_yaml(rendered("trainjob"))


def test_a_pod_has_no_rights_and_no_root() -> None:
    spec = pod_of(rendered("job"))["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    security = spec["containers"][0]["securityContext"]
    assert (security["allowPrivilegeEscalation"], security["readOnlyRootFilesystem"]) == (False, True)
    assert "privileged" not in to_yaml(rendered("job"))


def test_a_saved_run_is_requeued_and_a_stopped_one_is_not() -> None:
    rules = rendered("job")[-1]["spec"]["podFailurePolicy"]["rules"]
    codes = {rule["action"]: rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule}
    assert codes == {"FailJob": [2, 93], "Ignore": [75]}
    assert rules[-1]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]


@pytest.mark.parametrize(
    ("message", "action"),
    [  # as Kubernetes' Job controller writes them (pkg/controller/job/pod_failure_policy.go)
        ("Container node for pod ns/a-0-x failed with exit code 2 matching FailJob rule at index 0", "FailJobSet"),
        ("Container node for pod ns/a-0-x failed with exit code 93 matching FailJob rule at index 0", "FailJobSet"),
        (
            "Container node for pod ns/a-0-x failed with exit code 75 matching FailJob rule at index 1",
            "RestartJobSetAndIgnoreMaxRestarts",
        ),
        (
            "Pod ns/a-0-x has condition DisruptionTarget matching FailJob rule at index 2",
            "RestartJobSetAndIgnoreMaxRestarts",
        ),
        ("Job has reached the specified backoff limit", None),
    ],
)
def test_a_jobset_reads_why_its_job_failed(message: str, action: str | None) -> None:
    reason = "PodFailurePolicy" if action else "BackoffLimitExceeded"
    matching = [
        rule["action"]
        for rule in rendered("jobset")[-1]["spec"]["failurePolicy"]["rules"]
        if reason in rule["onJobFailureReasons"]
        and any(re.search(pattern, message) for pattern in rule["onJobFailureMessagePatterns"])
    ]
    assert matching == ([action] if action else [])


def test_a_queue_starts_it() -> None:
    for flavor in FLAVORS:
        workload = rendered(flavor, queue="research")[-1]
        assert workload["spec"]["suspend"] is True
        assert workload["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
        assert "suspend" not in rendered(flavor)[-1]["spec"]


def test_the_recipe_is_passed_on_unchanged(tmp_path: Path) -> None:
    text = "line one\n---\nkind: Pod  \n\t\"quotes\" 'and' $(subst) {{ helm }} é"
    planned = plan_for("gpt-tiny", [f"description={json.dumps(text)}"], "laptop", 2)
    applied = objects_of(planned, KubernetesOptions(image=IMAGE), "r")
    path = tmp_path / "recipe.yaml"
    path.write_text(next(iter(yaml.safe_load_all(to_yaml(applied))))["data"]["recipe.yaml"], "utf-8")
    assert load(str(path)).recipe == planned.recipe
    assert planned.recipe.description == text


@pytest.mark.parametrize("flavor", FLAVORS)
def test_hostile_values_round_trip_as_literals(flavor: str) -> None:
    planned = planned_for("gpt-tiny", "laptop", 2)
    environment = {f"NCCL_HOSTILE_{number}": text for number, text in enumerate(HOSTILE)}
    profile = planned.profile.model_copy(update={"environment": environment})
    run = PodRun("name", "run-1", 2, planned.plan, profile, "name: x\n", "0" * 64)
    things = list(yaml.safe_load_all(to_yaml(render(run, KubernetesOptions(image=IMAGE, flavor=flavor)))))
    workload = things[-1]
    if flavor == "trainjob":
        variables = workload["spec"]["trainer"]["env"]
    else:
        job = workload if flavor == "job" else workload["spec"]["replicatedJobs"][0]["template"]
        variables = job["spec"]["template"]["spec"]["containers"][0]["env"]
    found = {entry["name"]: as_kubelet(entry["value"]) for entry in variables}
    assert {name: found[name] for name in environment} == environment


def test_kubernetes_own_reader_sees_the_same_words(tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: apt-get install kubernetes-client")
    words = ["1e3", "y", "N", "0x1F", "0o14", "1_000", ".inf", "-.5", "+1", "null", "~", "yes", "1:30", "2026-01-01"]
    words += HOSTILE
    planned = planned_for("gpt-tiny", "laptop", 2)
    environment = {f"NCCL_HOSTILE_{number}": text for number, text in enumerate(words)}
    profile = planned.profile.model_copy(update={"environment": environment})
    run = PodRun("name", "1e3", 2, planned.plan, profile, "name: 1e3\n", "1" * 10 + "e" + "1" * 53)
    (tmp_path / "run.yaml").write_text(to_yaml(render(run, KubernetesOptions(image=IMAGE))))
    (tmp_path / "kustomization.yaml").write_text("resources: [run.yaml]\n")
    done = subprocess.run(["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    things = list(yaml.safe_load_all(done.stdout))
    job = next(thing for thing in things if thing["kind"] == "Job")
    container = job["spec"]["template"]["spec"]["containers"][0]
    found = {entry["name"]: as_kubelet(entry["value"]) for entry in container["env"]}
    assert {name: found[name] for name in environment} == environment
    assert container["args"][:2] == ["--run-id", "1e3"]
    require_valid(job)


@pytest.mark.parametrize("text", ["a b", "a;b", "$(id)", "a\nb", "../up", "-a", 'a"', "a'", "`id`", "Ä", "x" * 300, ""])
@pytest.mark.parametrize(
    "option", ["namespace", "queue", "claim", "service_account", "pull_secret", "topology", "image", "flavor"]
)
def test_hostile_names_are_refused(option: str, text: str) -> None:
    values: dict[str, Any] = {"image": IMAGE, "queue": "q", option: text}
    planned = planned_for("gpt-tiny", "laptop", 2)
    with refused(f"--{option.replace('_', '-')}"):
        objects_of(planned, KubernetesOptions(**values), "r")


@pytest.mark.parametrize(
    "image",
    ["llmrecipes", "llmrecipes:latest", "llmrecipes@sha256:0", f"--x@sha256:{'0' * 64}", f"A@sha256:{'0' * 64}"],
)
def test_an_image_is_named_by_its_digest(image: str) -> None:
    with refused("--image"):
        render(_run(), KubernetesOptions(image=image))


@pytest.mark.parametrize(
    "uri", ["http://user:word@mlflow", "http://mlflow?token=1", "file:///x", "mlflow", "http://a\nb"]
)
def test_no_secret_in_an_address(uri: str) -> None:
    with refused("--tracking-uri") as caught:
        render(_run(), KubernetesOptions(image=IMAGE, tracking_uri=uri))
    assert "word" not in str(caught.value).replace("password", "")


def test_secrets_are_named_and_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = "hf_PlantedTokenThatMustNotShowUp"
    monkeypatch.setenv("HF_TOKEN", planted)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", planted)
    for flavor in FLAVORS:
        applied = rendered(
            flavor, secrets=parse_secrets(["HF_TOKEN=huggingface", "MLFLOW_TRACKING_PASSWORD=mlflow:pw"])
        )
        assert planted not in to_yaml(applied)
        refs = {e["name"]: e["valueFrom"]["secretKeyRef"] for e in container_of(applied)["env"] if "valueFrom" in e}
        assert refs["HF_TOKEN"] == {"name": "huggingface", "key": "HF_TOKEN"}
        assert refs["MLFLOW_TRACKING_PASSWORD"] == {"name": "mlflow", "key": "pw"}
    for mistake in (planted, f"HF_TOKEN={planted}", f"{planted}="):
        with refused("--secret") as caught:
            parse_secrets([mistake])
        assert planted not in str(caught.value)


def test_names_are_short_and_different() -> None:
    names = {
        object_name(recipe, run)
        for recipe in ("gpt-1b", "a.b_c", "9" * 63)
        for run in ("r", "R", "r.1", "r-1", "x" * 64)
    }
    assert len(names) == 15
    for name in names:
        assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name), name
        assert len(f"{name}-node-0-1999-abcde") <= 63, name


def _run() -> PodRun:
    planned = planned_for("gpt-tiny", "laptop", 1)
    return PodRun("name", "run-1", 1, planned.plan, load_profile("laptop"), "name: x\n", "0" * 64)
