"""What runs inside a Slurm job, without Slurm."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llmrecipes.errors import ExitCode
from llmrecipes.hardware.binding import Binding
from llmrecipes.hardware.cluster import Cluster, DetectedGpu
from llmrecipes.launch.ranks import Rank
from llmrecipes.rundir import Run
from llmrecipes.workflow import slurm, start
from llmrecipes.workflow.restarts import require_progress
from llmrecipes.workflow.slurm import SlurmJob
from tests.helpers import environment, tiny, tiny_on, write_recipe
from tests.refusals import refused, require_message

TASK = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_CPUS_ON_NODE": "4", "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1", "MASTER_ADDR": "127.0.0.1",
}  # fmt: skip
PROFILE = """\
name: here
gpus_per_node: 0
cpu_cores: 4
memory_gib: 64
intra_node: {kind: memory, gb_per_s: 10}
inter_node: {kind: ethernet, gb_per_s: 0.1}
environment: {FROM_PROFILE: 1, SET_BY_USER: profile}
"""


def run(arguments: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """As the batch script starts it: with the signals that stop a run ignored."""
    calm = ["sh", "-c", 'trap "" USR1 TERM; exec "$@"', "sh"]
    return subprocess.run(
        [*calm, sys.executable, "-P", "-m", "llmrecipes.workflow.slurm", *arguments],
        env={**environment(), **TASK, **variables}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


@pytest.fixture
def arguments(tmp_path: Path, corpus: Path, data_dir: Path) -> list[str]:
    (tmp_path / "here.yaml").write_text(PROFILE)
    recipe = write_recipe(tiny_on(corpus), tmp_path)
    return [
        "begin", "--nodes", "1", "--ranks-per-node", "1", "--runs-dir", str(tmp_path / "runs"), "--data-dir",
        str(data_dir), "--run-id", "mine", "--cluster", str(tmp_path / "here.yaml"), "--", recipe,
        "train.train_iters=6",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_job_from_its_beginning_to_its_end(arguments: list[str], tmp_path: Path) -> None:
    begun = run(arguments, SLURM_RESTART_COUNT="2")
    assert begun.returncode == 0, begun.stderr
    path = tmp_path / "runs/tiny/mine/logs/job.json"
    assert begun.stdout == f"1 {path}\n"  # and nothing else, whatever preparing says
    job = SlurmJob.model_validate_json(path.read_text())
    assert job.run.restart == 2
    assert job.run.tags["slurm.restart_count"] == "2"
    assert job.environment == {"FROM_PROFILE": "1", "SET_BY_USER": "profile", "OMP_NUM_THREADS": "4"}
    done = run(["rank", str(path)], SET_BY_USER="user")
    assert done.returncode == 0, done.stderr
    assert (path.parent / "outcome").read_text() == "0\n"
    captured = json.loads((path.parents[1] / "env.json").read_text())
    assert captured["variables"]["SLURM_JOB_ID"] == "7"
    again = run(arguments)
    assert (again.returncode, again.stdout) == (0, "")


def test_bad_input_ends_with_2_and_one_message(arguments: list[str]) -> None:
    done = run([*arguments, "train.train_itres=1"])
    assert (done.returncode, done.stdout) == (2, "")
    require_message(done.stderr, "train.train_itres", rule="train.train_iters")


@pytest.mark.slow
def test_a_rank_outside_of_srun_is_refused(arguments: list[str], tmp_path: Path) -> None:
    path = Path(run(arguments).stdout.split()[1])
    done = run(["rank", str(path)], SLURM_PROCID="x")
    assert done.returncode == 2
    require_message(done.stderr, "srun", rule="slurm/train.sbatch")


@pytest.mark.parametrize(
    ("rank", "cores", "shown"), [(0, (1,), True), (7, (1,), True), (8, (1,), False), (8, (), True), (15, (), False)]
)
def test_the_binding_is_shown_of_one_node(
    rank: int, cores: tuple[int, ...], shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[int, int]] = []

    def bound(local_rank: int, ranks: int) -> Binding:
        asked.append((local_rank, ranks))
        return Binding(cores, reason="why")

    monkeypatch.setattr(slurm.binding, "bind", bound)
    slurm.bind(Rank(rank, 16, rank % 8, 8, "n1", 12000))
    assert asked == [(rank % 8, 8)]
    assert capsys.readouterr().out.startswith(f"rank {rank}: ") is shown


def test_a_rank_blocks_its_signals_before_it_loads_torch() -> None:
    """Ignored until then; blocked, one that arrives waits until training handles it; then they are ignored."""
    code = (
        "import os, signal, sys; from llmrecipes.workflow.slurm import hold_signals as hold;"
        "hold(); os.kill(os.getpid(), signal.SIGUSR1); os.kill(os.getpid(), signal.SIGTERM);"
        "print(sorted(signal.sigpending()) == [10, 15], 'torch' in sys.modules);"
        "from llmrecipes.faults.signals import catch_signals as catch;"
        "request = catch(str); print(request.__enter__().requested); request.__exit__(None, None, None);"
        "os.kill(os.getpid(), signal.SIGUSR1); os.kill(os.getpid(), signal.SIGTERM); print('closed')"
    )
    command = ["sh", "-c", 'trap "" USR1 TERM; exec "$@"', "sh", sys.executable, "-c", code]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.split() == ["True", "False", "True", "closed"], done.stderr


STOPS = tiny(train={"train_iters": 10, "early_stop": {"patience": 2}}).train


@pytest.mark.parametrize(
    ("status", "is_finished"),
    [
        ({"state": "finished", "step": 10}, True),
        ({"state": "finished", "step": 9}, False),  # train_iters has been raised since
        ({"state": "saved", "step": 10}, False),
        ({}, False),
        ({"state": "finished", "step": "10"}, False),
        ({"state": "finished", "step": 9, "ended_by": STOPS.stop_rules}, True),
        ({"state": "finished", "step": 9, "ended_by": {**STOPS.stop_rules, "target_loss": 2.0}}, False),
        ({"state": "saved", "step": 9, "ended_by": STOPS.stop_rules}, False),
    ],
)
def test_finished(status: dict[str, object], is_finished: bool, tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(json.dumps(status))
    assert Run(tmp_path).is_finished(STOPS) is is_finished


def test_restarts_without_progress_stop(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.create()
    for damaged in (b"no JSON", b"\xff", b"{}", b"[1]", b'[{"job": "7"}]'):
        run.starts.write_bytes(damaged)
        require_progress(run, "7", 0, 0, 100)
    run.starts.write_text("no JSON")
    for restart, step in enumerate([0, 0, 0, 5, 5, 5]):
        require_progress(run, "7", restart, step, 100)
    require_progress(run, "8", 0, 5, 100)  # somebody has looked at it and submits it anew
    for restart in (1, 2):
        require_progress(run, "8", restart, 5, 100)
    with refused(run.path, rule=("3", "5", "checkpoint.save_interval"), code=ExitCode.STOP):
        require_progress(run, "8", 3, 5, 100)
    with refused(run.path, rule=("3", "9", "2", "--max-restarts"), code=ExitCode.STOP):
        require_progress(run, "9", 3, 50, 2)


def test_ranks_on_detected_gpus_get_their_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus = (DetectedGpu("NVIDIA H100 80GB HBM3", 79 << 30, 79 << 30, None),) * 8
    monkeypatch.setattr(slurm, "detect", lambda: Cluster(gpus, 96, 1 << 40, 1 << 40, 1 << 40))
    monkeypatch.setattr(start, "prepare_data", lambda *_: None)
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "192")
    parallel = {"tensor_model_parallel_size": 2}
    recipe = write_recipe(tiny(layout=parallel, train={"global_batch_size": 16}), tmp_path)
    folders = ["--runs-dir", str(tmp_path / "runs"), "--data-dir", str(tmp_path / "data")]
    asked = ["begin", "--nodes", "2", "--ranks-per-node", "8", "--run-id", "mine", *folders]
    # Tokenizing would keep 16 GPUs waiting.
    assert slurm.main([*asked, "--", recipe]) == 2
    require_message(capsys.readouterr().err, "data", rule=("--prepare", "slurm/prepare.sbatch"))
    # What the doctor said in this job, on whose start the run's directory was not known yet.
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    (tmp_path / "runs" / ".doctor-7.jsonl").write_text('{"findings": []}\n')
    assert slurm.main([*asked, "--prepare", "--bind", "--", recipe]) == 0
    assert (tmp_path / "runs/tiny/mine/logs/doctor.jsonl").read_text() == '{"findings": []}\n'
    job = SlurmJob.model_validate_json(Path(capsys.readouterr().out.split()[1]).read_text("utf-8"))
    assert job.run.on_gpus and job.bind
    assert job.environment["OMP_NUM_THREADS"] == "16"
    assert job.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert job.environment["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "runs/tiny/mine/logs/collectives-rank-")
