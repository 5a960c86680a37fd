"""The program as users run it."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from benchmarks.former import ADAMW
from lab import __main__ as lab
from llmrecipes import __version__
from llmrecipes.cli import app as cli
from llmrecipes.cli.recipes import LIST
from llmrecipes.console import ignore_library_warnings
from llmrecipes.errors import UserError
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.load import load, names
from llmrecipes.recipe.reading.layouts import UNDECIDED, undecided
from tests.helpers import ROOMY
from tests.refusals import has_token, require_message

RECIPES = Path(__file__).parents[2] / "recipes"
HEAVY = ("torch", "megatron", "mlflow", "datasets", "transformers", "tokenizers", "numpy", "rich.console")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.run(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == names()
    rows = json.loads(run(capsys, "list", "--json")[1])
    assert {row["name"]: row["parameters"] for row in rows}["llama3-8b"] == 8_030_261_248


def test_list_reads_recipes_that_have_changed_since_its_file_was_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMRECIPES_RECIPES", str(tmp_path))
    written = json.loads((RECIPES / LIST).read_text("utf-8"))
    for name in ("gpt-1b", "gpt-tiny"):
        shutil.copy(RECIPES / f"{name}.yaml", tmp_path)
        written[name]["parameters"] = 7
    (tmp_path / LIST).write_text(json.dumps(written))
    recipe = tmp_path / "gpt-tiny.yaml"
    recipe.write_text(recipe.read_text().replace("num_layers: 2", "num_layers: 3"))
    rows = {row["name"]: row["parameters"] for row in json.loads(run(capsys, "list", "--json")[1])}
    assert rows == {"gpt-1b": 7, "gpt-tiny": derive(load(str(recipe)).recipe, 1, ROOMY).num_parameters.total}
    for other in ("[1]", "{", '{"gpt-1b": 7}'):
        (tmp_path / LIST).write_text(other)
        assert json.loads(run(capsys, "list", "--json")[1])[0]["parameters"] > 7


def test_a_broken_recipe_does_not_hide_the_others(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMRECIPES_RECIPES", str(tmp_path))
    (tmp_path / "bad.yaml").write_text("name: [")
    (tmp_path / "gpt-tiny.yaml").write_text((RECIPES / "gpt-tiny.yaml").read_text())
    _, out, _ = run(capsys, "list")
    assert "broken: " in out.splitlines()[1]
    assert out.splitlines()[2].startswith("gpt-tiny ")


@pytest.mark.parametrize(
    ("command", "needless"),
    [
        # Half of the processor time of `--help` was pydantic's schemas of recipes, searches and conversations.
        ("--help", ("pydantic", "yaml", "rich", "llmrecipes.recipe", "llmrecipes.plan", "llmrecipes.workflow")),
        ("list", ("pydantic", "yaml", "rich", "llmrecipes.recipe", "llmrecipes.plan", "llmrecipes.cli.training")),
    ],
)
def test_list_and_help_import_only_what_they_need(command: str, needless: tuple[str, ...]) -> None:
    """In a fresh interpreter: the options of other commands and the schema of all keys are not built either."""
    code = f"""
import sys
from llmrecipes.cli.app import run
run([{command!r}])
keys = sys.modules.get("llmrecipes.recipe.reading.keys")
print([name for name in {(*HEAVY, *needless)!r} if name in sys.modules])
made = [each.name for each in gc.get_objects() if keys is not None and type(each) is keys.RecipeKey]
print("train.train_iters" in made or "optimizer.weight_decay" in made)
"""
    done = subprocess.run([sys.executable, "-c", f"import gc\n{code}"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["[]", "False"]


def test_show_prints_the_resolved_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", "gpt-tiny", "optimizer.lr=1e-3")
    assert code == 0
    assert "\n  lr: 0.001\n" in out
    loaded = load("gpt-tiny", ["optimizer.lr=1e-3"])
    resolved = loaded.recipe.model_dump(mode="json")
    for key in ("name", *undecided(loaded.recipe)):
        del resolved["layout"][key]
    assert yaml.safe_load(out) == resolved
    assert f"# layout: auto: {UNDECIDED}\n" in out
    pinned = run(capsys, "show", "gpt-tiny", "layout.name=null")[1]
    assert UNDECIDED not in pinned
    assert yaml.safe_load(pinned) == load("gpt-tiny", ["layout.name=null"]).recipe.model_dump(mode="json")
    shown = json.loads(run(capsys, "show", "gpt-tiny", "optimizer.lr=1e-3", "--json")[1])
    assert shown == {"recipe": loaded.recipe.model_dump(mode="json"), "hash": loaded.hash}


def test_a_plan_has_the_preparation_of_what_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("plan", "gpt-1b", "--details", "--cluster", "h100-ib", "--json")
    data = json.loads(run(capsys, *asked)[1])["preparation"]
    assert data["tokens"] == pytest.approx(27e9)  # max_tokens of the recipe, of 100 billion
    assert data["disk_bytes"] == pytest.approx(54e9)
    assert data["seconds"] == pytest.approx(data["text_bytes"] / data["bytes_per_second"] / data["cores"])
    assert json.loads(run(capsys, *asked, "data.sources.0.max_tokens=null")[1])["preparation"] is None


def test_a_plan_has_the_configuration_of_an_engine_that_has_one(capsys: pytest.CaptureFixture[str]) -> None:
    changes = (*ADAMW, "layout.zero.stage=2", "layout.zero.extra.comms_logger.enabled=true")
    asked = ("plan", "gpt-tiny", "--details", *changes, "--nproc", "2")
    shown = json.loads(run(capsys, *asked, "--json")[1])
    assert shown["engine"] == "deepspeed"
    assert shown["engine_configuration"]["zero_optimization"]["stage"] == 2
    assert shown["engine_configuration"]["comms_logger"] == {"enabled": True}
    out = run(capsys, *asked)[1]
    assert json.JSONDecoder().raw_decode(out[out.index("\n{\n") + 1 :])[0] == shown["engine_configuration"]
    megatron = json.loads(run(capsys, "plan", "gpt-tiny", "--details", "--nproc", "1", "--json")[1])
    assert (megatron["engine"], megatron["engine_configuration"]) == ("megatron", None)


def test_version_names_what_a_bug_report_needs_and_loads_nothing_heavy() -> None:
    heavy = f"print([m for m in {HEAVY!r} if m in sys.modules])"
    code = f"import sys; from llmrecipes.cli.app import run; run(['--version']); {heavy}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *lines, loaded = done.stdout.splitlines()
    assert loaded == "[]"
    assert lines[0] == f"llmrecipes {__version__}"
    assert dict(line.split() for line in lines[1:3]) == {name: version(name) for name in ("megatron-core", "torch")}


def test_a_plan_of_what_does_not_fit_says_what_does(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ("layout=null", "layout.micro_batch_size=8")
    asked = ("plan", "gpt-1b", *layout, "--cluster", "rtx-4090", "--nodes", "1", "--details")
    code, out, error = run(capsys, *asked)
    assert code == 2 and "NOT" in out
    require_message(error, "recipe gpt-1b")
    code, out, error = run(capsys, *asked, "--json")
    assert code == 2 and not json.loads(out)["plan"]["fits"] and not error


def test_a_plan_of_a_machine_of_unknown_speed_has_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", "gpt-tiny", "--nproc", "1")
    assert code == 0
    rows = {line.split("  ")[0]: line for line in out.splitlines()}
    assert "unknown" in rows["time of a step"] and "llmrecipes bench step gpt-tiny" in rows["time of a step"]
    assert "34 MiB" in rows["checkpoint"]
    assert "MiB" in rows["prepared data"] and "tokenizer" in rows["time to prepare"]
    assert "global batches of an evaluation" not in rows  # there is one set
    measured = run(capsys, "plan", "gpt-tiny", "--nproc", "1", "--details", "--step-seconds", "2")[1]
    assert "21m20s" in measured and "unknown" not in measured
    sets = run(capsys, "plan", "gpt-tiny", "data.multiple_validation_sets=true", "--nproc", "1")[1]
    assert "global batches of an evaluation" in sets and " of 2 held-out sets " in sets
    asked = ("plan", "gpt-tiny", "--nproc", "1", "--json")
    details = json.loads(run(capsys, *asked, "--details")[1])
    assert details["step_seconds"] is None
    assert details["hash"] == load("gpt-tiny").hash
    assert details["plan"]["num_microbatches"] * details["recipe"]["layout"]["micro_batch_size"] == 16
    assert run(capsys, *asked)[0] == 2  # programs get a forecast or none, never something else
    assert run(capsys, *asked[:-1], "--usd-per-gpu-hour", "1")[0] == 2


def test_a_plan_warns_where_little_memory_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    changed = ("llama3-70b", "layout.bias_activation_fusion=false")
    asked = ("plan", *changed, "--details", "--cluster", "h100-ib", "--nodes", "8")
    printed = run(capsys, *asked)[1]
    plan = json.loads(run(capsys, *asked, "--json")[1])["plan"]
    assert plan["fits"] and len(plan["warnings"]) == 1
    assert f"warning: {plan['warnings'][0]}" in printed and "1.4%" in printed
    assert not json.loads(run(capsys, *asked[:-1], "16", "--json")[1])["plan"]["warnings"]


@pytest.mark.parametrize(
    ("arguments", "where", "rule"),
    [
        (["show", "nothing"], "nothing", ()),
        (["show", "gpt-tiny", "train.lr=1"], "train.lr", "optimizer.lr"),
        (["plan", "gpt-tiny", "--nproc", "many"], "--gpus", ()),
        (["plan", "gpt-tiny", "--details", "--search"], "--details", ()),
        (["plan", "gpt-tiny", "--step-seconds", "2"], "--step-seconds", "--details"),
        (["show", "gpt-tiny", "--plan"], "--plan", "--details"),
        (["show", "gpt-tiny", "--cluster", "h100-ib"], "--cluster", "llmrecipes plan"),
        (["layout", "gpt-tiny"], "layout", "--placement"),
        (["show"], "RECIPE", ()),
        (["show", "gpt-tiny", "--wrong"], "--wrong", "--help"),
        (["shwo"], "shwo", "--help"),
        (["prepare", "gpt-tiny", "--tasks", "4"], "--tasks", "--on ray"),
        (["submit", "gpt-tiny", "--prepare-tasks", "4"], "--prepare-tasks", ("--prepare-nodes", "--on ray")),
        (["search", "gpt-tiny", "--to", "k8s", "--image", "x"], "--image", "--submit image=VALUE"),
    ],
)
def test_wrong_use_gets_one_message_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], where: str, rule: str | tuple[str, ...]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    require_message(err, where, rule=rule)


def test_without_a_command_it_says_how_to_begin(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    assert (code, err) == (0, "")
    steps = [shlex.split(line)[1:] for line in out.splitlines() if line.startswith("  llmrecipes ")]
    commands = [words[: len(shlex.split(step))] for words, (step, _) in zip(steps, cli.FIRST_STEPS, strict=True)]
    assert len(commands) == 3
    for words in commands:
        # Training takes minutes; its plan says that it would begin.
        assert run(capsys, *(["plan", *words[1:]] if words[0] == "train" else words))[0] == 0
    assert run(capsys, "bench")[0] == run(capsys, "data")[0] == 0


def test_help_has_every_command_once_with_a_whole_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for title, commands in cli.SECTIONS.items():
        lines = out.partition(f"\n{title}:\n")[2].partition("\n\n")[0].splitlines()
        assert [line.split()[0] for line in lines] == list(commands)
    shown = [line for line in out.splitlines() if line.startswith("  ") and "-" not in line.split()[0]]
    assert not [line for line in shown if line.endswith("...")], "a summary is too long for one line"


def test_a_command_of_the_lab_says_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    for name in (str(command.name) for command in lab.program.registered_commands):
        code, _, err = run(capsys, name, "gpt-tiny")
        assert code == 2
        require_message(err, name)
        assert f"-m lab {name}" in err


GROUPS = {"bench": ("collectives", "fabric", "step", "data", "inference"), "data": ("show", "stats")}


def leaves() -> list[list[str]]:
    """Every command with the words that call it."""
    single = [[name] for commands in cli.SECTIONS.values() for name in commands if name not in GROUPS]
    return [*single, *([group, name] for group, names in GROUPS.items() for name in names)]


@pytest.mark.parametrize("words", leaves(), ids=" ".join)
def test_every_command_fails_in_json_where_json_is_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (["no-such-thing", "--json"], ["--no-such-option", "--json"]):
        code, out, err = run(capsys, *words, *arguments)
        assert (code, err) == (2, "")
        answer = json.loads(out)
        assert answer.keys() == {"error", "where", "rule", "fix", "exit_code"}
        assert answer["exit_code"] == 2 and answer["error"]
    assert list(tmp_path.iterdir()) == []


def test_json_behind_dashes_is_an_argument(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "show", "--", "--json")
    assert (code, out) == (2, "")
    assert err.startswith("error: ")


def test_errors_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "show", "gpt-tiny", "train.lr=1", "--json")
    answer = json.loads(out)
    assert (code, err) == (2, "")
    assert answer["exit_code"] == 2 and answer["where"].endswith("train.lr")
    assert has_token(answer["fix"], "optimizer.lr") and "problems" not in answer
    several = json.loads(run(capsys, "show", "gpt-tiny", "train.lr=1", "modle=1", "--json")[1])
    assert [problem["where"].split(": ")[-1] for problem in several["problems"]] == ["train.lr", "modle"]


def test_a_login_node_with_nvcc_and_no_gpu_gets_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    ignore_library_warnings()
    logger = logging.getLogger("torch.utils.cpp_extension")
    with caplog.at_level(logging.WARNING, logger.name):
        logger.warning("No CUDA runtime is found, using CUDA_HOME='%s'", "/usr/local/cuda")
        logger.warning("Error checking compiler version for %s", "c++")
    assert [record.msg for record in caplog.records if record.name == logger.name] == [
        "Error checking compiler version for %s"
    ]


def test_schema_is_json_for_editors(capsys: pytest.CaptureFixture[str]) -> None:
    schema = json.loads(run(capsys, "schema")[1])
    assert schema["properties"]["name"]["type"] == "string"
    assert run(capsys, "docs", "--check")[0] == 0


def test_a_closed_pipe_needs_no_words() -> None:
    program = [sys.executable, "-m", "llmrecipes.cli", "schema"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=240) == 1


@pytest.mark.parametrize(
    "arguments", [("list",), ("schema",), ("clusters",), ("plan", "gpt-1b", "--cluster", "h100-ib")]
)
def test_a_terminal_without_unicode_shows_everything(arguments: tuple[str, ...]) -> None:
    """Also the program by `python -m`: characters that ASCII lacks become JSON's escapes."""
    program = [sys.executable, "-m", "llmrecipes", *arguments]
    ascii_only = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    shown = subprocess.run(program, env=ascii_only, capture_output=True, timeout=240)
    assert (shown.returncode, shown.stderr) == (0, b"")
    text = shown.stdout.decode("ascii")
    unicode = subprocess.run(program, env=os.environ | {"PYTHONIOENCODING": "utf-8"}, capture_output=True, timeout=240)
    whole = unicode.stdout.decode("utf-8")
    assert not whole.isascii(), "this command tests nothing"
    assert re.sub(r"(\\u[0-9a-f]{4})+", lambda escapes: json.loads(f'"{escapes[0]}"'), text) == whole


def _commands(group: Any) -> Iterator[Any]:
    for each in group.commands.values():
        yield from _commands(each) if hasattr(each, "commands") else [each]


def test_no_number_of_an_option_is_out_of_range() -> None:
    """Nothing is computed with it: a tuple of so many GPUs, or a time that never ends."""
    seen, refusals = 0, (UserError, typer.TyperException)
    for command in _commands(typer.main.get_command(cli.build())):
        required = [parameter.opts[0] for parameter in command.params if parameter.required]
        needed = [f"{name}=x" if name.startswith("-") else "x" for name in required]
        for parameter in command.params:
            if not any(kind in str(parameter.type_descriptor.annotation) for kind in ("int", "float")):
                continue
            seen += 1
            option = parameter.opts[0]
            for value in ("1e36" if option == "--flops" else f"{10**20}", "nan", "inf", "1e309", f"-{10**36}"):
                with pytest.raises(refusals) as caught:
                    command.make_context(command.name, [*needed, f"{option}={value}"])
                told = caught.value
                words = told.format_message() if isinstance(told, typer.TyperException) else str(told)
                assert option in words, (command.name, option, value)
    assert seen > 40


@pytest.mark.parametrize("option", ["--nodes=100001", "--nodes=99999999999999999999"])
def test_more_nodes_than_any_cluster_has_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", "gpt-tiny", "--cluster", "h100-ib", option]) == 2
    require_message(capsys.readouterr().err, "--nodes", rule="100,000")


LONG = "x" * 300


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", f"{LONG}.yaml"],
        ["show", "a/" * 3000 + "b.yaml"],
        ["train", "gpt-tiny", "--run-id", LONG],
        ["prepare", "gpt-tiny", "--data-dir", LONG],
        ["compare", LONG, LONG],
        ["generate", LONG, "--prompt", "x"],
        ["import", f"./{LONG}"],
        ["serve", LONG],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_name_that_is_too_long_is_one_message(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, printed = run(capsys, *arguments)
    assert code == 2
    assert len([line for line in printed.splitlines() if line.startswith("error: ")]) == 1
    assert not list(tmp_path.iterdir())
