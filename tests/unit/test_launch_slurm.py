"""What is rendered for Slurm and submitted to it."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmrecipes.cli import app as cli
from llmrecipes.hardware.load import load_profile
from llmrecipes.hardware.machine import machine
from llmrecipes.hardware.slurm_words import gpus_of, limit_seconds
from llmrecipes.launch.launcher_options import SLURM, fields, options_of
from llmrecipes.launch.programs import tell
from llmrecipes.launch.slurm.sbatch import (
    LONGEST,
    SHORTEST,
    as_text,
    command,
    notice,
    prepare_command,
    script_text,
)
from llmrecipes.launch.slurm.slurm_options import SlurmOptions, SlurmRequest
from llmrecipes.recipe.load import load
from llmrecipes.train.spec import RunSpec
from llmrecipes.workflow.run import plan_run
from llmrecipes.workflow.start import Machine, PreparedStart
from llmrecipes.workflow.submit import plan_for
from tests.refusals import refused, require_message

SCRIPT = Path("slurm/train.sbatch")
HOSTILE = [
    "$(touch owned)", "`touch owned`", "a'b", 'a"b', "a b", "a\nb", "x\n#SBATCH --account=root", "; touch owned #",
    "../../etc/passwd", "%j", "\\", "*", "~", "-n9", "--wrap=touch owned", "ü", "a=b=c", "",
]  # fmt: skip


def rendered(
    cluster: str = "h100-ib",
    nodes: int = 4,
    recipe: str = "gpt-7b",
    *changes: str,
    elastic: bool = False,
    **options: Any,
) -> tuple[str, ...]:
    planned = plan_for(recipe, list(changes) if elastic else [], cluster, nodes)
    runs = Path("/shared/runs")
    request = SlurmRequest(
        (recipe, *changes), cluster, nodes, "run-1", runs, Path("/shared/data"), runs / recipe / "run-1"
    )
    return command(request, planned.plan, planned.profile, SlurmOptions(**{"warning": 180, **options}), SCRIPT)


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


def test_golden_of_nodes_that_tokenize(golden: Callable[[str, Any], None]) -> None:
    planned = plan_for("gpt-7b", [], "h100-ib", 4)
    runs = Path("/shared/runs")
    request = SlurmRequest(
        ("gpt-7b",), "h100-ib", 4, "run-1", runs, Path("/shared/data"), runs / planned.recipe.name / "run-1"
    )
    options = SlurmOptions(warning=180, prepare_partition="cpu", prepare_nodes=3)
    first = prepare_command(request, planned.profile, options, Path("slurm/prepare.sbatch"))
    words = command(request, planned.plan, planned.profile, options, SCRIPT)
    golden("slurm-prepare-nodes.sh", script_text(request.run_dir / "logs", words, first))


def test_every_option_of_slurm_reaches_sbatch() -> None:
    values: dict[str, Any] = {
        "runtime": "apptainer",
        "prepare-nodes": 3,
        "warning": 187,
        "max-restarts": 19,
        "time": "7:03:01",
    }
    values |= {name: f"seen-{name}" for name in options_of(SLURM) - values.keys() - {"sbatch"}}
    options = SlurmOptions(**fields(values), more=("--nice=seen",))
    planned, runs = plan_for("gpt-7b", [], "h100-ib", 4), Path("/runs")
    request = SlurmRequest(("gpt-7b",), "h100-ib", 4, "r", runs, Path("/data"), runs / "gpt-7b" / "r")
    words = " ".join(command(request, planned.plan, planned.profile, options, SCRIPT))
    first = " ".join(prepare_command(request, planned.profile, options, SCRIPT))
    lost = {name for name, value in values.items() if str(value) not in (first if "prepare" in name else words)}
    assert not lost and "--nice=seen" in words
    both = ("account", "qos", "time", "image", "python")
    assert all(str(values[name]) in first for name in both) and "--nice=seen" in first


@pytest.mark.parametrize("partition", [None, "cpu"])
def test_the_job_that_tokenizes_gets_what_a_node_without_gpus_can_have(partition: str | None) -> None:
    planned, runs = plan_for("gpt-7b", [], "h100-ib", 4), Path("/runs")
    site = planned.profile.slurm.model_copy(
        update={"qos": "gold", "time": "4:00:00", "cpu_partition": None, "sbatch": ("--comment=x", "--gpus-per-node=8")}
    )
    request = SlurmRequest(("gpt-7b",), "h100-ib", 4, "r", runs, Path("/data"), runs / "gpt-7b" / "r")
    options = SlurmOptions(more=("--gres=gpu:8", "--mail-user=a", "--partition=big"), prepare_partition=partition)
    profile = planned.profile.model_copy(update={"slurm": site})
    words = set(prepare_command(request, profile, options, SCRIPT))
    assert {"--comment=x", "--mail-user=a"} <= words
    assert not {"--gpus-per-node=8", "--gres=gpu:8", "--partition=big"} & words
    # Limits of the profile are those of its own partition.
    assert ({"--qos=gold", "--time=4:00:00"} <= words) == (partition is None)


def shell_words(text: str, folder: Path) -> list[str]:
    """What a shell hands to sbatch."""
    script = f"sbatch() {{ printf '%s\\0' \"$@\"; }}\n{text}\n"
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize(
    ("nodes", "elastic", "counts", "least"),
    [
        (4, "[4,16]", "1,2,4", "1"),  # 3 nodes have 12 replicas, which do not divide 1024 / 4 micro-batches
        (2, "[4,64]", "1-2", "1"),
        (4, "[8,64]", "2,4", "2"),
        (4, "[16,64]", "4", None),
    ],
)
def test_an_elastic_job_takes_the_numbers_of_nodes_that_its_ranks_fill(
    nodes: int, elastic: str, counts: str, least: str | None
) -> None:
    words = rendered("h100-ib", nodes, "gpt-7b", f"train.elastic={elastic}", elastic=True)
    assert f"--nodes={counts}" in words
    assert (words[words.index("--min-nodes") + 1] if "--min-nodes" in words else None) == least
    assert words[words.index("--ranks-per-node") + 1] == "8"


def test_golden_of_an_elastic_job(golden: Callable[[str, Any], None]) -> None:
    words = rendered("gb200-nvl72", 32, "gpt-7b", "train.elastic=[16,64]", elastic=True)
    golden("slurm-elastic.sh", as_text(words) + "\n")


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
        ({"image": "images/x.sqsh"}, "--image", (".sqsh", str(Path("images/x.sqsh").absolute()))),
        ({"image": "/images/x.sif"}, "--image", ".sif"),
        ({"image": "/images/x.sqsh", "runtime": "apptainer"}, "--image", ".sif"),
        ({"prepare_partition": "-x"}, "--prepare-partition", ()),
        ({"more": ("--array=0-3",)}, "--sbatch", "--array=0-3"),
        ({"more": ("-a0-3",)}, "--sbatch", "--name=value"),
        ({"more": ("--comment=a\n#SBATCH",)}, "--sbatch", "--name=value"),
        ({"time": "2", "warning": 121}, "--time", ("120", "121")),
        ({"time": "1:30", "warning": 121}, "--time", ("120", "121")),  # Slurm rounds up to 2 minutes
        ({"time": "10", "warning": 900}, "--time", ("600", "900")),
        ({"time": "0:05:00", "warning": 240}, "--time", "300"),  # Slurm may warn a minute early
        ({"time": "8:00:00", "warning": 121, "more": ("--time=2",)}, "--sbatch", "120"),
        ({"more": ("--time=soon",)}, "--sbatch", "--time=soon"),
        ({"more": ("--nodes=4",)}, "--sbatch", "--nodes"),
        ({"more": ("--signal=B:USR1@60",)}, "--sbatch", "--warning"),
        ({"more": ("--sig=B:USR1@60",)}, "--sbatch", "--warning"),  # sbatch takes any unambiguous beginning
        ({"more": ("--output=x",)}, "--sbatch", "--output=x"),
        ({"more": ("--ntasks-per-node=4",)}, "--sbatch", "--ranks-per-node"),
        ({"more": ("--wait",)}, "--sbatch", "--wait"),
        ({"more": ("--test-only",)}, "--sbatch", "--dry-run"),
        ({"more": ("--gres=gpu:4",)}, "--sbatch", ("--gres=gpu:4", "8")),
        ({"more": ("--gres=nvme:1",)}, "--sbatch", ("--gres=nvme:1", "8")),  # replaces the profile's
        ({"more": ("--gpus-per-node=h100:4",)}, "--sbatch", ("--gpus-per-node=h100:4", "8")),
        ({"more": ("--gpus=8",)}, "--sbatch", ("--gpus=8", "32")),
    ],
)
def test_options_that_slurm_would_reject_are_refused(
    options: dict[str, Any], where: str, rule: str | tuple[str, ...]
) -> None:
    with refused(where, rule=rule):
        rendered(**options)


def test_options_that_agree_with_the_plan_are_passed_on() -> None:
    more = ("--gres=gpu:h100:8,nvme:1", "--gpus=32", "--wait-all-nodes=1", "--ntasks-per-core=1", "--time=0", "--hold")
    words = rendered(time="4", warning=121, more=more)
    assert words[words.index("--hold") - len(more) + 1 : words.index("--hold") + 1] == more


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 1800), ("1:30", 120), ("8:00:00", 28800), ("2-0", 172800), ("1-2:03", 93780), ("1-02:03:04", 93840),
     ("0", None), ("UNLIMITED", None), ("infinite", None), ("NONE", None)],
)  # fmt: skip
def test_time_limits_as_slurm_reads_them(text: str, seconds: int | None) -> None:
    assert limit_seconds(text) == seconds


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [("gpu:8", 8), ("gpu", 1), ("gpu:h100", 1), ("gpu:h100:8", 8), ("gpu:a:2,nvme:1,gpu:b:3", 5), ("gres/gpu=4", 4),
     ("gpu_shard:8", None), ("nvme:1", None)],
)  # fmt: skip
def test_gpus_of_generic_resources(gres: str, gpus: int | None) -> None:
    assert gpus_of(gres) == gpus


def test_a_profile_has_the_defaults_of_its_site(tmp_path: Path) -> None:
    keys = {
        "account": "research", "qos": "high", "time": "4:00:00", "sbatch": ["--mail-type=FAIL"],
        "setup": ["module load cuda"],
    }  # fmt: skip
    own = yaml.safe_load(Path("recipes/clusters/h100-ib.yaml").read_text())
    own |= {"name": "own", "slurm": {**own["slurm"], **keys}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
    cluster = str(tmp_path / "own.yaml")
    words = rendered(cluster)
    assert {"--account=research", "--qos=high", "--time=4:00:00", "--mail-type=FAIL"} <= set(words)
    assert words[words.index("--setup") + 1] == "module load cuda"
    assert {"--account=other", "--time=1:00:00"} <= set(rendered(cluster, account="other", time="1:00:00"))
    with refused("slurm.time", rule="120"):
        own["slurm"]["time"] = "2"
        (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
        rendered(cluster)
    own["slurm"] |= {"time": "2:00:00", "gres": "gpu:4"}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
    with refused("slurm.gres", rule=("gpu:4", "8")):
        load_profile(cluster)


@pytest.mark.parametrize("folder", ["/a\\b", "/a\nb"])
def test_paths_that_slurm_would_misread_are_refused(folder: str) -> None:
    planned = plan_for("gpt-7b", [], "h100-ib", 4)
    request = SlurmRequest(("gpt-7b",), "h100-ib", 4, "r", Path(folder), Path("/d"), Path(folder))
    with refused(repr(folder), rule="--output"):
        command(request, planned.plan, planned.profile, SlurmOptions(), SCRIPT)
    request = SlurmRequest(("gpt-7b",), "h100-ib", 4, "r", Path("/a,b"), Path("/d"), Path("/a,b"))
    with refused("/a,b"):
        command(request, planned.plan, planned.profile, SlurmOptions(image="x"), SCRIPT)


def test_percent_signs_in_paths_and_odd_numbers_of_nodes() -> None:
    planned = plan_for("gpt-7b", ["train.global_batch_size=952"], "gb200-nvl72", 17)
    request = SlurmRequest(("gpt-7b",), "c", 17, "r", Path("/100%j"), Path("/d"), Path("/100%j/r"))
    words = command(request, planned.plan, planned.profile, SlurmOptions(), SCRIPT)
    assert "--output=/100%%j/r/logs/slurm-%j.out" in words
    assert "--segment=1" in words  # 17 nodes are no multiple of anything smaller


def test_nodes_change_data_parallelism_only() -> None:
    plans = [plan_for("gpt-7b", [], "h100-ib", nodes).plan.largest for nodes in (1, 4, 16)]
    assert [plan.layout.data_parallel_size for plan in plans] == [4, 16, 64]
    assert len({plan.layout.tensor_model_parallel_size for plan in plans}) == 1
    assert len({plan.tokens_per_step for plan in plans}) == 1


@pytest.mark.parametrize(
    ("arguments", "where", "rule"),
    [
        (["gpt-7b"], "--cluster", "h100-ib,"),
        (["gpt-7b", "--cluster", "nope"], "nope", ()),
        (["gpt-7b", "--cluster", "h100-ib", "--nodes", "3"], "train.global_batch_size", ()),
        (["llama3-405b", "--cluster", "ethernet", "--nodes", "2"], "layout.tensor_model_parallel_size", ()),
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
    assert capsys.readouterr().out.startswith("mkdir -p ")
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
    fuller = "layout.bias_activation_fusion=false"
    asked = ["submit", "llama3-70b", fuller, "--cluster", "h100-ib", "--nodes", "8", "--time", "8:00:00", "--dry-run"]
    assert cli.run(asked) == 0
    told = capsys.readouterr()
    assert shlex.split(told.out.replace("\\\n", " "))[0] == "mkdir"  # the commands alone can be piped
    assert "prepare-%j.out" in told.out and "tokenize" in told.err and "516 s" in told.err
    for what in (
        "64 × NVIDIA H100",
        "78.0 GiB of 79.1 GiB",
        "8:00:00",
        "meta-llama/Meta-Llama-3-70B",
        "headroom is 1.4%",
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


def sbatch_that(folder: Path, does: str = "") -> None:
    """An sbatch that, like Slurm, creates no folder, and numbers the jobs from 1 on; with a log of its words."""
    program(
        folder, "sbatch",
        f'for word; do case $word in --output=*) log=${{word#--output=}}; [ -d "${{log%/*}}" ] || exit 9;; esac; done\n'
        f'{does}\nfor word; do printf "%s\\0" "$word"; done >> "{folder}/jobs"; printf "\\1" >> "{folder}/jobs"\n'
        f'tr -cd "\\1" < "{folder}/jobs" | wc -c | sed "s/ //g; s/$/;lab/"',
    )  # fmt: skip


def jobs(folder: Path) -> list[list[str]]:
    return [job.split("\0")[:-1] for job in (folder / "jobs").read_text().split("\1")[:-1]]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


PARTITIONS = """\
PartitionName=train AllowGroups=ALL AllowAccounts=ALL Default=YES QoS=N/A DefaultTime=NONE Hidden=NO \
MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 Nodes=n[1-3] State=UP TotalCPUs=6 TotalNodes=3 JobDefaults=(null)
PartitionName=big AllowGroups=ALL AllowAccounts=ALL Default=NO QoS=N/A DefaultTime=00:02:00 Hidden=NO \
MaxNodes=4 MaxTime=01:00:00 MinNodes=0 Nodes=n[4-12] State=UP TotalCPUs=18 TotalNodes=9 JobDefaults=(null)
"""
"""As Slurm 22.05 prints them, without most fields."""


@pytest.mark.parametrize(
    ("options", "where", "rule"),
    [
        (["--nodes", "4"], "--nodes", ("4", "3", "--partition", "big")),
        (["--nodes", "16", "--partition", "train,big"], "--nodes", ("16", "3", "9")),
        (["--nodes", "4", "--partition", "train,big", "--time", "30"], "", ()),
        (["--nodes", "4", "--partition", "train,big"], "partition big", "120"),  # the only one that is large enough
        (["--nodes", "2"], "", ()),
        (["--nodes", "16", "--partition", "train,hidden"], "", ()),
        (["--nodes", "4", "--partition", "big"], "partition big", "120"),
        (["--nodes", "8", "--partition", "big", "--time", "2:00:00"], "", ("4", "8", "01:00:00")),
        (["--partition", "nope"], "sbatch", ("train", "big")),
    ],
)
def test_a_job_that_could_never_start_is_refused(
    programs: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, options: list[str],
    where: str, rule: tuple[str, ...],
) -> None:  # fmt: skip
    sbatch_that(programs, 'case "$*" in *nope*) exit 1;; esac')
    program(programs, "scontrol", f"cat <<'END'\n{PARTITIONS}END")
    code = cli.run(["submit", "gpt-7b", "--cluster", "h100-ib", "--sbatch=--dependency=singleton", *options])
    told = capsys.readouterr().err + caplog.text
    if where:
        assert code == 2 and not (programs / "jobs").exists()
        require_message(told, where)
        assert not list(Path("runs").rglob("*/logs"))
    else:
        assert code == 0 and len(jobs(programs)) == 1
    assert all(word in told for word in rule)


def test_a_cluster_that_does_not_answer_leaves_it_to_sbatch(programs: Path) -> None:
    sbatch_that(programs)
    program(programs, "scontrol", "exit 1")
    assert cli.run(["submit", "gpt-7b", "--cluster", "h100-ib", "--nodes", "4"]) == 0


def test_an_answer_of_sbatch_that_names_no_job_is_an_error(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program(programs, "sbatch", "echo sbatch 22.05.8")
    assert cli.run(["submit", "gpt-7b", "--cluster", "h100-ib"]) == 2
    require_message(capsys.readouterr().err, "sbatch", rule="22.05.8")


def test_what_a_dry_run_prints_can_be_pasted(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder of the log is made, and tokenizing comes first."""
    sbatch_that(programs)
    assert cli.run(["submit", "gpt-7b", "--cluster", "h100-ib", "--run-id", "mine", "--dry-run"]) == 0
    text = capsys.readouterr().out
    done = subprocess.run(["bash", "-euc", text], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "2;lab\n"), done.stderr
    prepare, train = jobs(programs)
    assert any(word.endswith("/slurm/prepare.sbatch") for word in prepare)
    assert {"--dependency=afterok:1", "--kill-on-invalid-dep=yes"} <= set(train)
    assert not any("$" in word for word in train)


def test_a_job_knows_why_it_has_its_layout(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It gets the keys that were chosen when it was submitted, and the reason through the run's directory."""
    sbatch_that(programs)
    where = ["--cluster", "h100-ib", "--run-id", "mine"]
    assert cli.run(["submit", "gpt-1b", "--nodes", "1", *where]) == 0
    said = capsys.readouterr().err.splitlines()
    _, words = jobs(programs)
    name, *overrides = words[words.index("gpt-1b") :]
    assert overrides == ["layout.name=null", "layout.micro_batch_size=8"]

    def chosen(*others: str) -> dict[str, Any] | None:
        recipe = load(name, [*overrides, *others]).recipe
        site = machine(load_profile("h100-ib"), 1)
        run_dir = Path("runs/gpt-1b/mine").absolute()
        spec = RunSpec(recipe=recipe, data_dir=Path("data"), run_dir=run_dir, runs_dir=run_dir.parents[1])
        return PreparedStart.of(spec, plan_run(recipe, site, 8), Machine(site, 8)).spec.chosen

    found = chosen()
    assert found is not None
    assert f"layout auto: {found['text']}" in said
    assert found["layout"] == "MBS8"
    assert chosen("layout.micro_batch_size=4") is None, "it is not that layout any more"


def test_several_nodes_tokenize(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Submitted, or pasted from a dry run."""
    submit = ["submit", "gpt-7b", "--cluster", "h100-ib", "--run-id", "mine", "--prepare-nodes", "3"]
    for pasted in (False, True):
        sbatch_that(programs)
        assert cli.run([*submit, *(["--dry-run"] if pasted else [])]) == 0
        if pasted:
            subprocess.run(["bash", "-euc", capsys.readouterr().out], capture_output=True, check=True)
        prepare, train = jobs(programs)
        assert "--nodes=3" in prepare and "--dependency=afterok:1" in train
        (programs / "jobs").unlink()
        capsys.readouterr()
    assert cli.run(["submit", "gpt-tiny", "--to", "local", "--prepare-nodes", "2"]) == 2
    require_message(capsys.readouterr().err, "--prepare-nodes")


def test_tokenizing_is_a_job_of_its_own_without_gpus(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sbatch_that(programs)
    submit = ["submit", "gpt-7b", "--cluster", "h100-ib", "--nodes", "4", "--partition", "gpu"]
    assert cli.run([*submit, "--prepare-partition", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("job 2;lab: ")
    prepare, train = jobs(programs)
    assert "--partition=cpu" in prepare and "--partition=gpu" in train
    assert not any(word.startswith(("--gres", "--nodes", "--switches")) for word in prepare)
    assert prepare[-1] == "gpt-7b"
    assert prepare[prepare.index("--data-dir") + 1] == str(Path("data").absolute())
    assert "--dependency=afterok:1" in train
    # Not for a job that waits for something else by its user's wish, nor where no GPU would wait.
    (programs / "jobs").unlink()
    assert cli.run([*submit, "--sbatch=--dependency=singleton"]) == 0
    assert cli.run(["submit", "gpt-tiny", "--cluster", "laptop"]) == 0
    assert [[word for word in job if word.startswith("--dependency")] for job in jobs(programs)] == [
        ["--dependency=singleton"],
        [],
    ]


def test_the_job_that_tokenizes_is_cancelled_if_the_run_is_refused(
    programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sbatch_that(programs, 'case "$*" in *train.sbatch*) echo refused-by-slurm >&2; exit 1;; esac')
    program(programs, "scancel", f'echo "$*" > "{programs}/cancelled"')
    assert cli.run(["submit", "gpt-7b", "--cluster", "h100-ib"]) == 2
    assert "refused-by-slurm" in capsys.readouterr().err
    assert (programs / "cancelled").read_text() == "--clusters=lab 1\n"


def test_a_job_asks_for_as_few_switches_as_its_nodes_need() -> None:
    def asked(nodes: int) -> list[str]:
        return [word for word in rendered("h100-ib", nodes) if word.startswith("--switches")]

    assert [asked(nodes) for nodes in (1, 32, 64)] == [[], ["--switches=1@00:10:00"], ["--switches=2@00:10:00"]]
    assert any(word == "--segment=16" for word in rendered("gb200-nvl72", 32))


def test_the_warning_follows_from_what_a_save_takes(tmp_path: Path) -> None:
    planned = plan_for("llama3-70b", [], "h100-ib", 8)
    site = load_profile("h100-ib")
    taken = planned.plan.checkpoint_bytes / (site.storage_gb_per_s * 1e9)
    found = notice(planned.plan, site, tmp_path, None)
    assert 2 * taken + SHORTEST <= found.seconds <= 2 * taken + SHORTEST + 1
    faster = site.model_copy(update={"storage_gb_per_s": 100 * site.storage_gb_per_s})
    assert notice(planned.plan, faster, tmp_path, None).seconds < found.seconds
    small = plan_for("gpt-125m", [], "h100-ib", 1).plan
    assert notice(small, site, tmp_path, None).seconds < 180
    assert notice(planned.plan, site, tmp_path, 42).seconds == 42
    run = tmp_path / planned.plan.recipe.name / "earlier"
    run.mkdir(parents=True)
    saves = [
        {"event": "checkpoint_saved", "step": step, "seconds": seconds} for step, seconds in ((20, 80), (40, 95.5))
    ]
    steps = [{"step": step, "step_seconds": seconds} for step, seconds in ((1, 300), (2, 14.5), (3, 12))]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*steps, *saves]))
    measured = notice(planned.plan, site, tmp_path, None)
    assert (measured.seconds, "earlier" in measured.reason) == (SHORTEST + 2 * 110, True)
    saves[0]["seconds"] = 1e6
    (run / "metrics.jsonl").write_text(json.dumps(saves[0]) + "\n")
    assert notice(planned.plan, site, tmp_path, None).seconds == LONGEST
