"""`llmrecipes verify` passes right layouts, and names what is wrong with others."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from llmrecipes.cli.app import run
from llmrecipes.recipe.load import to_yaml
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.variants.proxy import asked, scaled
from llmrecipes.verify.invariants import invariants
from llmrecipes.verify.report import verdict
from llmrecipes.verify.result import VerifyResult, relative
from llmrecipes.verify.verify_spec import TrainingRecord
from llmrecipes.workflow.run import Paths, prepare_data
from llmrecipes.workflow.verify import VerifyOptions, reference_recipe, verified_recipe, verify
from tests.dist.faulty import DRIFT, DRIFTING, FAULTS, train_with
from tests.dist.worlds import GlooWorld
from tests.refusals import refused, require_message

pytestmark = pytest.mark.dist

Verify = Callable[..., VerifyResult]
ITERS = 2

GATED = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "gated_linear_unit": True,
    "activation_func": "silu",
    "add_bias_linear": False,
}
EXPERTS = {**GATED, "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
TP2_EP2 = {**TP2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}


def make(corpus: Path, model: dict[str, Any], parallelism: dict[str, Any]) -> Recipe:
    """A small recipe that dropout, bf16 and recomputation are part of."""
    shape = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "vocab_size": 512}
    return Recipe.model_validate(
        {
            "name": "checked",
            "model": {**shape, "hidden_dropout": 0.1, "attention_dropout": 0.1, **model},
            "layout": {
                **parallelism,
                "micro_batch_size": 1,
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            },
            "train": {
                "train_iters": 100,
                "global_batch_size": 8,
                "precision": "bf16",
            },
            "optimizer": {"lr": 1e-3},
            "data": {"sources": [{"type": "text", "path": str(corpus)}]},
        }
    )


@pytest.fixture
def checked(worlds: dict[int, GlooWorld], corpus: Path, data_dir: Path, tmp_path: Path) -> Verify:
    """Verify a layout on ranks that are already there, with a fault or without."""

    def check(
        model: dict[str, Any], parallelism: dict[str, Any], ranks: int, fault: str | None = None, iters: int = ITERS
    ) -> VerifyResult:
        return verify(
            make(corpus, model, parallelism),
            Paths(tmp_path / "runs", data_dir),
            VerifyOptions(iters=iters, nproc=ranks),
            lambda _line: None,
            lambda spec, size, _cluster: worlds[size].run(train_with, fault, spec),
        ).result

    return check


@pytest.mark.parametrize(
    ("model", "parallelism", "ranks"),
    [
        pytest.param({}, {**TP2, **PP2}, 4, id="tp2 pp2, tied embeddings, biases"),
        pytest.param(GATED, {**CP2, **OVERLAP}, 4, id="cp2 dp2, gated, overlapped"),
        pytest.param(EXPERTS, TP2_EP2, 4, id="tp2 ep2 dp2"),
    ],
)
def test_a_right_layout_passes(
    checked: Verify, model: dict[str, Any], parallelism: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    result = checked(model, parallelism, ranks)
    assert result.ok, result.first_difference
    assert len(result.steps) == ITERS
    assert "bf16" in "; ".join(result.not_covered)
    assert "dropout" not in "; ".join(result.not_covered)
    computed = [each.name for each in result.invariants if each.difference is not None]
    assert len(computed) == (5 if "num_moe_experts" in model else 4), result.invariants
    assert 0 < result.max_rel_param < 1e-5  # one process and several ranks add in another order
    assert result.steps[0][0].loss > result.steps[-1][0].loss > 0
    folder = next((tmp_path / "runs" / "checked-verify").iterdir())
    assert json.loads((folder / "verify.json").read_text("utf-8"))["ok"] is True
    picture = ElementTree.parse(folder / "verify.svg").getroot()  # noqa: S314
    for name in ("loss-one", "loss-layout", "relative-loss", "relative-grad_norm"):
        line = picture.find(f".//{{*}}g[@id='{name}']/{{*}}path")
        assert line is not None
        assert len(re.findall("[ML]", line.attrib["d"])) == ITERS
    assert {path.name for path in folder.iterdir()} == {"logs", "verify.json", "verify.svg"}


@dataclass(frozen=True)
class Caught:
    """A fault, the layout it is in, and what has to be said about it."""

    fault: str
    model: dict[str, Any]
    parallelism: dict[str, Any]
    step: int
    quantity: str
    tensor: str
    layer: int | None = None
    kind: str = "gradients"


EMBEDDING = "embedding.word_embeddings.weight"
NORM = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
ROUTER = "decoder.layers.0.mlp.router.weight"
BEFORE = "weights before the step"
FOUND = (
    Caught("norm gradients not reduced over sequence-parallel ranks", {}, TP2, 1, "grad_norm", NORM, 0),
    Caught("loss divided by the number of micro-batches", {}, {}, 1, "grad_norm", EMBEDDING),
    Caught("one micro-batch dropped on one rank", {}, {}, 1, "loss", EMBEDDING),
    Caught("gradients averaged, not summed, over replicas", {}, {}, 1, "grad_norm", EMBEDDING),
    Caught("chunks of context in another order", GATED, CP2, 1, "loss", EMBEDDING),
    Caught("routers start from other weights", EXPERTS, TP2_EP2, 1, "loss", ROUTER, 0, BEFORE),
    # A router's gradient is too small to be seen in the norm of all; what it does to the next step is not. That loss
    # differs by about the tolerance, the norm by 30 times as much: either may be named.
    Caught("router gradients not reduced", EXPERTS, TP2_EP2, 2, "loss or grad_norm", ROUTER, 0, BEFORE),
    Caught("another learning rate", {}, {}, 2, "loss", EMBEDDING, None, BEFORE),
)


@pytest.mark.parametrize("case", FOUND, ids=lambda case: case.fault)
@pytest.mark.rotating
def test_a_fault_is_caught_and_named(case: Caught, checked: Verify) -> None:
    result = checked(case.model, case.parallelism, 2, case.fault)
    found = result.first_difference
    assert found is not None, "not caught"
    assert found.step == case.step
    assert found.quantity in case.quantity.split(" or ")
    assert found.tensor is not None
    assert (found.tensor.name, found.tensor.layer, found.tensor.kind) == (case.tensor, case.layer, case.kind)
    if case.fault == "gradients averaged, not summed, over replicas":
        assert found.layout == pytest.approx(found.reference / 2, rel=1e-5)
    answer = result.as_dict()
    assert answer["ok"] is False
    assert answer["first_difference"] == {
        "step": case.step,
        "quantity": found.quantity,
        "reference": found.reference,
        "layout": found.layout,
        "first_tensor": case.tensor,
        "layer": case.layer,
    }


def test_a_wrong_last_update_is_seen_in_the_weights(checked: Verify) -> None:
    result = checked({}, {}, 2, "another learning rate", iters=1)
    found = result.first_difference
    assert found is not None, "not caught"
    assert (found.step, found.quantity) == (1, "parameters")
    assert found.tensor is not None
    assert found.tensor.name == EMBEDDING
    assert result.max_relative("loss") < 1e-5 < result.max_rel_param


def test_diverging_replicas_are_reported_although_every_number_agrees(checked: Verify) -> None:
    # Each replica updates its own copy; the distributed optimizer would overwrite them.
    result = checked({}, {"use_distributed_optimizer": False}, 2, DRIFT)
    assert max(result.max_relative("loss"), result.max_relative("grad_norm"), result.max_rel_param) < 1e-5
    answer = result.as_dict()
    assert answer["ok"] is False
    assert answer["replicas"].pop("copies") > 20
    assert answer["replicas"] == {
        "step": 1, "tensor": DRIFTING, "layer": 1, "rank": 1, "main_rank": 0, "differing": 1,
    }  # fmt: skip
    difference = answer["first_difference"]
    assert (difference["step"], difference["quantity"], difference["first_tensor"]) == (1, "replicas", DRIFTING)
    assert "rank 1 differs from rank 0 after step 1" in verdict(result)


def test_what_was_not_run_is_not_called_the_same(checked: Verify) -> None:
    split = {**TP2, "tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 4, "expert_model_parallel_size": 4}
    result = checked({**EXPERTS, "moe_ffn_hidden_size": 128}, split, 2, iters=1)
    answer = result.as_dict()
    assert answer["ok"] is True
    assert answer["asked"]["expert_tensor_parallel_size"] == 4
    assert answer["layout"]["expert_tensor_parallel_size"] == 1
    changed = [(each["degree"], each["asked"], each["ran"]) for each in answer["reduced"]]
    assert changed == [("tensor_model_parallel_size", 4, 2), ("expert_model_parallel_size", 4, 2)]
    missing = [(each["degree"], each["asked"]) for each in answer["not_verified"]]
    assert missing == [("expert_tensor_parallel_size", 4), ("data_parallel_size", None)]
    assert all(each["reason"] for each in answer["not_verified"])
    text = verdict(result)
    assert "MATCH on TP2 EP2 SP:" in text
    assert "not verified      expert_tensor_parallel_size 4: gloo" in text


def _routers_by_all_tokens(patch: pytest.MonkeyPatch) -> None:
    target = "llmrecipes.engine.parts.router_losses.RouterLosses.batches"
    patch.setattr(target, lambda _self, batches, _number, **_: batches)


def _mean_of_micro_batches(patch: pytest.MonkeyPatch) -> None:
    from llmrecipes.engine.megatron import engine

    right = engine.sum_over_tokens

    def mean(*arguments: Any) -> Any:
        total, tokens, report = right(*arguments)
        return 64 * total / tokens, tokens, report

    patch.setattr(engine, "sum_over_tokens", mean)


def _masked_tokens_count(patch: pytest.MonkeyPatch) -> None:
    from llmrecipes.engine.megatron import engine

    right = engine.sum_over_tokens

    def all_of_them(*arguments: Any) -> Any:
        total, tokens, report = right(*arguments)
        return total + 1e-3 * arguments[-1].sum(), tokens, report

    patch.setattr(engine, "sum_over_tokens", all_of_them)


@pytest.mark.parametrize(
    ("fault", "broken", "weight"),
    [
        pytest.param(_routers_by_all_tokens, {"masked tokens"}, "router.weight", id="routers' losses by all tokens"),
        pytest.param(_mean_of_micro_batches, {"masked tokens", "micro-batch size"}, "", id="mean of micro-batches"),
        pytest.param(_masked_tokens_count, {"masked tokens", "labels under the mask"}, "", id="masked tokens count"),
    ],
)
@pytest.mark.rotating
def test_what_is_wrong_in_every_layout_is_caught_in_one_process(
    fault: Callable[[pytest.MonkeyPatch], None], broken: set[str], weight: str, corpus: Path, data_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    recipe = reference_recipe(verified_recipe(make(corpus, {**EXPERTS, "moe_aux_loss_coeff": 0.1}, {}), 2, "cpu"), 1)
    prepare_data(recipe, data_dir, lambda _line: None)
    fault(monkeypatch)
    empty = TrainingRecord(layout={}, steps=(), kept_step=None, replicas=None)
    ways = invariants(recipe, data_dir)
    result = VerifyResult("checked", 1e-5, empty, empty, 0.0, None, scaled(recipe, asked(recipe)), None, ways)
    assert {each.name for each in result.broken} == broken
    assert not result.ok
    assert all(each.weight.endswith(weight) for each in result.broken)


def test_every_fault_is_tried() -> None:
    assert {case.fault for case in FOUND} | {DRIFT} == set(FAULTS)


@pytest.mark.slow
def test_the_exit_code_of_the_command(
    corpus: Path, data_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "checked.yaml"
    path.write_text(to_yaml(make(corpus, {}, TP2)), "utf-8")
    paths = ["--runs-dir", str(tmp_path / "runs"), "--data-dir", str(data_dir)]
    common = ["verify", str(path), "train.train_iters=50", "--nproc", "2", "--iters", "2", *paths]
    assert run([*common, "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert list(answer) == [
        *(
            "recipe",
            "layout",
            "zero_stage",
            "iters",
            "max_rel_loss",
            "max_rel_grad_norm",
            "max_rel_param",
            "ok",
            "first_difference",
        ),
        *("replicas", "asked", "reduced", "added", "not_verified", "invariants", "not_covered"),
    ]
    assert (answer["ok"], answer["first_difference"], answer["iters"]) == (True, None, 2)
    assert answer["layout"]["tensor_model_parallel_size"] == answer["layout"]["world_size"] == 2
    assert max(answer[f"max_rel_{name}"] for name in ("loss", "grad_norm", "param")) <= 1e-5

    # Nothing agrees to the last digit.
    assert run([*common, "--tolerance", "1e-15"]) == 1
    printed = capfd.readouterr().out
    assert "MISMATCH" in printed
    assert "first difference" in printed


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--tolerance", "0"], "--tolerance"),
        (["--tolerance", "nan"], "--tolerance"),
        (["--iters", "0"], "--iters"),
        (["--nproc", "3"], "layout"),
        (["layout.context_parallel_size=3"], "model.seq_length"),
    ],
)
def test_bad_input_is_one_message(
    arguments: list[str], named: str, corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "checked.yaml"
    path.write_text(to_yaml(make(corpus, {}, TP2)), "utf-8")
    assert run(["verify", str(path), *arguments, "--runs-dir", str(tmp_path / "runs")]) == 2
    require_message(capfd.readouterr().err, named)
    assert not (tmp_path / "runs").exists()


def test_what_differs_on_purpose_is_refused(corpus: Path, tmp_path: Path) -> None:
    dropping = make(corpus, {**EXPERTS, "moe_expert_capacity_factor": 1.0}, TP2_EP2)
    with refused("model.moe_expert_capacity_factor", rule=("2", "model.moe_expert_capacity_factor=null")):
        verify(dropping, Paths(tmp_path, tmp_path), VerifyOptions(), lambda _line: None)


def test_numbers_that_are_not_finite_are_not_the_same() -> None:
    assert relative(math.nan, math.nan) == relative(1.0, math.nan) == relative(math.inf, 1.0) == math.inf
    assert relative(1.0, 0.0) == math.inf
    assert relative(0.0, 0.0) == 0.0
