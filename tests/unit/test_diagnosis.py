"""The checks of a run's records: each speaks of what provokes it and is silent on a healthy run."""

from __future__ import annotations

import io
import json
import math
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks.former import ADAMW
from llmrecipes.cli.app import run as command
from llmrecipes.diagnosis.check_rules import RULES
from llmrecipes.diagnosis.checks import Checks
from llmrecipes.diagnosis.data_checks import of_data
from llmrecipes.diagnosis.finding import PAGE, RunFacts, RunFinding
from llmrecipes.recipe.load import load, to_yaml
from llmrecipes.recipe.reading.keys import is_key
from llmrecipes.rundir import Run
from llmrecipes.tracking.events import StepMetrics
from llmrecipes.tracking.run_tracker import RunTracker
from llmrecipes.tracking.spread import spread
from llmrecipes.workflow.diagnose import diagnose

ROOT = Path(__file__).parents[2]
FACTS = RunFacts(steps=600, warmup=20, lr=1e-3, clip=1.0, vocabulary=4096, micro_batch_tokens=1024)
GIB = 1 << 30


def healthy(number: int = 600, **ranks: Any) -> list[dict[str, Any]]:
    """Steps of a run whose loss falls by a power law with the noise of its batches."""
    drawn = random.Random(0)
    records: list[dict[str, Any]] = []
    for step in range(1, number + 1):
        loss = 2.0 + 6.3 * (1 + step / 20) ** -0.6 + drawn.gauss(0, 0.05)
        records.append(
            {
                "step": step, "loss": loss, "grad_norm": 0.5 + 1.5 * math.exp(-step / 30) + drawn.random() * 0.1,
                "lr": 1e-3 * min(1, step / 20), "step_seconds": 0.5, "memory_bytes": GIB, "skipped": False,
            }
        )  # fmt: skip
        if ranks and step % 10 == 0:
            records[-1] |= {group: {} for group in ("ranks", "nodes")}
            for name, values in ranks.items():
                group, where = ("ranks", "rank") if name.endswith("_seconds") else ("nodes", "node")
                records[-1][group][name] = spread(np.array(values, np.float64), where)  # type: ignore[arg-type]
        if step % 100 == 0:
            records.append({"step": step, "valid_loss": loss + 0.1, "eval_seconds": 1.0})
            details = {"seconds": 2.0, "loop_waited": 0.01}
            records.append({"step": step, "event": "checkpoint_saved", "details": details, "alarm": False})
    return records


def changed(change: Callable[[dict[str, Any]], object], since: int = 100, number: int = 600) -> list[dict[str, Any]]:
    records = healthy(number)
    for record in records:
        if record["step"] >= since:
            change(record)
    return records


def found(records: Iterable[dict[str, Any]], facts: RunFacts = FACTS) -> dict[str, RunFinding]:
    checks = Checks(facts)
    for record in records:
        checks.add(record)
    return {each.rule: each for each in checks.findings()}


def steps(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[dict[str, Any]], object]:
    """A change of steps only."""
    return lambda record: record.update(change(record)) if "loss" in record else None


def layers(step: int, idle: str) -> dict[str, Any]:
    low = {"grad_norm": 1e-9, "update_norm": 0.0}
    fc1 = {kind: [1.0, low[kind] if kind == idle else 2.0, None, 4.0] for kind in low}
    return {"layers": {kind: {"mlp_fc1": fc1[kind], "embedding": 3.0} for kind in low}}


def experts(step: int, *tokens: int) -> dict[str, Any]:
    return {"experts": [{"layer": 1, "tokens_per_expert": list(tokens)}]} if step % 10 == 0 else {}


RANKS: dict[str, Any] = {
    "gpu_use": (0.9, 0.95, 1.0), "data_seconds": (0.0, 0.001, 0.002), "compute_seconds": (0.3, 0.31, 0.32),
    "communication_seconds": (0.1, 0.1, 0.1), "throttled": (0, 0, 0), "sm_clock_mhz": (1900, 1950, 1980),
}  # fmt: skip


def slow(*slowness: float, rank: int = 3, start: int = 8) -> list[dict[str, Any]]:
    """A run of eight ranks in whose reports a rank takes so many times as long as its peers."""
    records = healthy(200)
    records.insert(0, {"step": 0, "event": "started", "details": {"ranks": start}})
    of = {"min": 0.9, "median": 1.0, "min_rank": 0, "max_rank": rank}
    for number, value in enumerate(slowness, start=1):
        next(record for record in records if record["step"] == 10 * number)["ranks"] = {
            "slowness": {**of, "max": value}
        }
    return records


PROVOKED: dict[str, list[dict[str, Any]]] = {
    "divergence": changed(steps(lambda r: {"loss": r["loss"] + min(3, (r["step"] - 300) / 50)}), since=300),
    "worse_than_guessing": [r | {"loss": r["loss"] + 6} if "loss" in r else r for r in healthy(150)],
    "learning_rate_high": changed(steps(lambda r: {"loss": r["loss"] + 0.3 * (r["step"] % 40 < 20)})),
    "learning_rate_low": [r | {"loss": 8.3 - r["step"] / 400, "grad_norm": 1.0} for r in healthy(120) if "loss" in r],
    "plateau": changed(steps(lambda r: {"loss": 4 + 0.05 * math.sin(7 * r["step"])})),
    "underfitting": changed(
        lambda r: r.update({"loss": 4 + 0.05 * math.sin(7 * r["step"])} if "loss" in r else {"valid_loss": 4.01}
                           if "valid_loss" in r else {})
    ),
    "overfitting": changed(
        lambda r: r.update({"valid_loss": 3 + r["step"] / 500} if "valid_loss" in r else {})
    ),
    "train_valid_gap": changed(
        lambda r: r.update({"valid_loss": 3.0 + 2e-4 * (600 - r["step"])} if "valid_loss" in r else {"loss": r["loss"]
                           - r["step"] / 400} if "loss" in r else {})
    ),
    "exploding_gradients": changed(steps(lambda r: {"grad_norm": 0.5 * 1.02 ** (r["step"] - 100)})),
    "vanishing_gradients": changed(steps(lambda r: {"grad_norm": 1e-9})),
    "frozen_layer": changed(steps(lambda r: layers(r["step"], "update_norm"))),
    "dead_experts": changed(steps(lambda r: experts(r["step"], 500, 520, 0, 510))),
    "fp16_scale_collapse": changed(steps(lambda r: {"loss_scale": 2.0 ** max(0, 16 - (r["step"] - 100) // 4)}), 1),
    "gpu_use_low": healthy(**RANKS | {"gpu_use": (0.2, 0.3, 0.4)}),
    "loader_bound": healthy(**RANKS | {"data_seconds": (0.1, 0.2, 0.3)}),
    "clock_throttling": healthy(**RANKS | {"throttled": (0, 0, 1)}),
    "slow_rank": slow(*[1.3] * 12),
    "slow_storage": changed(
        lambda r: r.update({"details": {"seconds": 9.0, "loop_waited": 8.0}} if "event" in r else {})
    ),
    "memory_creep": changed(steps(lambda r: {"memory_bytes": GIB + r["step"] * (4 << 20)})),
}  # fmt: skip


def test_a_healthy_run_is_silent() -> None:
    assert found(healthy()) == {}
    assert found(healthy(**RANKS)) == {}
    assert found(changed(steps(lambda r: layers(r["step"], "") | experts(r["step"], 400, 500, 600, 548)))) == {}


PEAKS = {
    1: 1188396, 2: 1321260, 4: 1324972, 6: 1328684, 7: 1394220, 8: 1397932, 10: 1402156, 11: 1467692, 12: 1598764,
    22: 1602604, 24: 1668140, 27: 1799212, 34: 1864748, 44: 1930284, 69: 1995820, 72: 2061356, 84: 2126892, 91: 2192428,
    104: 2257964, 143: 2323500, 152: 2389036, 178: 2454700,
}  # fmt: skip
"""Peak memory in KiB from a step on, recorded on a CPU: 2 layers, width 128, 16 × 256 tokens, vocabulary 4,096; glibc
places the logits (64 MiB) ever less often anew, and never again in the 82 steps that follow."""


def test_a_cpu_run_that_warms_up_leaks_nothing() -> None:
    """Wherever the groups of steps begin: a run that was killed at once begins them later."""
    records = changed(
        steps(lambda r: {"memory_bytes": 1024 * max(peak for at, peak in PEAKS.items() if at <= r["step"])}), 0
    )
    for first in range(1, 21):
        assert "memory_creep" not in found(record for record in records if record["step"] >= first)


@pytest.mark.parametrize("rule", PROVOKED)
def test_a_check_speaks_of_what_provokes_it(rule: str) -> None:
    seen = found(PROVOKED[rule])
    assert rule in seen
    finding = seen[rule]
    assert finding.first_step is not None
    assert finding.last_step is not None
    assert 1 <= finding.first_step <= finding.last_step
    json.dumps(finding.as_dict(), allow_nan=False)
    # What comes with it is of the same kind.
    related = {
        "divergence": {"learning_rate_high", "overfitting"},
        "plateau": {"underfitting"},
        "underfitting": {"plateau"},
        "overfitting": {"train_valid_gap"},
    }
    assert set(seen) <= {rule} | related.get(rule, set())


@pytest.mark.parametrize(
    ("records", "facts"),
    [
        (slow(*[1.3] * 9), FACTS),
        (slow(*[1.3, 1.1] * 6), FACTS),
        (slow(*[1.7] * 12), replace(FACTS, straggler=1.5)),  # it has been an alarm
        (slow(*[1.3] * 12), replace(FACTS, experts=True)),
        (slow(*[1.3] * 12), replace(FACTS, pipeline_stages=8)),
    ],
)
def test_a_rank_that_is_slow_by_chance_or_by_its_work_is_none(records: list[dict[str, Any]], facts: RunFacts) -> None:
    assert found(records, facts) == {}


def test_a_rank_is_slow_only_if_it_is_always_the_same() -> None:
    records = slow(*[1.3] * 16)
    reports = [record for record in records if "ranks" in record]
    for number, record in enumerate(reports):
        record["ranks"]["slowness"]["max_rank"] = number % 8
    assert found(records) == {}


def test_the_layer_of_the_largest_gradients_is_named() -> None:
    rising = changed(steps(lambda r: layers(r["step"], "") | {"grad_norm": 0.5 * 1.02 ** (r["step"] - 100)}))
    exploding = found(rising)["exploding_gradients"]
    assert exploding.evidence["layer"] == "layer 4 mlp_fc1" and "layer 4 mlp_fc1" in exploding.text


def test_a_layer_without_gradient_is_named() -> None:
    seen = found(changed(steps(lambda r: layers(r["step"], "grad_norm"))))
    assert seen["vanishing_gradients"].evidence["layers"] == ["layer 2 mlp_fc1"]


@pytest.mark.parametrize(
    ("ranks", "facts", "reason"),
    [
        ({"data_seconds": (0.1, 0.2, 0.3)}, FACTS, "data"),
        ({"communication_seconds": (0.2, 0.3, 0.4)}, FACTS, "communication"),
        ({}, FACTS, "small batch"),
        ({}, RunFacts(micro_batch_tokens=8192), "unknown"),
    ],
)
def test_low_use_of_gpus_has_a_reason(ranks: dict[str, Any], facts: RunFacts, reason: str) -> None:
    seen = found(healthy(100, **RANKS | {"gpu_use": (0.2, 0.3, 0.4)} | ranks), facts)
    assert seen["gpu_use_low"].evidence["reason"] == reason


def test_one_spike_is_not_a_divergence_and_alarms_of_the_training_are_findings() -> None:
    records = changed(steps(lambda r: {"loss": 9.0} if r["step"] == 300 else {}))
    alarm = {"step": 300, "event": "loss_spike", "details": {"loss": 9.0, "usual": 3.0, "limit": 4.0}, "alarm": True}
    seen = found([*records, alarm])
    assert set(seen) == {"loss_spike"}
    assert seen["loss_spike"].evidence["limit"] == 4.0


def test_a_stage_of_other_text_is_not_a_divergence_and_one_within_it_is() -> None:
    risen = changed(steps(lambda r: {"loss": r["loss"] + 2}), since=301)
    assert "divergence" in found(risen)
    assert found([r | ({"stage": 1 + (r["step"] > 300)} if "loss" in r else {}) for r in risen]) == {}
    assert "divergence" in found([r | ({"stage": 1} if "loss" in r else {}) for r in PROVOKED["divergence"]])


def advised(rule: str, *overrides: str) -> RunFinding:
    return found(PROVOKED[rule], RunFacts.of(load("gpt-tiny", [*ADAMW, *overrides]).recipe))[rule]


@pytest.mark.parametrize(
    ("rule", "key", "setting", "other"),
    [
        ("exploding_gradients", "optimizer.clip_grad", "1.0", "0"),
        ("exploding_gradients", "model.qk_layernorm", "true", "false"),
        ("divergence", "faults.loss_spike_action", "rewind", "none"),
        ("overfitting", "checkpoint.keep_best", "true", "false"),
        ("train_valid_gap", "train.early_stop", "{patience: 2}", "null"),
        ("slow_storage", "checkpoint.async_save", "true", "false"),
    ],
)
def test_nothing_is_advised_that_the_recipe_has(rule: str, key: str, setting: str, other: str) -> None:
    assert key not in advised(rule, f"{key}={setting}").advice
    assert key in advised(rule, f"{key}={other}").advice


def test_every_tip_is_for_a_recipe_that_does_not_follow_it() -> None:
    for name, rule in RULES.items():
        for tip in rule.tips:
            assert tip.done(load("gpt-tiny").recipe) in (True, False), name
        words = re.findall(r"\b(?:model|train|optimizer|scheduler|checkpoint|faults|data)\.\w+", rule.advice)
        assert not [word for word in words if not is_key(word)], name


def test_a_learning_rate_that_is_too_high_is_named_as_the_cause() -> None:
    for rule in ("worse_than_guessing", "divergence", "exploding_gradients", "learning_rate_high"):
        high, usual = advised(rule, "optimizer.lr=2.0"), advised(rule)
        assert "optimizer.lr 2 is" in high.text and high.evidence["usual_lr"] == pytest.approx(1.2e-3, rel=0.2)
        assert "optimizer.lr" not in usual.text
    # Without the size of the model: the loss was lowest at the end of the warm-up.
    rising = [{"step": n, "loss": 8 - n / 40 if n <= 40 else min(25.0, 7 + n / 20), "lr": 2.0} for n in range(1, 150)]
    seen = found(rising, replace(FACTS, warmup=40, vocabulary=4096))["worse_than_guessing"]
    assert seen.severity == "error" and seen.evidence["lowest_at"] == 40


def test_a_short_run_that_ends_above_guessing_is_an_error() -> None:
    records = [{"step": step, "loss": 9.0, "lr": 1e-3} for step in range(1, 31)]
    assert set(found(records, replace(FACTS, steps=30))) == {"worse_than_guessing"}
    assert found(records, replace(FACTS, steps=31)) == {}  # not yet
    assert found(records, RunFacts(steps=30)) == {}


def test_the_note_of_a_live_check_is_not_counted_again() -> None:
    note = {"step": 9, "event": "divergence", "details": {}, "alarm": True}
    assert found([*healthy(), note]) == {}


def test_prepared_data() -> None:
    for dropped in ({"duplicates": 40}, {"duplicates": 4, "steps": {"near_duplicates": 30, "html": 3}}):
        (seen,) = of_data({"sources": [{"label": "a", "read": 100, **dropped}]})
        assert seen.rule == "duplicate_data"
    assert list(of_data({"sources": [{"label": "a", "read": 100, "duplicates": 1}, None, 3]})) == []
    assert list(of_data({"sources": 5})) == list(of_data({"sources": [{"rules": {"decontaminate.a.jsonl": 0}}]})) == []
    rules = [{"decontaminate.a.jsonl": 3, "gopher.words": 50}, {"decontaminate.b.jsonl": 40, "decontaminate.c": "x"}, 5]
    (seen,) = of_data({"sources": [{"rules": each} for each in rules]})
    assert (seen.rule, seen.evidence) == ("leaking_data", {"documents": 43, "file": "b.jsonl"})


def test_every_rule_has_a_section() -> None:
    page = (ROOT / PAGE).read_text("utf-8")
    sections = re.findall(r"^### (.*)$", page, re.MULTILINE)
    assert sorted(sections) == sorted(rule.replace("_", " ") for rule in RULES)


def test_a_run_says_so_while_it_trains(tmp_path: Path) -> None:
    quiet = load("gpt-tiny", ["tracking.mlflow=false", "tracking.tensorboard=false"]).recipe
    console = Console(file=io.StringIO())
    tracker = RunTracker.open(
        quiet, plan={}, environment={}, run_dir=tmp_path / "r", runs_dir=tmp_path, resumed_step=0, total_steps=200,
        console=console,
    )  # fmt: skip
    for step in range(1, 61):
        tracker.step(
            StepMetrics(
                step=step, loss=3.0 + 2 * (step > 30), grad_norm=1.0, lr=1e-3, consumed_samples=step,
                consumed_tokens=step, step_seconds=0.1, tokens_per_second=1.0,
            )
        )  # fmt: skip
    tracker.close("FINISHED")
    notes = [each for line in (tmp_path / "r" / "metrics.jsonl").open() if "event" in (each := json.loads(line))]
    assert [(note["event"], note["alarm"]) for note in notes] == [("divergence", True)]
    assert notes[0]["details"]["see"] == f"{PAGE}#divergence"
    assert "ALARM  divergence" in console.file.getvalue()  # type: ignore[attr-defined]


def write_run(folder: Path, lines: Iterable[str], recipe: str | None = None) -> Run:
    run = Run(folder / "gpt-tiny" / "one")
    run.create()
    run.recipe_file.write_text(recipe or to_yaml(load("gpt-tiny").recipe), "utf-8")
    run.metrics.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return run


def test_the_command_prints_evidence_advice_and_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, map(json.dumps, PROVOKED["divergence"]))
    assert command(["diagnose", "gpt-tiny", "--runs-dir", str(tmp_path)]) == 0
    assert f"{PAGE}#divergence" in capsys.readouterr().out
    assert command(["diagnose", "gpt-tiny", "--json", "--runs-dir", str(tmp_path)]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["steps"] == 600
    assert value["findings"][0]["rule"] == "divergence"
    assert value["findings"][0]["severity"] == "error"


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ["{", "null", "[]", '{"step": -1, "loss": 1}', '{"step": 1, "loss": "x"}', '{"step": 1}'],
        ['{"step": 1, "loss": null, "non_finite": ["loss"], "ranks": 3, "experts": 7, "layers": []}'],
        ['{"step": 2, "event": "checkpoint_saved", "details": {"seconds": "a"}}', '{"step": 1, "valid_loss": null}'],
        ['{"step": 1, "loss": 1.0, "experts": [3, {"layer": 1, "tokens_per_expert": ["a"]}]}'],
        ['{"step": 1, "loss": 1.0, "ranks": {"data_seconds": 1}, "nodes": 2}'],
        ['{"step": 3, "event": "loss_spike", "alarm": true}'],
    ],
)
def test_bad_records_are_left_out(tmp_path: Path, lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path, lines)
    run.metrics.write_text(run.metrics.read_text("utf-8") + '{"step": 9, "lo', "utf-8")  # still writing
    diagnose(run, tmp_path)
    assert command(["diagnose", "gpt-tiny", "--runs-dir", str(tmp_path)]) == 0
    assert "Traceback" not in capsys.readouterr().err


def test_a_run_without_metrics_or_of_another_version(tmp_path: Path) -> None:
    run = write_run(tmp_path, [], recipe="name: gpt-tiny\nnew_section: 1\n")
    run.metrics.unlink()
    seen = diagnose(run)
    assert seen.findings == ()
    assert len(seen.absent) == 3
    damaged = write_run(tmp_path, ["garbage", *map(json.dumps, healthy(50))], recipe="a: [")
    assert diagnose(damaged).damaged == 1
    assert diagnose(damaged).steps == 50
