"""`llmrecipes export`: what it writes, what it refuses, and that nothing half-written is left behind."""

from __future__ import annotations

import io
import itertools
import json
import re
import shutil
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jinja2
import pytest
import tokenizers
import torch
import transformers
from huggingface_hub import ModelCard
from rich.console import Console
from safetensors import safe_open
from transformers.utils.chat_template_utils import render_jinja_template

import llmrecipes
from llmrecipes.checkpoint.manifest import MANIFEST_NAME
from llmrecipes.cli.app import run
from llmrecipes.data.folder.prepared import open_prepared
from llmrecipes.data.prepare import prepare
from llmrecipes.data.tokens.templates import CHATML, SPECIAL, TEMPLATES, of_prepared
from llmrecipes.data.tokens.tokenizer import EOD
from llmrecipes.data.tokens.tokenizer import train as train_tokenizer
from llmrecipes.engine.sampling import Sampling
from llmrecipes.hardware.profile import Costs
from llmrecipes.hf.family import family_named, family_of
from llmrecipes.hf.match import section_of
from llmrecipes.hf.safetensors import SafetensorsFolder, write
from llmrecipes.hf.tokenizer_files import serving_form, write_tokenizer
from llmrecipes.launch.run_options import RunOptions
from llmrecipes.models.create import published
from llmrecipes.models.importing import import_model
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Model
from llmrecipes.tracking.energy import Energy
from llmrecipes.tracking.progress import Counted
from llmrecipes.workflow.generate import GenerationRequest, samples
from llmrecipes.workflow.model_source import open_tensors
from llmrecipes.workflow.run import Paths, TrainOptions
from llmrecipes.workflow.train import train
from tests.helpers import environment, tiny, tiny_on
from tests.hf_models import saved
from tests.refusals import refused, require_message

GPT_TINY = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "add_bias_linear": False, "qk_layernorm": True,
    "share_embeddings_and_output_weights": False, "init_method_std": 0.2, "vocab_size": 400, "seq_length": 32,
}  # fmt: skip


END, UNKNOWN_WORD = "<end>", "<unk>"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Paths:
    return Paths(tmp_path_factory.mktemp("runs"), data_dir)


@pytest.fixture(scope="module")
def trained(paths: Paths, corpus: Path) -> Path:
    """A run of four steps, in the shape of gpt-tiny, with checkpoints of steps 2 and 4."""
    recipe = tiny_on(
        corpus,
        model=GPT_TINY,
        train={"train_iters": 4, "global_batch_size": 4},
        checkpoint={"save_interval": 2},
        data={"num_workers": 0},
    )
    assert train(recipe, paths, TrainOptions(run_id="done", run=RunOptions(sample=False)), lambda _: None) == 0
    return paths.runs_dir / "tiny" / "done"


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run, to damage."""
    return Path(shutil.copytree(trained, tmp_path / "runs" / "tiny" / "done"))


def command(run_name: str | Path, *options: str | Path, paths: Paths) -> list[str]:
    directories = ["--runs-dir", str(paths.runs_dir), "--data-dir", str(paths.data_dir)]
    return ["export", str(run_name), *map(str, options), *directories]


def test_a_run_is_a_model_of_transformers(
    trained: Path, paths: Paths, tmp_path: Path, capsys: pytest.CaptureFixture[str], corpus: Path
) -> None:
    out = tmp_path / "new" / "model"
    assert run(command("tiny", "--to", "hf", "--out", out, "--max-shard-size", "100KB", "--json", paths=paths)) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["path"], report["step"], report["family"], report["dtype"]) == (str(out), 4, "apertus", "fp32")
    shards = sorted(out.glob("*.safetensors"))
    assert len(shards) == report["shards"] > 2
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {shard.name for shard in shards}
    held: dict[str, int] = {}
    for shard in shards:
        with safe_open(shard, "pt") as file:
            held |= {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118
    assert held.keys() == index["weight_map"].keys()
    assert sum(held.values()) == index["metadata"]["total_size"] == report["bytes"]
    assert [path.name for path in out.parent.iterdir()] == ["model"]

    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    text = "word 17 döcument\n\t  if"
    ours = open_prepared(load(str(trained / "recipe.yaml")).recipe, paths.data_dir).tokenizer()
    assert tokenizer(text).input_ids == ours.encode(text)
    assert tokenizer.decode(tokenizer(text).input_ids) == text

    request = GenerationRequest("word 1", max_new_tokens=20, sampling=Sampling(temperature=0))
    (sample,) = samples(trained, paths.data_dir, request)
    prompt = tokenizer("word 1", return_tensors="pt")
    found = model.generate(**prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)[0]
    assert tokenizer.decode(found[prompt.input_ids.shape[1] :], skip_special_tokens=True) == sample.text

    card = (out / "README.md").read_text()
    front, _, body = card.removeprefix("---\n").partition("---\n")
    assert "license" not in front and "library_name: transformers" in front
    assert str(corpus) not in body and corpus.name in body, "a card is published; folders of a machine are not"
    assert f"{sum(p.numel() for p in model.parameters()):,}" in body
    assert "co2" not in front and "energy used by the training is not known" in body


def test_the_card_has_the_energy_up_to_the_checkpoint(trained: Path, paths: Paths, tmp_path: Path) -> None:
    metrics = trained / "metrics.jsonl"
    before = metrics.read_bytes()
    try:
        with metrics.open("a") as file:
            for step, joules in ((2, 3.6e6), (4, 7.2e6)):
                details = Energy().plus(joules, ["nvml"], Costs(kg_co2_per_kwh=0.5)).details(100)
                file.write(json.dumps({"step": step, "event": "energy", "details": details}) + "\n")
        assert run(command(f"{trained}@2", "--no-tokenizer", "--out", tmp_path / "out", paths=paths)) == 0
    finally:
        metrics.write_bytes(before)
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.to_dict()["co2_eq_emissions"] == {
        "emissions": 500.0, "source": "llmrecipes, energy measured by nvml", "training_type": "pre-training",
    }  # fmt: skip
    assert "1 kWh, measured by nvml" in card.text


def test_a_step_a_type_and_python(trained: Path, paths: Paths, tmp_path: Path) -> None:
    assert run(command(f"{trained}@2", "--dtype", "bf16", "--no-tokenizer", paths=paths)) == 0
    out = trained / "hf" / "step-00000002"
    early = SafetensorsFolder(out)
    assert {early.dtype(name) for name in early.names()} == {torch.bfloat16}
    assert transformers.AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    assert not (out / "tokenizer.json").exists()

    later = llmrecipes.open_run(trained, data_dir=paths.data_dir).export(tmp_path / "later", dtype="fp16")
    whole = llmrecipes.open_run(trained, data_dir=paths.data_dir).export(tmp_path / "early", step=2)
    half, full = SafetensorsFolder(later), SafetensorsFolder(whole)
    name = "model.layers.0.mlp.up_proj.weight"
    assert half.dtype(name) == torch.float16
    assert torch.equal(full.read(name).bfloat16(), early.read(name))
    assert not torch.equal(full.read(name).half(), half.read(name)), "step 4 has learnt since step 2"

    again = open_tensors(str(whole), paths.runs_dir)
    assert again.config["model_type"] == "apertus" and torch.equal(again.source.read(name), full.read(name))


def as_exported(made: Path, out: Path, paths: Paths, capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    assert run(command(made, "--no-tokenizer", "--out", out, "--json", *options, paths=paths)) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])  # a library may have said something before
    assert json.loads((out / "config.json").read_text())["model_type"] == report["family"]
    return report


@pytest.mark.parametrize("kind", ["mistral", "phi3", "ernie4_5"])
def test_a_model_leaves_as_the_family_that_it_entered_as(
    kind: str, paths: Paths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the same form as `llama`, which is tried first."""
    saved(kind, tmp_path / "m")
    made = Path(import_model(str(tmp_path / "m"), ["data.tokenizer.type=bpe"], tmp_path, "a").run_dir)
    report = as_exported(made, tmp_path / "own", paths, capsys)
    assert (report["family"], report["notes"]) == (kind, [])
    report = as_exported(made, tmp_path / "other", paths, capsys, "--family", "llama")
    assert (report["family"], report["notes"]) == ("llama", [])


def test_a_family_that_nobody_named_is_said_with_the_others_that_fit(
    paths: Paths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved("llama", tmp_path / "m")
    made = Path(import_model(str(tmp_path / "m"), ["data.tokenizer.type=bpe"], tmp_path, "a").run_dir)
    record = made / "imported.json"
    entered = json.loads(record.read_text())
    record.write_text(json.dumps({**entered, "model_type": "gpt2"}))
    report = as_exported(made, tmp_path / "gpt2", paths, capsys)
    (note,) = report["notes"]
    assert report["family"] == "llama" and {"gpt2", "mistral", "phi3", "--family"} <= set(re.split(r"[ ,;]+", note))
    record.unlink()
    report = as_exported(made, tmp_path / "unknown", paths, capsys)
    (note,) = report["notes"]
    assert report["family"] == "llama" and "gpt2" not in note
    assert {"mistral", "phi3", "ernie4_5", "--family"} <= set(re.split(r"[ ,;]+", note))
    assert "--family" not in (tmp_path / "unknown" / "README.md").read_text()


@pytest.mark.parametrize(
    ("options", "where", "rule"),
    [
        (["none"], "RUNS", ()),
        (["tiny@3"], "STEPS", ("2", "4")),
        (["tiny@last"], "tiny@last", ()),
        (["tiny", "--to", "gguf"], "--to", ()),
        (["tiny", "--dtype", "fp8"], "--dtype", ("fp32", "bf16", "fp16")),
        (["tiny", "--max-shard-size", "5 parsecs"], "--max-shard-size", "5GB"),
        (["tiny", "--max-shard-size", "0"], "--max-shard-size", "5GB"),
        (["tiny", "--family", "bloom"], "--family", "deepseek_v3"),
        (["tiny", "--family", "qwen3"], "model.gated_linear_unit", "gated_linear_unit=True"),
        (["tiny", "--out", "OUT"], "OUT", "--out"),
        (["tiny", "--data-dir", "OUT"], "OUT", "--no-tokenizer"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else None,
)
def test_bad_input(
    trained: Path,
    options: list[str],
    where: str,
    rule: str | tuple[str, ...],
    paths: Paths,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"OUT": str(tmp_path), "RUNS": str(paths.runs_dir)}
    words = [places.get(word, word) for word in options]
    if "--out" not in words:
        words += ["--out", str(tmp_path / "out")]
    given = command(words[0], paths=paths) + words[1:]
    assert run(given) == 2
    places["STEPS"] = str(trained / "checkpoints")
    require_message(capsys.readouterr().err, places.get(where, where), rule=rule)
    assert not list(tmp_path.iterdir())


NO_FORM: list[tuple[str, dict[str, Any]]] = [
    ("model.use_mup", {"use_mup": True}),
    ("model.rotary_percent", {"rotary_percent": 0.5, "qk_layernorm": True}),
    ("model.mtp_num_layers", {"mtp_num_layers": 1}),
    ("model.add_bias_linear", {"add_bias_linear": True}),
    ("model.normalization", {"num_moe_experts": 4, "normalization": "LayerNorm", "moe_router_topk": 2}),
    ("model.moe_shared_expert_intermediate_size", {"num_moe_experts": 4, "moe_shared_expert_intermediate_size": 8}),
]


@pytest.mark.parametrize(("key", "changes"), NO_FORM, ids=[key for key, _ in NO_FORM])
def test_what_has_no_form_is_refused_with_the_key(key: str, changes: dict[str, Any]) -> None:
    dense = {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "vocab_size": 512,
        "position_embedding_type": "rope", "normalization": "RMSNorm", "activation_func": "silu",
        "gated_linear_unit": True, "add_bias_linear": False,
    }  # fmt: skip
    assert family_of(Model.model_validate(dense)).name == "llama"
    with refused(key):
        family_of(Model.model_validate({**dense, **changes}))


LLAMA_CONFIG = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 96, "max_position_embeddings": 64, "rope_theta": 5e5,
}  # fmt: skip
LLAMA_3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
UNKNOWN: list[tuple[str, dict[str, Any]]] = [
    ("attention_bias", {"attention_bias": True}),
    ("mlp_bias", {"mlp_bias": True}),
    ("hidden_act", {"hidden_act": "relu"}),
    ("rope_scaling.rope_type", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    ("rope_scaling.full_attention", {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0}}}),
    ("rope_scaling.factor", {"rope_scaling": {"rope_type": "yarn", "factor": None}}),
    ("config.json", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": "32"}}),
    ("rope_scaling.attn_factor", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.9}}),
    # Nothing is multiplied without a longer context.
    ("rope_scaling.attention_factor", {"rope_scaling": {"type": "yarn", "factor": 1.0, "attention_factor": 1.2}}),
    ("config.json", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0}}),
    ("rope_scaling.low_freq_factor", {"rope_scaling": LLAMA_3 | {"low_freq_factor": 2.0}}),
    ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
    ("quantization_config", {"quantization_config": {"quant_method": "fp8"}}),
    ("sliding_window", {"model_type": "mistral", "sliding_window": 0}),
    ("layer_types", {"model_type": "qwen2", "layer_types": ["full_attention", "chunked_attention"]}),
    ("layer_types", {"model_type": "llama", "layer_types": ["sliding_attention", "full_attention"]}),
]


@pytest.mark.parametrize("changes", [{"truncate": False}, {"mscale_all_dim": 0.7, "attention_factor": 0.3}], ids=str)
def test_yarn_that_latent_attention_does_not_have_is_refused_with_the_key(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    from tests.hf_models import CONFIGS

    scaling = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    config = {**CONFIGS["deepseek_v3"]().to_dict(), "rope_theta": 10000}
    del config["rope_parameters"]
    published = {**config, "rope_scaling": {**scaling, "mscale": 1.0, "mscale_all_dim": 1.0}}
    _, model = section_of(published, tmp_path)
    assert (model["rope_type"], model["mscale"], model["mscale_all_dim"]) == ("yarn", 1.0, 1.0)
    with refused(f"rope_scaling.{[*changes][-1]}"):
        section_of({**config, "rope_scaling": {**scaling, **changes}}, tmp_path)


@pytest.mark.parametrize(("key", "changes"), UNKNOWN, ids=[json.dumps(changes) for _, changes in UNKNOWN])
def test_what_a_recipe_cannot_say_is_refused_with_the_key(key: str, changes: dict[str, Any], tmp_path: Path) -> None:
    assert section_of(LLAMA_CONFIG, tmp_path)[1]["rotary_base"] == 5e5
    with refused(key):
        section_of({**LLAMA_CONFIG, **changes}, tmp_path)


def test_a_model_type_that_no_table_has_is_refused() -> None:
    for name in ("bloom", None, ["llama"]):
        with refused("config.json", rule="deepseek_v3"):
            family_named(name, "config.json")


# -- damage ------------------------------------------------------------------------------------------------------------


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def weights_file(checkpoint: Path) -> tuple[Path, int]:
    """The file with the embedding, and a place in the middle of its values."""
    from llmrecipes.checkpoint.manifest import inspect
    from llmrecipes.engine.core.checkpoint.reading import read_index

    index = read_index(inspect(checkpoint, full=False))
    parts = index.tensors["embedding.word_embeddings.weight"].slices((0, 0), (1, 1))
    number, start, length = parts.places[0].tolist()
    return checkpoint / index.files[number], start + length // 2


@pytest.mark.parametrize("damage", ["a value", "the index", "the manifest", "a shorter file", "a missing file"])
def test_a_damaged_checkpoint_is_refused(
    damage: str, copied: Path, paths: Paths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = copied / "checkpoints" / "step-00000004"
    file, place = weights_file(checkpoint)
    if damage == "a value":
        flip(file, place)
    elif damage == "a shorter file":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "a missing file":
        file.unlink()
    else:
        flip(checkpoint / ("index.bin" if damage == "the index" else MANIFEST_NAME), -40)
    out = tmp_path / "out" / "model"
    assert run(command(f"{copied}@4", "--out", out, paths=paths)) == 2
    where = file if damage == "a value" else checkpoint
    require_message(capsys.readouterr().err, where)
    assert not out.exists() and not list(tmp_path.glob("out/.*"))
    assert run(command(f"{copied}@2", "--out", out, paths=paths)) == 0


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[None]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_leaves_nothing(
    trained: Path, paths: Paths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, 256):
        assert run(command(trained, "--out", disk / "model", paths=paths)) == 2
        require_message(capsys.readouterr().err, disk, rule="--out")
        assert not list(disk.iterdir())


HOLD = """
import sys
from pathlib import Path
from llmrecipes.models.create import published
with published(Path(sys.argv[1])) as folder:
    (folder / "model.safetensors").write_text("half")
    (folder / "more").mkdir()
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_killed_export_is_cleaned_up_by_the_next_and_a_live_one_is_not(tmp_path: Path) -> None:
    out = tmp_path / "model"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(out)], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"ready\n"
            with refused(out):
                published(out).__enter__()
            assert list(tmp_path.glob(".*")), "the other's files are still there"
        finally:
            holder.kill()
    assert not out.exists()
    with published(out) as folder:
        assert [path.name for path in folder.iterdir() if not path.name.startswith(".")] == []
        (folder / "config.json").write_text("{}")
    assert [path.name for path in out.iterdir()] == ["config.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_is_interrupted_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), published(tmp_path / "model") as folder:
        (folder / "model.safetensors").write_text("half")
        raise error
    assert not list(tmp_path.iterdir())


# -- values ------------------------------------------------------------------------------------------------------------


class Made:
    """Tensors that are made when they are read, and counted while they are in memory; see `TensorSource`."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> None:
        self._shapes, self._dtype = shapes, dtype
        self.alive = self.most = 0

    def names(self) -> Sequence[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype

    def read(self, name: str) -> torch.Tensor:
        made = torch.full(self._shapes[name], 3.0e5, dtype=self._dtype)
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(made, self._gone)
        return made

    def _gone(self) -> None:
        self.alive -= 1


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    source = Made({f"{number}.weight": (8, 16) for number in range(9)} | {"large": (100, 16), "scalar": ()})
    written = write(source, {}, tmp_path, "bf16", shard_bytes=600)
    assert source.most <= 2
    assert written.shards[-1] == "model-00006-of-00006.safetensors"
    folder = SafetensorsFolder(tmp_path)
    assert {name: folder.shape(name) for name in folder.names()} == {
        name: source.shape(name) for name in source.names()
    }
    assert {float(folder.read(name).float().mean()) for name in folder.names()} == {float(torch.tensor(3e5).bfloat16())}


def test_every_tensor_that_is_written_is_counted(tmp_path: Path) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=False)
    source = Made({f"{number}.weight": (8, 16) for number in range(3)})
    write(source, {}, tmp_path, progress=Counted(console, itertools.count(step=11).__next__))
    lines = [line.split()[:2] for line in shown.getvalue().splitlines()]
    assert lines == [["tensors", "1/3"], ["tensors", "2/3"], ["tensors", "3/3"]]


def test_a_value_that_fp16_cannot_hold_is_refused(tmp_path: Path) -> None:
    with refused("--dtype", rule="bf16"):
        write(Made({"weight": (2, 2)}), {}, tmp_path, "fp16")


def test_a_bias_that_selects_experts_keeps_its_precision(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.gate.e_score_correction_bias"
    write(Made({name: (4,), "weight": (4,)}), {}, tmp_path, "bf16")
    folder = SafetensorsFolder(tmp_path)
    assert (folder.dtype(name), folder.dtype("weight")) == (torch.float32, torch.bfloat16)


def test_a_tokenizer_of_hugging_face_keeps_its_files(paths: Paths, corpus: Path, tmp_path: Path) -> None:
    own = tiny_on(corpus, model={"vocab_size": 400}, data={"num_workers": 0})
    prepare(own, paths.data_dir, progress=lambda _: None)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(open_prepared(own, paths.data_dir).path / "tokenizer.json"),
        eos_token=EOD,
        pad_token="word",  # noqa: S106 - no password
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "theirs")
    section = {"type": "huggingface", "path": str(tmp_path / "theirs")}
    recipe = tiny_on(corpus, model={"vocab_size": 400}, data={"num_workers": 0, "tokenizer": section})
    prepare(recipe, paths.data_dir, progress=lambda _: None)
    prepared = open_prepared(recipe, paths.data_dir)
    out = tmp_path / "out"
    out.mkdir()
    assert write_tokenizer(out, recipe, prepared)["pad_token_id"] == tokenizer.pad_token_id
    found = transformers.AutoTokenizer.from_pretrained(out)
    assert found.apply_chat_template([{"role": "user", "content": "word"}], tokenize=False) == "word"

    transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(prepared.path / "tokenizer.json"), eos_token=EOD, extra_special_tokens=["<new>"]
    ).save_pretrained(tmp_path / "theirs")
    with refused("data.tokenizer", rule="--no-tokenizer"):
        write_tokenizer(out, recipe, prepared)


@pytest.mark.parametrize("kind", ["bpe", "huggingface"])
def test_the_chat_template_is_the_one_that_made_the_tokens(kind: str, paths: Paths, tmp_path: Path) -> None:
    talks = tmp_path / "talks.jsonl"
    rows = [{"prompt": f"question {number}", "completion": f"answer {number * 7}"} for number in range(200)]
    talks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data: dict[str, Any] = {"sources": [{"type": "jsonl", "path": str(talks)}], "chat": {}, "num_workers": 0}
    model = {"vocab_size": 400}
    if kind == "huggingface":
        own = tokenizers.Tokenizer(
            tokenizers.models.WordLevel({"a": 0, END: 1, UNKNOWN_WORD: 2}, unk_token=UNKNOWN_WORD)
        )
        made = transformers.PreTrainedTokenizerFast(tokenizer_object=own, eos_token=END)
        made.chat_template = "overwritten"
        made.save_pretrained(tmp_path / "theirs")
        template = tmp_path / "template.jinja"
        template.write_text(
            "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}a {{ m.content }}{{ eos_token }}"
            "{% endgeneration %}{% else %}a a{% endif %}{% endfor %}"
        )
        data |= {"tokenizer": {"type": "huggingface", "path": str(tmp_path / "theirs")}}
        data["chat"] = {"chat_template": str(template)}
    recipe = tiny(model=model, data=data)
    prepare(recipe, paths.data_dir, progress=lambda _: None)
    prepared = open_prepared(recipe, paths.data_dir)
    out = tmp_path / "out"
    out.mkdir()
    special = write_tokenizer(out, recipe, prepared)
    found = transformers.AutoTokenizer.from_pretrained(out)
    talk = [{"role": "user", "content": "question 1"}, {"role": "assistant", "content": "answer 7"}]
    expected = of_prepared(prepared).spans(talk, 1 << 20)[0]
    assert found.apply_chat_template(talk, tokenize=False) == expected
    ends = special["eos_token_id"] if isinstance(special["eos_token_id"], list) else [special["eos_token_id"]]
    assert found.eos_token_id in ends and found.eos_token in expected


@pytest.mark.parametrize("template", [
    *(marked.source for marked in TEMPLATES.values()),
    "{% for m in messages %}\n  {% generation %}\n  {{ m.content }}\n  {% endgeneration %}\n end\n{% endfor %}\n",
    "{% for m in messages %}a  {%- generation -%}  \n {{ m.content }}{% endgeneration -%} \n b{% endfor %}",
    "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}{# {% generation %} #}",
    "{{ '{% generation %}' }}{% raw %}{% generation %}{% endraw %}{% generation %}a{% endgeneration %}",
])  # fmt: skip
def test_a_template_without_marks_writes_the_same_text(template: str) -> None:
    served = serving_form(template)
    jinja2.Environment(autoescape=True).from_string(served)  # whose tags are plain Jinja's
    talk = [{"role": "user", "content": " question\n"}, {"role": "assistant", "content": "answer"}] * 2
    for asked in (True, False):
        of_both = [render_jinja_template([talk], chat_template=source, add_generation_prompt=asked)[0]
                   for source in (template, served)]  # fmt: skip
        assert of_both[0] == of_both[1]


def test_a_model_ends_with_every_token_that_ends_an_answer_or_a_document(paths: Paths, tmp_path: Path) -> None:
    """As of Qwen's base models: their tokenizer's end of text is not the end of a turn."""
    talks = tmp_path / "talks.jsonl"
    talks.write_text("".join(f'{{"prompt": "question {n}", "completion": "answer {n * 7}"}}\n' for n in range(200)))
    backend, end = train_tokenizer([talks.read_text()], 300, SPECIAL)
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOD).save_pretrained(tmp_path / "theirs")
    ends = [end, backend.token_to_id(EOD)]
    for number, (chat, eos) in enumerate(
        [
            ({"template": "chatml"}, SPECIAL[-1]),
            # A template that writes eos_token is to find the one that it was written for.
            ({"chat_template": str(tmp_path / "a.jinja")}, EOD),
        ]
    ):
        (tmp_path / "a.jinja").write_text("{{ eos_token }}" + CHATML)
        data = {
            "sources": [{"type": "jsonl", "path": str(talks)}], "chat": chat, "num_workers": 0,
            "tokenizer": {"type": "huggingface", "path": str(tmp_path / "theirs")},
        }  # fmt: skip
        recipe = tiny(model={"vocab_size": 400}, data=data)
        prepare(recipe, paths.data_dir, progress=lambda _: None)
        prepared = open_prepared(recipe, paths.data_dir)
        out = tmp_path / str(number)
        out.mkdir()
        assert write_tokenizer(out, recipe, prepared)["eos_token_id"] == ends
        found = transformers.AutoTokenizer.from_pretrained(out)
        assert found.eos_token == eos
        assert len(found) == len(backend.get_vocab())
        talk = [{"role": "user", "content": "question 1"}]
        asked = found.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        assert asked == of_prepared(prepared).prompt(talk)
