"""The folders under k8s/: valid, safe, two nodes of one run as kubectl builds them, and as `submit` fills them in."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from llmrecipes import __version__, files
from llmrecipes.cli.app import build, run
from llmrecipes.errors import ExitCode
from llmrecipes.launch.base import PlannedForCluster
from llmrecipes.launch.kubernetes import preparation
from llmrecipes.launch.kubernetes.launcher import objects_of
from llmrecipes.launch.kubernetes.objects import BASES as RUNS
from llmrecipes.launch.kubernetes.objects import pod_spec
from llmrecipes.launch.kubernetes.pod import PodRun
from llmrecipes.launch.kubernetes.settings import KubernetesOptions
from llmrecipes.launch.ranks import Rank
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Recipe
from llmrecipes.workflow import train as workflow
from llmrecipes.workflow.run import Paths, TrainOptions
from llmrecipes.workflow.submit import plan_for
from tests.kubernetes_schemas import require_valid
from tests.refusals import refused

Thing = dict[str, Any]

K8S = Path(__file__).parents[2] / "k8s"
BASES = sorted(path.parent.relative_to(K8S).as_posix() for path in K8S.glob("**/kustomization.yaml"))
IMAGE = f"registry.example.com:5000/ml/llmrecipes@sha256:{'7' * 64}"


def kubectl(*words: str) -> str:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: apt-get install kubernetes-client")
    done = subprocess.run(["kubectl", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr
    return done.stdout


@cache
def is_old() -> bool:
    """Whether kubectl has kustomize 2 in it, as Debian's 1.20 does."""
    return (
        int(re.sub(r"\D", "", json.loads(kubectl("version", "--client", "--output=json"))["clientVersion"]["minor"]))
        < 21
    )


@cache
def _built(folder: Path) -> list[Thing]:
    return list(yaml.safe_load_all(kubectl("kustomize", str(folder))))


def built(folder: Path | str) -> list[Thing]:
    """What `kubectl apply -k` would send; a path that is not absolute is one under k8s/."""
    return copy.deepcopy(_built(K8S / folder))


def workload(things: list[Thing]) -> Thing:
    return next(thing for thing in things if thing["kind"] in ("Job", "JobSet", "TrainJob"))


@cache
def planned() -> PlannedForCluster:
    return plan_for("gpt-1b", [], "h100-ib", 4)


def submitted(flavor: str) -> list[Thing]:
    """A larger run as `llmrecipes submit` sends it, or what prepares its data; the workload is the last."""
    if flavor in RUNS:
        return objects_of(planned(), KubernetesOptions(image=IMAGE, flavor=flavor), "run-1")
    run = PodRun("name", "run-1", 4, planned().plan, planned().profile, "name: x\n", "0" * 64)
    return preparation.render(run, KubernetesOptions(image=IMAGE, prepare_nodes=4 if flavor == "prepare-ray" else 1))


@pytest.fixture
def edited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A copy of k8s/ that `submit` fills in."""
    folder, copied = files.folder, tmp_path / "k8s"
    shutil.copytree(K8S, copied)
    monkeypatch.setattr(files, "folder", lambda name: copied if name == "k8s" else folder(name))
    return copied


def job_of(thing: Thing) -> Thing:
    """The Job that pods are made by. Of a TrainJob: its runtime's, with what the run adds, merged as Trainer does."""
    if thing["kind"] == "Job":
        return thing
    if thing["kind"] == "JobSet":
        return thing["spec"]["replicatedJobs"][0]["template"]
    job: Thing = runtime()["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]
    pod = job["spec"]["template"]
    trainer = thing["spec"]["trainer"]
    patch = thing["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    added = patch["template"]["spec"]["template"]
    pod["metadata"] = added["metadata"]
    pod["spec"]["volumes"] += added["spec"]["volumes"]
    pod["spec"]["containers"][0] |= {name: trainer[name] for name in ("image", "command", "args", "env")}
    pod["spec"]["containers"][0]["resources"] = trainer["resourcesPerNode"]
    for container, more in zip(pod["spec"]["containers"], added["spec"]["containers"], strict=True):
        assert container["name"] == more["name"]
        container["volumeMounts"] += more["volumeMounts"]
    job["spec"] |= {"completionMode": "Indexed", "completions": trainer["numNodes"], "parallelism": trainer["numNodes"]}
    return job


def runtime() -> Thing:
    (thing,) = built("trainjob/runtime")
    return thing


def pod_of(thing: Thing) -> Thing:
    pod: Thing = job_of(thing)["spec"]["template"]
    return pod


def containers(thing: Thing) -> list[Thing]:
    pod = pod_of(thing)["spec"]
    return [*pod.get("initContainers", []), *pod["containers"]]


def host(thing: Thing, index: int) -> str:
    """The host name of a pod in cluster DNS."""
    name = thing["metadata"]["name"]
    return (
        f"{name}-{index}.{pod_of(thing)['spec']['subdomain']}"
        if thing["kind"] == "Job"
        else f"{name}-node-0-{index}.{name}"
    )


def environment(thing: Thing, index: int) -> dict[str, str]:
    """Variables of a training container: its own, and those that the controller of its kind adds."""
    own = {entry["name"]: entry["value"] for entry in containers(thing)[-1]["env"]}
    if thing["kind"] != "TrainJob":
        return {**own, "JOB_COMPLETION_INDEX": str(index)}
    added = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(index)}
    return {**own, **added, "PET_MASTER_ADDR": host(thing, 0), "PET_MASTER_PORT": "29400"}


@dataclass
class Started:
    """What `llmrecipes train` was asked for."""

    recipe: Recipe
    paths: Paths
    options: TrainOptions


def started(words: list[str], variables: dict[str, str], patch: pytest.MonkeyPatch) -> Started:
    """What this program makes of a pod's command line and environment, up to where training would start."""
    found: list[Started] = []

    def start(recipe: Recipe, paths: Paths, options: TrainOptions, _say: Any) -> int:
        found.append(Started(recipe, paths, options))
        return 0

    with patch.context() as context:
        context.setattr(workflow, "train", start)
        for name, value in variables.items():
            context.setenv(name, value)
        assert words[0] == "llmrecipes"
        assert run(words[1:]) == 0
    return found[0]


def mappings(thing: Any) -> list[Thing]:
    """All mappings within an object."""
    inner = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list) else ()
    return [*([thing] if isinstance(thing, dict) else []), *(found for value in inner for found in mappings(value))]


@pytest.mark.parametrize("base", BASES)
def test_what_kubectl_builds_is_valid(base: str) -> None:
    things = built(base)
    assert things
    for thing in things:
        require_valid(thing)


@pytest.mark.parametrize("base", BASES)
def test_no_secret_no_root_no_open_port(base: str) -> None:
    for thing in built(base):
        assert thing["kind"] != "Secret"
        for part in mappings(thing):
            assert part.get("type") not in ("NodePort", "LoadBalancer")
            assert not part.get("privileged")
            assert "hostPath" not in part
            # What a TrainJob names so is merged into its runtime's.
            if isinstance(part.get("containers"), list) and thing["kind"] != "TrainJob":
                require_no_rights(part)


@pytest.mark.parametrize("base", RUNS.values())
def test_a_run_has_no_rights_and_bounded_memory(base: str) -> None:
    thing = workload(built(base))
    pod = pod_of(thing)["spec"]
    require_no_rights(pod)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for container in containers(thing):
        resources = container["resources"]
        assert resources["limits"]["memory"] == resources["requests"]["memory"]
        assert "cpu" in resources["requests"]
        paths = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        assert paths["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        assert paths["/dev/shm"]["emptyDir"]["sizeLimit"]
        assert "emptyDir" in paths["/tmp"]
        claim = paths["/workspace"]["persistentVolumeClaim"]["claimName"]
        assert claim == next(
            each["metadata"]["name"] for each in built("storage") if each["kind"] == "PersistentVolumeClaim"
        )
    assert pod["terminationGracePeriodSeconds"] > load("gpt-tiny").recipe.train.exit_grace_seconds


def require_no_rights(pod: Thing) -> None:
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        security = container["securityContext"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert (security["allowPrivilegeEscalation"], security["readOnlyRootFilesystem"]) == (False, True)


@pytest.mark.parametrize("base", RUNS.values())
def test_its_pods_are_two_nodes_of_one_run(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    thing = workload(built(base))
    job, container = job_of(thing)["spec"], containers(thing)[-1]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 2, 2)
    words = [*container["command"], *container["args"]]
    pods = [started(words, environment(thing, index), monkeypatch) for index in range(2)]
    assert pods[0].recipe == pods[1].recipe == load("gpt-tiny").recipe
    assert pods[0].options.run_id == pods[1].options.run_id
    for pod in pods:
        assert {pod.paths.runs_dir.parent, pod.paths.data_dir.parent} == {Path("/workspace")}
    nodes = [pod.options.node for pod in pods]
    assert nodes[0] and nodes[1]
    ranks_per_node, left = divmod(pods[0].options.nproc or 0, nodes[0].nodes)
    assert left == 0
    port = nodes[0].master_port
    assert [rank for node in nodes if node for rank in node.ranks(ranks_per_node)] == [
        Rank(index, 2, 0, 1, host(thing, 0), port) for index in range(2)
    ]
    plan_for("gpt-tiny", [], "laptop", 2, ranks_per_node)


@pytest.mark.parametrize("base", [*RUNS.values(), "prepare"])
def test_its_other_containers_run_commands_of_this_program(base: str) -> None:
    for container in containers(workload(built(base))):
        words: list[str] = [*container["command"], *container.get("args", [])]
        assert words[0] == "llmrecipes"
        group: Any = typer.main.get_command(build())
        assert load(group.commands[words[1]].make_context(words[1], words[2:]).params["recipe"]).recipe


@pytest.mark.parametrize("base", RUNS.values())
def test_its_pods_reach_each_other_and_nobody_else_does(base: str) -> None:
    things = built(base)
    thing = workload(things)
    labels = pod_of(thing)["metadata"]["labels"].items()
    policy = next(thing for thing in things if thing["kind"] == "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    selectors = [policy["podSelector"], *(peer["podSelector"] for rule in policy["ingress"] for peer in rule["from"])]
    assert len(selectors) == 2
    for selector in selectors:
        assert selector["matchLabels"].items() <= labels
    # The other kinds make their Service themselves.
    services = [thing for thing in things if thing["kind"] == "Service"]
    assert len(services) == (1 if thing["kind"] == "Job" else 0)
    for service in services:
        assert service["metadata"]["name"] == pod_of(thing)["spec"]["subdomain"]
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"] is True
        assert service["spec"]["selector"].items() <= labels
    for other in {*RUNS.values()} - {base}:
        assert not selectors[0]["matchLabels"].items() <= pod_of(workload(built(other)))["metadata"]["labels"].items()


@pytest.mark.parametrize("base", RUNS.values())
def test_a_saved_run_restarts_and_a_stopped_one_does_not(base: str) -> None:
    rules = job_of(workload(built(base)))["spec"]["podFailurePolicy"]["rules"]
    codes = [rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule]
    assert codes == [[ExitCode.BAD_INPUT, ExitCode.STOP], [ExitCode.REQUEUE]]


def test_the_runtime_starts_nothing_and_a_run_installs_nothing() -> None:
    assert "image" not in json.dumps(runtime())
    things = built("trainjob/run")
    assert sorted(thing["kind"] for thing in things) == ["NetworkPolicy", "TrainJob"]
    reference = workload(things)["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == (runtime()["kind"], runtime()["metadata"]["name"])
    assert runtime()["spec"]["template"]["spec"]["failurePolicy"] == workload(built("jobset"))["spec"]["failurePolicy"]


@pytest.mark.parametrize("flavor", [*RUNS, "prepare", "prepare-ray"])
def test_a_submitted_run_has_all_of_its_base_but_its_names_and_sizes(edited: Path, flavor: str) -> None:
    for path in edited.glob("**/*.yaml"):
        path.write_text(path.read_text("utf-8").replace("enableServiceLinks: false", "hostname: changed"), "utf-8")
    objects = submitted(flavor)
    of_base = [part for thing in objects for part in mappings(thing) if part.get("hostname") == "changed"]
    assert len(of_base) == {"trainjob": 0, "prepare-ray": 3}.get(flavor, 1)
    assert of_base or pod_spec(objects[-1])["hostname"] == "changed", "a TrainJob has it from its runtime"
    text = json.dumps(objects[-1])
    assert [word for word in ("gpt-tiny", "[0-1]", '"4Gi"') if word in text] == []


@pytest.mark.parametrize(
    ("flavor", "text", "replacement", "field"),
    [
        ("job", "  completions: 2\n", "", "spec.completions"),
        ("job", "          image: llmrecipes\n", "", "spec.template.spec.initContainers.doctor.image"),
        ("job", '--nproc, "2", ', "", "--nproc"),
        ("job", "kind: Job\n", "kind: CronJob\n", "Job"),
        ("job", "metadata:", "metadata", "Job"),
        ("job", "command: [llmrecipes, train, gpt-tiny]", "command: llmrecipes", "Job"),
        ("job", "- {name: HOME, value: /workspace}", "- HOME", "Job"),
        ("jobset", "    maxRestarts: 3\n", "", "spec.failurePolicy.maxRestarts"),
        ("jobset", "- name: shm", "- name: x", "JobSet"),
        ("trainjob", "    numNodes: 2\n", "", "spec.trainer.numNodes"),
        ("prepare", "- name: prepare\n", "- name: x\n", "spec.template.spec.containers.prepare"),
        ("prepare-ray", "        replicas: 1\n", "", "spec.rayClusterSpec.workerGroupSpecs.0.replicas"),
    ],
)
def test_a_base_that_lacks_what_submit_sets_is_named(
    edited: Path, flavor: str, text: str, replacement: str, field: str
) -> None:
    base = RUNS.get(flavor, flavor)
    path = edited / base / {"prepare-ray": "rayjob.yaml"}.get(flavor, f"{flavor}.yaml")
    before = path.read_text("utf-8")
    assert text in before
    path.write_text(before.replace(text, replacement), "utf-8")
    with refused(f"k8s/{base}", rule=() if field in ("Job", "JobSet") else field):
        submitted(flavor)


def test_what_a_base_has_more_is_sent(edited: Path) -> None:
    path = edited / "job" / "job.yaml"
    more = "      tolerations: [{key: ours, operator: Exists}]\n"
    path.write_text(path.read_text("utf-8").replace("      restartPolicy: Never\n", more), "utf-8")
    with (edited / "job" / "kustomization.yaml").open("a") as file:
        file.write("resources: [job.yaml, more.yaml]\n")
    (edited / "job" / "more.yaml").write_text("{apiVersion: v1, kind: ServiceAccount, metadata: {name: gpt-tiny-job}}")
    _, account, job = submitted("job")
    assert (account["kind"], account["metadata"]["name"]) == ("ServiceAccount", job["metadata"]["name"])
    keys = [toleration["key"] for toleration in pod_spec(job)["tolerations"]]
    assert keys == ["ours", "nvidia.com/gpu"]


def test_a_base_with_keys_that_submit_does_not_apply_is_refused(edited: Path) -> None:
    with (edited / "job" / "kustomization.yaml").open("a") as file:
        file.write("namePrefix: my-\n")
    with refused("k8s/job", rule="namePrefix"):
        submitted("job")


def test_pods_of_a_ray_cluster_have_the_ray_of_their_image() -> None:
    version = next(thing for thing in built("prepare-ray") if thing["kind"] == "RayJob")["spec"]["rayClusterSpec"]
    locked = (K8S.parent / "requirements" / "ray.txt").read_text("utf-8")
    assert f"\nray=={version['rayVersion']} " in locked


def test_a_submitted_trainjob_fits_the_runtime() -> None:
    pod = pod_of(submitted("trainjob")[-1])["spec"]
    names = [volume["name"] for volume in pod["volumes"]]
    mounts = pod["containers"][0]["volumeMounts"]
    assert sorted(names) == sorted({mount["name"] for mount in mounts})
    assert len({mount["mountPath"] for mount in mounts}) == len(mounts)


def images(things: list[Thing]) -> list[str]:
    return [part["image"] for thing in things for part in mappings(thing) if isinstance(part.get("image"), str)]


@pytest.mark.parametrize("base", BASES)
def test_images_are_of_this_version_or_pinned(base: str) -> None:
    for image in images(built(base)):
        if image.startswith("llmrecipes:"):
            ray = "-all.ray" if base == "prepare-ray" else ""
            assert image == f"llmrecipes:{__version__}-cpu{ray}"  # as tools/build_image.py tags it
        else:
            assert re.search(r"@sha256:[0-9a-f]{64}$", image), image


@pytest.mark.parametrize("how", ["edit", "overlay"])
@pytest.mark.parametrize("base", RUNS.values())
def test_an_image_reaches_every_container(tmp_path: Path, base: str, how: str) -> None:
    if is_old() and base == RUNS["trainjob"]:
        pytest.xfail("kubectl 1.20 cannot set the image of a TrainJob; needs 1.21 or newer")
    name, _, digest = IMAGE.partition("@")
    chosen = {"images": [{"name": "llmrecipes", "newName": name, "digest": digest}]}
    folder = tmp_path / "mine"
    if how == "edit":  # what `kustomize edit set image` writes
        shutil.copytree(K8S / base, folder)
        written = yaml.safe_load((folder / "kustomization.yaml").read_text()) | chosen
    else:
        folder.mkdir()
        written = {("bases" if is_old() else "resources"): [os.path.relpath(K8S / base, folder.resolve())], **chosen}
        if (K8S / base / "images.yaml").exists():
            shutil.copy(K8S / base / "images.yaml", folder)
            written["configurations"] = ["images.yaml"]
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(written))
    assert {container["image"] for container in containers(workload(built(folder)))} == {IMAGE}


def test_no_digest_is_made_up() -> None:
    for path in K8S.glob("**/*.yaml"):
        text = path.read_text()
        assert "0" * 64 not in text, path
        # Only `submit` knows the digest that a run should record.
        assert "LLMRECIPES_IMAGE_DIGEST" not in text, path


def test_the_database_is_the_one_of_the_images() -> None:
    versions = (K8S.parent / "docker" / "versions.env").read_text()
    digest = re.search(r"^POSTGRES_IMAGE=.*@(sha256:\w+)$", versions, re.MULTILINE)
    assert digest
    assert digest[1] in (K8S / "mlflow" / "kustomization.yaml").read_text()


def test_who_submits_reads_no_secret() -> None:
    roles = [thing for thing in built("storage") if thing["kind"] == "Role"]
    assert roles
    for rule in (rule for role in roles for rule in role["rules"]):
        assert not {"secrets", "*"} & {*rule["resources"], *rule["verbs"], *rule["apiGroups"]}
