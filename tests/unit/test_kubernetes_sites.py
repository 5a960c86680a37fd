"""What a cluster profile gives its pods: interfaces, devices, volumes, sidecars, claims, and the site's own patch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from llmrecipes.cli.app import build
from llmrecipes.hardware import profile
from llmrecipes.hardware.load import load_profile, names
from llmrecipes.launch.base import PlannedForCluster, Submission
from llmrecipes.launch.kubernetes import pod
from llmrecipes.launch.kubernetes.bases import Object
from llmrecipes.launch.kubernetes.launcher import KubernetesLauncher, objects_of
from llmrecipes.launch.kubernetes.objects import pod_spec
from llmrecipes.launch.kubernetes.settings import FLAVORS, KubernetesOptions, Secret
from llmrecipes.launch.rendezvous import TOKEN, job_hosts
from llmrecipes.workflow.submit import plan_for
from tests.kubernetes_schemas import require_valid
from tests.refusals import refused

IMAGE = f"registry.example.com/llmrecipes@sha256:{'7' * 64}"
NEEDS = {"gcp-a3": "privileged", "gcp-a3-ultra": "privileged"}
"""Pod Security Standard of the shipped profiles' pods, where `restricted` does not admit them."""
SMALL = ["layout.micro_batch_size=1", "train.global_batch_size=64"]
QUEUE = Path(__file__).parents[2] / "k8s" / "queue" / "queue.yaml"


def planned(cluster: str, nodes: int = 2, ranks_per_node: int | None = None, **kubernetes: Any) -> PlannedForCluster:
    """A small recipe on a site, with changes to the site's section `kubernetes`."""
    found = plan_for("gpt-tiny", SMALL, cluster, nodes, ranks_per_node)
    wanted = profile.Kubernetes.model_validate(
        {**found.profile.kubernetes.model_dump(exclude_defaults=True), **kubernetes}
    )
    return replace(found, profile=found.profile.model_copy(update={"kubernetes": wanted}))


def rendered(where: PlannedForCluster, flavor: str = "job", **options: Any) -> list[Object]:
    return objects_of(where, KubernetesOptions(image=IMAGE, flavor=flavor, namespace="llmrecipes", **options), "run-1")


def containers(objects: list[Object]) -> dict[str, Any]:
    spec = pod_spec(objects[-1])
    return {each["name"]: each for each in (*spec.get("initContainers", ()), *spec["containers"])}


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


def seen_by(objects: list[Object], tmp_path: Path, words: list[str]) -> Any:
    """The profile that the doctor of a pod reads, as the kubelet mounts it."""
    path = Path(words[words.index("--cluster") + 1])
    volume = next(each for each in pod_spec(objects[-1])["volumes"] if each["name"] == "recipe")
    item = next(each for each in volume["configMap"]["items"] if path == Path("/etc/llmrecipes") / each["path"])
    file = tmp_path / path.name
    file.write_text(objects[0]["data"][item["key"]], "utf-8")
    return load_profile(str(file))


# -- environment -----------------------------------------------------------------------------------------------------


def test_interfaces_of_the_node_do_not_reach_pods() -> None:
    """`ens32` does not exist in a pod, and gloo would not start."""
    node = variables(containers(rendered(planned("aws-p5-efa", environment={})))["node"])
    assert "GLOO_SOCKET_IFNAME" not in node
    assert node["NCCL_SOCKET_IFNAME"] == "^docker,lo,veth"  # excludes; need not exist
    assert node["FI_PROVIDER"] == "efa"
    shared = variables(containers(rendered(planned("aws-p5-efa"), host_network=True))["node"])
    assert shared["GLOO_SOCKET_IFNAME"] == "ens32"


@pytest.mark.parametrize("flavor", FLAVORS)
def test_pods_have_variables_of_their_own(flavor: str) -> None:
    site = planned("aws-p5-efa", environment={"GLOO_SOCKET_IFNAME": "eth0", "FI_PROVIDER": None, "A": 1})
    workload = rendered(site, flavor)[-1]
    container = workload["spec"]["trainer"] if flavor == "trainjob" else containers([workload])["node"]
    found = variables(container)
    assert (found["GLOO_SOCKET_IFNAME"], found["A"]) == ("eth0", "1")
    assert "FI_PROVIDER" not in found


def test_interfaces_that_pods_do_not_get_are_named() -> None:
    """A profile written before may have meant them for pods."""
    given = {"image": IMAGE, "secret": [], "flavor": "job", "namespace": "llmrecipes"}

    def warnings(where: PlannedForCluster, **options: Any) -> tuple[str, ...]:
        submission = Submission(where, "run-1", Path("/runs"), Path("/data"))
        return KubernetesLauncher().render(submission, {**given, **options}).warnings

    [told] = warnings(planned("aws-p5-efa", environment={}))
    assert "GLOO_SOCKET_IFNAME" in told and "NCCL_SOCKET_IFNAME" not in told
    assert warnings(planned("aws-p5-efa", environment={}), **{"host-network": True}) == ()
    assert [name for name in names() if warnings(planned(name))] == []


def test_the_network_of_the_node_has_the_interfaces_of_the_node() -> None:
    site = planned("aws-p5-efa", environment={"GLOO_SOCKET_IFNAME": "eth0"})
    assert variables(containers(rendered(site, host_network=True))["node"])["GLOO_SOCKET_IFNAME"] == "ens32"


# -- the check of the nodes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flavor", "stem"), [("job", "{0}-{1}.{0}"), ("jobset", "{0}-node-0-{1}.{0}")])
def test_the_doctor_of_a_pod_knows_the_site_and_all_nodes(tmp_path: Path, flavor: str, stem: str) -> None:
    objects = rendered(planned("h100-ib", nodes=4), flavor)
    doctor = containers(objects)["doctor"]
    words = doctor["args"]
    group: Any = typer.main.get_command(build())
    assert group.commands["doctor"].make_context("doctor", [*doctor["command"][2:], *words]).params["quiet"] is True
    name = objects[-1]["metadata"]["name"]
    hosts = job_hosts(words[words.index("--nodes") + 1])
    assert words[words.index("--run-id") + 1] == "run-1"
    assert hosts == tuple(stem.format(name, number) for number in range(4))
    assert variables(containers(objects)["node"])["MASTER_ADDR"] == hosts[0]
    profile = seen_by(objects, tmp_path, words)
    assert (profile.gpus_per_node, profile.inter_node.kind, profile.adapters.ports) == (8, "infiniband", 8)


def test_the_doctor_of_half_a_node_expects_half_of_it(tmp_path: Path) -> None:
    objects = rendered(planned("gb200-nvl72", ranks_per_node=2))
    profile = seen_by(objects, tmp_path, containers(objects)["doctor"]["args"])
    assert (profile.gpus_per_node, profile.adapters.ports, profile.nvlink_domain) == (2, 2, 72)


def test_the_doctor_judges_adapters_by_the_profile_and_not_as_the_users_own_choice(tmp_path: Path) -> None:
    objects = rendered(planned("coreweave-h100"))
    doctor, node = containers(objects)["doctor"], containers(objects)["node"]
    assert variables(node)["NCCL_IB_HCA"].startswith("=ibp0,")
    assert "NCCL_IB_HCA" not in variables(doctor)
    assert seen_by(objects, tmp_path, doctor["args"]).adapters.names[0] == "ibp0"
    virtual = rendered(planned("oci-h100"))  # whose pods have adapters with names of their own
    assert "NCCL_IB_HCA" not in variables(containers(virtual)["node"])
    assert "NCCL_IB_HCA" not in seen_by(virtual, tmp_path, containers(virtual)["doctor"]["args"]).environment


@pytest.mark.parametrize("flavor", ["job", "jobset"])
def test_pods_recognise_each_other_by_what_no_manifest_has(flavor: str) -> None:
    """The check of the nodes refuses strangers, and its secret is a field that the cluster fills in."""
    objects = rendered(planned("h100-ib", nodes=4), flavor)
    found = [container for container in containers(objects)["doctor"]["env"] if container["name"] == TOKEN]
    field = {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}}
    assert found == [{"name": TOKEN, "valueFrom": field}]
    assert TOKEN not in {container["name"] for container in containers(objects)["node"]["env"]}, (
        "ranks have no use for it"
    )
    chosen = rendered(planned("h100-ib", nodes=4), flavor, secrets={TOKEN: Secret("ours", "key")})
    [own] = [container for container in containers(chosen)["doctor"]["env"] if container["name"] == TOKEN]
    assert own["valueFrom"] == {"secretKeyRef": {"name": "ours", "key": "key"}}


def test_one_pod_meets_nobody_and_thousands_fit_into_an_argument() -> None:
    assert "--nodes" not in containers(rendered(planned("h100-ib", nodes=1)))["doctor"]["args"]
    words = containers(rendered(planned("laptop", nodes=8)))["doctor"]["args"]
    assert len(words[words.index("--nodes") + 1]) < 100


# -- quota -----------------------------------------------------------------------------------------------------------


def requests(workload: Object) -> dict[str, str]:
    """What Kueue counts: of init containers and containers the larger, which are the same here."""
    if workload["kind"] == "TrainJob":
        found: dict[str, str] = workload["spec"]["trainer"]["resourcesPerNode"]["requests"]
        return found
    return dict(containers([workload])["node"]["resources"]["requests"])


@pytest.mark.parametrize("cluster", [name for name in names() if load_profile(name).gpus_per_node])
def test_the_queue_admits_two_nodes_of_every_shipped_site(cluster: str) -> None:
    """Kueue never admits a workload that asks for a resource without quota."""
    units = {"Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}

    def amount(text: str) -> int:
        return int(text[:-2]) * units[text[-2:]] if text[-2:] in units else int(text)

    queue = next(each for each in yaml.safe_load_all(QUEUE.read_text()) if each["kind"] == "ClusterQueue")
    [group] = queue["spec"]["resourceGroups"]
    quota = {each["name"]: amount(str(each["nominalQuota"])) for each in group["flavors"][0]["resources"]}
    assert list(quota) == group["coveredResources"], "the same resources in the same order"
    asked = requests(rendered(planned(cluster), queue="llmrecipes")[-1])
    assert {name: amount(text) * 2 > quota.get(name, 0) for name, text in asked.items()} == dict.fromkeys(asked, False)


# -- what else a site has --------------------------------------------------------------------------------------------

EVERYTHING: dict[str, Any] = {
    "annotations": {"k8s.v1.cni.cncf.io/networks": "default/rdma"},
    "volumes": [
        {"name": "plugin", "host_path": "/opt/plugin", "mount_path": "/opt/plugin", "read_only": True},
        {"name": "scratch", "empty_dir": "100Gi", "mount_path": "/scratch"},
        {"name": "sets", "claim": "sets", "mount_path": "/sets"},
        {"name": "sys", "host_path": "/sys"},
    ],
    "tolerations": [{"key": "reserved", "operator": "Equal", "value": "us", "effect": "NoExecute"}],
    "hugepages": {"2Mi": "5Gi"},
}
OF_A_POD: dict[str, Any] = {
    "sidecars": [
        {"name": "daemon", "image": "example.com/daemon:1", "volumeMounts": [{"name": "sys", "mountPath": "/h"}]}
    ],
    "resource_claims": [{"name": "nics", "template": "nics"}, {"name": "one", "claim": "shared"}],
    "priority_class": "high",
}


@pytest.mark.parametrize("flavor", FLAVORS)
def test_what_a_site_gives_its_pods_is_valid_and_there(flavor: str) -> None:
    more = {} if flavor == "trainjob" else OF_A_POD
    objects = rendered(planned("h100-ib", **EVERYTHING, **more), flavor, topology="rack", queue="q")
    for thing in objects:
        require_valid(thing)
    spec = pod_spec(objects[-1])
    assert requests(objects[-1])["hugepages-2Mi"] == "5120Mi"
    assert spec["tolerations"][-1] == EVERYTHING["tolerations"][0]
    found = {each["name"]: each for each in spec["volumes"]}
    assert found["plugin"] == {"name": "plugin", "hostPath": {"path": "/opt/plugin"}}
    assert found["scratch"]["emptyDir"] == {"sizeLimit": "100Gi"}
    assert found["sets"]["persistentVolumeClaim"] == {"claimName": "sets"}
    mounts = {container["name"]: container for container in containers(objects)["node"]["volumeMounts"]}
    assert mounts["plugin"] == {"name": "plugin", "mountPath": "/opt/plugin", "readOnly": True}
    assert "sys" not in mounts
    assert "k8s.v1.cni.cncf.io/networks" in json.dumps(objects[-1])
    if flavor == "trainjob":
        return
    assert spec["priorityClassName"] == "high"
    assert spec["resourceClaims"] == [
        {"name": "nics", "resourceClaimTemplateName": "nics"},
        {"name": "one", "resourceClaimName": "shared"},
    ]
    # A sidecar that were a container would keep the Job's pod from completing.
    assert [each["name"] for each in spec["initContainers"]] == ["doctor", "daemon"], "the doctor wants idle GPUs"
    assert spec["initContainers"][1]["restartPolicy"] == "Always"
    for name in ("doctor", "node"):
        assert containers(objects)[name]["resources"]["claims"] == [{"name": "nics"}, {"name": "one"}]


def test_half_a_node_takes_half_of_the_huge_pages() -> None:
    assert requests(rendered(planned("aws-p5-efa", ranks_per_node=4))[-1])["hugepages-2Mi"] == "2560Mi"


def test_nodes_of_an_nvlink_domain_share_a_channel() -> None:
    objects = rendered(planned("gb200-nvl72", nodes=4), "jobset")
    for thing in objects:
        require_valid(thing)
    domain = next(object_ for object_ in objects if object_["kind"] == "ComputeDomain")
    template = domain["spec"]["channel"]["resourceClaimTemplate"]["name"]
    [claim] = pod_spec(objects[-1])["resourceClaims"]
    assert claim["resourceClaimTemplateName"] == template
    assert {"name": claim["name"]} in containers(objects)["node"]["resources"]["claims"]
    assert "ComputeDomain" not in [each["kind"] for each in rendered(planned("gb200-nvl72", nodes=1))]


@pytest.mark.parametrize("key", [*OF_A_POD, "patch"])
def test_a_trainjob_takes_the_rest_from_its_runtime(key: str) -> None:
    with refused("--flavor trainjob", rule=f"kubernetes.{key}"):
        rendered(planned("h100-ib", **{key: {**OF_A_POD, "patch": {"spec": {"hostPID": True}}}[key]}), "trainjob")
    with refused("--flavor trainjob", rule="kubernetes.compute_domain"):
        rendered(planned("gb200-nvl72"), "trainjob")


# -- a site's own patch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flavor", ["job", "jobset"])
def test_a_patch_is_merged_as_kubernetes_merges(flavor: str) -> None:
    """Containers, variables and volumes by their names; kustomize would replace the lists of a JobSet."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: apt-get install kubernetes-client")
    patch = {
        "metadata": {"labels": {"team": "us"}},
        "spec": {
            "schedulerName": "binpack",
            "containers": [{"name": "node", "env": [{"name": "HOME", "value": "/elsewhere"}], "tty": True}],
            "volumes": [{"name": "shm", "$patch": "delete"}, {"name": "shm2", "emptyDir": {}}],
        },
    }
    plain, objects = rendered(planned("h100-ib"), flavor), rendered(planned("h100-ib", patch=patch), flavor)
    for thing in objects:
        require_valid(thing)
    spec, before = pod_spec(objects[-1]), pod_spec(plain[-1])
    assert spec["schedulerName"] == "binpack"
    node, unpatched = containers(objects)["node"], containers(plain)["node"]
    assert variables(node) == {**variables(unpatched), "HOME": "/elsewhere"}
    assert node["tty"] is True
    assert [node[key] for key in ("image", "command", "args", "resources")] == [
        unpatched[key] for key in ("image", "command", "args", "resources")
    ]
    assert [each["name"] for each in spec["initContainers"]] == [each["name"] for each in before["initContainers"]]
    assert {each["name"] for each in spec["volumes"]} == {each["name"] for each in before["volumes"]} - {"shm"} | {
        "shm2"
    }
    assert '"team": "us"' in json.dumps(objects[-1])
    assert list(spec)[: len(before)] == list(before), "the order of the keys stays readable"


def test_a_patch_that_kubectl_rejects_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: apt-get install kubernetes-client")
    for containers in ([{"image": "without-a-name"}], "none", [{"name": "node", "$patch": "delete"}]):
        with refused("kubernetes.patch of h100-ib"):
            rendered(planned("h100-ib", patch={"spec": {"containers": containers}}))
    monkeypatch.setenv("PATH", "/nowhere")
    with refused("kubectl"):
        rendered(planned("h100-ib", patch={"spec": {"tty": True}}))


# -- rights ----------------------------------------------------------------------------------------------------------


# Not as a TrainJob: see test_a_trainjob_takes_the_rest_from_its_runtime.
NO_TRAINJOB = {"gb200-nvl72", "gcp-a3"}
RENDERED = [(name, flavor) for name in names() for flavor in FLAVORS if flavor != "trainjob" or name not in NO_TRAINJOB]


@pytest.mark.parametrize(("cluster", "flavor"), RENDERED)
@pytest.mark.rotating
def test_rights_of_pods_follow_from_the_fabric(cluster: str, flavor: str) -> None:
    """InfiniBand, RoCE and EFA work without a right of the pod; the container runtime allows locked memory."""
    where = planned(cluster)
    objects = rendered(where, flavor)
    for thing in objects:
        require_valid(thing)
    assert "IPC_LOCK" not in json.dumps(objects)
    assert pod.security_level(pod_spec(objects[-1]))[0] == NEEDS.get(cluster, "restricted")


@pytest.mark.parametrize(
    ("change", "level"),
    [
        ({"hostNetwork": True}, "privileged"),
        ({"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}, "privileged"),
        ({"initContainers": [{"name": "i", "securityContext": {"privileged": True}}]}, "privileged"),
        ({"initContainers": [{"name": "i", "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}]}, "privileged"),
        ({"initContainers": [{"name": "i"}]}, "baseline"),
        ({"securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "Unconfined"}}}, "privileged"),
        ({"securityContext": {"runAsNonRoot": True}}, "baseline"),
        ({"securityContext": {"seccompProfile": {"type": "RuntimeDefault"}}}, "baseline"),
        ({"volumes": [{"name": "v", "nfs": {"server": "s", "path": "/"}}]}, "baseline"),
        ({}, "restricted"),
    ],
)
def test_levels_are_those_of_the_pod_security_standards(change: dict[str, Any], level: str) -> None:
    own = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    spec: dict[str, Any] = {
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [{"name": "node", "securityContext": own}],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    assert pod.security_level(spec | change)[0] == level


# -- profiles with mistakes ------------------------------------------------------------------------------------------

PROFILE = """\
name: mine
gpus_per_node: 0
cpu_cores: 8
memory_gib: 64
intra_node: {kind: memory, gb_per_s: 10}
inter_node: {kind: ethernet, gb_per_s: 1}
kubernetes:
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "mine.yaml"
        path.write_text(PROFILE + text, "utf-8")
        return str(path)

    return write


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("  environment: {LD_PRELOAD: /x.so}", "kubernetes.environment.LD_PRELOAD"),
        ("  environment: {HF_TOKEN: hf_x}", "kubernetes.environment.HF_TOKEN"),
        ("  annotations: {'a b': x}", "kubernetes.annotations.a b"),
        ("  volumes: [{name: v, mount_path: /v}]", "kubernetes.volumes.0"),
        ("  volumes: [{name: v, host_path: /v, claim: c}]", "kubernetes.volumes.0"),
        ("  resource_claims: [{name: c}]", "kubernetes.resource_claims.0"),
        ("  sidecars: [{image: i}]", "kubernetes.sidecars.0.name"),
        ("  tolerations: [{key: k, value: v}]", "kubernetes.tolerations.0.value"),
        ("  tolerations: [{operator: Equal, value: v}]", "kubernetes.tolerations.0.key"),
        ("  hugepages: {2Mi: five}", "kubernetes.hugepages.2Mi"),
        ("  hugepages: {1Gi: 1Mi}", "kubernetes.hugepages.1Gi"),
        ("  annotations: {llmrecipes/run-id: x}", "kubernetes.annotations.llmrecipes/run-id"),
        ("  node_selector: {a b: c}", "kubernetes.node_selector.a b"),
        ("  node_selector: {a: b c}", "kubernetes.node_selector.a"),
        ("  sidecars: [{name: A_b, image: i}]", "kubernetes.sidecars.0.name"),
        ("  sidecars: [{name: a}]", "kubernetes.sidecars.0.image"),
        ("  patch: {kind: Pod}", "kubernetes.patch.kind"),
    ],
)
def test_what_is_wrong_is_named(write: Callable[[str], str], text: str, where: str) -> None:
    with refused(where):
        load_profile(write(text))


@pytest.mark.parametrize(
    ("text", "where", "name"),
    [
        ("  volumes: [{name: shm, host_path: /v}]", "kubernetes.volumes", "'shm'"),
        ("  volumes: [{name: v, host_path: /v, mount_path: /workspace}]", "kubernetes.volumes", "/workspace"),
        ("  volumes: [{name: v1, host_path: /v}, {name: v1, host_path: /w}]", "kubernetes.volumes", "v1"),
        (
            "  compute_domain: true\n  resource_claims: [{name: imex-channel, claim: c}]",
            "kubernetes.resource_claims",
            "imex-channel",
        ),
        ("  sidecars: [{name: node, image: i}]", "kubernetes.sidecars", "'node'"),
        ("  priority_class: High!", "kubernetes.priority_class", "High!"),
    ],
)
def test_names_that_are_taken_or_no_names(write: Callable[[str], str], text: str, where: str, name: str) -> None:
    with refused(where, rule=name):
        load_profile(write(text))


def test_a_size_of_pages_that_does_not_exist_is_told_those_that_do(write: Callable[[str], str]) -> None:
    with refused("kubernetes.hugepages.4Mi", rule="'1Gi'"):
        load_profile(write("  hugepages: {4Mi: 4Gi}"))


def test_the_users_topology_wins_over_the_sites() -> None:
    key = "kueue.x-k8s.io/podset-preferred-topology"
    objects = rendered(planned("h100-ib", annotations={key: "rack"}), topology="block", queue="q")
    assert objects[-1]["spec"]["template"]["metadata"]["annotations"][key] == "block"
