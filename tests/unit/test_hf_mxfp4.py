"""gpt-oss as it is published, in 4 bits, against transformers' own dequantisation."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from llmrecipes.engine.core.checkpoint.tensors import StoredWeights
from llmrecipes.hf import mxfp4
from llmrecipes.hf.family import family_of
from llmrecipes.hf.reading import CONFIG, Held, fingerprint, open_folder
from llmrecipes.hf.safetensors import SafetensorsFolder
from llmrecipes.hf.weights import AsHuggingFace
from llmrecipes.models.importing import import_model
from tests.hf_models import saved
from tests.refusals import refused
from tests.unit.test_hf_import import BPE, opened

State = dict[str, torch.Tensor]
MATRICES = ("gate_up_proj", "down_proj")


def packed(state: State, random: torch.Generator) -> State:
    """A model's tensors with random ones of 4 bits in place of its experts' matrices."""
    found = dict(state)
    for name, value in state.items():
        if name.endswith(MATRICES):
            experts, inputs, rows = found.pop(name).shape
            blocks = (experts, rows, inputs // mxfp4.GROUP, mxfp4.GROUP // 2)
            found[f"{name}_blocks"] = torch.randint(256, blocks, dtype=torch.uint8, generator=random)
            found[f"{name}_scales"] = torch.randint(120, 126, blocks[:-1], dtype=torch.uint8, generator=random)
        else:
            found[name] = value.clone()
    return found


def published(folder: Path) -> State:
    """A folder like that of gpt-oss on the Hub."""
    saved("gpt_oss", folder, torch.bfloat16)
    state = packed(load_file(folder / "model.safetensors"), torch.Generator().manual_seed(5))
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / CONFIG).read_text())
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    names = {"experts_per_token": 2, "initial_context_length": 4096}
    (folder / CONFIG).write_text(json.dumps(config | names | {"quantization_config": quantised}))
    return state


def test_every_pair_of_value_and_scale_is_transformers_own() -> None:
    """Of all bytes with all scales, whatever part is read."""
    blocks = torch.arange(256, dtype=torch.uint8).repeat(2).view(1, 1, -1, 16)
    blocks = blocks.repeat(1, 256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(1, -1, 1).repeat(1, 1, blocks.shape[2])
    tensors = {"w_blocks": blocks, "w_scales": scales}
    expected = convert_moe_packed_tensors(blocks, scales)
    for rows in (slice(None), slice(3, 200)):
        for inputs in (slice(None), slice(0, 64), slice(33, 130), slice(1, 2)):
            place = (slice(0, 1), inputs, rows)
            found = mxfp4.read("w", Held(Path("w"), "BF16", ()), lambda _, name, part: tensors[name][part], place)
            assert found.dtype == torch.bfloat16
            assert found.contiguous().view(torch.int16).equal(expected[place].contiguous().view(torch.int16))


def test_an_import_has_the_weights_that_transformers_has(tmp_path: Path) -> None:
    published(tmp_path / "m")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "m", quantization_config=transformers.Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    ).state_dict()
    made = import_model(str(tmp_path / "m"), [BPE], tmp_path, "a")
    assert made.origin["stored_precision"] == "bf16" and not made.origin["ignored_keys"]
    recipe, entry = opened(Path(made.run_dir))
    source = AsHuggingFace(StoredWeights(entry), family_of(recipe.model), recipe.model)
    assert set(source.names()) == set(theirs)
    for name in source.names():
        assert source.read(name).equal(theirs[name]), name


def test_only_what_trains_reads_them(tmp_path: Path) -> None:
    state = published(tmp_path)
    with refused(tmp_path / "model.safetensors", rule="train.pretrained"):
        SafetensorsFolder(tmp_path)
    name = "model.layers.0.mlp.experts.down_proj"
    for wrong in (state[f"{name}_scales"][:, :1], state[f"{name}_scales"].to(torch.int16), None):
        other = {key: value for key, value in state.items() if key != f"{name}_scales"}
        save_file(
            other if wrong is None else other | {f"{name}_scales": wrong.contiguous()}, tmp_path / "model.safetensors"
        )
        with refused(tmp_path, rule=f"{name}_blocks"):
            open_folder(tmp_path)


def test_other_types_of_models_do_not_have_them(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    with refused(tmp_path / CONFIG, rule="mxfp4"):
        open_folder(tmp_path)


def test_scales_in_another_file_count_too(tmp_path: Path) -> None:
    """The index may have them apart; a changed one is another model."""
    state = published(tmp_path)
    parts: dict[str, State] = {"a.safetensors": {}, "b.safetensors": {}}
    for name, value in state.items():
        parts["b.safetensors" if name.endswith("_scales") else "a.safetensors"][name] = value
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model.safetensors").unlink()
    found = []
    for change in (0, 1):
        for value in parts["b.safetensors"].values():
            value += change
        for file, part in parts.items():
            save_file(part, tmp_path / file)
        found.append(fingerprint(open_folder(tmp_path), print))
    assert len({*found}) == 2
    name = "model.layers.0.mlp.experts.down_proj"
    folder = open_folder(tmp_path)
    made = import_model(str(tmp_path), [BPE], tmp_path / "runs", "a")
    recipe, entry = opened(Path(made.run_dir))
    source = AsHuggingFace(StoredWeights(entry), family_of(recipe.model), recipe.model)
    expected = convert_moe_packed_tensors(state[f"{name}_blocks"], parts["b.safetensors"][f"{name}_scales"])
    assert source.read(name).equal(expected) and folder.tensors[name].shape == tuple(expected.shape)
