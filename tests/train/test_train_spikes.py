"""What a run does about the spike of a step: alarm, leave out its update, or go back and leave out its batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.engine.base import Progress, StepResult
from llmrecipes.engine.megatron.engine import MegatronEngine
from llmrecipes.faults.numerics import StepSpike
from llmrecipes.plan.derive import derive
from llmrecipes.plan.run_plan import derive_run
from llmrecipes.recipe.load import load
from llmrecipes.recipe.sections.faults import Faults
from llmrecipes.rundir import Run as RunDir
from llmrecipes.train import guard
from llmrecipes.train.rewind import Rewinds
from tests.helpers import ROOMY, curve, lines, require_same_checkpoints, tiny, tiny_on, train_lines
from tests.refusals import require_message
from tests.train.test_train_faults import run_spec
from tests.unit.test_checkpoint_store import publish

Run = Callable[..., tuple[int, Path]]
BATCH = 4
"""Samples of a global batch."""


class Batches:
    """The batches that steps were computed from, by number in the order of the run; the losses of some are high."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[tuple[int, ...]] = []
        """The first tokens of each batch, in the order of a run without spikes."""
        self.seen: list[int] = []
        self.bad: set[int] = set()
        real, agree = MegatronEngine._attempt, MegatronEngine._agree
        high = [False]

        def attempt(engine: MegatronEngine, batches: Iterator[Any], *arguments: Any) -> StepResult:
            first = next(batches)
            key = tuple(first["tokens"][0, :16].tolist())
            if key not in self.order:
                self.order.append(key)
            self.seen.append(self.order.index(key))
            high[0] = self.seen[-1] in self.bad
            result = real(engine, chain([first], batches), *arguments)
            high[0] = False
            return result

        def higher(engine: MegatronEngine, *arguments: Any) -> Any:
            agreed = agree(engine, *arguments)
            return agreed._replace(loss=agreed.loss + 5.0 * high[0])

        monkeypatch.setattr(MegatronEngine, "_attempt", attempt)
        monkeypatch.setattr(MegatronEngine, "_agree", higher)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Batches:
    return Batches(monkeypatch)


@pytest.fixture
def run(tmp_path: Path, corpus: Path, data_dir: Path) -> Run:
    """Train a small recipe with settings of `faults`: folder, changes of the start → exit code and run."""

    def start(folder: str, faults: dict[str, Any], **changes: Any) -> tuple[int, Path]:
        from llmrecipes.data.prepare import prepare

        recipe = tiny_on(
            corpus,
            model={"hidden_dropout": 0.1},
            train={"global_batch_size": BATCH, "eval_interval": 100},
            checkpoint={"save_interval": 2, "most_recent_k": 6},
            faults={"loss_spike_window": 4, **faults},
        )
        prepare(recipe, data_dir)
        return run_spec(recipe, tmp_path / folder, data_dir, **changes), tmp_path / folder / "runs" / "tiny" / "r"

    return start


def notes(run_dir: Path, event: str) -> list[dict[str, Any]]:
    return [line for line in lines(run_dir) if line.get("event") == event]


SKIP = {"loss_spike_action": "skip", "loss_spike_sigmas": 20.0}
REWIND = {"loss_spike_action": "rewind", "loss_spike_sigmas": 20.0, "loss_spike_rewind_steps": 3}


def test_the_update_of_a_spike_is_left_out_also_right_after_a_restart(
    run: Run, batches: Batches, capfd: pytest.CaptureFixture[str]
) -> None:
    batches.bad = {8, 10}  # the second is the first batch of the resumed run, which has to know the losses before it
    code, whole = run("whole", SKIP)
    assert code == 0
    assert [line["step"] for line in train_lines(whole) if line["skipped"]] == [9, 11]
    found = notes(whole, "spike_skipped")
    assert [(note["step"], note["alarm"], note["details"]["samples"]) for note in found] == [
        (9, True, [8 * BATCH, 9 * BATCH]),
        (11, True, [10 * BATCH, 11 * BATCH]),
    ]
    assert "faults: spike_skipped at step 9, 11 " in capfd.readouterr().out
    assert run("cut", SKIP, stop_after=10)[0] == 75
    code, cut = run("cut", SKIP)
    assert code == 0
    assert curve(cut) == curve(whole)
    require_same_checkpoints(cut / "checkpoints/step-00000012", whole / "checkpoints/step-00000012")


@pytest.mark.slow
def test_a_run_goes_back_from_a_spike_and_leaves_out_the_batches_that_led_to_it(run: Run, batches: Batches) -> None:
    assert run("clean", REWIND)[0] == 0
    assert batches.seen == list(range(12))
    batches.seen.clear()
    batches.bad = {8}
    code, whole = run("whole", REWIND)
    assert code == 0
    # Back to step 6, without the batches 6 to 8: the last steps have those that follow in the order.
    assert batches.seen == [*range(9), *range(9, 15)]
    assert [line["step"] for line in train_lines(whole)] == list(range(1, 13))
    (note,) = notes(whole, "rewound")
    left_out = [6 * BATCH, 9 * BATCH]
    assert (note["step"], note["alarm"], note["details"]["samples"]) == (6, True, left_out)
    assert (note["details"]["step"], note["details"]["to_step"]) == (9, 6)
    assert [record["samples"] for record in json.loads((whole / "rewinds.json").read_text())] == [left_out]
    # A run that is interrupted before and after it goes back does the same.
    batches.seen.clear()
    assert run("cut", REWIND, stop_after=7)[0] == 75
    assert run("cut", REWIND, stop_after=10)[0] == 75
    code, cut = run("cut", REWIND)
    assert code == 0
    assert batches.seen == [*range(9), *range(9, 15)]
    assert curve(cut) == curve(whole)
    require_same_checkpoints(cut / "checkpoints/step-00000012", whole / "checkpoints/step-00000012")


def test_a_start_that_is_killed_while_it_deletes_checkpoints_is_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, world = RunDir(tmp_path), SimpleNamespace(is_first=True)
    store = run.store()
    for step in (2, 4, 6, 8):
        publish(store, step)
    faults = {"loss_spike_action": "rewind", "loss_spike_rewind_steps": 3}
    recipe = tiny(
        train={"global_batch_size": BATCH}, checkpoint={"save_interval": 2, "most_recent_k": 6}, faults=faults
    )
    rewinds = Rewinds(recipe, run, store, world)  # type: ignore[arg-type]
    assert rewinds.finish() == ()
    delete = CheckpointStore._delete

    def killed(store: CheckpointStore, path: Path) -> None:
        if path.name == "step-00000006":
            raise KeyboardInterrupt
        delete(store, path)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "_delete", killed)
        with pytest.raises(KeyboardInterrupt):
            rewinds._chosen(StepSpike("loss", 9.0, 2.0, 3.0), Progress(step=8), 7 * BATCH)
    assert [entry.step for entry in store.entries()] == [2, 4, 6]
    (note,) = rewinds.finish()
    assert [entry.step for entry in store.entries()] == [2, 4]
    assert (note.event, note.step, note.details["samples"]) == ("rewound", 4, [5 * BATCH, 8 * BATCH])
    publish(store, 6)  # of the run that went on
    assert rewinds.finish() == ()
    assert [entry.step for entry in store.entries()] == [2, 4, 6]


def test_a_spike_is_answered_once() -> None:
    spikes = guard.SpikeGuard(Faults(loss_spike_action="skip", loss_spike_window=2), Progress())
    assert spikes.accept(1.0, 1.0)
    assert spikes.take() is None
    assert not spikes.accept(9.0, 1.0)
    assert spikes.take() is not None
    assert spikes.take() is None, "after a step that overflowed in fp16"


def test_a_stage_begins_its_own_statistic() -> None:
    """Else half a window of updates was left out where the next text has a higher loss."""
    assert guard.spike_guard(derive(load("gpt-tiny").recipe, 1, ROOMY), Progress()) is None
    recipe = load("gpt-tiny-stages", ["faults.loss_spike_action=skip", "faults.loss_spike_window=4"]).recipe
    second = derive_run(recipe, 1, ROOMY).stages[1]
    span = second.span
    assert span is not None
    for steps, accepted in ((0, True), (1, False)):
        progress = Progress(step=span.first_step + steps, recent_losses=(1.0,) * 4, recent_norms=(1.0,) * 4)
        spikes = guard.spike_guard(second, progress)
        assert spikes is not None and spikes.accept(9.0, 1.0) == accepted


@pytest.mark.slow
def test_a_run_that_has_gone_back_often_enough_stops(
    run: Run, batches: Batches, capfd: pytest.CaptureFixture[str]
) -> None:
    run("clean", {"loss_spike_action": "none", "loss_spike_window": 128})
    batches.bad = {8, 10}
    code, stopped = run("stopped", {**REWIND, "loss_spike_max_rewinds": 1, "loss_spike_rewind_steps": 2})
    assert code == 93
    require_message(capfd.readouterr().err, "faults.loss_spike_max_rewinds", rule="1 rewinds")
    assert CheckpointStore(stopped / "checkpoints").valid(6, full=True)


def test_without_a_checkpoint_that_is_old_enough_the_update_is_left_out(run: Run, batches: Batches) -> None:
    batches.bad = {4}
    code, run_dir = run("young", {**REWIND, "loss_spike_rewind_steps": 9})
    assert code == 0
    assert [note["step"] for note in notes(run_dir, "spike_skipped")] == [5]
    assert not notes(run_dir, "rewound")
    assert [line["step"] for line in train_lines(run_dir) if line["skipped"]] == [5]
