"""`llmrecipes submit --to k8s` as users type it: what is printed, what kubectl is given, and what is refused."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmrecipes.cli.app import run
from llmrecipes.launch.kubernetes.launcher import status_of
from llmrecipes.launch.kubernetes.objects import to_yaml
from llmrecipes.launch.kubernetes.pod import security_level
from tests.kubernetes_schemas import pod_templates, require_valid
from tests.refusals import require_message

IMAGE = f"registry.example.com/llmrecipes@sha256:{'0' * 64}"
COMMAND = [
    "submit",
    "gpt-tiny",
    "--to",
    "k8s",
    "--cluster",
    "laptop",
    "--nodes",
    "2",
    "--image",
    IMAGE,
    "--run-id",
    "r1",
]


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kubectl that keeps what it is given, and answers and ends as files beside it say."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "kubectl"
    program.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" > {folder}/arguments\n/bin/cat > {folder}/given\n'
        f"/bin/cat {folder}/answer\nexit $(/bin/cat {folder}/code)\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (folder / "answer").write_text("job.batch/gpt-tiny-r1 created\n")
    (folder / "code").write_text("0")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


def test_a_dry_run_prints_what_would_be_applied(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert run([*COMMAND, "--dry-run"]) == 0
    things = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [thing["kind"] for thing in things] == ["ConfigMap", "NetworkPolicy", "Service", "Job"]
    assert run([*COMMAND, "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["objects"] == things
    assert (told["ranks"], told["nodes"], told["submitted"], told["run_id"]) == (2, 2, False, "r1")


def test_a_dry_run_ends_with_what_the_pods_get_and_need(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["submit", "llama3-8b", *COMMAND[2:], "--cluster", "h100-ib", "--nodes", "1", "--dry-run", "--queue", "q"]
    assert run(asked) == 0
    told = capsys.readouterr()
    # YAML alone can be piped.
    assert [thing["kind"] for thing in yaml.safe_load_all(told.out)] == ["ConfigMap", "Job", "NetworkPolicy", "Job"]
    assert "HF_TOKEN" in told.err and "8 ranks" in told.err
    assert run([*asked, "--json", "--secret", "HF_TOKEN=huggingface"]) == 0
    summary = json.loads(capsys.readouterr().out)["summary"]
    assert summary["has_token"] is True
    assert summary["place"] == {"namespace": "default", "queue": "q", "security": "restricted"}


def test_kubectl_is_given_the_same(kubectl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*COMMAND, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert not (kubectl / "given").exists()
    assert run(COMMAND) == 0
    assert (kubectl / "given").read_text() == shown
    assert (kubectl / "arguments").read_text() == "apply\n--filename\n-\n"
    printed = capsys.readouterr().out
    assert printed.startswith("job default/job/gpt-tiny-r1-")
    assert "kubectl logs" in printed


@pytest.mark.parametrize(("enforced", "code"), [("restricted", 2), ("baseline", 2), ("privileged", 0), ("", 0)])
def test_a_namespace_that_admits_no_such_pods_is_named_before_anything_is_created(
    kubectl: Path, capsys: pytest.CaptureFixture[str], enforced: str, code: int
) -> None:
    """The Job would be created, and wait for pods that are never admitted."""
    (kubectl / "answer").write_text(enforced)
    assert run([*COMMAND, "--host-network"]) == code
    words = (kubectl / "arguments").read_text().split()
    assert words[:3] == (["get", "namespace", "default"] if code else ["apply", "--filename", "-"])
    if code:
        require_message(capsys.readouterr().err, "--namespace", rule="pod-security.kubernetes.io/enforce=privileged")


def test_a_namespace_that_may_not_be_read_is_left_to_the_cluster(kubectl: Path) -> None:
    program = kubectl / "kubectl"
    program.write_text(program.read_text().replace("exit $(", '[ "$1" = apply ] && exit 0\nexit $('))
    (kubectl / "code").write_text("1")
    assert run([*COMMAND, "--host-network"]) == 0


def test_a_refusal_is_shown_in_the_clusters_own_words(kubectl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = 'Error from server (NotFound): namespaces "research" not found'
    (kubectl / "answer").write_text(words)
    (kubectl / "code").write_text("1")
    assert run([*COMMAND, "--namespace", "research"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code"),
    [('unknown field "spec.x"', 2), ('admission webhook "site.example.com" does not support dry run', 0)],
)
def test_nothing_is_created_before_the_cluster_has_accepted_all(kubectl: Path, words: str, code: int) -> None:
    program = kubectl / "kubectl"
    refusal = f"case \"$*\" in *--dry-run=server) echo '{words}' >&2; exit 1;; esac\nprintf"
    program.write_text(program.read_text().replace("printf", refusal, 1))
    assert run(COMMAND) == code
    assert (kubectl / "arguments").exists() == (code == 0)


def test_without_kubectl_there_is_a_way_on(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert run(COMMAND) == 2
    require_message(capsys.readouterr().err, "kubectl", rule="--dry-run")


@pytest.mark.parametrize(
    ("more", "where", "rule"),
    [
        (["--to", "nomad"], "--to", "'nomad'"),
        (["--flavor", "pod"], "--flavor", "'pod'"),
        (["--cluster", "nowhere"], "nowhere", ()),
        (["--image", "llmrecipes:latest"], "--image", "NAME@sha256:DIGEST"),
        (["--namespace", "../up"], "--namespace", ()),
        (["--partition", "gpu"], "--partition", "--to"),
        (["--secret", "HF_TOKEN"], "--secret", "VARIABLE=SECRET"),
        (["--secret", "HF_TOKEN=hf_PlantedToken"], "--secret", "VARIABLE=SECRET"),
        (["--run-id", "../x"], "--run-id", "'../x'"),
        (["--topology", "rack"], "--topology", "--queue"),
        (["--tracking-uri", "http://me:word@mlflow"], "--tracking-uri", "--secret"),
        (["--flavor", "trainjob", "--host-network"], "--host-network", "--flavor"),
        (["--nodes", "0"], "--nodes", "1"),
        (["train.global_batch_size=17"], "train.global_batch_size", "17"),
        (["train.unknown=1"], "train.unknown", ()),
    ],
)
def test_bad_input_is_one_message_and_nothing_is_applied(
    kubectl: Path, capsys: pytest.CaptureFixture[str], more: list[str], where: str, rule: str | tuple[str, ...]
) -> None:
    assert run([*COMMAND, *more]) == 2
    said = capsys.readouterr()
    require_message(said.err, where, rule=rule)
    assert "PlantedToken" not in said.err + said.out
    assert not (kubectl / "given").exists()


def test_slurm_takes_none_of_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["submit", "gpt-tiny", "--to", "slurm", "--cluster", "laptop", "--queue", "q", "--dry-run"]
    assert run(command) == 2
    require_message(capsys.readouterr().err, "--queue", rule="--to")


def test_an_image_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["submit", "gpt-tiny", "--to", "k8s", "--cluster", "laptop", "--dry-run"]) == 2
    require_message(capsys.readouterr().err, "--image")


# -- tokenizing before GPUs are asked for -----------------------------------------------------------------------------

ON_GPUS = ["submit", "gpt-1b", *COMMAND[2:], "--cluster", "h100-ib"]
CLUSTER = r"""#!/bin/sh
# Keeps what is applied, and has a Job for preparing in the state that the file `job` says: none, Complete or Failed.
case "$*" in
    *--dry-run=server*|"get namespace"*) exec /bin/cat > /dev/null;;
    apply*) echo "$*" >> calls; /bin/cat > given; /bin/cat given >> applied; echo "---" >> applied
        case $(/bin/cat given) in *"kind: NetworkPolicy"*) ;; *) /bin/cp after job;; esac;;
    delete*) echo "$*" >> calls; echo none > job;;
    get*) echo get >> calls
        if [ "$(/bin/cat job)" = none ]; then echo '{"items": []}'; exit; fi
        name=${*#*in (}; name=${name%%)*}
        echo '{"items": [{"metadata": {"name": "'$name'"}, "status": {"conditions":'
        echo '[{"type": "'$(/bin/cat job)'", "status": "True", "reason": "BackoffLimitExceeded"}]}}]}';;
esac
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a kubectl that has one Job, which ends at once in the state of the file `after`."""
    program = tmp_path / "kubectl"
    program.write_text(CLUSTER)
    program.chmod(0o755)
    (tmp_path / "job").write_text("none")
    (tmp_path / "after").write_text("Complete")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def applied(cluster: Path) -> list[tuple[str, str]]:
    """Kinds and names in the order in which they were created."""
    path = cluster / "applied"
    things = yaml.safe_load_all(path.read_text()) if path.exists() else ()
    return [(thing["kind"], thing["metadata"]["name"]) for thing in things if thing]


def prepares(things: list[tuple[str, str]]) -> list[int]:
    return [at for at, (_, name) in enumerate(things) if name.endswith("-prepare")]


def calls(cluster: Path) -> list[str]:
    return [call.split()[0] for call in (cluster / "calls").read_text().splitlines()]


def test_gpus_are_asked_for_when_the_data_is_there(cluster: Path) -> None:
    """Otherwise all of them would wait while one pod tokenizes."""
    assert run(ON_GPUS) == 0
    things = applied(cluster)
    assert [kind for kind, _ in things] == ["ConfigMap", "Job", "ConfigMap", "NetworkPolicy", "Service", "Job"]
    assert prepares(things) == [1]
    assert calls(cluster) == ["get", "apply", "get", "apply"]


@pytest.mark.parametrize(
    ("job", "more", "expected"),
    [("Complete", [], ["get", "apply"]), ("none", ["--prepared"], ["apply"])],
    ids=["completed", "prepared"],
)
def test_nothing_is_tokenized_twice(cluster: Path, job: str, more: list[str], expected: list[str]) -> None:
    (cluster / "job").write_text(job)
    assert run([*ON_GPUS, *more]) == 0
    assert prepares(applied(cluster)) == []
    assert calls(cluster) == expected


def test_a_job_that_failed_before_starts_again(cluster: Path) -> None:
    (cluster / "job").write_text("Failed")
    assert run(ON_GPUS) == 0
    assert calls(cluster) == ["get", "delete", "apply", "get", "apply"]


def test_without_data_the_run_is_not_created(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (cluster / "after").write_text("Failed")
    assert run(ON_GPUS) == 2
    assert [kind for kind, _ in applied(cluster)] == ["ConfigMap", "Job"]
    error = capsys.readouterr().err
    assert "Traceback" not in error and "kubectl logs" in error


def test_pods_without_gpus_tokenize_themselves(cluster: Path) -> None:
    assert run(COMMAND) == 0
    assert prepares(applied(cluster)) == []


def test_several_pods_tokenize_as_a_ray_cluster(
    golden: Callable[[str, Any], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """None is root, all have limits, and only they and KubeRay reach them."""
    words = ["--prepare-nodes", "4", "--queue", "research", "--secret", "HF_TOKEN=hf", "--run-id", "first"]
    assert run([*ON_GPUS, *words, "--dry-run", "--json"]) == 0
    recipe, policy, job = json.loads(capsys.readouterr().out)["prepare_objects"]
    for thing in (recipe, policy, job):
        require_valid(thing)
    cluster = job["spec"]["rayClusterSpec"]
    [workers] = cluster["workerGroupSpecs"]
    assert {workers[name] for name in ("replicas", "minReplicas", "maxReplicas")} == {3}
    assert job["spec"]["entrypoint"] == "llmrecipes prepare --on ray /etc/llmrecipes/recipe.yaml"
    assert cluster["authOptions"] == {"mode": "token"}
    templates = list(pod_templates(job["spec"]))
    assert len(templates) == 3
    for template in templates:
        assert template["metadata"]["labels"].items() >= policy["spec"]["podSelector"]["matchLabels"].items()
        assert security_level(template["spec"]) == ("restricted", ())
        [container] = template["spec"]["containers"]
        assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
    golden("k8s-prepare-ray.yaml", to_yaml([policy, job]))


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({}, "pending"),
        ({"jobDeploymentStatus": "Suspended"}, "pending"),
        ({"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}, "running"),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}, "completed"),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "STOPPED"}, "failed"),
        ({"jobDeploymentStatus": "Failed", "jobStatus": "FAILED", "reason": "AppFailed"}, "failed"),
        ({"jobDeploymentStatus": "ValidationFailed"}, "failed"),
    ],
)
def test_states_of_a_ray_job(status: dict[str, str], state: str) -> None:
    assert status_of({"kind": "RayJob", "status": status}).state == state


@pytest.mark.parametrize("queue", [None, "research"])
@pytest.mark.parametrize("site", ["h100-ib", "gcp-a3", "aws-p5-efa"])
def test_the_job_that_tokenizes_is_valid_and_asks_for_no_gpu(
    site: str, queue: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [] if queue is None else ["--queue", queue]
    assert run([*ON_GPUS, "--cluster", site, "--secret", "HF_TOKEN=hf", "--dry-run", "--json", *more]) == 0
    told = json.loads(capsys.readouterr().out)
    recipe, job = told["prepare_objects"]
    assert recipe == told["objects"][0]
    require_valid(job)
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    resources = {name for part in container["resources"].values() for name in part}
    assert resources == {"cpu", "memory"}
    assert "nodeSelector" not in pod and not any("hostPath" in volume for volume in pod["volumes"])
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    claim = "llmrecipes-workspace"
    assert claim in {each.get("persistentVolumeClaim", {}).get("claimName") for each in pod["volumes"]}
    assert "HF_TOKEN" in {each["name"] for each in container["env"]}
    assert (job["spec"].get("suspend") is True) == (queue is not None)
    # Neither the Service nor the NetworkPolicy of the run selects it, nor do the logs of its ranks.
    assert job["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/instance"] == told["name"] + "-prepare"
