"""`llmrecipes finetune`: from a folder of transformers and conversations to one that ends its answers, step by step."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from llmrecipes.cli.app import run
from llmrecipes.data.tokens.templates import SPECIAL
from llmrecipes.data.tokens.tokenizer import EOD
from llmrecipes.data.tokens.tokenizer import train as train_tokenizer
from llmrecipes.hardware.cluster import Cluster, DetectedGpu
from llmrecipes.models.finetune import STEPS, Finetuning, finetune, make_recipe
from llmrecipes.plan.check import fitted
from llmrecipes.plan.derive import LEAST_HEADROOM, derive
from llmrecipes.recipe.load import load
from llmrecipes.recipe.rules.recipe_rules import check
from llmrecipes.recipe.schema import LayoutKeys
from llmrecipes.rundir import Run
from llmrecipes.units import GIB
from llmrecipes.workflow.run import Paths
from tests.helpers import environment, train_lines
from tests.hf_models import SIZES
from tests.refusals import refused, require_message

VOCABULARY, POSITIONS = 300, 128
ANSWER = "yes"
KEYS = ("tracking.mlflow=false", "tracking.tensorboard=false", "data.num_workers=0", "train.log_interval=1")
ENDED = 75


def base_model(folder: Path) -> Path:
    """A random Qwen2 whose tokenizer's end of text is not the end of a turn, and which has no chat template."""
    backend, _ = train_tokenizer([f"question {number} {ANSWER}" for number in range(99)], VOCABULARY, SPECIAL)
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOD).save_pretrained(folder)
    torch.manual_seed(1)
    sizes = {**SIZES, "max_position_embeddings": POSITIONS}
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, eos_token_id=backend.token_to_id(EOD)))
    model.save_pretrained(folder)
    return folder


def conversations(file: Path, count: int = 300) -> Path:
    file.write_text("".join(f'{{"prompt": "question {n}", "completion": "{ANSWER}"}}\n' for n in range(count)))
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a base model and conversations."""
    folder = tmp_path_factory.mktemp("finetune")
    base_model(folder / "base")
    conversations(folder / "chat.jsonl")
    return folder


def command(folder: Path, *options: str, out: str = "tuned", template: str | None = "chatml") -> list[str]:
    chosen = [] if template is None else ["--template", template]
    where = ["--runs-dir", str(folder / "runs"), "--data-dir", str(folder / "data"), "--out", str(folder / out)]
    return ["finetune", str(folder / "base"), *KEYS, "--data", str(folder / "chat.jsonl"), *chosen, *where, *options]


LONG = ("train.train_iters=40", "--epochs", "20", "--lr", "0.01")


@pytest.fixture(scope="module")
def tuned(folder: Path, request: pytest.FixtureRequest) -> Path:
    """The exported model of a fine-tuning that was interrupted after three steps, and called again."""
    run_dir = folder / "runs" / "tuned" / "finetune"

    def interrupt() -> None:
        while len(train_lines(run_dir)) < 3 and threading.main_thread().is_alive():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    watcher = threading.Thread(target=interrupt, daemon=True)
    watcher.start()
    assert run(command(folder, *LONG)) == ENDED
    watcher.join()
    assert not (folder / "tuned" / "model").exists()
    early = len(train_lines(run_dir))
    assert run(command(folder, *LONG)) == 0
    recipe = load(str(folder / "tuned" / "tuned.yaml")).recipe
    taken = [line["step"] for line in train_lines(run_dir)]
    assert taken == list(range(1, recipe.train.train_iters + 1)) and 3 <= early < len(taken), "no step was repeated"
    return folder / "tuned" / "model"


@pytest.mark.rotating
def test_an_exported_model_ends_its_answers(tuned: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tuned)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tuned)
    end, eod = tokenizer.convert_tokens_to_ids([SPECIAL[-1], EOD])
    assert model.generation_config.eos_token_id == [end, eod] and tokenizer.eos_token_id == end
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "question 5"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**prompt, max_new_tokens=60, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(ids) == f"{ANSWER}{SPECIAL[-1]}"


def test_steps_that_are_done_are_not_repeated_and_can_be_called_alone(
    folder: Path, tuned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def files() -> dict[Path, int]:
        folders = (folder / "tuned", folder / "runs", folder / "data")
        return {path: path.stat().st_mtime_ns for folder in folders for path in folder.rglob("*") if path.is_file()}

    before = files()
    assert run(command(folder, *LONG)) == 0
    assert files() == before
    printed = capsys.readouterr().out
    assert shlex.split(printed.splitlines()[-1])[1:] == ["llmrecipes", "serve", str(tuned)]
    assert run(command(folder, *LONG, "--dry-run")) == 0
    shown = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [(words[1], words[2]) for words in shown] == [(step, "done") for step in STEPS]
    commands = [words[words.index("llmrecipes") + 1 :] for words in shown]
    for step, words in zip(STEPS, commands, strict=True):
        # What is finished is recognised by the commands too; an export overwrites nothing.
        assert run(words) == (2 if step == "export" else 0), words
    require_message(capsys.readouterr().err, tuned)
    tuned.rename(tuned.with_name("moved"))
    assert run(commands[-1]) == 0
    same = [(tuned.with_name(name) / "model.safetensors").read_bytes() for name in ("model", "moved")]
    assert same[0] == same[1]


@pytest.mark.slow
def test_a_server_of_the_exported_model_answers(tuned: Path, unused_port: int) -> None:
    words = [sys.executable, "-m", "llmrecipes.cli", "serve", str(tuned), "--backend", "transformers"]
    with subprocess.Popen(
        [*words, "--port", str(unused_port)],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert any(line.startswith("INFO:     Uvicorn running") for line in process.stdout)
            messages = [{"role": "user", "content": "question 5"}]
            body = json.dumps({"messages": messages, "max_tokens": 60, "temperature": 0}).encode()
            address = f"http://127.0.0.1:{unused_port}/v1/chat/completions"
            asked = urllib.request.Request(address, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(asked, timeout=120) as answer:  # noqa: S310
                (choice,) = json.load(answer)["choices"]
            assert (choice["message"]["content"], choice["finish_reason"]) == (ANSWER, "stop")
        finally:
            process.terminate()
            process.communicate(timeout=240)


def test_adapters_are_merged_into_the_exported_model(folder: Path) -> None:
    assert run(command(folder, "--lora", "--epochs", "0.3", out="adapted")) == 0
    recipe = load(str(folder / "adapted" / "adapted.yaml")).recipe
    assert recipe.lora is not None and recipe.optimizer.lr == 2e-4
    names = transformers.AutoModelForCausalLM.from_pretrained(folder / "adapted" / "model").state_dict()
    assert not [name for name in names if "lora" in name]


def asked(folder: Path, **changes: Any) -> Finetuning:
    wanted = Finetuning(str(folder / "base"), str(folder / "chat.jsonl"), folder / "new", template="chatml")
    return replace(wanted, **changes)


def silent(line: str) -> None:
    pass


HERE = Cluster((), 2, 64 * GIB, 64 * GIB, 64 * GIB)


def gpus(number: int, gib: int = 79) -> Cluster:
    gpu = DetectedGpu("NVIDIA H100 80GB HBM3", gib * GIB, gib * GIB, 989.4)
    return replace(HERE, gpus=(gpu,) * number, memory_available_bytes=number * 256 * GIB)


def test_the_recipe_follows_from_data_model_and_machine(folder: Path, tmp_path: Path) -> None:
    recipe, lengths = make_recipe(asked(folder), HERE, silent)
    assert lengths.conversations == lengths.used == 300
    assert lengths.longest - 1 <= recipe.model.seq_length == 64 <= POSITIONS
    assert recipe.train.precision == "fp32" and recipe.data.split[1] > 0
    tokens = recipe.train.train_iters * recipe.train.global_batch_size * recipe.model.seq_length
    assert 1.0 < tokens / (2.0 * lengths.tokens * recipe.data.split[0] / 100) < 1.2
    twice, _ = make_recipe(asked(folder, epochs=4.0), HERE, silent)
    steps = [each.train.train_iters * each.train.global_batch_size for each in (recipe, twice)]
    assert steps[1] == pytest.approx(2 * steps[0], rel=0.1)

    on_gpus, _ = make_recipe(asked(folder, overrides=("optimizer.lr=3e-5",)), gpus(8), silent)
    assert on_gpus.train.precision == "bf16" and on_gpus.optimizer.lr == 3e-5
    assert on_gpus.train.global_batch_size % 8 == 0
    assert derive(on_gpus, 8, gpus(8)).fits

    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "question " * 400, "completion": ANSWER}) + "\n" * 2 + json.dumps(
        {"prompt": "question", "completion": f"{ANSWER} " * 200}) + "\n")  # fmt: skip
    cut, _ = make_recipe(asked(folder, data=str(long)), HERE, silent)
    assert cut.model.seq_length == POSITIONS


@pytest.mark.parametrize(
    ("changes", "where", "rule"),
    [
        ({"template": None}, "--template", ("--template chatml", "--template qwen3")),
        ({"template": "llama3"}, "data.chat.template: llama3", "<|begin_of_text|>"),
        ({"template": "alpaca"}, "data.chat.template", "llama3"),
        ({"data": "chat.csv"}, "--data", "jsonl:chat.jsonl"),
        ({"data": "text:chat.txt"}, "--data", "jsonl:chat.jsonl"),
        ({"data": "jsonl:no-such-file.jsonl"}, "data.sources", ()),
        ({"model": "/no/such/folder"}, "/no/such/folder", ()),
        ({"overrides": ("train.lr=1",)}, "train.lr", "optimizer.lr"),
    ],
)
def test_what_cannot_be_fine_tuned_is_refused(
    folder: Path, changes: dict[str, Any], where: str, rule: str | tuple[str, ...]
) -> None:
    with refused(where, rule=rule):
        make_recipe(asked(folder, **changes), HERE, silent)
    assert not (folder / "new").exists()


def test_conversations_without_an_answer_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text('{"prompt": "question", "completion": ""}\n')
    with refused("--data", rule="1"):
        make_recipe(asked(folder, data=str(tmp_path / "chat.jsonl")), HERE, silent)


def test_a_folder_is_of_one_fine_tuning(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command(folder, "--step", "recipe", out="one")) == 0
    recipe = folder / "one" / "one.yaml"
    recipe.write_text(recipe.read_text("utf-8") + "# edited\n", "utf-8")
    assert run(command(folder, "--step", "recipe", out="one")) == 0
    assert recipe.read_text("utf-8").endswith("# edited\n")
    capsys.readouterr()
    for options in (["--epochs", "5"], ["--lora"], ["--dry-run", "--epochs", "5"]):
        assert run(command(folder, *options, out="one")) == 2
        require_message(capsys.readouterr().err, folder / "one", rule="--out")
    (folder / "other").mkdir()
    (folder / "other" / "other.yaml").write_text("name: other\n")
    assert run(command(folder, out="other")) == 2
    require_message(capsys.readouterr().err, folder / "other", rule="--out")


def test_a_run_is_fine_tuned_by_its_name(folder: Path, tuned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--runs-dir", str(folder / "runs"), "--data-dir", str(folder / "data")]
    options = ["--data", str(folder / "chat.jsonl"), *where, "--step", "recipe"]
    step = Run(folder / "runs" / "tuned" / "finetune").newest_step()
    exported = folder / "runs" / "tuned" / "finetune" / "hf" / f"step-{step:08d}"
    for name in ("tuned", f"tuned/finetune@{step}", str(folder / "runs" / "tuned" / "finetune")):
        out = folder / "again"
        assert run(["finetune", name, *options, "--out", str(out)]) == 0
        made = load(str(out / "again.yaml")).recipe
        assert made.train.pretrained == getattr(made.data.tokenizer, "path", "") == str(exported)
        assert (exported / "model.safetensors").read_bytes() == (tuned / "model.safetensors").read_bytes()
        shutil.rmtree(out)
    capsys.readouterr()
    for wrong, rule in (("tuned@7", str(step)), ("tuned/finetune@last", "RUN@STEP")):
        assert run(["finetune", wrong, *options, "--out", str(folder / "again")]) == 2
        require_message(capsys.readouterr().err, "7" if "7" in wrong else wrong, rule=rule)
    assert run(["finetune", "tuned", *options, "--revision", "main", "--out", str(folder / "again")]) == 2
    require_message(capsys.readouterr().err, "--revision", rule="tuned@STEP")
    assert not (folder / "again").exists()


def test_an_unknown_name_says_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str, **_: Any) -> str:
        raise OSError(f"404 {name}")

    monkeypatch.setattr("huggingface_hub.snapshot_download", nothing)
    paths = Paths(tmp_path / "runs", tmp_path / "data")
    with refused("gpt-tinny", rule=("404", "RUN", "HF_ENDPOINT")):
        finetune(Finetuning("gpt-tinny", "chat.jsonl", out=tmp_path / "out"), paths, print, "recipe")


def test_a_tokenizer_without_tokens_for_roles_has_a_template_too(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "base", tmp_path / "plain")
    backend, _ = train_tokenizer([f"question {number} {ANSWER}" for number in range(99)], VOCABULARY)
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOD).save_pretrained(tmp_path / "plain")
    with refused("--template") as caught:
        make_recipe(asked(folder, model=str(tmp_path / "plain"), template=None), HERE, silent)
    override = caught.value.fix.split(",")[0]
    plain = asked(folder, model=str(tmp_path / "plain"), template=None, overrides=(override,))
    chat = make_recipe(plain, HERE, silent)[0].data.chat
    assert chat is not None and str(chat.chat_template).endswith("plain.jinja")


@pytest.mark.parametrize(
    ("arguments", "where"), [(["base"], "--data"), (["base", "--data", "x", "--step", "x"], "--step")]
)
def test_options(arguments: Sequence[str], where: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["finetune", *arguments]) == 2
    require_message(capsys.readouterr().err, where)


@pytest.mark.parametrize(
    ("name", "cluster", "tensor", "pipeline"),
    [
        ("gpt-125m", gpus(8), 1, 1),
        ("llama3-8b", gpus(8), 1, 1),
        ("llama3-8b", gpus(8, 39), 4, 1),
        ("gpt-1b", gpus(3), 1, 1),
        ("llama3-405b", replace(gpus(512), nodes=64), 8, 8),
    ],
)
def test_a_layout_is_as_small_as_fits(name: str, cluster: Cluster, tensor: int, pipeline: int) -> None:
    recipe, ranks = fitted(load(name).recipe.model_copy(update={"layout": LayoutKeys()}), cluster)
    plan = derive(recipe, ranks, cluster)
    assert not check(recipe) and ranks == len(cluster.gpus)
    assert plan.fits and plan.memory_headroom >= LEAST_HEADROOM
    assert (plan.layout.tensor_model_parallel_size, plan.layout.pipeline_model_parallel_size) == (tensor, pipeline)
