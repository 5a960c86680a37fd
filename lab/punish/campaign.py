"""Run after run with faults at random, restarted as a scheduler would, and compared with a run that has none."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from lab.punish import faults
from lab.punish.comparison import differences, keep_manifest
from lab.punish.faults import ALARMS, COMPARED, FAULTS, ORDERS, Fault, Pace
from lab.punish.report import Injection, Punished
from lab.punish.signs import Signs
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.hardware.cluster import detect
from llmrecipes.io import write_atomic
from llmrecipes.launch.local.processes import PROCESSES
from llmrecipes.recipe.derived.batch_schedule import without_ramp
from llmrecipes.recipe.engines import engine_name
from llmrecipes.recipe.load import to_yaml
from llmrecipes.recipe.schema import Recipe
from llmrecipes.rundir import Run
from llmrecipes.workflow.run import Log, Paths, plan_run, prepare_data

POLL_SECONDS = 0.05
MOST_FAILURES = 3
"""Runs that may not recover before no more are begun."""
RECOVERY_SECONDS = 400.0
"""Without a step for so long a run has not recovered."""
ORPHAN_SECONDS = 10.0
"""In which the ranks of a killed launcher have to end."""
RESTARTS_IN_JOB = 1000
NAMED = {"rank killed": signal.SIGKILL, "first rank killed": signal.SIGKILL, "rank stopped": signal.SIGSTOP,
         "rank told to stop": signal.SIGTERM}  # fmt: skip


class Unrecovered(Exception):
    """The run does not go on."""


def punished_recipe(recipe: Recipe, ranks: int, steps: int, save_interval: int) -> Recipe:
    """The recipe as it is punished: short, saved and evaluated often, with all guards and without other sinks."""
    train, faults = recipe.train, recipe.faults
    micro = min(recipe.layout.micro_batch_size, max(1, train.global_batch_size // ranks))
    return recipe.model_copy(
        update={
            "name": f"{recipe.name}.punish",
            "stages": (),
            "layout": recipe.layout.model_copy(update={"micro_batch_size": micro}),
            "train": without_ramp(
                train.without_stops(), train_iters=steps,
                eval_interval=2 * save_interval, eval_iters=1, log_interval=20,
            ),
            "scheduler": recipe.scheduler.model_copy(
                update={"lr_decay_iters": max(steps, recipe.scheduler.lr_decay_iters or steps)}
            ),
            "checkpoint": recipe.checkpoint.model_copy(update={"save_interval": save_interval, "most_recent_k": 3}),
            "tracking": recipe.tracking.model_copy(
                update={"mlflow": False, "tensorboard": False, "wandb": False, "system_metrics_interval": None}
            ),
            "faults": faults.model_copy(
                update={"rank_heartbeat_timeout": 10.0, "initial_rank_heartbeat_timeout": 240.0,
                        "check_weight_hash_across_dp_replicas_interval": COMPARED}
            ),
        }
    )  # fmt: skip


def begin(
    recipe: Recipe,
    paths: Paths,
    ranks: int,
    steps: int,
    pace: Pace,
    names: Sequence[str] | None,
    log: Log,
) -> Punished:
    """Punish a recipe on this machine, and record the result beside the runs.

    Args:
        recipe: as the user has it; its runs are shorter, see `punished_recipe`.
        steps: of each run.
        names: of faults; None: all.

    Raises:
        UserError: the recipe does not run like this.
    """
    known = {fault.name: fault for fault in FAULTS}
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise UserError(f"{unknown[0]!r}", where="--fault", rule="one of: " + ", ".join(known))
    if engine_name(recipe) != "megatron":
        raise UserError(
            f"engine {engine_name(recipe)}", where="layout.engine",
            rule="faults can only be injected into the engine megatron",
            fix="layout.engine=megatron",
        )  # fmt: skip
    if ranks < 2:
        raise UserError(f"{ranks}", where="--nproc", rule="at least 2 ranks are needed", fix="--nproc 2")
    if steps < 4 * pace.save_interval:
        raise UserError(
            f"{steps}", where="--steps", rule="at least four times --save-interval",
            fix=f"--steps {4 * pace.save_interval}",
        )  # fmt: skip
    planned = plan_run(punished_recipe(recipe, ranks, steps, pace.save_interval), detect(), ranks).largest
    recipe, layout = planned.recipe, planned.layout
    drawn = tuple(known[name] for name in names or known)
    if layout.data_parallel_size * layout.context_parallel_size == 1 and any(fault.replicas for fault in drawn):
        hidden = ", ".join(fault.name for fault in drawn if fault.replicas)
        drawn = tuple(fault for fault in drawn if not fault.replicas)
        if not drawn:
            raise UserError(hidden, where="--fault", rule="it shows only between data-parallel replicas, of which this "
                            "layout has one", fix=f"--nproc {2 * ranks}")  # fmt: skip
        log(f"{hidden}: left out, because it shows only between data-parallel replicas, of which this layout has one")
    prepare_data(recipe, paths.data_dir, log)
    campaign = Campaign(recipe, paths, ranks, pace, drawn, log)
    result = campaign.run()
    values = {**result.as_dict(), "faults": [injection.as_dict() for injection in result.injections]}
    write_atomic(campaign.recipe_file.with_name("punish.json"), json.dumps(values, indent=1) + "\n")
    return result


@dataclass
class Campaign:
    """Runs of one recipe.

    Args:
        recipe: as it runs; see `punished_recipe`.
        paths: of runs and data.
        ranks: on this machine.
        pace: of the faults.
        drawn: the faults to draw from.
        log: receives a line for each fault.
    """

    recipe: Recipe
    paths: Paths
    ranks: int
    pace: Pace
    drawn: tuple[Fault, ...]
    log: Log
    injections: list[Injection] = field(default_factory=list)
    false_alarms: list[str] = field(default_factory=list)
    _process: subprocess.Popen[str] | None = None

    def __post_init__(self) -> None:
        self._random = random.Random(self.pace.seed)
        self._deck: list[Fault] = []
        self._shuffled = False
        self._due = 0.0
        self.token = f"{int(time.time()):x}-{self.pace.seed}"

    def run(self) -> Punished:
        """One run without faults, then runs with faults until the time is over; the last one is finished."""
        self.recipe_file.parent.mkdir(parents=True)
        self.recipe_file.write_text(to_yaml(self.recipe), "utf-8")
        reference, undisturbed = self._round("reference", 0.0)
        began, healthy, equal, wall, kept, done = time.monotonic(), len(reference.steps), True, 0.0, 0.0, 0
        number, failures, over = 0, 0, list[float]()
        until = math.inf if self.pace.minutes is None else began + 60.0 * self.pace.minutes
        self._due = began + self.pace.pause(self._random)
        while number == 0 or (time.monotonic() < until and not self._is_done):
            number += 1
            try:
                signs, seconds = self._round(f"run-{number}", until)
            except Unrecovered as problem:
                self._judge(number, str(problem))
                equal, failures = False, failures + 1
                if failures == MOST_FAILURES:
                    break
                continue
            wall += seconds
            done += 1
            healthy += len(signs.steps)
            over += signs.over_limit
            kept += sum({step.step: step.ended - step.began for step in signs.steps}.values())
            different = differences(reference, signs, self.recipe.train.train_iters, self.ranks)
            equal = equal and not different
            self._judge(number, "; ".join(different))
        return Punished(
            tuple(self.injections), tuple(self.false_alarms), wall, kept, done * undisturbed, number, healthy, equal,
            max(over, default=None), str(self.recipe_file.parent),
        )  # fmt: skip

    @property
    def folder(self) -> Path:
        return self.paths.runs_dir / self.recipe.name

    @property
    def recipe_file(self) -> Path:
        return self.folder / self.token / f"{self.recipe.name}.yaml"

    def _judge(self, number: int, different: str) -> None:
        """Say whether a run that has ended is equal, after which faults, and what became of those that were missed."""
        path = str(self.folder / f"run-{number}-{self.token}")
        had = [injection for injection in self.injections if injection.run == path]
        names = ", ".join(f"{injection.fault.name} at step {injection.step}" for injection in had) or "no faults"
        self.log(f"run {number}: {different or 'equal to the uninterrupted run'}; after {names}")
        for injection in had:
            injection.equal = not different
            if injection.recovering is None:
                self.log(f"run {number}: MISSED  {injection.line()}")

    # -- one run -------------------------------------------------------------------------------------------------------

    def _round(self, name: str, until: float) -> tuple[Signs, float]:
        """Train to the last step; faults come until a time. Returns seconds from the first step to the end."""
        run = Run(self.folder / f"{name}-{self.token}")
        orders = run.logs / ORDERS
        orders.mkdir(parents=True)
        signs = Signs(run, orders)
        with self._mounted(run) as disk:
            self._start(signs)
            try:
                last = self._until_finished(run, signs, disk, until)
            finally:
                self._end()
                if self.injections and self.injections[-1].noticed_at is None:
                    self.injections[-1].undo()
            keep_manifest(run, self.recipe.train.train_iters)
        return signs, last - (signs.steps[0].began if signs.steps else last)

    def _until_finished(self, run: Run, signs: Signs, disk: Path | None, until: float) -> float:
        fault, at, injected, seen = None, 0, None, 0
        while True:
            time.sleep(POLL_SECONDS)
            signs.look()
            ended = self._process is not None and self._process.poll() is not None
            if ended:
                code = self._reap(signs)
                if code == ExitCode.DONE:
                    if injected is not None and (injected := self._followed(injected, signs, disk)) is not None:
                        fault = self._ended_with(injected)
                    if fault is not None:  # there was no room left in this run
                        self._deck.append(fault)
                    return time.monotonic()
            seen = self._false_alarms(signs, seen, injected)
            if injected is None and ended:
                raise Unrecovered(f"{run.path} exited by itself with code {code}:\n" + signs.tail())
            if injected is not None:
                injected = self._followed(injected, signs, disk)
            if ended:
                self._start(signs)
            if injected is None and fault is None and self._due <= time.monotonic() < until and not self._is_done:
                fault, at = self._next(disk), self._moment(signs)
            if injected is None and fault is not None and self._is_time(fault, at, signs, run):
                injected, fault = self._inject(fault, run, signs, disk), None

    def _ended_with(self, injection: Injection) -> Fault | None:
        """Settle a fault whose run came to its last step while it was followed; the fault if it has to be drawn again.

        One that was ordered, and whose moment did not come, has not happened. One that was noticed is repaired.
        """
        if injection.injected_at is None:
            self.injections.remove(injection)
            return injection.fault
        if injection.noticed_at is not None:
            injection.recovered_at = time.monotonic()
        return None

    def _moment(self, signs: Signs) -> int:
        return signs.last_step + 2 + self._random.randrange(8)

    def _is_time(self, fault: Fault, at: int, signs: Signs, run: Run) -> bool:
        """Whether a fault may come: after a checkpoint since the last one, and early enough to be noticed."""
        needed = fault.steps + fault.saves * self.pace.save_interval + 3
        if signs.last_step < at or signs.last_step + needed > self.recipe.train.train_iters:
            return False
        since = self.injections[-1].recovered_at if self.injections and self.injections[-1].run == str(run.path) else 0
        saved = signs.first(faults.SAVED_AGAIN, since or 0.0) is not None
        return saved and (not fault.checkpoint or len(run.store().entries()) >= 2)

    @property
    def _is_done(self) -> bool:
        return self.pace.minutes is None and self._shuffled and not self._deck

    def _next(self, disk: Path | None) -> Fault:
        """The next of the faults in random order, each once before one comes again."""
        if not self._deck:
            self._shuffled = True
            self._deck = [fault for fault in self.drawn if disk is not None or not fault.mounted]
            self._random.shuffle(self._deck)
        return self._deck.pop()

    def _start(self, signs: Signs) -> None:
        options = {
            "recipe": str(self.recipe_file), "nproc": self.ranks, "run_id": signs.files.run_id,
            "runs_dir": str(self.paths.runs_dir), "data_dir": str(self.paths.data_dir), "restarts": RESTARTS_IN_JOB,
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lab.punish.launcher", json.dumps(options)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self._reader = signs.follow(self._process)

    def _reap(self, signs: Signs) -> int:
        process = self._running
        code = process.wait()
        self._reader.join(ORPHAN_SECONDS)
        if process.stdout is not None and not self._reader.is_alive():
            process.stdout.close()
        signs.look()
        signs.add(f"exit: {code}")
        return code

    @property
    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise AssertionError("no run was started")
        return self._process

    def _end(self) -> None:
        process = self._running
        if process.poll() is None:
            children = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            psutil.wait_procs(children, ORPHAN_SECONDS)
        process.wait()

    def _ranks(self, run: Run) -> dict[int, psutil.Process]:
        """The processes that are ranks now; spares are not among them."""
        children = {child.pid: child for child in psutil.Process(self._running.pid).children()}
        try:
            pids = json.loads((run.logs / PROCESSES).read_text("utf-8"))
        except FileNotFoundError:
            return {}
        return {int(rank): children[pid] for rank, pid in pids.items() if pid in children}

    # -- faults --------------------------------------------------------------------------------------------------------

    def _inject(self, fault: Fault, run: Run, signs: Signs, disk: Path | None) -> Injection | None:
        rank = 0 if fault.name == "first rank killed" else self._random.randrange(self.ranks)
        if fault.name == "rank killed" and rank == 0:
            rank = 1 % self.ranks
        victim = self._ranks(run).get(rank)
        if victim is None and not fault.inside:
            return None
        injection = Injection(len(self.injections), fault, rank, str(run.path), signs.last_step)
        self.injections.append(injection)
        self._due = time.monotonic() + self.pace.pause(self._random)
        if fault.inside:
            faults.give(signs.orders, rank, fault.name, injection.number)
            return injection
        injection.injected_at = time.monotonic()
        if fault.mounted and disk is not None:
            injection.undo = fill(disk) if fault.name == "full disk" else read_only(disk)
        elif fault.checkpoint:
            self._damage(fault.name, run)
        if fault.launcher:
            everyone = psutil.Process(self._running.pid).children(recursive=True)
            self._running.send_signal(signal.SIGTERM if fault.name == "preempted" else signal.SIGKILL)
            if fault.name != "preempted":
                _, alive = psutil.wait_procs(everyone, ORPHAN_SECONDS)
                injection.orphans = sum(one.status() != psutil.STATUS_ZOMBIE for one in alive if one.is_running())
        elif fault.name in NAMED and victim is not None:
            with suppress(psutil.NoSuchProcess):
                victim.send_signal(NAMED[fault.name])
        return injection

    def _damage(self, name: str, run: Run) -> None:
        newest = run.store().entries()[-1]
        path = newest.path / self._random.choice(sorted(newest.manifest.files))
        size = path.stat().st_size
        if name == "deleted checkpoint file":
            path.unlink()
        elif name == "truncated checkpoint":
            os.truncate(path, size // 2)
        else:
            with path.open("r+b") as file:
                place = self._random.randrange(size)
                file.seek(place)
                byte = file.read(1)[0]
                file.seek(place)
                file.write(bytes([byte ^ 1 << self._random.randrange(8)]))

    def _followed(self, injection: Injection, signs: Signs, disk: Path | None) -> Injection | None:
        """The same while the run has not recovered from it; None afterwards."""
        now = time.monotonic()
        if injection.injected_at is None:
            injection.injected_at = faults.taken_at(signs.orders, injection.number)
            if injection.injected_at is None:
                return injection
        fault = injection.fault
        if injection.noticed_at is None:
            sign = signs.first(fault.noticed, injection.injected_at)
            if sign is None:
                if now - injection.injected_at > RECOVERY_SECONDS:
                    injection.undo()
                    raise Unrecovered(f"{fault.name}: not noticed in {RECOVERY_SECONDS:g} s")
                return injection
            injection.noticed_at, injection.sign = sign.time, sign.text
            injection.undo()
        if fault.recovered:
            again = signs.first(fault.recovered, injection.noticed_at)
            injection.recovered_at = None if again is None else again.time
        elif step := signs.step_since(injection.noticed_at):
            injection.recovered_at, injection.steps_lost = step.ended, max(0, injection.step + 1 - step.step)
            injection.step_seconds = step.ended - step.began
        if injection.recovered_at is None:
            if now - injection.noticed_at > RECOVERY_SECONDS:
                raise Unrecovered(f"{fault.name}: no step in {RECOVERY_SECONDS:g} s")
            return injection
        self.log(injection.line())
        return None

    def _false_alarms(self, signs: Signs, seen: int, injected: Injection | None) -> int:
        """Count the alarms since the last look while no fault is followed; returns how many signs were looked at."""
        for sign in signs.all[seen:]:
            if injected is None and re.match(ALARMS, sign.text) and not self._is_late(sign.text):
                self.false_alarms.append(sign.text)
        return len(signs.all)

    def _is_late(self, text: str) -> bool:
        """Whether it belongs to the fault before, such as its note in the start after it."""
        last = self.injections[-1] if self.injections else None
        return last is not None and last.recovered_at is not None and time.monotonic() - last.recovered_at < 1.0

    @contextmanager
    def _mounted(self, run: Run) -> Iterator[Path | None]:
        """The checkpoints of a run as a file system, if this process may mount one."""
        if not any(fault.mounted for fault in self.drawn):
            yield None
            return
        run.checkpoints.mkdir(parents=True)
        try:
            mount("-t", "tmpfs", "-o", "size=1g", "tmpfs", str(run.checkpoints))
        except OSError:
            yield None
            return
        try:
            yield run.checkpoints
        finally:
            subprocess.run(["umount", "--lazy", str(run.checkpoints)], check=False)


def mount(*words: str) -> None:
    """Run mount(8).

    Raises:
        OSError: it is not permitted or not installed.
    """
    done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(done.stderr.strip())


def fill(disk: Path) -> Callable[[], None]:
    """Take all the space of a file system; returns what frees it."""
    filler = disk / ".filler"
    with filler.open("wb") as file:
        status = os.statvfs(disk)
        os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize)
    return filler.unlink


def read_only(disk: Path) -> Callable[[], object]:
    """Mount a folder read-only onto itself; returns what undoes it."""
    mount("--bind", "-o", "ro", str(disk), str(disk))
    return lambda: subprocess.run(["umount", str(disk)], check=True)
