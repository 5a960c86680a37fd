"""A Slurm cluster for the tests of this folder, and a run that can be handed to it."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.launch.record import JobRecord, read
from llmrecipes.recipe.schema import Recipe
from tests.helpers import ROOT, tiny_on, train_lines, write_recipe
from tests.system.slurm.daemons import PROGRAMS, Lab, cluster, missing

PROFILE = """\
name: lab
gpus_per_node: 0
cpu_cores: 2
memory_gib: 64
intra_node: {kind: memory, gb_per_s: 10}
inter_node: {kind: ethernet, gb_per_s: 0.1}
environment:
  GLOO_SOCKET_IFNAME: eth0
"""

IMPATIENT = """\
from llmrecipes.cli.app import main
from llmrecipes.launch.slurm.launcher import SlurmLauncher
from llmrecipes.launch import job
SlurmLauncher.poll_seconds = 1.0
job.HELD_SECONDS = 5.0
main()
"""
"""`llmrecipes`, which asks for its jobs every second; a cluster of many users it would ask every 15 s."""

STEPS = 100
"""Steps of the run that is interrupted: some seconds are left at each interruption."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = f"{Path(__file__).parent}/"
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.system)


@dataclass
class Waiting:
    """A `submit --wait` that runs."""

    job: str
    run_dir: Path
    process: subprocess.Popen[str]

    def end(self, timeout: float = 60) -> tuple[int, dict[str, Any], list[str]]:
        """Its exit code, its answer, and the states that it has told."""
        printed, told = self.process.communicate(timeout=timeout)
        states = [line[9:] for line in told.splitlines() if line[2:3] == line[5:6] == ":"]
        assert printed, told
        return self.process.returncode, json.loads(printed), states


@dataclass
class Site:
    """A cluster, and a folder on its shared disk from which jobs are submitted."""

    lab: Lab
    folder: Path
    data_dir: Path

    @property
    def variables(self) -> dict[str, str]:
        """What users of this checkout have in their environment."""
        return {**self.lab.variables, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def llmrecipes(self, *arguments: str, code: int = 0, **variables: str) -> str:
        """Run the program, which waits for jobs impatiently; returns what it printed."""
        done = subprocess.run(
            [sys.executable, "-c", IMPATIENT, *arguments], env={**self.variables, **variables},
            cwd=self.folder, capture_output=True, text=True, timeout=400, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def submit(self, recipe: Recipe, run_id: str, *arguments: str, nodes: int = 2) -> tuple[str, Path]:
        """Submit a recipe; returns the number of the job and the run's directory."""
        printed = self.llmrecipes(
            "submit", write_recipe(recipe, self.folder), "--cluster", str(self.folder / "lab.yaml"),
            "--nodes", str(nodes), "--run-id", run_id, "--data-dir", str(self.data_dir), "--json", *arguments,
        )  # fmt: skip
        answer = json.loads(printed)
        return answer["job_id"], Path(answer["run_dir"])

    @contextmanager
    def waiting(self, recipe: Recipe, run_id: str, *arguments: str, nodes: int = 2) -> Iterator[Waiting]:
        """Submit a recipe with --wait; the block has the job, and the result after it has ended."""
        words = [
            "submit", write_recipe(recipe, self.folder), "--cluster", str(self.folder / "lab.yaml"), "--nodes",
            str(nodes), "--run-id", run_id, "--data-dir", str(self.data_dir), "--wait", "--json", *arguments,
        ]  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-c", IMPATIENT, *words], env=self.variables, cwd=self.folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        run_dir = self.folder / "runs" / recipe.name / run_id
        try:

            def look() -> JobRecord | None:
                assert process.poll() is None, process.communicate()
                return read(run_dir)

            record = self.lab.until(look, f"{run_id} was not submitted", 60)
            yield Waiting(record.ref.job_id, run_dir, process)
        finally:
            process.kill()
            process.wait()

    def python_that(self, case: str = "", *, doctor: bool = False) -> str:
        """A Python that does something else first, where its arguments match a case of the shell's `case`.

        Args:
            case: the shell's.
            doctor: whether the nodes are checked before each start; without, they are well.
        """
        program = self.folder / "python"
        cases = "".join(f"{words};; " for words in ("" if doctor else '*" doctor "*) exit 0', case) if words)
        program.write_text(f'#!/bin/sh\ncase "$*" in {cases}esac\nexec {shlex.quote(sys.executable)} "$@"\n')
        program.chmod(0o755)
        return str(program)

    def sbatch(self, *arguments: str, code: int = 0, **variables: str) -> str:
        """Run sbatch by hand; returns what it printed."""
        done = subprocess.run(
            ["sbatch", *arguments], env={**self.variables, **variables}, cwd=self.folder, capture_output=True,
            text=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return (done.stdout + done.stderr).strip()

    def log(self, run_dir: Path, job: str) -> str:
        """What a job has printed."""
        return (run_dir / f"logs/slurm-{job}.out").read_text("utf-8", "replace")

    def finish(self, job: str, run_dir: Path, state: str = "COMPLETED") -> dict[str, str]:
        """Wait until a job has ended; it has to end like this."""
        fields = self.lab.wait(job, "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", timeout=400)
        assert fields["JobState"] == state, f"{fields}\n{self.log(run_dir, job)}\n{self.lab.state()}"
        return fields

    def wait_for_step(self, job: str, run_dir: Path, step: int) -> None:
        """Wait until the run has done a step; it must not have ended then."""

        looks = itertools.count()

        def look() -> bool | None:
            if next(looks) % 20 == 0:
                assert self.lab.job(job)["JobState"] in ("PENDING", "RUNNING", "COMPLETING"), self.log(run_dir, job)
            return True if any(line["step"] >= step for line in train_lines(run_dir)) else None

        self.lab.until(look, f"job {job} has not done step {step}", pause=0.1)

    def wait_for_restart(self, job: str, number: int) -> None:
        """Wait until Slurm has put a job back into its queue so many times."""
        self.lab.until(
            lambda: True if int(self.lab.job(job)["Restarts"]) >= number else None,
            f"job {job} was not restarted {number} times",
        )


@pytest.fixture(scope="session")
def lab(pyxis: Path | None) -> Iterator[Lab]:
    """Three nodes of two cores, with the double of pyxis where it could be compiled."""
    if lacks := missing(PROGRAMS):
        pytest.skip(f"Slurm: {lacks}")
    with cluster(3, 2, spank=f"required {pyxis}" if pyxis else "") as started:
        yield started


@pytest.fixture(scope="session")
def pyxis(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """The compiled double of pyxis, or None without a C compiler or Slurm's headers."""
    if missing({"gcc": "gcc"}) or not Path("/usr/include/slurm/spank.h").exists():
        return None
    library = tmp_path_factory.mktemp("pyxis") / "pyxis_double.so"
    source = Path(__file__).with_name("pyxis_double.c")
    compile_it = ["gcc", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", str(library), str(source)]
    done = subprocess.run(compile_it, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return library


@pytest.fixture
def new_site(tmp_path: Path, data_dir: Path) -> Callable[[Lab], Site]:
    def new(lab: Lab) -> Site:
        (tmp_path / "lab.yaml").write_text(PROFILE, "utf-8")
        return Site(lab, tmp_path, data_dir)

    return new


@pytest.fixture
def site(lab: Lab, new_site: Callable[[Lab], Site]) -> Iterator[Site]:
    """The cluster, without a job at the start and at the end."""
    yield new_site(lab)
    lab.run("scancel", "--user", str(os.getuid()))
    lab.until(lambda: True if not lab.run("squeue", "--noheader").stdout else None, "jobs are left", 60)


@pytest.fixture(scope="session")
def recipe(corpus: Path) -> Recipe:
    """Steps that take a tenth of a second each."""
    return tiny_on(
        corpus,
        train={"train_iters": STEPS, "global_batch_size": 32, "eval_interval": 50, "log_interval": 25},
        checkpoint={"save_interval": 20},
    )
