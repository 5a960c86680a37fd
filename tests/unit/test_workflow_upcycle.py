"""A dense run becomes a mixture of experts that computes the same."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.cli.app import run
from llmrecipes.engine.core.checkpoint.loader import load
from llmrecipes.engine.core.model.gpt import build
from llmrecipes.engine.core.platform import select
from llmrecipes.engine.core.rank_weights import load_model, model_state
from llmrecipes.engine.core.world import join
from llmrecipes.engine.megatron.engine import MegatronEngine
from llmrecipes.launch.run_options import RunOptions
from llmrecipes.models.upcycle import upcycle
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.load import load as load_recipe
from llmrecipes.recipe.load import to_yaml
from llmrecipes.recipe.schema import Recipe
from llmrecipes.workflow.run import Paths, TrainOptions
from llmrecipes.workflow.train import train
from tests.refusals import require_message
from tests.unit.balance_worker import ROOMY, make_engine, micro_batches

SHAPE = {
    "name": "dense",
    "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16, "vocab_size": 384},
    "train": {"train_iters": 3, "global_batch_size": 8, "precision": "fp32"},
    "optimizer": {"lr": 1e-2},
    "tracking": {"mlflow": False, "tensorboard": False},
    "layout": {"micro_batch_size": 2},
}
GATED = {"add_bias_linear": False, "gated_linear_unit": True, "activation_func": "silu", "normalization": "RMSNorm"}
OVERRIDES = ["model.num_moe_experts=4", "model.moe_aux_loss_coeff=0.01", "train.train_iters=2"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Paths:
    return Paths(tmp_path_factory.mktemp("runs"), data_dir)


@pytest.fixture(scope="module")
def dense_run(paths: Paths, corpus: Path) -> Path:
    """A dense run of three steps."""
    values = json.loads(json.dumps(SHAPE))
    values["model"] |= GATED
    values["data"] = {"sources": [{"type": "text", "path": str(corpus)}], "num_workers": 0}
    recipe = Recipe.model_validate(values)
    assert train(recipe, paths, TrainOptions(run_id="first", run=RunOptions(sample=False)), print) == 0
    return paths.runs_dir / "dense" / "first"


def loss_of(run_dir: Path) -> float:
    """Training loss of the newest checkpoint's weights on one batch that is the same for all models."""
    recipe = load_recipe(str(run_dir / "recipe.yaml")).recipe
    entry = CheckpointStore(run_dir / "checkpoints").latest_valid()
    assert entry is not None
    with join(select(), recipe.train.seed, recipe.layout):
        engine = make_engine(recipe)
        load_model(engine.modules, load(entry, model_state(engine.modules)))
        return engine.train_step(micro_batches()).loss


@pytest.mark.parametrize("extra", [[], ["model.moe_layer_freq=[0,1]", "model.moe_router_score_function=sigmoid"]])
def test_the_first_loss_is_the_dense_model_s(paths: Paths, dense_run: Path, extra: list[str]) -> None:
    run_id = f"made-{len(extra)}"
    made = upcycle(dense_run, [*OVERRIDES, *extra], paths.runs_dir, run_id)
    run_dir = paths.runs_dir / "dense-moe" / run_id
    assert made.run_dir == str(run_dir) and made.origin["dense_step"] == 3
    assert loss_of(run_dir) == pytest.approx(loss_of(dense_run), rel=1e-5)


def test_training_continues_from_it(paths: Paths, dense_run: Path) -> None:
    # In bf16 the optimizer has weights of its own, which have to be the experts' too.
    upcycle(dense_run, [*OVERRIDES, "train.precision=bf16"], paths.runs_dir, "next")
    run_dir = paths.runs_dir / "dense-moe" / "next"
    command = ["train", str(run_dir / "recipe.yaml"), "--run-id", "next", "--no-sample"]
    command += ["--runs-dir", str(paths.runs_dir), "--data-dir", str(paths.data_dir)]
    assert run(command) == 0
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()]
    losses = {record["step"]: record["loss"] for record in records if "loss" in record}
    of_dense = [json.loads(line) for line in (dense_run / "metrics.jsonl").read_text("utf-8").splitlines()]
    # Both read the data from its beginning, but only one of them had learnt something by then.
    assert (
        losses.keys() == {1, 2}
        and max(losses.values()) < next(record["loss"] for record in of_dense if "loss" in record) - 0.05
    )
    assert CheckpointStore(run_dir / "checkpoints").entries()[-1].step == 2


def test_experts_start_alike_and_routers_do_not(paths: Paths, dense_run: Path) -> None:
    upcycle(dense_run, OVERRIDES, paths.runs_dir, "weights")
    run_dir = paths.runs_dir / "dense-moe" / "weights"
    recipe = load_recipe(str(run_dir / "recipe.yaml")).recipe
    (entry,) = CheckpointStore(run_dir / "checkpoints").entries()
    with join(select(), recipe.train.seed, recipe.layout):
        engine: MegatronEngine = make_engine(recipe)
        load_model(engine.modules, load(entry, model_state(engine.modules)))
        first, second = (layer.mlp for layer in engine.modules[0].decoder.layers)
        for expert in first.experts.local_experts:
            assert expert.linear_fc1.weight.equal(first.experts.local_experts[0].linear_fc1.weight)
        assert not first.router.weight.equal(second.router.weight)
        assert first.router.weight.std() > 0.01


def test_a_run_id_in_use_and_a_refused_recipe_leave_all_as_it_is(
    paths: Paths, dense_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["upcycle", str(dense_run), "model.num_moe_experts=4", "--runs-dir", str(paths.runs_dir)]
    assert run([*command, "--run-id", "once"]) == 0
    said = capsys.readouterr().out
    assert f"llmrecipes train {paths.runs_dir}/dense-moe/once/recipe.yaml --run-id once" in said
    before = sorted((paths.runs_dir / "dense-moe").rglob("*"))
    assert run([*command, "--run-id", "once"]) == 2
    require_message(capsys.readouterr().err, paths.runs_dir / "dense-moe" / "once", rule="--run-id")
    assert run([*command, "model.moe_expert_capacity_factor=1.0", "--run-id", "refused"]) == 2
    require_message(capsys.readouterr().err, "model.moe_expert_capacity_factor")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(CheckpointStore, "publish", full)
    assert run([*command, "--run-id", "full"]) == 93
    assert sorted((paths.runs_dir / "dense-moe").rglob("*")) == before


def test_a_run_without_a_checkpoint_is_refused(paths: Paths, dense_run: Path, tmp_path: Path) -> None:
    recipe = load_recipe(str(dense_run / "recipe.yaml")).recipe
    (tmp_path / "recipe.yaml").write_text(to_yaml(recipe), "utf-8")
    command = ["upcycle", str(tmp_path), "model.num_moe_experts=4", "--runs-dir", str(tmp_path / "runs")]
    assert run(command) == 2
    assert not (tmp_path / "runs").exists()


def test_norms_in_front_of_experts_are_named_as_transformer_engine_names_them(dense_run: Path) -> None:
    recipe = load_recipe(str(dense_run / "recipe.yaml")).recipe
    moe = recipe.model_copy(
        update={"model": recipe.model.model_copy(update={"num_moe_experts": 4, "moe_layer_freq": [0, 1]})}
    )
    with join(select(), 1, moe.layout):
        state = build(derive(moe, 1, ROOMY), select()).module.sharded_state()
    keys = {value.key for value in state.values() if hasattr(value, "key")}
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in keys
    assert "decoder.layers.1.pre_mlp_layernorm.weight" in keys
