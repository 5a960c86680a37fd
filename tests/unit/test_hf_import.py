"""Models of transformers become runs that compute the same, and leave again with the same bytes."""

from __future__ import annotations

import io
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from rich.console import Console
from safetensors.torch import load_file

from llmrecipes.checkpoint.store import CheckpointStore, Entry
from llmrecipes.cli.app import run
from llmrecipes.engine.core.checkpoint.loader import load
from llmrecipes.engine.core.checkpoint.tensors import StoredWeights
from llmrecipes.engine.core.model.gpt import RecipeModel, build, construct
from llmrecipes.engine.core.platform import select
from llmrecipes.engine.core.rank_weights import load_model, model_state
from llmrecipes.engine.core.world import join
from llmrecipes.hf.family import family_of
from llmrecipes.hf.match import section_of
from llmrecipes.hf.reading import CONFIG, read_config
from llmrecipes.hf.weights import AsHuggingFace, open_weights
from llmrecipes.models.importing import import_model
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.load import load as load_recipe
from llmrecipes.recipe.load import load_values
from llmrecipes.recipe.schema import Recipe
from llmrecipes.rundir import Run
from llmrecipes.tracking.progress import Counted
from llmrecipes.workflow.pretrained import entered_as
from tests.hf_models import CONFIGS, EXPERTS, LENGTH, ROUTED, SIZES, VOCABULARY, saved
from tests.refusals import refused, require_message
from tests.unit.balance_worker import ROOMY

BPE = "data.tokenizer.type=bpe"
FP32 = "train.precision=fp32"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def opened(run_dir: Path) -> tuple[Recipe, Entry]:
    (entry,) = CheckpointStore(run_dir / "checkpoints").entries()
    return load_recipe(str(run_dir / "recipe.yaml")).recipe, entry


def loaded(recipe: Recipe, entry: Entry) -> RecipeModel:
    built = construct(derive(recipe, 1, ROOMY), select())
    load_model(built.modules, load(entry, model_state(built.modules)))
    return built.module


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_import_computes_the_same_and_leaves_with_the_same_bytes(kind: str, models: Path, tmp_path: Path) -> None:
    theirs = saved(kind, models / kind)
    made = import_model(str(models / kind), [BPE, FP32], tmp_path, "a")
    recipe, entry = opened(Path(made.run_dir))
    assert made.origin["model_type"] == kind and made.origin["new_rows"] == 384 - VOCABULARY
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(4))
    with join(select(), recipe.train.seed, recipe.layout), torch.no_grad():
        ours = loaded(recipe, entry)
        logits = ours.eval()(tokens, torch.arange(LENGTH).expand(2, -1), None)
        expected = theirs(tokens).logits
        assert float((logits[..., :VOCABULARY] - expected).norm() / expected.norm()) < 1e-5
        # Rows of padding have the mean of the others' logits.
        assert logits[..., VOCABULARY:].sub(expected.mean(-1, keepdim=True)).abs().max() < 1e-4
        given = open_weights(models / kind, recipe.model)
        straight = build(derive(recipe, 1, ROOMY), select(), given).module
        for name, value in ours.state_dict().items():
            assert value is None or value.equal(straight.state_dict()[name]), name
    source = AsHuggingFace(StoredWeights(entry), family_of(recipe.model, kind), recipe.model)
    original = load_file(models / kind / "model.safetensors")
    assert set(source.names()) == set(original)
    for name, value in original.items():
        assert source.read(name).equal(value), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_import_stores_the_type_of_the_weights_and_says_it(
    dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved("llama", tmp_path / "m", dtype)
    config = json.loads((tmp_path / "m" / CONFIG).read_text())
    config.pop("dtype")
    (tmp_path / "m" / CONFIG).write_text(json.dumps(config))
    precision = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    for run_id, override, stored in (("a", [], precision), ("b", ["train.precision=bf16"], "bf16")):
        where = ["--runs-dir", str(tmp_path), "--run-id", run_id]
        assert run(["import", str(tmp_path / "m"), BPE, *override, *where]) == 0
        printed, notes = capsys.readouterr()
        assert "train.precision" in printed and stored in printed and precision in printed
        assert "note:" not in notes
        recipe, entry = opened(tmp_path / "m" / run_id)
        assert recipe.train.precision == stored
        source = AsHuggingFace(StoredWeights(entry), family_of(recipe.model), recipe.model)
        original = load_file(tmp_path / "m" / "model.safetensors")
        assert all(source.read(name).equal(value) for name, value in original.items()) is (stored == precision)


WINDOW = 16
ROPE = {"rope_theta": 10000.0}
# An eighth of the sequence: most of the positions are beyond the original context.
YARN = {**ROPE, "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": LENGTH // 8}


def latent(**mscales: float) -> transformers.PretrainedConfig:
    config = CONFIGS["deepseek_v3"]()
    config.rope_parameters = {**YARN, "beta_fast": 2.0, "beta_slow": 0.2, **mscales}
    return config


POSITIONS: dict[str, tuple[Callable[[], transformers.PretrainedConfig], int]] = {
    "mistral-window": (lambda: transformers.MistralConfig(**SIZES, sliding_window=WINDOW), LENGTH),
    "mixtral-window": (
        lambda: transformers.MixtralConfig(**SIZES, num_local_experts=EXPERTS, sliding_window=WINDOW), LENGTH,
    ),
    "qwen3_moe-window": (
        lambda: transformers.Qwen3MoeConfig(
            **SIZES, **ROUTED, num_experts=EXPERTS, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
        ),
        LENGTH,
    ),
    "qwen2-window": (
        lambda: transformers.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
        LENGTH,
    ),
    "linear": (
        lambda: transformers.LlamaConfig(**SIZES, rope_parameters={**ROPE, "rope_type": "linear", "factor": 4.0}),
        LENGTH,
    ),
    "yarn": (lambda: transformers.LlamaConfig(**SIZES, rope_parameters=YARN), LENGTH),
    "qwen3-yarn": (
        lambda: transformers.Qwen3Config(
            **SIZES, head_dim=32,
            rope_parameters={**YARN, "attention_factor": 0.8, "beta_fast": 2.0, "beta_slow": 0.2, "truncate": False},
        ),
        LENGTH,
    ),
    "deepseek_v3-yarn": (lambda: latent(mscale=1.0, mscale_all_dim=0.7), LENGTH),
    "deepseek_v3-yarn-attention-factor": (lambda: latent(mscale_all_dim=1.0, attention_factor=1.5), LENGTH),
}  # fmt: skip
"""A configuration, and the longest sequences that a recipe computes the same."""


@pytest.mark.parametrize("kind", POSITIONS)
def test_windows_and_interpolated_positions_compute_the_same(kind: str, models: Path) -> None:
    config, longest = POSITIONS[kind]
    theirs = saved(config(), models / kind)
    family, section = section_of(read_config(models / kind), models / kind)
    assert section["max_position_embeddings"] == longest
    values = {
        "name": "x", "model": {"seq_length": longest, **section}, "optimizer": {"lr": 1e-3},
        "train": {"train_iters": 1, "global_batch_size": 1, "precision": "fp32"}, "layout": {"micro_batch_size": 1}
    }  # fmt: skip
    recipe = load_values(values, models / kind, ()).recipe
    tokens = torch.randint(VOCABULARY, (2, longest), generator=torch.Generator().manual_seed(4))
    platform = select()
    platform.install()
    with join(platform, 1, recipe.layout):
        ours = build(derive(recipe, 1, ROOMY), platform, open_weights(models / kind, recipe.model)).module.eval()
        logits = ours(tokens, torch.arange(longest).expand(2, -1), None)[..., :VOCABULARY]
        logits.logsumexp(-1).sum().backward()
    expected = theirs(tokens).logits
    expected.logsumexp(-1).sum().backward()
    gradient = ours.embedding.word_embeddings.weight.grad
    reference = theirs.get_parameter("model.embed_tokens.weight").grad
    assert float((logits - expected).detach().norm() / expected.detach().norm()) < 1e-5
    # The gradient of the embedding has passed through all layers.
    assert reference is not None and float((gradient[:VOCABULARY] - reference).norm() / reference.norm()) < 1e-5
    written = family.config_of(recipe.model)[0]
    assert section_of(written, models)[1] == section
    with refused("model.seq_length"):
        load_values(values, models / kind, [f"model.seq_length={longest + 1}"])


def test_keys_that_transformers_does_not_read_are_named_and_others_refused(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved("llama", models / "llama-keys")
    folder = shutil.copytree(models / "llama-keys", tmp_path / "model")
    config = json.loads((folder / CONFIG).read_text())

    def imported(run_id: str, *options: str, **keys: object) -> int:
        (folder / CONFIG).write_text(json.dumps({**config, **keys}))
        return run(["import", str(folder), BPE, "--runs-dir", str(tmp_path), "--run-id", run_id, *options])

    other = {"is_llama_config": True, "transformers.js_config": {"dtype": "q4"}}
    assert imported("a", "--json", **other) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["ignored_keys"] == list(other) and made["new_rows"] == made["padding_rows"] == 384 - VOCABULARY
    # A key that a file of transformers reads may change the model, even where its configuration class lacks it.
    assert imported("b", attention_chunk_size=4) == 2
    require_message(capsys.readouterr().err, folder / CONFIG, rule="--ignore-key")
    assert imported("b", "--json", "--ignore-key", "attention_chunk_size", attention_chunk_size=4) == 0
    assert json.loads(capsys.readouterr().out)["ignored_keys"] == ["attention_chunk_size"]
    for key in ("mlp_bias", "not_there"):
        assert imported("c", "--ignore-key", key) == 2
        require_message(capsys.readouterr().err, "--ignore-key", rule=key)
    # A later transformers, or code in the folder, could read any key.
    assert imported("c", transformers_version="99.0.0", **other) == 2
    require_message(capsys.readouterr().err, folder / CONFIG, rule=tuple(other))
    (folder / "modeling.py").touch()
    assert imported("c", **other) == 2
    require_message(capsys.readouterr().err, folder / CONFIG, rule=tuple(other))


def test_an_import_is_shown_and_its_warm_up_fits_its_steps(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shown = io.StringIO()
    progress = Counted(Console(file=shown, force_terminal=False), itertools.count(step=11).__next__)
    made = import_model(str(model), [], tmp_path, "shown", progress=progress)
    assert f"{made.origin['parameters']:,}/{made.origin['parameters']:,}" in shown.getvalue().splitlines()[-1]
    for run_id, override, warmup in (("a", "train.train_iters=20", 1), ("b", "train.train_iters=2000", 50)):
        recipe, _ = opened(Path(import_model(str(model), [override], tmp_path, run_id).run_dir))
        assert recipe.scheduler.lr_warmup_iters == warmup
    mine = ["train.train_iters=20", "scheduler.lr_warmup_iters=7"]
    assert opened(Path(import_model(str(model), mine, tmp_path, "c").run_dir))[0].scheduler.lr_warmup_iters == 7
    assert not caplog.records  # the recipe has today's form


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    """A model with a tokenizer."""
    import tokenizers

    from llmrecipes.data.tokens.tokenizer import train as train_tokenizer

    folder = models / "with-tokenizer"
    saved("llama", folder)
    backend, _ = train_tokenizer(["some text " * 9, "another one"], VOCABULARY)
    assert isinstance(backend, tokenizers.Tokenizer)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def steps_of(run_dir: Path) -> dict[int, float]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def test_training_starts_alike_from_an_import_and_from_the_recipe_s_key(
    model: Path, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original = shutil.copytree(model, tmp_path / "model")
    keys = [
        "train.train_iters=2", "scheduler.lr_warmup_iters=0", "train.precision=bf16", "model.seq_length=16",
        f"data.sources=[{{type: text, path: {corpus}}}]", "data.num_workers=0", "tracking.mlflow=false",
        "tracking.tensorboard=false", "train.global_batch_size=2", "train.eval_iters=1",
    ]  # fmt: skip
    folders = ["--runs-dir", str(tmp_path / "runs"), "--data-dir", str(tmp_path / "data")]
    assert run(["import", str(model), *keys, "--name", "one", "--run-id", "a", *folders[:2], "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    first = Path(made["run_dir"])
    assert first == tmp_path / "runs/one/a" and made["vocab_size"] == VOCABULARY
    assert run(["train", str(first / "recipe.yaml"), "--run-id", "a", "--no-sample", *folders]) == 0
    resolved = (first / "recipe.yaml").read_text()
    (imported,) = (first / "logs").glob("recipe.until-*.yaml")
    assert len(imported.read_text().splitlines()) < 60 < len(resolved.splitlines())
    assert load_recipe(str(imported), ["name=one"]).recipe == load_recipe(str(first / "recipe.yaml")).recipe
    (tmp_path / "two.yaml").write_text(resolved.replace("pretrained: null", f"pretrained: {original}"))
    again = ["train", str(tmp_path / "two.yaml"), "name=two", "--run-id", "b", "--no-sample", *folders]
    assert run(again) == 0
    second = tmp_path / "runs/two/b"
    assert steps_of(first) == steps_of(second) and steps_of(first).keys() == {1, 2}
    assert entered_as(first) == entered_as(second) == "llama"
    # A resumed run does not read the weights again; another model is another run.
    moved = original.rename(original.with_name("moved"))
    assert run([*again, "train.train_iters=3", "--accept-changes"]) == 0
    assert steps_of(second).keys() == {1, 2, 3}
    capsys.readouterr()
    assert run([*again, "train.train_iters=3", f"train.pretrained={moved}"]) == 2
    require_message(capsys.readouterr().err, second, rule="train.pretrained")
    # A new run is refused before anything is started.
    assert run([*again[:3], "--run-id", "c", *folders]) == 2
    require_message(capsys.readouterr().err, original)
    assert not (tmp_path / "runs/two/c").exists()


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    first, ids = tokenizer["added_tokens"][0], range(len(tokenizer["model"]["vocab"]), VOCABULARY + 1)
    tokenizer["added_tokens"] += [{**first, "id": number, "content": f"<{number}>"} for number in ids]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(model / "tokenizer_config.json", tmp_path)
    arguments = ["import", str(model), f"data.tokenizer.path={tmp_path}", "--runs-dir", str(tmp_path / "runs")]
    assert run(arguments) == 2
    require_message(capsys.readouterr().err, "model.vocab_size", rule=str(VOCABULARY + 1))
    assert not (tmp_path / "runs").exists()


def test_a_run_id_in_use_is_refused_and_a_full_disk_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, refused(tmp_path / "with-tokenizer" / "a"):
        patch.setattr("llmrecipes.checkpoint.store.CheckpointStore.publish", full)
        import_model(str(model), [], tmp_path, "a")
    assert not list(tmp_path.rglob("*recipe.yaml"))
    made = import_model(str(model), [], tmp_path, "a")
    with refused(made.run_dir, rule="--runs-dir"):  # not --out, which import does not have
        import_model(str(model), [], tmp_path, "a")


KILLED = """
import os, signal
from llmrecipes.checkpoint.store import CheckpointStore
CheckpointStore.publish = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
"""
FULL = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # bytes of a file, fewer than the weights have
"""


@pytest.mark.slow
@pytest.mark.parametrize(("before", "code"), [(KILLED, -9), (FULL, 2)], ids=["killed", "full"])
def test_an_import_that_ends_in_the_middle_leaves_no_run(before: str, code: int, model: Path, tmp_path: Path) -> None:
    arguments = ["import", str(model), "--runs-dir", str(tmp_path), "--name", "one", "--run-id", "a"]
    script = f"{before}\nfrom llmrecipes.cli.app import run\nraise SystemExit(run({arguments!r}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    if code == 2:
        require_message(done.stderr[done.stderr.index("error: ") :], tmp_path)
    assert not list(tmp_path.rglob("recipe.yaml")) and not (tmp_path / "one/a").exists()
    with refused(tmp_path):
        Run.find("one", tmp_path)
    assert run(arguments) == 0
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["a"]
