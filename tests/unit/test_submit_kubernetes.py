"""`llmrecipes submit --to k8s` as users type it: what is printed, what kubectl is given, and what is refused."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import yaml

from llmrecipes.cli.app import run
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
    assert [thing["kind"] for thing in yaml.safe_load_all(told.out)] == ["ConfigMap", "NetworkPolicy", "Job"]
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
