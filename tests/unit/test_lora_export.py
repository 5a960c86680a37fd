"""Adapters leave for PEFT, alone or added to their base model, and compute there what they do here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from llmrecipes.checkpoint.manifest import CheckpointInfo
from llmrecipes.checkpoint.saver import AsyncSaver, saver_group
from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.cli.app import run as command
from llmrecipes.engine.base import Progress
from llmrecipes.engine.core.checkpoint.tensors import StoredWeights
from llmrecipes.engine.core.world import join
from llmrecipes.engine.megatron.backend import MegatronBackend
from llmrecipes.engine.megatron.engine import MegatronEngine
from llmrecipes.hf.adapter import KEYS
from llmrecipes.hf.match import section_of
from llmrecipes.hf.reading import read_config
from llmrecipes.models.export import export, export_adapter
from llmrecipes.models.export_options import ExportOptions
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.load import recipe_hash, to_yaml
from llmrecipes.recipe.schema import Lora, Recipe
from llmrecipes.train.spec import RunSpec
from llmrecipes.workflow.model_source import lora_of
from llmrecipes.workflow.pretrained import base_weights, with_pretrained
from tests.helpers import ROOMY, random_batches, steps, tiny
from tests.hf_models import LENGTH, VOCABULARY, saved
from tests.refusals import refused, require_message

TOKENS = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(4))
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {"rank": 4, "alpha": 6.0},
    "llama": {"rank": 4, "dropout": 0.5},
    "phi3": {"rank": 4},
    "ernie4_5": {"rank": 4, "target_modules": ["linear_qkv"]},
    "qwen3": {"rank": 4, "target_modules": ["linear_qkv", "linear_fc2"]},
    "mixtral": {"rank": 4, "target_modules": ["linear_qkv"]},
    "deepseek_v3": {
        "rank": 3,
        "alpha": 9.0,
        "target_modules": ["linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"],
    },
}
CASES_OF_EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral, experts": (
        "mixtral", {"rank": 3, "target_modules": ["linear_qkv", "experts.linear_fc1", "experts.linear_fc2"]}
    ),
    "gpt_oss, experts": (
        "gpt_oss", {"rank": 3, "target_modules": ["linear_proj", "experts.linear_fc1", "experts.linear_fc2"]}
    ),
    "qwen3_moe, second matrices": ("qwen3_moe", {"rank": 2, "alpha": 5.0, "target_modules": ["experts.linear_fc2"]}),
    "deepseek_v3, first matrices": (
        "deepseek_v3", {"rank": 4, "dropout": 0.1, "target_modules": ["linear_q_up_proj", "experts.linear_fc1"]}
    ),
}  # fmt: skip
OF_EXPERTS: dict[str, Any] = {
    "rank": 3, "target_modules": ["linear_fc1", "linear_fc2", "experts.linear_fc1", "experts.linear_fc2"]
}  # fmt: skip


def lora_recipe(base: Path, lora: dict[str, Any]) -> Recipe:
    _, model = section_of(read_config(base), base)
    sections = {
        "model": {**model, "seq_length": LENGTH},
        "train": {
            "train_iters": 3, "global_batch_size": 4, "precision": "fp32",
            "pretrained": str(base)
        },
        "optimizer": {"lr": 1e-2},
        "lora": lora, "layout": {"micro_batch_size": 2}
    }  # fmt: skip
    return Recipe.model_validate({"name": "adapted", **sections})


def new_run(recipe: Recipe, folder: Path) -> RunSpec:
    """The directory of a run, before its first step."""
    run_dir = folder / "runs" / "adapted" / "a"
    run_dir.mkdir(parents=True)
    (run_dir / "recipe.yaml").write_text(to_yaml(recipe), "utf-8")
    spec = RunSpec(recipe=recipe, run_dir=run_dir, runs_dir=folder / "runs", data_dir=folder / "data")
    return with_pretrained(spec, lambda _line: None)


@contextmanager
def engine_of_run(spec: RunSpec) -> Iterator[MegatronEngine]:
    platform = MegatronBackend().platform()
    plan = derive(spec.recipe, 1, ROOMY)
    with (
        join(platform, 1, spec.recipe.layout),
        base_weights(spec.run_dir, spec.recipe) as weights,
        closing(MegatronBackend().build(plan, platform, weights)) as engine,
    ):
        yield engine


def trained(spec: RunSpec) -> torch.Tensor:
    """Train and save; returns the logits afterwards."""
    with engine_of_run(spec) as engine:
        steps(engine, 3)
        store = CheckpointStore(spec.run_dir / "checkpoints")
        info = CheckpointInfo(
            step=3, consumed_samples=12, consumed_tokens=12 * LENGTH, layout=engine.plan.layout.as_dict(),
            recipe_hash=recipe_hash(spec.recipe), engine="megatron", recipe=spec.recipe.model_dump(mode="json"),
        )  # fmt: skip
        with AsyncSaver(store, saver_group(), engine.checkpoint_format()) as saver:
            saver.save(engine.state(Progress(step=3)), info)
            (report,) = saver.wait()
        assert report.path is not None, report.error
        return ours(engine)


@torch.no_grad()
def ours(engine: MegatronEngine) -> torch.Tensor:
    (module,) = engine.modules
    found: torch.Tensor = module.eval()(TOKENS, torch.arange(LENGTH).expand(2, -1), None)
    return found[..., :VOCABULARY]


@torch.no_grad()
def theirs(model: torch.nn.Module) -> torch.Tensor:
    found: torch.Tensor = model.eval()(TOKENS).logits
    return found


@pytest.mark.parametrize("name", [*CASES, *CASES_OF_EXPERTS])
@pytest.mark.rotating
def test_peft_computes_the_same(name: str, tmp_path: Path) -> None:
    import peft

    kind, lora = CASES_OF_EXPERTS[name] if name in CASES_OF_EXPERTS else (name, CASES[name])
    base = tmp_path / "base"
    saved(kind, base)
    spec = new_run(lora_recipe(base, lora), tmp_path)
    here = trained(spec)
    made = export_adapter("a", None, tmp_path / "runs")
    whole = transformers.AutoModelForCausalLM.from_pretrained(base)
    plain = theirs(whole)
    assert (here - plain).abs().max() > 1e-2, "the adapters have no effect"
    adapted = peft.PeftModel.from_pretrained(whole, made.path)
    assert made.parameters == sum(each.numel() for name, each in adapted.named_parameters() if "lora_" in name)
    assert (theirs(adapted) - here).abs().max() < 1e-5
    export(
        "a",
        tmp_path / "merged",
        tmp_path / "runs",
        tmp_path,
        ExportOptions(tokenizer=False, merge_adapter=True, family=kind),
    )
    ready = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (theirs(ready) - here).abs().max() < 1e-5
    merged = adapted.merge_and_unload().state_dict()
    for key, value in ready.state_dict().items():
        assert torch.allclose(value, merged[key], rtol=0, atol=1e-6), key


def test_adapters_of_shared_experts_leave_in_a_whole_model_alone(tmp_path: Path) -> None:
    base = tmp_path / "base"
    saved("deepseek_v3", base)
    here = trained(new_run(lora_recipe(base, OF_EXPERTS), tmp_path))
    with refused("lora.target_modules", rule="--merge-adapter"):
        export_adapter("a", None, tmp_path / "runs")
    export(
        "a",
        tmp_path / "merged",
        tmp_path / "runs",
        tmp_path,
        ExportOptions(tokenizer=False, merge_adapter=True),
    )
    ready = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (theirs(ready) - here).abs().max() < 1e-5


def test_a_base_model_that_has_changed_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "base"
    saved("llama", base)
    spec = new_run(lora_recipe(base, CASES["llama"]), tmp_path)
    trained(spec)
    assert with_pretrained(spec, lambda _line: None).pretrained == base
    weights = (base / "model.safetensors").read_bytes()
    (base / "model.safetensors").write_bytes(weights[:-4] + b"abcd")
    for starts in (
        lambda: with_pretrained(spec, lambda _line: None),
        lambda: export_adapter("a", None, tmp_path / "runs"),
        lambda: export("a", None, tmp_path / "runs", tmp_path, ExportOptions(tokenizer=False, merge_adapter=True)),
    ):
        with refused(base):
            starts()
    (base / "model.safetensors").write_bytes(weights)
    export_adapter("a", tmp_path / "b", tmp_path / "runs")
    (spec.run_dir / "pretrained.json").write_text("{}")
    with refused(spec.run_dir):
        with_pretrained(spec, lambda _line: None)


def test_a_checkpoint_has_adapters_alone_and_goes_on_exactly(tmp_path: Path) -> None:
    base = tmp_path / "base"
    saved("llama", base)
    spec = new_run(lora_recipe(base, {"rank": 4, "dropout": 0.5}), tmp_path)
    trained(spec)
    (entry,) = CheckpointStore(spec.run_dir / "checkpoints").entries()
    names = StoredWeights(entry).names()
    assert names and all("_lora." in name for name in names)

    def losses(engine: MegatronEngine, skipped: int) -> list[float]:
        batches = random_batches(spec.recipe, consumed=skipped * spec.recipe.train.global_batch_size)
        return [step.loss for step in steps(engine, 2, batches)]

    with engine_of_run(spec) as engine:
        engine.load_state(entry)
        first = losses(engine, 1)
    with engine_of_run(spec) as engine:
        engine.load_state(entry)
        assert losses(engine, 1) == first


def test_a_key_that_is_not_exported_has_its_default() -> None:
    class Stabilised(Lora):
        use_rslora: bool = False

    recipe = tiny("adapted")
    assert lora_of(recipe.model_copy(update={"lora": Stabilised(rank=4)}), Path()).rank == 4
    with refused("lora.use_rslora"):
        lora_of(recipe.model_copy(update={"lora": Stabilised(rank=4, use_rslora=True)}), Path())
    assert Lora.model_fields.keys() == KEYS, "a new key of lora: does hf/adapter.py write and merge it?"


def test_what_has_no_adapters_or_base_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tmp_path / "base"
    saved("llama", base)
    recipe = lora_recipe(base, CASES["llama"])
    trained(new_run(recipe, tmp_path))
    with refused(tmp_path / "runs" / "adapted" / "a", rule="--merge-adapter"):
        export("a", None, tmp_path / "runs", tmp_path, ExportOptions(tokenizer=False))
    assert command(["export", "a", "--to", "ggml", "--runs-dir", str(tmp_path / "runs")]) == 2
    require_message(capsys.readouterr().err, "--to", rule="'ggml'")
    for lora, train, where in (
        (None, recipe.train, "--to"),
        (recipe.lora, recipe.train.model_copy(update={"pretrained": None}), "train.pretrained"),
    ):
        other = recipe.model_copy(update={"lora": lora, "train": train})
        (tmp_path / "runs" / "adapted" / "a" / "recipe.yaml").write_text(to_yaml(other), "utf-8")
        with refused(where):
            export_adapter("a", None, tmp_path / "runs")
