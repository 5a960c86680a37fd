"""`llmrecipes new`: recipes from options and from answers, that `show` plans."""

from __future__ import annotations

import json
import math
import os
import pty
import subprocess
import sys
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from llmrecipes.cli.app import run
from llmrecipes.plan.parameters import count
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Model
from llmrecipes.workflow.new import SAME_SIZE, amount, nearest, resized
from tests.helpers import environment
from tests.refusals import require_message


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "like", "world"),
    [
        (["--params", "2m"], "gpt-tiny", None),
        (["--params", "300M", "--cluster", "h100-ib"], "gpt-350m", 8),
        (["--params", "6b", "--cluster", "h100-ib", "--nodes", "3", "--seq-length", "8192"], "gpt-7b", 24),
        (["--params", "350b", "--cluster", "h100-ib", "--nodes", "64", "--tokens", "2t"], "llama3-405b", 512),
        (["--like", "gpt-1b", "--cluster", "h100-ib", "--data", "hub:a/b", "--data", "jsonl:c"], "gpt-1b", 8),
    ],
)
def test_a_recipe_fits_and_is_planned_by_show(
    options: list[str], like: str, world: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["new", "mine", *options, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["like"] == like and made["fits"]
    recipe, base = load(made["path"]).recipe, load(like).recipe
    assert count(recipe.model, shape(recipe.model)).total == made["parameters"]
    assert recipe.optimizer.lr == base.optimizer.lr
    if "--params" in options:
        assert made["parameters"] == pytest.approx(amount(options[1], "--params"), rel=SAME_SIZE)
    else:
        assert recipe.model.hidden_size == base.model.hidden_size
    machine = [] if world is None else options[options.index("--cluster") :][: 4 if "--nodes" in options else 2]
    assert run(["plan", made["path"], "--details", *machine, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["fits"] and plan["world_size"] == (world or plan["world_size"]) == made["world_size"]
    assert plan["total_tokens"] == made["tokens"]
    assert recipe.scheduler.lr_warmup_iters < recipe.train.train_iters
    if "--seq-length" in options:
        assert recipe.model.seq_length == 8192
    if "--data" in options:
        assert [(source.type, source.location) for source in recipe.data.sources] == [("hub", "a/b"), ("jsonl", "c")]
    wanted = 2e12 if "--tokens" in options else 20 * made["parameters"]
    if "--params" in options:
        assert plan["total_tokens"] == pytest.approx(wanted, rel=0.02)


def test_a_recipe_that_was_made_is_short_and_trains_on_what_was_asked(folder: Path) -> None:
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("some text " * 99)
    options = ["--like", "gpt-tiny", "--data", "texts", "--tokens", "50k", "--tokenizer", "bpe", "--out", "sub"]
    options += ["model.num_layers=1", "optimizer.muon_coefficient_type=polar_express"]
    assert run(["new", "mine", *options]) == 0
    file = folder / "sub" / "mine.yaml"
    recipe = load(str(file)).recipe
    assert len(file.read_text().splitlines()) < 60 and recipe.model.num_layers == 1
    assert recipe.optimizer.muon_num_ns_steps == 8, "the default of the base is not that of another key"
    assert recipe.data.sources[0].type == "text" and recipe.data.tokenizer.type == "bpe"
    tokens = recipe.train.train_iters * recipe.train.global_batch_size * recipe.model.seq_length
    assert tokens == pytest.approx(50_000, rel=0.02) and recipe.train.train_iters >= 100


def test_rows_on_this_machine_have_the_column_of_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a.jsonl").write_text('{"text": "some"}\n')
    pq.write_table(pa.table({"path": ["a"], "main_text": ["some"], "n_stars": [1]}), folder / "web.parquet")
    words = ["new", "mine", "--params", "2m", "--data", "a.jsonl", "--data", "web.parquet", "--data", "elsewhere.jsonl"]
    key = "data.sources.1.text_key"
    for column, named in ([], "main_text"), ([f"{key}=n_stars"], "n_stars"):
        assert run([*words, *column]) == 2
        require_message(capsys.readouterr().err, "web.parquet", rule=(key, named))
        assert not (folder / "mine.yaml").exists()
    assert run([*words, f"{key}=main_text"]) == 0
    printed = capsys.readouterr().out
    assert "elsewhere.jsonl" in printed and "web.parquet" not in printed
    assert run([*words, f"{key}=main_text", "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["no_files"] == ["elsewhere.jsonl"]
    recipe = load("mine.yaml").recipe
    assert [source.model_dump()["text_key"] for source in recipe.data.sources] == ["text", "main_text", "text"]
    assert (folder / "mine.yaml").read_text().count("weight: 1.0") == 3  # of the blend, to be changed


def test_no_file_is_overwritten_unless_asked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.yaml").write_text("kept")
    assert run(["new", "mine", "--params", "2m"]) == 2
    require_message(capsys.readouterr().err, "mine.yaml", rule="--force")
    assert (folder / "mine.yaml").read_text() == "kept"
    assert run(["new", "mine", "--params", "2m", "--force"]) == 0
    assert load("mine.yaml").recipe.name == "mine"


@pytest.mark.parametrize(
    ("arguments", "where", "rule"),
    [
        ([], "NAME", "--params"),
        (["mine"], "--params", ("--params 1b", "--like gpt-1b")),
        (["mine", "--params", "1b", "--like", "gpt-1b"], "--params", "--like"),
        (["mine", "--params", "big"], "--params", "1b"),
        (["mine", "--params", "0"], "--params", "1b"),
        (["mine", "--params", "2m", "--tokens", "1x"], "--tokens", "1b"),
        (["mine", "--params", "2m", "--data", "books"], "--data", "text:FOLDER"),
        (["mine", "--params", "2m", "--data", "docstrings"], "--data", "text:FOLDER"),
        (["mine", "--params", "2m", "--tokenizer", "/no/such"], "data.tokenizer", "HF_ENDPOINT"),
        (["mine", "--like", "gpt-2b"], "gpt-2b", "gpt-7b"),
        (["mine", "--params", "2m", "--cluster", "none"], "none", ()),
        (["mine", "--params", "2m", "--nodes", "2"], "--nodes", "--cluster"),
        (["Mine", "--params", "2m"], "name", ()),
        (["mine", "--params", "2m", "train.lr=1"], "train.lr", "optimizer.lr"),
    ],
)
def test_what_makes_no_recipe_is_refused(
    arguments: list[str], where: str, rule: str | tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["new", *arguments]) == 2
    require_message(capsys.readouterr().err, where, rule=rule)
    assert list(folder.iterdir()) == []


def test_on_a_terminal_it_asks(folder: Path) -> None:
    terminal, end = pty.openpty()
    words = [sys.executable, "-m", "llmrecipes.cli", "new"]
    with subprocess.Popen(words, stdin=end, stdout=end, stderr=end, env=environment(), cwd=folder) as process:
        os.close(end)
        answers = ["mine", "1b", "jsonl:a.jsonl stdlib", "", "1024", "1b", "h100-ib", "2"]
        os.write(terminal, "".join(f"{answer}\n" for answer in answers).encode())
        printed = b""
        try:
            while part := os.read(terminal, 4096):
                printed += part
        except OSError:  # the other end is closed
            pass
        assert process.wait(timeout=240) == 0, printed.decode()
    os.close(terminal)
    recipe = load("mine.yaml").recipe
    assert [source.type for source in recipe.data.sources] == ["jsonl", "stdlib"]
    assert (recipe.model.seq_length, recipe.data.tokenizer.type) == (1024, "bpe")
    tokens = recipe.train.train_iters * recipe.train.global_batch_size * recipe.model.seq_length
    assert tokens == pytest.approx(1e9, rel=0.02)


def test_every_size_is_met_or_refused_with_one_that_exists(capsys: pytest.CaptureFixture[str]) -> None:
    for params in (round(10 ** (exponent / 8)) for exponent in range(53, 97, 3)):  # 4.2m to 750b
        base = load(nearest(params)).recipe.model
        section = base.model_dump(mode="json", exclude_defaults=True)
        model = Model(**resized(section, params))
        assert count(model, shape(model)).total == pytest.approx(params, rel=SAME_SIZE)
        assert model.num_query_groups == base.num_query_groups
        assert model.hidden_size / model.num_attention_heads == base.hidden_size / base.num_attention_heads
        assert abs(math.log(model.hidden_size / model.num_layers * base.num_layers / base.hidden_size)) < math.log(4)
        own = count(base, shape(base)).total
        assert resized(section, own) is section
    assert run(["new", "mine", "--params", "10k"]) == 2
    refused = capsys.readouterr().err
    require_message(refused, "--params")
    assert run(["new", "mine", *refused.split("fix:")[1].split()]) == 0
