"""Spaces: what the rules refuse, what samplers and pruners do with them, and the recipe of a trial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmrecipes.recipe.reading.keys import keys
from llmrecipes.recipe.rules import recipe_rules
from llmrecipes.search.samplers import pruner as make_pruner
from llmrecipes.search.space import evaluation, evaluations, trial_recipe
from llmrecipes.search.study import require_section
from llmrecipes.search.trials import own_trials
from tests.helpers import tiny
from tests.refusals import has_token, refused
from tests.unit.search_lab import LR, curves, ran, searched

__all__ = ["curves"]

LAYERS = {"key": "model.num_layers", "low": 1, "high": 4}
ACT = {"key": "model.activation_func", "choices": ["gelu", "silu"]}
GATE = {"key": "model.gated_linear_unit", "choices": [False, True]}
CONDITION = {"key": "model.ffn_hidden_size", "choices": [64, 128], "when": {"model.gated_linear_unit": [True]}}
SEEDS = {"key": "train.seed", "low": 1, "high": 9}
PATIENT = {"type": "PatientPruner", "patience": 2}
STEPS = {"key": "optimizer.weight_decay", "low": 0.0, "high": 0.2, "step": 0.1}


def item(**changes: Any) -> dict[str, Any]:
    return {"space": [{**LR, **changes}]}


def norm(*choices: str) -> dict[str, Any]:
    return {"key": "model.normalization", "choices": list(choices)}


@pytest.mark.parametrize(
    ("search", "key", "tokens"),
    [
        (item(key="optimizer.learning_rate"), "search.space.0.key", "optimizer.lr"),
        (item(key="optimizer"), "search.space.0.key", "optimizer"),
        (item(key="train.train_iters"), "search.space.0.key", "search.trial_tokens"),
        (item(key="checkpoint.save_interval"), "search.space.0.key", "checkpoint.save_interval"),
        (item(low=1.0, high=0.1), "search.space.0.low", "0.1"),
        (item(low=0.1, high=0.1), "search.space.0.low", "0.1"),
        (item(low=None), "search.space.0", "optimizer.lr"),
        (item(low=0.0), "search.space.0.low", "optimizer.lr"),
        (item(low=-1.0, log=False), "search.space.0.low", "optimizer.lr"),
        (item(step=0.1), "search.space.0.step", "log"),
        (item(key="model.num_layers", low=1.5, high=3.0, log=False), "search.space.0.low", "1.5"),
        (item(key="model.num_layers", low=1, high=4, log=False, step=2), "search.space.0.high", "3"),
        (item(key="model.normalization"), "search.space.0", "RMSNorm"),
        (item(choices=[1e-3]), "search.space.0.choices", "optimizer.lr"),
        ({"space": [norm("BatchNorm")]}, "search.space.0.choices", "LayerNorm"),
        ({"space": [norm("RMSNorm", "RMSNorm")]}, "search.space.0.choices", "RMSNorm"),
        ({"space": [LR, LR]}, "search.space.1.key", "optimizer.lr"),
        ({"space": [CONDITION, GATE]}, "search.space.0.when", "model.gated_linear_unit"),
        ({"space": [{**LR, "when": {"model.nothing": [1]}}]}, "search.space.0.when", "model.nothing"),
        ({"sampler": {"type": "GridSampler"}}, "search.sampler.type", "optimizer.lr"),
        ({"sampler": {"type": "GridSampler"}, **item(step=1e-6, log=False)}, "search.sampler.type", "1,000"),
        ({"sampler": {"type": "CmaEsSampler"}}, "search.sampler.type", "CmaEsSampler"),
        ({"sampler": {"type": "CmaEsSampler"}, "space": [LR, ACT]}, "search.sampler.type", "model.activation_func"),
        ({"sampler": {"type": "QMCSampler"}, "space": [LR, ACT]}, "search.sampler.type", "model.activation_func"),
        ({"sampler": {"type": "GPSampler"}, "space": [GATE, CONDITION]}, "search.sampler.type", "GPSampler"),
        ({"pruner": {**PATIENT, "p_threshold": 0.2}}, "search.pruner.p_threshold", "wrapped_pruner"),
        ({"pruner": {**PATIENT, "wrapped_pruner": "MedianPruner", "p_threshold": 0.2}}, "search.pruner.p_threshold",
         "WilcoxonPruner"),
        ({"pruner": {**PATIENT, "wrapped_pruner": "PercentilePruner"}}, "search.pruner.percentile", "100"),
        ({"pruner": {**PATIENT, "wrapped_pruner": "WilcoxonPruner"}}, "search.pruner.type", "train.eval_interval"),
        ({"pruner": {"type": "WilcoxonPruner"}}, "search.pruner.type", "train.eval_interval"),
        ({"pruner": {"type": "WilcoxonPruner", "p_threshold": 0.0}}, "search.pruner.type", "search.pruner.p_threshold"),
        ({"pruner": {}, "objectives": ["valid_loss", "train_seconds"]}, "search.pruner.type", "NopPruner"),
        ({"seeds_per_point": 2, "space": [SEEDS]}, "search.seeds_per_point", "train.seed"),
        ({"objectives": ["valid_loss", "valid_loss"]}, "search.objectives", "valid_loss"),
        ({"space": [{"key": "model.vocab_size", "choices": [512, 1024]}]}, "search.objectives", "valid_bits_per_byte"),
        ({"patience": 2, "objectives": ["valid_loss", "train_seconds"]}, "search.patience", "2"),
        ({"enqueue_trials": [{"train.seed": 1}]}, "search.enqueue_trials.0", "train.seed"),
        ({"enqueue_trials": [{"optimizer.lr": 7.0}]}, "search.enqueue_trials.0", "optimizer.lr"),
        ({"storage": "postgresql://me:secret@host/db"}, "search.storage", "PGPASSWORD"),
        ({"storage": "mysql://host/db"}, "search.storage", "mysql"),
        ({"storage": "sqlite:///:memory:"}, "search.storage", "memory"),
        ({"storage": "sqlite://"}, "search.storage", "memory"),
        ({"storage": ""}, "search.storage", "path"),
        ({"grace_period": 60, "heartbeat_interval": 60}, "search.grace_period", "120"),
        (item(key="data.sources.9.weight"), "search.space.0.key", "data.sources.9.weight"),
        (item(when={"model.num_layers": ["two"]}), "search.space.0.when", "two"),
        ({"n_trials": None}, "search.n_trials", "timeout"),
    ],
)  # fmt: skip
def test_rules_of_a_search(search: dict[str, Any], key: str, tokens: str) -> None:
    problems = [
        each for each in recipe_rules.check(tiny(search={"space": [LR], "n_trials": 3, **search})) if each.key == key
    ]
    assert problems
    text = f"{problems[0].what} {problems[0].rule} {problems[0].fix}"
    assert has_token(text, tokens), text
    assert "secret" not in text


MIXED = (LR, LAYERS, GATE, CONDITION, STEPS)
NUMBERS = (LR, LAYERS, STEPS)


@pytest.mark.usefixtures("curves")
@pytest.mark.parametrize(
    ("sampler", "space"),
    [
        ({"type": "TPESampler", "n_startup_trials": 3}, MIXED),
        ({"type": "TPESampler", "n_startup_trials": 3, "multivariate": False}, MIXED),
        ({"type": "GPSampler", "n_startup_trials": 3}, (LR, LAYERS, GATE)),
        ({"type": "CmaEsSampler", "with_margin": True, "popsize": 4}, NUMBERS),
        ({"type": "RandomSampler"}, MIXED),
        ({"type": "QMCSampler", "scramble": True}, NUMBERS),
        ({"type": "GridSampler"}, (LAYERS, STEPS, ACT)),
    ],
    ids=lambda value: value.get("type") if isinstance(value, dict) else "",
)
@pytest.mark.rotating
def test_samplers(sampler: dict[str, Any], space: tuple[dict[str, Any], ...], tmp_path: Path) -> None:
    """Each samples the keys that the rules let it: in range, on their steps, and where their condition holds."""
    recipe = searched(*space, n_trials=8, sampler={**sampler, "seed": 1}, pruner={"type": "NopPruner"})
    assert recipe_rules.check(recipe) == []
    trials = [trial for trial in own_trials(ran(recipe, tmp_path)) if trial.state.is_finished()]
    assert len(trials) == 8
    for trial in trials:
        params = trial.params
        gated = CONDITION in space and params["model.gated_linear_unit"]
        assert ("model.ffn_hidden_size" in params) == gated
        assert 1e-4 <= params.get("optimizer.lr", 1e-3) <= 1
        assert type(params.get("model.num_layers", 1)) is int
        assert round(params.get("optimizer.weight_decay", 0.0) * 10, 6).is_integer()
    assert len({str(trial.params) for trial in trials}) >= 7


@pytest.mark.usefixtures("curves")
@pytest.mark.parametrize(
    "pruner",
    [
        {"type": "MedianPruner", "n_startup_trials": 1},
        {"type": "PercentilePruner", "percentile": 30.0, "n_startup_trials": 1},
        {"type": "SuccessiveHalvingPruner", "min_resource": 1, "reduction_factor": 2},
        {"type": "HyperbandPruner", "reduction_factor": 2},
        {"type": "PatientPruner", "patience": 0, "wrapped_pruner": "MedianPruner", "n_startup_trials": 1},
        {"type": "WilcoxonPruner", "p_threshold": 0.4},
    ],
    ids=lambda value: value["type"],
)
@pytest.mark.rotating
def test_pruners(pruner: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ends some of the trials whose curve is the worst, and not the best one."""
    points = [{"optimizer.lr": lr} for lr in (1e-2, 1.0, 0.5, 0.8, 0.6, 0.7, 0.9, 0.4)]
    loss = {lr["optimizer.lr"]: 1 + number for number, lr in enumerate(points)}
    # The worse, the longer the curve rises.
    monkeypatch.setattr(
        "tests.unit.search_lab.Curves.loss", staticmethod(lambda recipe, n: loss[recipe.optimizer.lr] * (1 + n / 9))
    )
    recipe = searched(n_trials=8, pruner=pruner, enqueue_recipe=False, enqueue_trials=points)
    assert recipe_rules.check(recipe) == []
    study = ran(recipe, tmp_path)
    assert any(trial.state.name == "PRUNED" for trial in study.trials)
    assert study.best_trial.number == 0


@pytest.mark.parametrize(
    "pruner",
    [
        None,
        {"type": "PercentilePruner", "percentile": 50.0},
        {"type": "SuccessiveHalvingPruner"},
        {"type": "HyperbandPruner"},
    ],
    ids=lambda value: value["type"] if value else "default",
)
@pytest.mark.parametrize(("evaluations", "first"), [(8, 2), (9, 3), (4, 1), (1, None)])
def test_no_trial_is_pruned_in_the_first_quarter(
    pruner: dict[str, Any] | None, evaluations: int, first: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the learning rate rises, losses say little."""
    import optuna

    monkeypatch.setattr("optuna.pruners.HyperbandPruner._get_bracket_id", lambda *_: 0)
    search = require_section(searched(pruner=pruner))
    study = optuna.create_study(pruner=make_pruner(search, evaluations))

    def decisions(loss: float) -> list[bool]:
        trial, found = study.ask(), []
        for number in range(1, evaluations + 1):
            trial.report(loss, number)
            found.append(number < evaluations and trial.should_prune())
        study.tell(trial, loss)
        return found

    for loss in range(1, 7):
        decisions(float(loss))
    found = decisions(100.0)
    assert (found.index(True) + 1 if True in found else None) == first


def test_every_sampler_and_pruner_is_optunas() -> None:
    from optuna import pruners, samplers

    assert all(hasattr(samplers, name) for name in keys()["search.sampler.type"].by_type)
    assert all(hasattr(pruners, name) for name in keys()["search.pruner.type"].by_type)


def test_trials_train_on_as_many_tokens_whatever_their_batch() -> None:
    base = searched(
        {"key": "train.global_batch_size", "choices": [4, 8, 16]}, LR, trial_tokens=12 * 8 * 64 * 2
    ).model_copy(update={"scheduler": tiny(scheduler={"lr_warmup_iters": 3, "lr_decay_iters": 12}).scheduler})
    search = base.search
    assert search is not None
    for batch, steps in ((4, 48), (8, 24), (16, 12)):
        recipe = trial_recipe(base, search, {"train.global_batch_size": batch})
        assert recipe.train.train_iters == steps
        assert recipe.train.train_iters * batch * 64 == search.trial_tokens
        assert evaluations(recipe) == evaluations(base) == 4
        assert evaluation(recipe, steps // 2) == 2
        assert (recipe.scheduler.lr_warmup_iters, recipe.scheduler.lr_decay_iters) == (steps // 4, steps)
        assert (recipe.name, recipe.search) == ("lab-search", None)
    # A key that is searched itself keeps its value.
    kept = trial_recipe(base, search, {"train.global_batch_size": 4, "scheduler.lr_warmup_iters": 5})
    assert kept.scheduler.lr_warmup_iters == 5


def test_values_that_do_not_go_together_are_named() -> None:
    base = searched(LR)
    assert base.search is not None
    with refused("model.num_attention_heads"):
        trial_recipe(base, base.search, {"model.num_attention_heads": 3})
