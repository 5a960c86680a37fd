"""DeepSeek-V3 as it is published, in fp8 by blocks, against transformers' own dequantisation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from llmrecipes.engine.core.checkpoint.tensors import StoredWeights
from llmrecipes.hf import fp8_blocks
from llmrecipes.hf.family import family_of
from llmrecipes.hf.match import section_of
from llmrecipes.hf.reading import CONFIG, Held, open_folder, read_config
from llmrecipes.hf.weights import AsHuggingFace
from llmrecipes.models.importing import import_model
from tests.hf_models import saved
from tests.refusals import refused
from tests.unit.test_hf_import import BPE, opened

State = dict[str, torch.Tensor]
SIDES = (16, 32)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(SIDES)}


def changed(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | keys))


def published(folder: Path) -> tuple[State, State]:
    """A folder like that of DeepSeek-V3 on the Hub; its tensors before, and as they are stored."""
    saved("deepseek_v3", folder, torch.bfloat16)
    before = load_file(folder / "model.safetensors")
    random = torch.Generator().manual_seed(5)
    stored = {}
    for name, value in before.items():
        stored[name] = value
        if name.endswith("_proj.weight") or "kv_a_proj" in name:
            grid = [-(-length // side) for length, side in zip(value.shape, SIDES, strict=True)]
            stored[name] = value.to(torch.float8_e4m3fn)
            stored[name + "_scale_inv"] = torch.rand(grid, generator=random) + 0.5
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    changed(folder, quantization_config=FP8)
    return before, stored


def dequantised(name: str, stored: State) -> torch.Tensor:
    scales = stored[name + "_scale_inv"]
    for dimension, side in enumerate(SIDES):
        scales = scales.repeat_interleave(side, dimension)
    rows, columns = stored[name].shape
    return (stored[name].float() * scales[:rows, :columns]).bfloat16()


def test_an_import_has_the_weights_that_transformers_has(tmp_path: Path) -> None:
    before, stored = published(tmp_path / "m")
    made = import_model(str(tmp_path / "m"), [BPE], tmp_path, "a")
    assert made.origin["stored_precision"] == "bf16"
    recipe, entry = opened(Path(made.run_dir))
    source = AsHuggingFace(StoredWeights(entry), family_of(recipe.model), recipe.model)
    assert set(source.names()) == set(before)
    whole = ragged = 0
    for name, value in before.items():
        if f"{name}_scale_inv" not in stored:
            assert source.read(name).equal(value), name
            continue
        assert source.read(name).equal(dequantised(name, stored)), name
        if any(length % side for length, side in zip(value.shape, SIDES, strict=True)):
            ragged += 1  # which transformers refuses
            continue
        theirs = Fp8Dequantize(None)._dequantize_one(stored[name], stored[f"{name}_scale_inv"], torch.bfloat16)
        assert source.read(name).equal(theirs), name
        whole += 1
    assert whole > 10 and ragged > 1


def test_any_part_is_read_with_the_scales_of_its_blocks() -> None:
    random = torch.Generator().manual_seed(6)
    stored = {"w": torch.randn(40, 70, generator=random).to(torch.float8_e4m3fn)}
    stored["w_scale_inv"] = torch.rand(3, 3, generator=random)
    expected = dequantised("w", stored)
    held = Held(Path("w"), "BF16", (40, 70))
    for rows in (slice(None), slice(0, 16), slice(15, 17), slice(33, 40)):
        for columns in (slice(None), slice(31, 33), slice(64, 70)):
            place = (rows, columns)
            found = fp8_blocks.read("w", held, lambda _, name, part: stored[name][part], place, block=SIDES)
            assert found.equal(expected[place])


def test_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    _, stored = published(tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    scales = stored[f"{name}_scale_inv"]
    for wrong in (scales[:, :1], scales.bfloat16(), scales.flatten(), None):
        other = {key: value for key, value in stored.items() if key != f"{name}_scale_inv"}
        replaced = other if wrong is None else other | {f"{name}_scale_inv": wrong.contiguous()}
        save_file(replaced, tmp_path / "model.safetensors")
        with refused(tmp_path, rule=name):
            open_folder(tmp_path)


@pytest.mark.parametrize("size", [None, [128], [128, 0], 128, ["128", 128]])
def test_other_forms_of_fp8_are_refused(size: Any, tmp_path: Path) -> None:
    saved("llama", tmp_path)
    for section in ({"quant_method": "fp8", "weight_block_size": size}, "fp8"):
        changed(tmp_path, quantization_config=section)
        with refused(tmp_path / CONFIG, rule="quantization_config"):
            read_config(tmp_path)


def test_kimi_k2_is_a_deepseek_v3(tmp_path: Path) -> None:
    saved("deepseek_v3", tmp_path)
    family, section = section_of(read_config(tmp_path), tmp_path)
    changed(
        tmp_path, model_type="kimi_k2", auto_map={"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    )
    assert section_of(read_config(tmp_path), tmp_path) == (family, section)
