"""Trainings on two nodes of a real Slurm: whatever ends a job, the run goes on and ends with the same numbers."""

from __future__ import annotations

import json
import shlex
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Recipe
from tests.helpers import checkpoint_values, curve, largest_difference, lines, saved_steps, train_lines, write_recipe
from tests.refusals import require_message
from tests.system.slurm.conftest import STEPS, Site

Curve = list[tuple[Any, ...]]
Whole = Callable[[int], Curve]


@pytest.fixture
def whole(site: Site, recipe: Recipe, shared: Path) -> Whole:
    """The curve of the uninterrupted run with so many ranks a node; the first process that asks for it trains it."""

    def trained(ranks: int) -> Curve:
        kept = shared / f"slurm-whole-{ranks}.json"
        with FileLock(f"{kept}.lock"):
            if not kept.exists():
                job, run_dir = site.submit(recipe, f"whole-{ranks}", "--ranks-per-node", str(ranks))
                site.finish(job, run_dir)
                assert f"{2 * ranks} × CPU" in site.log(run_dir, job)
                kept.write_text(json.dumps(curve(run_dir)))
        return [tuple(line) for line in json.loads(kept.read_text())]

    return trained


def restarts(run_dir: Path) -> list[int]:
    """Steps from which a run went on, in the order of the restarts."""
    return [line["step"] for line in lines(run_dir) if line.get("event") == "restarted"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_nodes(whole: Whole, ranks: int) -> None:
    assert whole(ranks)[-1][0] == STEPS
    if ranks > 1:
        one, several = ([line[1] for line in whole(number) if line[1] is not None] for number in (1, ranks))
        assert largest_difference(one, several) < 1e-5


@pytest.mark.deepspeed
@pytest.mark.rotating
def test_zero_trains_as_one_process_of_the_other_engine(site: Site, corpus: Path) -> None:
    """ZeRO-3 on two nodes; a warning in between, so that its checkpoint is loaded."""
    sharded = load(
        "gpt-tiny-zero",
        [
            f"data.sources={json.dumps([{'type': 'text', 'path': str(corpus)}])}", "data.split=[90, 5, 5]",
            "model.vocab_size=512", "model.seq_length=64", "train.train_iters=24", "train.eval_iters=2",
            "tracking.mlflow=false", "tracking.tensorboard=false",
            # As in tests/dist/table.py: neither Adam nor clipping by DeepSpeed's norm may turn noise into full steps.
            "optimizer.adam_eps=1e-2", "optimizer.clip_grad=0",
        ],
    ).recipe  # fmt: skip
    job, run_dir = site.submit(sharded, "sharded", "--partition", "spot", "--python", site.python_that())
    plain = sharded.model_copy(update={"name": "whole"}).with_layout(zero=None, engine="megatron")
    site.wait_for_step(job, run_dir, 5)
    warn(site, job, run_dir)
    folders = ["--runs-dir", str(site.folder / "runs"), "--data-dir", str(site.data_dir)]
    site.llmrecipes("train", write_recipe(plain, site.folder), "--nproc", "1", "--run-id", "one", *folders)
    assert site.finish(job, run_dir)["Restarts"] == "1", site.log(run_dir, job)
    [resumed] = restarts(run_dir)
    assert 5 <= resumed < 24
    one = site.folder / "runs/whole/one"
    expected, found = ([line["loss"] for line in train_lines(folder)] for folder in (one, run_dir))
    assert largest_difference(expected, found) < 1e-5
    last = "checkpoints/step-00000024"
    saved = checkpoint_values(one / last)
    of_zero = checkpoint_values(run_dir / last)
    assert saved.keys() == of_zero.keys()
    for name in (name for name in saved if name.endswith(".weight")):
        assert torch.dist(of_zero[name], saved[name]) < 1e-4 * saved[name].norm(), name


def test_the_controller_is_away_while_a_job_trains(site: Site, recipe: Recipe, whole: Whole) -> None:
    """The run does not notice; who waits for it asks again until it answers."""
    with site.waiting(recipe, "controller-away") as waiting:
        site.wait_for_step(waiting.job, waiting.run_dir, 5)
        site.lab.stop_controller()
        try:
            then = train_lines(waiting.run_dir)[-1]["step"]
            site.lab.until(
                lambda: True if train_lines(waiting.run_dir)[-1]["step"] >= min(then + 30, STEPS) else None,
                "the run does not go on without slurmctld",
            )
            assert waiting.process.poll() is None
        finally:
            site.lab.start_controller()
        assert site.finish(waiting.job, waiting.run_dir)["Restarts"] == "0"
        code, answer, states = waiting.end()
    assert (code, answer["state"], answer["result"]["step"]) == (0, "completed", STEPS)
    assert states[-1] == "completed"
    assert curve(waiting.run_dir) == whole(1)


@pytest.mark.rotating
def test_requeued_three_times(site: Site, recipe: Recipe, whole: Whole) -> None:
    """One run, one MLflow run, which knows how often it was restarted; and one job for who waits for it."""
    with site.waiting(recipe, "requeued", "tracking.mlflow=true", "--python", site.python_that()) as waiting:
        job, run_dir = waiting.job, waiting.run_dir
        for number, step in enumerate((10, 35, 60), 1):
            site.wait_for_step(job, run_dir, step)
            site.lab.run("scontrol", "requeue", job)
            site.wait_for_restart(job, number)
        fields = site.finish(job, run_dir)
        code, answer, states = waiting.end()
    assert (code, answer["state"]) == (0, "completed")
    assert (answer["result"]["step"], answer["result"]["exit_code"]) == (STEPS, 0)
    assert answer["result"]["loss"] == pytest.approx(curve(run_dir)[-2][1])
    assert "running, restart 1" in states and states[-1] == "completed, restart 3"
    assert fields["Restarts"] == "3"
    assert curve(run_dir) == whole(1)
    resumed = restarts(run_dir)
    assert len(resumed) == 3
    assert resumed == sorted(resumed) and resumed[0] >= 10
    with closing(sqlite3.connect(run_dir.parents[1] / "mlflow.db")) as database:
        [[run]] = database.execute("select run_uuid from runs").fetchall()
        tags = dict(database.execute("select key, value from tags where run_uuid = ?", [run]).fetchall())
    assert (tags["slurm.restart_count"], tags["slurm.job_id"]) == ("3", job)
    # A job that has finished and is started again ends at once.
    before = (run_dir / "metrics.jsonl").read_bytes()
    site.lab.run("scontrol", "requeue", job)
    site.wait_for_restart(job, 4)
    site.finish(job, run_dir)
    assert "the run has already finished; nothing to do" in site.log(run_dir, job)
    assert (run_dir / "metrics.jsonl").read_bytes() == before


def warn(site: Site, job: str, run_dir: Path) -> None:
    """What slurmctld does at `--signal=B:USR1@…`."""
    site.lab.run("scancel", "--batch", "--signal=USR1", job)


def preempt(site: Site, job: str, run_dir: Path) -> None:
    """A job of a partition that takes this one's nodes."""
    urgent = site.sbatch(
        "--parsable", "--partition=train", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=:"
    )
    site.lab.wait(urgent, "COMPLETED")


def lose_head(site: Site, job: str, run_dir: Path) -> None:
    """The node that runs the batch script goes away."""
    lose(site, run_dir, site.lab.job(job)["BatchHost"])


def lose_other(site: Site, job: str, run_dir: Path) -> None:
    """A node that does not run the batch script goes away."""
    fields = site.lab.job(job)
    hosts = site.lab.run("scontrol", "show", "hostnames", fields["NodeList"]).stdout.split()
    lose(site, run_dir, next(host for host in hosts if host != fields["BatchHost"]))


def lose(site: Site, run_dir: Path, name: str) -> None:
    site.lab.until(lambda: saved_steps(run_dir) or None, f"{run_dir.name} has no checkpoint")
    site.lab.kill_node(name)


@pytest.fixture
def repaired(site: Site) -> Iterator[None]:
    """Lost nodes come back at the end.

    While the job is there, slurmctld would repeat what it could not tell a lost node: to end the job, which may have
    started there again.
    """
    yield
    for name in site.lab.nodes:
        if name not in site.lab.slurmds:
            site.lab.start_node(name)


@pytest.mark.usefixtures("repaired")
@pytest.mark.parametrize("interrupt", [warn, preempt, lose_head, lose_other], ids=lambda function: function.__name__)
@pytest.mark.rotating
def test_interrupted(
    site: Site,
    recipe: Recipe,
    interrupt: Callable[[Site, str, Path], None],
    whole: Whole,
) -> None:
    job, run_dir = site.submit(recipe, interrupt.__name__, "--partition", "spot", "--python", site.python_that())
    site.wait_for_step(job, run_dir, 25)
    interrupt(site, job, run_dir)
    site.wait_for_restart(job, 1)
    newest = saved_steps(run_dir)[-1]  # the next ranks have yet to start
    fields = site.finish(job, run_dir)
    assert fields["Restarts"] == "1", site.log(run_dir, job)
    assert curve(run_dir) == whole(1)
    [resumed] = restarts(run_dir)
    assert resumed >= newest  # one that was complete is published by the next start
    if interrupt in (warn, preempt):
        assert resumed >= 25  # saved when it was asked to stop
    else:
        assert resumed % 20 == 0


@pytest.mark.usefixtures("repaired")
@pytest.mark.rotating
def test_a_job_goes_on_with_more_nodes_and_with_those_that_are_left(site: Site, recipe: Recipe, whole: Whole) -> None:
    """One node while the other is drained, two when it is back, and one again when a node is lost."""
    elastic = recipe.model_copy(update={"train": recipe.train.model_copy(update={"elastic": (1, 2)})})
    site.lab.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=repair")
    job, run_dir = site.submit(elastic, "elastic", "--sbatch=--exclude=n3", "--python", site.python_that())
    site.wait_for_step(job, run_dir, 10)
    assert site.lab.job(job)["NodeList"] == "n1"
    site.lab.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    site.lab.run("scontrol", "requeue", job)
    site.wait_for_restart(job, 1)
    site.wait_for_step(job, run_dir, train_lines(run_dir)[-1]["step"] + 10)
    assert site.lab.job(job)["NodeList"] == "n[1-2]"
    [resumed] = restarts(run_dir)
    # One of both nodes: from one of the node alone, the run would go on as it was.
    site.lab.until(lambda: True if saved_steps(run_dir)[-1] > resumed else None, "two nodes save no checkpoint")
    lose_other(site, job, run_dir)
    fields = site.finish(job, run_dir)
    assert (fields["NumNodes"], fields["ExcNodeList"]) == ("1", "n3"), site.log(run_dir, job)

    notes = [line["details"] for line in lines(run_dir) if line.get("event") == "resized"]
    assert [(note["before"]["world_size"], note["now"]["world_size"]) for note in notes] == [(1, 2), (2, 1)]
    found, expected = curve(run_dir), whole(1)
    assert [step[0] for step in found] == [step[0] for step in expected]
    losses = [[line[1] for line in steps if line[1] is not None] for steps in (found, expected)]
    assert largest_difference(*losses) < 1e-5  # ranks sum in another order


@pytest.mark.rotating
def test_time_limit_whose_warning_comes_before_the_ranks_are_started(site: Site, recipe: Recipe, whole: Whole) -> None:
    """The batch script gets it while `begin` runs, which is held up on the first start; no rank is started then."""
    released = site.folder / "released"
    held_up = site.python_that(
        '*"slurm begin"*) [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || '
        f"until [ -e {shlex.quote(str(released))} ]; do sleep 0.1; done",
    )
    # slurmctld looks every 30 s and warns up to 30 s early: 31 to 61 s after the start, when it has a handler.
    arguments = ["--time", "5", "--warning", "239", "--python", held_up]
    job, run_dir = site.submit(recipe, "limited", *arguments)
    log, sent = site.lab.root / "log/slurmctld.log", f"job_signal: {signal.SIGUSR1.value} of running JobId={job} "
    site.lab.until(lambda: True if sent in log.read_text("utf-8") else None, f"job {job} is not warned")
    released.touch()
    site.wait_for_restart(job, 1)
    assert "step 1/" not in site.log(run_dir, job)
    site.lab.run("scontrol", "update", f"JobId={job}", "TimeLimit=UNLIMITED")
    site.finish(job, run_dir)
    assert curve(run_dir) == whole(1)


def test_cancelled_jobs_stay_so(site: Site, recipe: Recipe) -> None:
    job, run_dir = site.submit(recipe, "cancelled", "--python", site.python_that())
    site.wait_for_step(job, run_dir, 5)
    assert json.loads(site.llmrecipes("cancel", "cancelled", "--json"))["cancelled"] is True
    fields = site.finish(job, run_dir, "CANCELLED")
    assert fields["Restarts"] == "0"
    assert "has already ended: cancelled" in site.llmrecipes("cancel", job)  # by the number of the job
    require_message(site.llmrecipes("cancel", "4711", code=2), "runs", rule="4711")


def test_restarts_without_progress_end(site: Site, recipe: Recipe) -> None:
    """A Python that ends ranks after they have started, and before their first step."""
    started = site.folder / "runs/tiny/stuck/logs/outcome"
    broken = site.python_that(f'*"slurm rank"*) echo started >{shlex.quote(str(started))}; echo broken >&2; exit 1')
    with site.waiting(recipe, "stuck", "--python", broken) as waiting:
        job, run_dir = waiting.job, waiting.run_dir
        fields = site.finish(job, run_dir, "FAILED")
        code, answer, states = waiting.end()
    assert (code, answer["result"]["exit_code"], states[-1]) == (93, 93, "failed, restart 3")
    assert fields["ExitCode"] == "93:0"
    assert fields["Restarts"] == "3"
    assert "3 restarts without progress" in site.log(run_dir, job)
