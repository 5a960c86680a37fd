"""`llmrecipes prune`: smaller and sparser runs, what they compute, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llmrecipes.data.folder.prepared import open_prepared
from llmrecipes.engine.backends import backend, stored_weights
from llmrecipes.engine.core.backend import loaded
from llmrecipes.engine.core.sparsegpt import sparsegpt
from llmrecipes.models import prune as prune_module
from llmrecipes.models.merge import Boxes
from llmrecipes.models.prune import PruningText, calibration_rows
from llmrecipes.models.pruned_weights import LINEAR, removed
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.derived.weight_names import weights
from llmrecipes.recipe.load import load
from llmrecipes.recipe.variants.pruned_models import PruneOptions
from llmrecipes.rundir import Run
from tests.conftest import Command
from tests.helpers import tiny_on, train_lines, write_recipe
from tests.refusals import require_message
from tests.unit.balance_worker import ROOMY

STEPS = {"train_iters": 3, "eval_interval": 3, "eval_iters": 1, "log_interval": 1}
SHAPE = {
    "num_layers": 4, "hidden_size": 32, "num_attention_heads": 8, "num_query_groups": 4, "ffn_hidden_size": 64,
    "vocab_size": 300, "seq_length": 32, "gated_linear_unit": True, "init_method_std": 0.2, "add_bias_linear": False,
    "position_embedding_type": "rope", "normalization": "RMSNorm", "activation_func": "silu",
}  # fmt: skip
EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 32, "moe_shared_expert_intermediate_size": 32}
FEW = ("--sequences", "4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pruned")


@pytest.fixture
def whole(folder: Path, corpus: Path, command: Command) -> Path:
    """A run of three steps."""
    return trained(folder, corpus, command, "whole", SHAPE)


@pytest.fixture
def sparse(folder: Path, corpus: Path, command: Command) -> Path:
    """A run of three steps, with experts."""
    return trained(folder, corpus, command, "experts", {**SHAPE, **EXPERTS, "num_layers": 2})


def trained(folder: Path, corpus: Path, command: Command, name: str, model: dict[str, Any]) -> Path:
    run = folder / "runs" / name / "one"
    if not run.exists():
        recipe = tiny_on(corpus, name, model=model, train=STEPS, checkpoint={"save_interval": 3})
        assert command("train", write_recipe(recipe, folder), "--run-id", "one", "--no-sample")[0] == 0
    return run


class Cleared:
    """Weights of a run with rows or columns set to zero; a `TensorSource` for `Boxes`."""

    def __init__(self, run: Path, columns: dict[str, list[int]]) -> None:
        self._tensors, self._columns = tensors(run), columns

    def read(self, name: str) -> torch.Tensor:
        tensor = self._tensors.read(name)
        if name in self._columns:
            tensor[:, self._columns[name]] = 0
        return tensor


def tensors(run: Path) -> Any:
    return stored_weights(load(str(run / "recipe.yaml")).recipe, Run(run).require_checkpoint())


def read(run: Path) -> dict[str, torch.Tensor]:
    source = tensors(run)
    return {name: source.read(name) for name in source.names()}


def logprobs(run: Path, data_dir: Path, columns: dict[str, list[int]] | None = None) -> torch.Tensor:
    """Of calibration text, by a run's weights, with some columns set to zero."""
    recipe = load(str(run / "recipe.yaml")).recipe
    rows = calibration_rows(recipe, data_dir, PruningText("valid", 2))
    engines, plan = backend(recipe), derive(recipe, 1, ROOMY)
    platform = engines.platform()
    with engines.join(recipe, platform):
        source: Any = Cleared(run, columns or {})
        return engines.load_given(plan, platform, Boxes(source)).scorer().score(rows).logprobs


def without(kept: torch.Tensor, size: int) -> list[int]:
    return sorted(set(range(size)) - set(kept.tolist()))


def rows_in(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Which rows of `whole` the rows of `part` are."""
    return (part[:, None] == whole[None]).all(-1).float().argmax(-1)


def test_neurons_and_heads_that_are_removed_are_all_that_is_missing(
    whole: Path, folder: Path, data_dir: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmrecipes.tracking.progress.SECONDS_BEFORE_COUNTING", 0.0)
    code, printed = command("prune", "whole", "--method", "width", "--ratio", "0.5", "--run-id", "w", *FEW)
    assert code == 0
    assert "sequences  " in printed and "parameters  " in printed, "long work shows its progress"
    run = folder / "runs/whole-pruned/w"
    assert f"llmrecipes train {run}/recipe.yaml --run-id w" in printed
    model = load(str(run / "recipe.yaml")).recipe.model
    assert (model.ffn_hidden_size, model.num_attention_heads, model.num_query_groups, model.kv_channels) == (
        32,
        4,
        2,
        4,
    )
    before, after, columns = read(whole), read(run), {}
    assert {name: tuple(tensor.shape) for name, tensor in after.items()} == weights(model)
    origin = json.loads((run / "pruned.json").read_text())
    for key, values in (("parameters_before", before), ("parameters", after)):
        assert origin[key] == sum(tensor.numel() for tensor in values.values())
    chosen = set()
    for layer in range(4):
        front = f"decoder.layers.{layer}."
        fc1, qkv = front + "mlp.linear_fc1.weight", front + "self_attention.linear_qkv.weight"
        neurons = rows_in(after[fc1][:32], before[fc1][:64])
        assert after[fc1][32:].equal(before[fc1][64 + neurons])
        columns[front + "mlp.linear_fc2.weight"] = without(neurons, 64)
        groups = rows_in(after[qkv].view(2, -1), before[qkv].view(4, -1))
        gone = without(groups, 4)
        columns[front + "self_attention.linear_proj.weight"] = [8 * group + n for group in gone for n in range(8)]
        chosen |= {tuple(neurons.tolist())}
    assert len(chosen) > 1  # layers are measured one by one
    expected = logprobs(whole, data_dir, columns)
    assert torch.allclose(logprobs(run, data_dir), expected, atol=1e-5)
    assert not torch.allclose(logprobs(whole, data_dir), expected, atol=1e-3)


def test_layers_that_change_their_input_least_are_removed(
    whole: Path, folder: Path, data_dir: Path, command: Command
) -> None:
    code, printed = command("prune", "whole", "--method", "depth", "--ratio", "0.5", "--run-id", "d", "--json", *FEW)
    assert code == 0
    origin = json.loads(printed.splitlines()[-1])
    influence, kept = origin["influence"], origin["layers"]
    assert len(influence) == 4 and min(influence) > 0
    assert kept == sorted(sorted(range(4), key=lambda layer: -influence[layer])[:2])
    assert origin["tokens"] == 4 * 32 and json.loads((folder / "runs/whole-pruned/d/pruned.json").read_text()) == origin
    gone = {
        f"decoder.layers.{layer}.{name}.weight": list(range(size))
        for layer in set(range(4)) - set(kept)
        for name, size in (("mlp.linear_fc2", 64), ("self_attention.linear_proj", 32))
    }
    expected = logprobs(whole, data_dir, gone)
    assert torch.allclose(logprobs(folder / "runs/whole-pruned/d", data_dir), expected, atol=1e-5)


def test_channels_and_several_sizes_of_another_recipe(
    whole: Path, folder: Path, corpus: Path, command: Command
) -> None:
    sizes = {**SHAPE, "num_layers": 2, "hidden_size": 24, "kv_channels": 4, "ffn_hidden_size": 40}
    recipe = tiny_on(corpus, "smaller", model=sizes, train=STEPS, checkpoint={"save_interval": 3})
    path = write_recipe(recipe, folder)
    assert command("prune", "whole", "--into", path, "--run-id", "s", *FEW)[0] == 0
    run = folder / "runs/smaller/s"
    before, after = read(whole), read(run)
    assert {name: tuple(tensor.shape) for name, tensor in after.items()} == weights(recipe.model)
    norm = "decoder.final_layernorm.weight"
    words = "embedding.word_embeddings.weight"
    channels = rows_in(after[words].t(), before[words].t())
    assert after[norm].equal(before[norm][channels])
    layers = json.loads((run / "pruned.json").read_text())["layers"]
    rows = after["decoder.layers.1.mlp.linear_fc1.weight"][:40]
    assert set(map(tuple, rows.tolist())) <= set(
        map(tuple, before[f"decoder.layers.{layers[1]}.mlp.linear_fc1.weight"][:, channels].tolist())
    )
    # It trains on, and transformers has its form.
    assert command("train", str(run / "recipe.yaml"), "--run-id", "s", "--no-sample")[0] == 0
    assert [line["step"] for line in train_lines(run)] == [1, 2, 3]
    assert command("export", str(run), "--out", str(folder / "smaller-hf"))[0] == 0


def test_experts_and_their_neurons(sparse: Path, folder: Path, command: Command) -> None:
    assert command("prune", "experts", "--method", "experts", "--ratio", "0.5", "--run-id", "e", *FEW)[0] == 0
    before, after = read(sparse), read(folder / "runs/experts-pruned/e")
    for layer in range(2):
        front = f"decoder.layers.{layer}.mlp."
        kept = rows_in(after[front + "router.weight"], before[front + "router.weight"]).tolist()
        assert len(set(kept)) == 2
        for new, old in enumerate(kept):
            name = "experts.local_experts.{}.linear_fc2.weight"
            assert after[front + name.format(new)].equal(before[front + name.format(old)])
    assert (
        command("prune", "experts", "--method", "width", "--axes", "ffn", "--ratio", "0.5", "--run-id", "f", *FEW)[0]
        == 0
    )
    model = load(str(folder / "runs/experts-pruned/f/recipe.yaml")).recipe.model
    shapes = {name: tuple(tensor.shape) for name, tensor in read(folder / "runs/experts-pruned/f").items()}
    assert shapes == weights(model) and model.moe_ffn_hidden_size == 16


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (PruneOptions("magnitude", 0.5), [[1, 1, 0, 0], [0, 1, 1, 0]]),
        (PruneOptions("wanda", 0.5), [[1, 1, 0, 0], [0, 1, 1, 0]]),
        (PruneOptions("wanda", 0.25), [[1, 0, 0, 0], [0, 1, 0, 0]]),
        (PruneOptions("magnitude", pattern="2:4"), [[1, 1, 0, 0], [0, 1, 1, 0]]),
        (PruneOptions("magnitude", 0.375), [[1, 1, 0, 0], [0, 1, 0, 0]]),
    ],
)
def test_the_smallest_scores_are_removed(options: PruneOptions, expected: list[list[int]]) -> None:
    scores = torch.tensor([[1.0, 2.0, 8.0, 9.0], [7.0, 3.0, 4.0, 6.0]])
    assert removed(scores, options).int().tolist() == expected


def published(weight: torch.Tensor, inputs: torch.Tensor, share: float | None) -> torch.Tensor:
    """Algorithm 1 of arXiv 2301.00774, as its authors' code has it, in fp64; without a share two of four."""
    weight, inputs = weight.double().clone(), inputs.double()
    hessian = 2 / len(inputs) * inputs.t() @ inputs
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    inverse = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    for start in range(0, weight.size(1), 128):
        stop = min(start + 128, weight.size(1))
        part, errors, own = weight[:, start:stop].clone(), [], inverse[start:stop, start:stop]
        mask = torch.zeros_like(part, dtype=torch.bool)
        if share is not None:
            scores = part**2 / own.diagonal()[None] ** 2
            mask = scores <= scores.flatten().sort().values[round(scores.numel() * share) - 1]
        made = torch.zeros_like(part)
        for column in range(stop - start):
            if share is None and column % 4 == 0:
                scores = part[:, column : column + 4] ** 2 / own.diagonal()[None, column : column + 4] ** 2
                mask.scatter_(1, column + scores.topk(2, dim=1, largest=False).indices, value=True)
            made[:, column] = part[:, column].masked_fill(mask[:, column], 0)
            errors.append((part[:, column] - made[:, column]) / own[column, column])
            part[:, column:] -= errors[-1][:, None] * own[column, column:][None]
        weight[:, start:stop] = made
        weight[:, stop:] -= torch.stack(errors, 1) @ inverse[start:stop, stop:]
    return weight


@pytest.mark.parametrize("share", [0.5, 0.3, None])
def test_sparsegpt_is_the_published_algorithm(share: float | None) -> None:
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(600, 40, generator=draw) @ torch.randn(40, 200, generator=draw)
    weight = torch.randn(24, 200, generator=draw)
    options = PruneOptions("sparsegpt", share, pattern=None if share else "2:4")
    # In fp64: a score that is rounded otherwise would remove another weight.
    made = sparsegpt(weight.double(), inputs.double().t() @ inputs.double(), options)
    torch.testing.assert_close(made, published(weight, inputs, share))
    zeros = (made == 0).float().mean().item()
    assert zeros == pytest.approx(share or 0.5, abs=1e-3)
    if share is None:
        assert ((made == 0).view(24, -1, 4).sum(-1) == 2).all()
    by_size = weight.masked_fill(removed(weight.abs(), replace(options, method="magnitude")), 0)
    squares = inputs.square().sum(0).sqrt()
    by_wanda = weight.masked_fill(removed(weight.abs() * squares, replace(options, method="wanda")), 0)
    errors = [float((inputs @ (each - weight).float().t()).square().sum()) for each in (made, by_size, by_wanda)]
    assert errors[0] < 0.5 * min(errors[1:])


def test_sparsegpt_keeps_what_a_model_says_better_than_magnitude(
    whole: Path, folder: Path, data_dir: Path, command: Command
) -> None:
    differences, expected = {}, logprobs(whole, data_dir)
    for method in ("magnitude", "sparsegpt"):
        text = ("--sequences", "32") if method == "sparsegpt" else ()
        arguments = ("--method", method, "--ratio", "0.5", "--run-id", method, *text)
        assert command("prune", "whole", *arguments)[0] == 0
        run = folder / "runs/whole-pruned" / method
        origin = json.loads((run / "pruned.json").read_text())
        assert origin["zeros"] == pytest.approx(0.5, abs=1e-3) and ("tokens" in origin) == (method == "sparsegpt")
        assert load(str(run / "recipe.yaml")).recipe.train.keep_zeros
        differences[method] = float((logprobs(run, data_dir) - expected).square().mean())
    assert differences["sparsegpt"] < 0.9 * differences["magnitude"], differences


def test_layers_are_pruned_with_the_states_of_pruned_layers(
    whole: Path, folder: Path, data_dir: Path, command: Command
) -> None:
    """The first matrix of the last layer has the same inputs in the pruned run."""
    options, name = PruneOptions("sparsegpt", pattern="2:4"), "decoder.layers.3.self_attention.linear_qkv"
    arguments = ("--method", "sparsegpt", "--pattern", "2:4", "--run-id", "order", *FEW)
    assert command("prune", "whole", *arguments)[0] == 0
    run = folder / "runs/whole-pruned/order"
    before, after = read(whole), read(run)
    recipe = load(str(run / "recipe.yaml")).recipe
    rows = calibration_rows(recipe, data_dir, PruningText("train", 4))
    engines, plan = backend(recipe), derive(recipe, 1, ROOMY)
    platform, hessian = engines.platform(), torch.zeros(32, 32)

    def see(_layer: Any, inputs: Any) -> None:
        flat = inputs[0].detach().reshape(-1, 32)
        hessian.addmm_(flat.t(), flat)

    with engines.join(recipe, platform):
        module = loaded(plan, platform, Run(run).require_checkpoint()).module.eval()
        module.get_submodule(name).register_forward_pre_hook(see)
        with torch.no_grad():
            module(rows, torch.arange(32).expand_as(rows), None)
    expected = sparsegpt(before[f"{name}.weight"], hessian, options)
    torch.testing.assert_close(after[f"{name}.weight"], expected, rtol=1e-3, atol=1e-4)


def test_experts_without_tokens_are_pruned_by_size(sparse: Path, folder: Path, command: Command) -> None:
    arguments = ("--method", "sparsegpt", "--pattern", "2:4", "--sequences", "1", "--run-id", "sp")
    assert command("prune", "experts", *arguments)[0] == 0
    matrices = {
        name: tensor
        for name, tensor in read(folder / "runs/experts-pruned/sp").items()
        if LINEAR.fullmatch(name.removesuffix(".weight"))
    }
    assert sum(".local_experts." in name for name in matrices) == 16
    for tensor in matrices.values():
        assert ((tensor == 0).view(tensor.size(0), -1, 4).sum(-1) >= 2).all()
    draw = torch.Generator().manual_seed(0)
    weight, options = torch.randn(8, 64, generator=draw), PruneOptions("sparsegpt", pattern="2:4")
    by_size = weight.masked_fill(removed(weight.abs(), options), 0)
    assert sparsegpt(weight, torch.eye(64), options).equal(by_size)


@pytest.mark.rotating
def test_zeros_stay_in_training_and_after_a_restart(whole: Path, folder: Path, command: Command) -> None:
    assert command("prune", "whole", "--method", "wanda", "--pattern", "2:4", "--run-id", "z", *FEW)[0] == 0
    run = folder / "runs/whole-pruned/z"
    before = {name: tensor for name, tensor in read(run).items() if LINEAR.fullmatch(name.removesuffix(".weight"))}
    assert len(before) == 16
    assert json.loads((run / "pruned.json").read_text())["zeros"] == 0.5
    for tensor in before.values():
        assert ((tensor == 0).view(tensor.size(0), -1, 4).sum(-1) == 2).all()
    recipe = str(run / "recipe.yaml")
    often = ("--no-sample", "checkpoint.save_interval=1", "--accept-changes")
    assert command("train", recipe, "--run-id", "z", *often)[0] == 0
    after = read(run)
    for name, tensor in before.items():
        assert ((after[name] == 0) == (tensor == 0)).all()
        assert not after[name].equal(tensor)
    again = folder / "runs/whole-pruned/again"
    shutil.copytree(run, again)
    shutil.rmtree(again / "checkpoints/step-00000003")
    assert command("train", recipe, "--run-id", "again", *often)[0] == 0
    resumed = read(again)
    assert all(tensor.equal(resumed[name]) for name, tensor in after.items())


@pytest.mark.parametrize(
    ("arguments", "where", "rule"),
    [
        (["--method", "depth", "--ratio", "0.9"], "--ratio", "0.75"),
        (["--method", "depth", "--ratio", "0.01"], "--ratio", ()),
        (["--method", "depth", "--ratio", "1.5"], "--ratio", "1.5"),
        (["--method", "depth"], "--ratio", ()),
        (["--method", "half", "--ratio", "0.5"], "--method", ()),
        ([], "--method", "--into"),
        (["--method", "width", "--ratio", "0.5", "--axes", "depth"], "--axes", ()),
        (["--method", "width", "--ratio", "0.5", "--pattern", "2:4"], "--pattern", "2:4"),
        (["--method", "wanda", "--ratio", "0.5", "--pattern", "2:4"], "--ratio", "2:4"),
        (["--method", "experts", "--ratio", "0.5"], "--method", "model.num_moe_experts"),
        (["--into", "gpt-tiny", "--ratio", "0.5"], "--ratio", "--into"),
        (["--into", "gpt-tiny"], "recipes/gpt-tiny.yaml", ("model.vocab_size", "300")),
        (["--method", "depth", "--ratio", "0.5", "model.normalization=LayerNorm"], "model.normalization", "RMSNorm"),
        (["--method", "width", "--ratio", "0.25", "layout.tensor_model_parallel_size=2"],
         "layout.tensor_model_parallel_size", ("num_query_groups", "3")),
        (["--method", "depth", "--ratio", "0.25", "layout.pipeline_model_parallel_size=2"],
         "layout.pipeline_model_parallel_size", "3"),
        (["--method", "magnitude", "--ratio", "0.5", "optimizer.optimizer=muon",
          "layout.use_distributed_optimizer=false"], "train.keep_zeros", "optimizer.optimizer"),
        (["--method", "depth", "--ratio", "0.5", "--sequences", "9999999"], "--sequences", "319,999,968"),
    ],
)  # fmt: skip
def test_what_cannot_be_pruned_is_refused(
    whole: Path, folder: Path, command: Command, arguments: list[str], where: str, rule: str | tuple[str, ...]
) -> None:
    before = sorted(folder.rglob("*"))
    code, printed = command("prune", "whole", *arguments, "--run-id", "refused")
    assert code == 2
    require_message(printed, where, rule=rule)
    assert sorted(folder.rglob("*")) == before


def test_calibration_rows_are_documents_with_an_end(whole: Path, folder: Path, data_dir: Path) -> None:
    recipe = load(str(whole / "recipe.yaml")).recipe
    (folder / "two.jsonl").write_text(f'{{"text": "{"word " * 10}"}}\n' * 2)
    (row,) = calibration_rows(recipe, data_dir, PruningText(f"jsonl:{folder / 'two.jsonl'}", 1))
    assert open_prepared(recipe, data_dir).tokenizer().eod in row


def test_a_model_that_does_not_fit_is_not_measured(
    whole: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prune_module, "detect", lambda: replace(ROOMY, memory_available_bytes=1 << 10))
    code, printed = command("prune", "whole", "--method", "depth", "--ratio", "0.5", "--run-id", "large", *FEW)
    assert code == 2
    require_message(printed, "whole", rule="--method")


def test_adapters_and_a_run_without_a_checkpoint_are_refused(whole: Path, folder: Path, command: Command) -> None:
    for name, lines in (("adapters", "\nlora: {rank: 2}\n"), ("empty", "")):
        run = folder / "bare" / name
        run.mkdir(parents=True)
        (run / "recipe.yaml").write_text((whole / "recipe.yaml").read_text("utf-8") + lines, "utf-8")
        code, printed = command("prune", str(run), "--method", "depth", "--ratio", "0.5")
        assert code == 2
        require_message(printed, "lora" if lines else run / "checkpoints")
