"""Layers of multi-token prediction, by the names of DeepSeek-V3's published files, come in and go out bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.cli.app import run
from llmrecipes.engine.core.checkpoint.loader import load
from llmrecipes.engine.core.model.gpt import construct
from llmrecipes.engine.core.platform import select
from llmrecipes.engine.core.rank_weights import load_model, model_state
from llmrecipes.engine.core.world import join
from llmrecipes.hf.reading import CONFIG, WEIGHTS
from llmrecipes.models.importing import import_model
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.load import load as load_recipe
from tests.hf_models import CONFIGS, LENGTH, VOCABULARY, saved
from tests.refusals import refused
from tests.unit.balance_worker import ROOMY

OVERRIDES = ["data.tokenizer.type=bpe", "train.precision=fp32"]
LAYERS = 2


def published(folder: Path, depths: int, *, tied: bool = False) -> dict[str, torch.Tensor]:
    """A model with further layers like its last one, and what DeepSeek writes around each."""
    config = CONFIGS["deepseek_v3"]()
    config.num_nextn_predict_layers, config.tie_word_embeddings = depths, tied
    saved(config, folder)
    tensors = load_file(folder / WEIGHTS)
    draw = torch.Generator().manual_seed(5)

    def like(name: str) -> torch.Tensor:
        value = tensors[name]
        return value + torch.randn(value.shape, generator=draw) * 0.05

    embedding = tensors["model.embed_tokens.weight"]
    hidden = embedding.size(1)
    last = f"model.layers.{LAYERS - 1}."
    for layer in range(LAYERS, LAYERS + depths):
        front = f"model.layers.{layer}."
        tensors |= {name.replace(last, front): like(name) for name in tensors if name.startswith(last)}
        tensors |= {f"{front}{name}.weight": like("model.norm.weight") for name in ("enorm", "hnorm")}
        tensors[f"{front}eh_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=draw) * 0.1
        tensors[f"{front}shared_head.norm.weight"] = like("model.norm.weight")
        tensors[f"{front}shared_head.head.weight"] = (embedding if tied else tensors["lm_head.weight"]).clone()
        tensors[f"{front}embed_tokens.weight"] = embedding.clone()
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return tensors


def expected_losses(folder: Path, ids: torch.Tensor, depths: int) -> list[torch.Tensor]:
    """Of each further token, [b, s - its distance], by transformers' own layers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    drafting = MtpModel.from_pretrained(model).eval()
    states = model.model(ids).last_hidden_state
    cache = MtpCache(config=model.config.get_mtp_config())
    losses = []
    for depth in range(depths):
        states = states[:, :-1]
        inputs = ids[:, depth + 1 :]
        positions = torch.arange(inputs.size(1))[None]
        states = drafting.forward_layer(depth, states, positions, cache, input_ids=inputs)
        logits = model.lm_head(states)[:, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, depth + 2 :], reduction="none"))
    return losses


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers finds these layers by the number of the published model's."""
    monkeypatch.setattr(
        transformers.DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.[2-9]\..*"]
    )


@pytest.mark.usefixtures("drafts")
@pytest.mark.parametrize(("depths", "tied"), [(1, False), (2, True)])
def test_further_predictions_are_imported_and_exported_bit_for_bit(depths: int, tied: bool, tmp_path: Path) -> None:
    original = published(tmp_path / "model", depths, tied=tied)
    made = import_model(str(tmp_path / "model"), OVERRIDES, tmp_path, "a")
    assert made.origin["left_out"] == 0
    out = tmp_path / "out"
    assert run(["export", made.run_dir, "--to", "hf", "--no-tokenizer", "--out", str(out)]) == 0
    assert json.loads((out / CONFIG).read_text())["num_nextn_predict_layers"] == depths
    written = load_file(out / WEIGHTS)
    assert set(written) == set(original)
    assert [name for name, value in original.items() if not written[name].equal(value)] == []

    ids = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(4))
    before, after = (transformers.AutoModelForCausalLM.from_pretrained(each) for each in (tmp_path / "model", out))
    assert before(ids).logits.equal(after(ids).logits)
    recipe = load_recipe(f"{made.run_dir}/recipe.yaml").recipe
    assert recipe.model.mtp_num_layers == depths
    (entry,) = CheckpointStore(Path(made.run_dir) / "checkpoints").entries()
    found: list[torch.Tensor] = []
    with join(select(), 1, recipe.layout), torch.no_grad():
        built = construct(derive(recipe, 1, ROOMY), select())
        load_model(built.modules, load(entry, model_state(built.modules)))
        compute = built.module.eval()._token_losses

        def seen(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            found.append(compute(labels, logits[..., :VOCABULARY]))
            return found[-1]

        built.module._token_losses = seen  # type: ignore[method-assign]
        positions = torch.arange(LENGTH).expand(2, -1)
        built.module(ids, positions, None, labels=ids.roll(-1, 1), loss_mask=torch.ones(2, LENGTH))
        expected = expected_losses(tmp_path / "model", ids, depths)
    assert len(found) == depths + 1
    for ours, theirs in zip(found, expected, strict=False):
        torch.testing.assert_close(ours[:, : theirs.size(1)], theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("copy", ["embed_tokens", "shared_head.head"])
def test_a_copy_that_differs_is_refused_and_one_that_is_missing_is_not(copy: str, tmp_path: Path) -> None:
    tensors = published(tmp_path / "model", 1)
    name = f"model.layers.{LAYERS}.{copy}.weight"
    save_file({**tensors, name: tensors[name] + 1}, tmp_path / "model" / WEIGHTS, {"format": "pt"})
    with refused(tmp_path / "model", rule="model.mtp_num_layers=null") as error:
        import_model(str(tmp_path / "model"), OVERRIDES, tmp_path, "a")
    assert name in error.value.what
    # Without these layers nothing of them is read; what is left out is counted.
    made = import_model(str(tmp_path / "model"), [*OVERRIDES, "model.mtp_num_layers=null"], tmp_path, "b")
    assert made.origin["left_out"] == sum(each.startswith(f"model.layers.{LAYERS}.") for each in tensors)
    del tensors[name]
    save_file(tensors, tmp_path / "model" / WEIGHTS, {"format": "pt"})
    assert import_model(str(tmp_path / "model"), OVERRIDES, tmp_path, "c").origin["left_out"] == 0


def test_a_model_that_transformers_saved_without_them_has_none(tmp_path: Path) -> None:
    saved("deepseek_v3", tmp_path / "model")
    assert json.loads((tmp_path / "model" / CONFIG).read_text())["num_nextn_predict_layers"] == 1
    made = import_model(str(tmp_path / "model"), OVERRIDES, tmp_path, "a")
    assert load_recipe(f"{made.run_dir}/recipe.yaml").recipe.model.mtp_num_layers is None
    incomplete: dict[str, Any] = published(tmp_path / "other", 1)
    del incomplete[f"model.layers.{LAYERS}.eh_proj.weight"]
    save_file(incomplete, tmp_path / "other" / WEIGHTS, {"format": "pt"})
    with refused(tmp_path / "other") as error:
        import_model(str(tmp_path / "other"), OVERRIDES, tmp_path, "b")
    assert "eh_proj" in error.value.what
