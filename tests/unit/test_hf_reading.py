"""What is wrong with a folder is one message with exit code 2, and nothing in it is run."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from llmrecipes.cli.app import run
from llmrecipes.errors import ExitCode, UserError
from llmrecipes.hf.match import section_of
from llmrecipes.hf.reading import CONFIG, INDEX, WEIGHTS, fingerprint, open_folder, precision_of, read_config
from llmrecipes.hf.weights import open_weights
from llmrecipes.recipe.load import load_values
from llmrecipes.recipe.schema import Recipe
from tests.hf_models import saved
from tests.refusals import refused, require_message

BPE = "data.tokenizer.type=bpe"
HOSTILE: tuple[Any, ...] = (
    None, "x", -1, 0, 3, 10**30, 1.5, [], {}, True, False, float("nan"), float("inf"), [1], {"a": 1}, "", "0",
    ["full_attention", 3],
)  # fmt: skip
SHARDS = "model-0000{}-of-0000{}.safetensors"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in ("gpt2", "llama", "deepseek_v3"):
        saved(kind, folder / kind)
    saved("llama", folder / "sharded", max_shard_size="150kB")
    return folder


@pytest.fixture
def model(originals: Path, tmp_path: Path) -> Path:
    return shutil.copytree(originals / "llama", tmp_path / "llama")


@pytest.fixture
def sharded(originals: Path, tmp_path: Path) -> Path:
    return shutil.copytree(originals / "sharded", tmp_path / "sharded")


def recipe_of(folder: Path, *overrides: str) -> Recipe:
    values = {
        "name": "x",
        "model": {"seq_length": 8, **section_of(read_config(folder), folder)[1]},
        "train": {"train_iters": 1, "global_batch_size": 1},
        "optimizer": {"lr": 1e-3},
        "layout": {"micro_batch_size": 1},
    }
    return load_values(values, folder / CONFIG, overrides).recipe


def opened(folder: Path, *overrides: str) -> None:
    open_weights(folder, recipe_of(folder, *overrides).model)


def changed(folder: Path, **values: Any) -> None:
    config = {**json.loads((folder / CONFIG).read_text()), **values}
    (folder / CONFIG).write_text(json.dumps(config))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "deepseek_v3"])
@pytest.mark.rotating
def test_any_value_of_any_key_is_taken_or_refused(kind: str, originals: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(originals / kind, tmp_path / kind)
    opened(folder)
    whole = json.loads((folder / CONFIG).read_text())
    draw = random.Random(kind)
    for key in [*whole, "rope_scaling", "layer_types", "quantization_config", "head_dim", "auto_map", "n_inner"]:
        for value in [*draw.sample(HOSTILE, 5), ...]:
            config = {name: each for name, each in {**whole, key: value}.items() if each is not ...}
            (folder / CONFIG).write_text(json.dumps(config))
            try:
                opened(folder)
            except UserError as error:
                assert error.code == ExitCode.BAD_INPUT and str(folder) in str(error), (key, value)


@pytest.mark.parametrize("text", ["", "[]", "{", "nul", "[" * 100_000, '{"model_type": NaN}', "\ud800"])
def test_what_is_no_object_is_refused(text: str, model: Path) -> None:
    (model / CONFIG).write_text(text, "utf-8", "surrogatepass")
    with refused(model / CONFIG):
        opened(model)


def test_a_shard_that_is_cut_off_or_altered_is_refused(model: Path) -> None:
    whole = (model / WEIGHTS).read_bytes()
    header = int.from_bytes(whole[:8], "little")
    draw = random.Random(0)
    broken = [whole[: draw.randrange(len(whole))] for _ in range(20)] + [whole[:length] for length in (0, 7, 8, 9)]
    broken += [
        size.to_bytes(8, "little") + whole[8:] for size in (0, 1, header - 1, header + 1, 1 << 40, (1 << 64) - 1)
    ]
    for content in broken:
        (model / WEIGHTS).write_bytes(content)
        with refused(model / WEIGHTS):
            opened(model)
    for _ in range(200):
        place = draw.randrange(8, 8 + header)
        altered = bytes([*whole[:place], whole[place] ^ (1 << draw.randrange(8)), *whole[place + 1 :]])
        (model / WEIGHTS).write_bytes(altered)
        try:
            opened(model)  # a flipped letter of a comment, or of what is ignored, may pass
        except UserError as error:
            assert error.code == ExitCode.BAD_INPUT and str(model) in str(error)


@pytest.mark.parametrize(
    "file", ["../../etc/passwd", "/etc/passwd", "..", "", "a/b.safetensors", "x\0.safetensors", 3, None, "other.bin"]
)
def test_a_weight_map_stays_in_its_folder(file: object, sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = file
    (sharded / INDEX).write_text(json.dumps(index))
    with refused(sharded / INDEX):
        opened(sharded)


def test_missing_shards_are_named(sharded: Path) -> None:
    files = sorted(path.name for path in sharded.glob("*.safetensors"))
    assert len(files) > 2
    for name in files[:2]:
        (sharded / name).unlink()
    with refused(sharded, rule=(files[0], files[1])):
        opened(sharded)


def test_two_sets_of_weights_are_refused(sharded: Path) -> None:
    files = sorted(sharded.glob("*.safetensors"))
    index = (sharded / INDEX).read_text()
    files[0].rename(sharded / WEIGHTS)
    (sharded / INDEX).write_text(index.replace(files[0].name, WEIGHTS))
    opened(sharded)  # it is one of the shards
    (sharded / WEIGHTS).rename(files[0])
    (sharded / INDEX).write_text(index)
    save_file({"lm_head.weight": torch.zeros(2, 2)}, sharded / WEIGHTS)  # left by an earlier export
    with refused(sharded, rule=(WEIGHTS, INDEX)):
        opened(sharded)


def test_an_index_that_names_what_a_shard_does_not_have_is_refused(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"]["lm_head.weight"] = next(
        file for file in files if file != index["weight_map"]["lm_head.weight"]
    )
    (sharded / INDEX).write_text(json.dumps(index))
    with refused(sharded / INDEX, rule="lm_head.weight"):
        opened(sharded)


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def test_missing_unknown_and_misshapen_tensors_are_named(model: Path) -> None:
    rewritten(model, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with refused(model, rule="model.layers.1.mlp.up_proj.weight"):
        opened(model)
    rewritten(model, lambda tensors: tensors.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(3, 64)}))
    with refused(model, rule=("model.layers.1.mlp.up_proj.weight", "[96, 64]", "[3, 64]")):
        opened(model)
    rewritten(model, lambda tensors: tensors.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(96, 64)}))
    opened(model)
    rewritten(model, lambda tensors: tensors.update({"model.layers.0.adapter.weight": torch.zeros(2)}))
    with refused(model, rule="model.layers.0.adapter.weight"):
        opened(model)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantised_weights_are_refused(dtype: torch.dtype, model: Path) -> None:
    rewritten(model, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].to(dtype)}))
    with refused(model / WEIGHTS, rule="lm_head.weight"):
        opened(model)
    changed(model, quantization_config={"quant_method": "gptq", "bits": 4})
    with refused(model / CONFIG, rule="quantization_config"):
        opened(model)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_precision_is_that_of_transformers(stored: torch.dtype, tmp_path: Path) -> None:
    saved("llama", tmp_path, stored)
    config = {key: value for key, value in read_config(tmp_path).items() if key != "dtype"}
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp32"}
    for keys in (
        {}, {"dtype": None}, {"dtype": "float16"}, {"torch_dtype": "bfloat16"}, {"dtype": "float64"},
        {"dtype": "float32", "torch_dtype": "bfloat16"}, {"dtype": None, "torch_dtype": "float16"},
    ):  # fmt: skip
        (tmp_path / CONFIG).write_text(json.dumps({**config, **keys}))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype
        assert precision_of(open_folder(tmp_path)) == names[theirs], keys
    for odd in ("auto", "torch.float32", "int8", "", 3, ["float32"]):
        (tmp_path / CONFIG).write_text(json.dumps({**config, "dtype": odd}))
        with refused(f"{tmp_path / CONFIG}: dtype", rule=("float32", "bfloat16", "float16")):
            precision_of(open_folder(tmp_path))


@pytest.mark.parametrize("kind", ["gpt2", "qwen3"])
def test_a_tied_output_layer_is_kept_or_refused_as_transformers_ties_it(kind: str, tmp_path: Path) -> None:
    """transformers ties what is equal, and keeps an output layer of its own, which a tied recipe cannot have."""
    saved(kind, tmp_path)
    opened(tmp_path)
    name = next(name for name in load_file(tmp_path / WEIGHTS) if name.endswith(("wte.weight", "embed_tokens.weight")))
    embedding = load_file(tmp_path / WEIGHTS)[name]
    for output, kept in ((embedding.clone(), False), (embedding + 1e-3, True)):
        save_file({**load_file(tmp_path / WEIGHTS), "lm_head.weight": output}, tmp_path / WEIGHTS)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert theirs.get_output_embeddings().weight.equal(theirs.get_input_embeddings().weight) is not kept
        if not kept:
            opened(tmp_path)
            continue
        with refused(tmp_path, rule=("lm_head.weight", name, "tie_word_embeddings")):
            opened(tmp_path)
    changed(tmp_path, tie_word_embeddings=False)
    opened(tmp_path)
    changed(tmp_path, tie_word_embeddings=True)
    rewritten(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors[name][:-1].clone()}))
    with refused(tmp_path, rule=("lm_head.weight", name)):
        opened(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"])
def test_pickles_are_refused_and_not_opened(name: str, model: Path) -> None:
    (model / WEIGHTS).unlink()
    (model / name).write_bytes(b"cos\nsystem\n(S'touch " + str(model / "run").encode() + b"'\ntR.")
    with refused(model, rule=name):
        opened(model)
    assert not (model / "run").exists()


def test_code_of_a_model_is_never_run(model: Path) -> None:
    (model / "modeling_x.py").write_text(f"open({str(model / 'run')!r}, 'w')")
    changed(model, auto_map={"AutoModelForCausalLM": "modeling_x.X"})
    opened(model)  # the type is known: its code is not needed
    changed(model, model_type="x")
    with refused(model / CONFIG, rule="auto_map"):
        opened(model)
    assert not (model / "run").exists()


def test_links_lead_into_the_cache_of_the_hub_and_nowhere_else(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--a--b"
    snapshot = cache / "snapshots" / ("0" * 40)
    for folder in (cache / "blobs", snapshot):
        folder.mkdir(parents=True)
    for name in (CONFIG, WEIGHTS):
        shutil.copy(model / name, cache / "blobs" / name)
        (snapshot / name).symlink_to(Path("../../blobs") / name)
    opened(snapshot)
    (model / WEIGHTS).unlink()
    (model / WEIGHTS).symlink_to(cache / "blobs" / WEIGHTS)
    with refused(model / WEIGHTS):
        opened(model)
    (model / WEIGHTS).unlink()
    (model / WEIGHTS).symlink_to(model / WEIGHTS)
    with refused(model / WEIGHTS):
        opened(model)
    (model / WEIGHTS).unlink()
    os.mkfifo(model / WEIGHTS)
    with refused(model / WEIGHTS):
        open_folder(model)


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("model.hidden_size=128", ("128", "64")), ("model.num_layers=4", ("4", "2")),
        ("model.num_query_groups=4", ("4", "2")), ("model.ffn_hidden_size=100", ("100", "96")),
        ("model.rotary_base=500000", ("500000.0", "10000.0")), ("model.add_qkv_bias=true", ()),
        ("model.vocab_size=299", ("299", "300")), ("model.seq_length=65", ("65", "64")),
        ("model.normalization=LayerNorm", ("LayerNorm", "RMSNorm")),
        ("model.layernorm_epsilon=1.0e-5", ("1e-05", "1e-06")),
        ("model.num_moe_experts=4", ("4", "None")), ("model.mtp_num_layers=1", ("1", "None")),
    ],
)  # fmt: skip
def test_a_recipe_with_another_model_is_refused_with_both_values(
    override: str, rule: tuple[str, ...], model: Path
) -> None:
    key = override.partition("=")[0]
    overrides = [override, *(["model.max_position_embeddings=null"] if key == "model.seq_length" else [])]
    with refused(key, rule=rule):
        opened(model, *overrides)


def test_what_a_recipe_may_choose(model: Path) -> None:
    opened(
        model, "model.seq_length=16", "model.max_position_embeddings=4096", "model.hidden_dropout=0.1",
        "model.vocab_size=512", "model.make_vocab_size_divisible_by=1", "model.init_method_std=0.5",
    )  # fmt: skip


def test_commands_say_what_is_wrong_before_anything_is_written(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    runs = tmp_path / "runs"
    for arguments, where in (
        (["nobody/nothing"], "nobody/nothing"),
        (["nobody/nothing", "--revision", "abc"], "nobody/nothing"),
        (["no such name!"], "no such name!"),
        (["./nothing"], "nothing"),
        ([str(model), "--revision", "main"], "--revision"),
        ([str(model)], model),
        ([str(model), BPE, "model.num_layers=4"], "model.num_layers"),
        ([str(model), BPE, "model.hidden_sise=128"], "model.hidden_sise=128"),
    ):
        assert run(["import", *arguments, "--runs-dir", str(runs)]) == 2
        require_message(capsys.readouterr().err, where)
        assert not runs.exists()


def test_every_byte_counts_for_the_fingerprint_and_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "model"
    model.mkdir()
    (model / CONFIG).write_text("{}")
    save_file({"weight": torch.zeros(1 << 20)}, model / WEIGHTS)
    read: list[str] = []

    def of_now() -> str:
        return fingerprint(open_folder(model), read.append)

    first = of_now()
    assert len(read) == 1
    assert of_now() == first
    assert len(read) == 1, "remembered by size, times and inode"
    for place in (-5, 1 << 21, 3_333_333):
        times = (model / WEIGHTS).stat()
        with (model / WEIGHTS).open("r+b") as file:
            file.seek(place, os.SEEK_END if place < 0 else os.SEEK_SET)
            file.write(b"x")
        os.utime(model / WEIGHTS, ns=(times.st_atime_ns, times.st_mtime_ns))
        before, first = first, of_now()
        assert first != before
    assert not [path for path in model.iterdir() if path.name not in (CONFIG, WEIGHTS)], "nothing is left in the folder"
    (model / CONFIG).write_text("{ }")
    assert of_now() != first
