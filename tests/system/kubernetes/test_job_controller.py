"""Rendered objects on a real API server, and what the real Job controller makes of them."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.cli.app import run as run_command
from llmrecipes.hardware.load import names
from llmrecipes.launch.base import JobState, JobStatus
from llmrecipes.launch.kubernetes.launcher import objects_of, status_of
from llmrecipes.launch.kubernetes.objects import pod_spec, to_yaml
from llmrecipes.launch.kubernetes.pod import LEVELS, admits, security_level
from llmrecipes.launch.kubernetes.settings import KubernetesOptions
from llmrecipes.workflow.submit import plan_for
from tests.system.kubernetes.control import Cluster, Object, control_plane

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
IMAGE = f"registry.example.com/llmrecipes@sha256:{'7' * 64}"
SMALL = ["layout.micro_batch_size=1", "train.global_batch_size=64"]
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with control_plane(tmp_path_factory.mktemp("kubernetes")) as made:
        yield made


@pytest.fixture(scope="module")
def levels(cluster: Cluster) -> dict[str, str]:
    """A namespace for each Pod Security Standard."""
    return {level: cluster.namespace(f"is-{level}", level) for level in LEVELS}


@pytest.fixture
def namespace(cluster: Cluster) -> str:
    return cluster.namespace(f"test-{next(NUMBERS)}")


def rendered(namespace: str, site: str = "laptop", nodes: int = 2, **options: Any) -> list[Object]:
    wanted = KubernetesOptions(image=IMAGE, namespace=namespace, **options)
    return objects_of(plan_for("gpt-tiny", SMALL, site, nodes), wanted, "run-1")


class Submitted:
    """A Job on the cluster."""

    def __init__(self, cluster: Cluster, objects: list[Object]) -> None:
        self.cluster = cluster
        self.namespace, self.name = (objects[-1]["metadata"][key] for key in ("namespace", "name"))
        cluster("apply", "--filename=-", text=to_yaml(objects))

    def get(self) -> Object:
        return self.cluster.get("job", f"-n{self.namespace}", self.name)

    def status(self) -> JobStatus:
        return status_of(self.get())

    def counted(self) -> int:
        return int(self.get()["status"].get("failed", 0))

    def pods(self, number: int = 2, other_than: dict[int, Object] | None = None) -> dict[int, Object]:
        """Its pods once there are so many, all started; none of `other_than` among them."""
        before = {each["metadata"]["uid"] for each in (other_than or {}).values()}

        def there() -> dict[int, Object]:
            found = self.cluster.pods(self.namespace)
            new = [each for each in found.values() if each["metadata"]["uid"] not in before]
            return found if len(new) == number else {}

        found: dict[int, Object] = self.cluster.wait(there)
        for each in found.values():
            self.cluster.start_pod(each)
        return found

    def end(self, state: JobState) -> JobStatus:
        self.cluster.wait(lambda: self.status().state is state)
        return self.status()


# -- what the API server accepts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("site", names())
def test_objects_of_every_site_are_accepted_without_a_warning(cluster: Cluster, namespace: str, site: str) -> None:
    """Unknown fields, rules that a schema cannot express, and deprecated fields."""
    objects = [each for each in rendered(namespace, site) if each["kind"] != "ComputeDomain"]  # needs NVIDIA's driver
    printed = cluster("apply", "--dry-run=server", "--validate=strict", "--filename=-", text=to_yaml(objects))
    assert printed.count("created (server dry run)") == len(printed.splitlines()) == len(objects)


@pytest.mark.parametrize("site", names())
def test_admission_has_the_same_opinion_as_the_preview(cluster: Cluster, levels: dict[str, str], site: str) -> None:
    """The real admission of Pod Security Standards, each level."""
    template = rendered("default", site)[-1]["spec"]["template"]
    template["spec"].pop("priorityClassName", None)
    needed, _ = security_level(template["spec"])
    for enforced in LEVELS:
        pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(template)}
        pod["metadata"] |= {"name": "pod", "namespace": levels[enforced]}
        printed = cluster("create", "--dry-run=server", "--filename=-", text=json.dumps(pod), check=False)
        assert ("violates PodSecurity" not in printed) == admits(enforced, needed), printed
        assert "violates PodSecurity" in printed or "created" in printed, printed


# -- restarts --------------------------------------------------------------------------------------------------------


def test_pods_that_saved_restart_and_are_not_counted(cluster: Cluster, namespace: str) -> None:
    job = Submitted(cluster, rendered(namespace, max_restarts=0))
    before = job.pods()
    assert [before[index]["spec"]["hostname"] for index in (0, 1)] == [f"{job.name}-0", f"{job.name}-1"]
    assert {each["spec"]["subdomain"] for each in before.values()} == {job.name}
    cluster.wait(lambda: job.status().state is JobState.RUNNING)
    for pod in before.values():
        cluster.end_pod(pod, 75)
    after = job.pods(other_than=before)
    assert sorted(after) == [0, 1]
    assert job.counted() == 0
    for pod in after.values():
        cluster.end_pod(pod, 0)
    assert job.end(JobState.COMPLETED).exit_code == 0


def test_disrupted_pods_restart_and_are_not_counted(cluster: Cluster, namespace: str) -> None:
    job = Submitted(cluster, rendered(namespace, max_restarts=0))
    before = job.pods()
    cluster.end_pod(before[0], 143, disrupted=True)
    job.pods(number=1, other_than=before)
    assert job.counted() == 0


@pytest.mark.parametrize("code", [2, 93])
def test_what_would_fail_again_ends_the_run_at_once(cluster: Cluster, namespace: str, code: int) -> None:
    job = Submitted(cluster, rendered(namespace))
    pods = job.pods()
    cluster.end_pod(pods[1], code)
    status = job.end(JobState.FAILED)
    assert status.exit_code == code
    assert "PodFailurePolicy" in status.reason
    cluster.wait(lambda: not cluster.pods(namespace))


def test_other_failures_are_counted_and_end_the_run(cluster: Cluster, namespace: str) -> None:
    """As often as --max-restarts times the pods, and once more."""
    job = Submitted(cluster, rendered(namespace, nodes=1, max_restarts=1))
    first = job.pods(1)
    cluster.end_pod(first[0], 143)
    second = job.pods(1, other_than=first)
    assert job.counted() == 1
    cluster.wait(lambda: job.status().state is JobState.RUNNING)
    cluster.end_pod(second[0], 1)
    status = job.end(JobState.FAILED)
    assert "BackoffLimitExceeded" in status.reason


def test_a_pod_is_replaced_when_it_has_ended_and_not_before(cluster: Cluster, namespace: str) -> None:
    """Two pods of one rank would write the same checkpoint."""
    job = Submitted(cluster, rendered(namespace, max_restarts=0))
    before = job.pods()
    name = before[0]["metadata"]["name"]
    # As on a node: the kubelet has not ended it yet.
    keep = {"metadata": {"finalizers": ["example.com/kubelet"]}}
    cluster("patch", "pod", f"-n{namespace}", name, "--type=merge", "--patch", json.dumps(keep))
    cluster("delete", "pod", f"-n{namespace}", name, "--wait=false")
    cluster.wait(lambda: job.get()["status"].get("terminating") == 1)
    assert list(cluster.pods(namespace)) == [1]
    cluster.end_pod(before[0], 75)
    job.pods(number=1, other_than=before)


def test_a_queued_run_has_no_pods_until_it_is_admitted(cluster: Cluster, namespace: str) -> None:
    """What Kueue does with the field: to admit, and to preempt."""
    job = Submitted(cluster, rendered(namespace, queue="llmrecipes"))
    place = ("job", f"-n{namespace}", job.name, "--type=merge", "--patch")
    cluster.wait(lambda: job.status().reason == "suspended")
    assert not cluster.pods(namespace)
    cluster("patch", *place, '{"spec": {"suspend": false}}')
    job.pods()
    cluster.wait(lambda: job.status().state is JobState.RUNNING)
    cluster("patch", *place, '{"spec": {"suspend": true}}')
    cluster.wait(lambda: not cluster.pods(namespace))
    assert job.status().state is JobState.PENDING
    cluster("patch", *place, '{"spec": {"suspend": false}}')
    job.pods()
    assert job.counted() == 0


def test_pods_have_host_names_before_they_are_ready(cluster: Cluster, namespace: str) -> None:
    """Ranks look up the first pod while it still checks its node."""
    job = Submitted(cluster, rendered(namespace))
    pods: dict[int, Object] = cluster.wait(lambda: len(found := cluster.pods(namespace)) == 2 and found)
    for pod in pods.values():
        cluster.report(pod, phase="Pending", podIP="10.0.0.7", podIPs=[{"ip": "10.0.0.7"}])

    def hosts() -> set[str]:
        slices = cluster.get("endpointslices", f"-n{namespace}")["items"]
        return {str(each.get("hostname")) for one in slices for each in one.get("endpoints") or ()}

    cluster.wait(lambda: hosts() == {f"{job.name}-0", f"{job.name}-1"})
    # The rendezvous of the rendered pods is one of these names.
    env = {each["name"]: each.get("value") for each in pod_spec(job.get())["containers"][0]["env"]}
    assert env["MASTER_ADDR"] == f"{job.name}-0.{job.name}"


# -- the commands ----------------------------------------------------------------------------------------------------


@pytest.fixture
def command(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`llmrecipes` as a member of the group in k8s/storage, who has no other right."""
    cluster("apply", "--kustomize", str(ROOT / "k8s" / "storage"))
    config = json.loads(cluster.kubeconfig.read_text())
    config["users"][0]["user"] |= {"as": "somebody", "as-groups": ["llmrecipes"]}
    limited = tmp_path / "kubeconfig"
    limited.write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(limited))
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> int:
        return run_command(list(words))

    return run


def submitted(run_id: str, *more: str) -> tuple[str, ...]:
    words = ("--to", "k8s", "--nodes", "2", "--cluster", "laptop", "--namespace", "llmrecipes", "--image", IMAGE)
    return ("submit", "gpt-tiny", *SMALL, *words, "--run-id", run_id, *more)


def test_a_run_is_submitted_listed_and_cancelled_with_the_rights_of_the_role(
    cluster: Cluster, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*submitted("one")) == 0
    capsys.readouterr()
    cluster.wait(lambda: len(cluster.pods("llmrecipes")) == 2)
    assert command("cancel", "one") == 0
    cluster.wait(lambda: not cluster.pods("llmrecipes"))
    assert not cluster.get("jobs", "-nllmrecipes")["items"]
    # The same run again: what `cancel` left is no obstacle.
    assert command(*submitted("one")) == 0
    cluster.wait(lambda: len(cluster.pods("llmrecipes")) == 2)
    assert command("cancel", "one") == 0
    cluster.wait(lambda: not cluster.pods("llmrecipes"))


def test_what_the_server_rejects_leaves_nothing_behind(
    cluster: Cluster, command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A patch that kubectl merges and that is no pod: the Job is the last object to be created."""
    profile = {
        "name": "mine", "gpus_per_node": 0, "cpu_cores": 8, "memory_gib": 64,
        "intra_node": {"kind": "memory", "gb_per_s": 10}, "inter_node": {"kind": "ethernet", "gb_per_s": 1},
        "kubernetes": {"patch": {"spec": {"tolerationss": []}}},
    }  # fmt: skip
    (tmp_path / "mine.yaml").write_text(json.dumps(profile))
    words = [word if word != "laptop" else str(tmp_path / "mine.yaml") for word in submitted("two")]
    assert command(*words) == 2
    assert "tolerationss" in capsys.readouterr().err
    kinds = "configmaps,networkpolicies,services,jobs"
    left = cluster.get(kinds, "-nllmrecipes", "--selector=app.kubernetes.io/name=llmrecipes")["items"]
    assert not [each["metadata"]["name"] for each in left if "two" in each["metadata"]["name"]]
