"""`llmrecipes merge`: what comes out, what is refused, and that nothing is left of what did not finish."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

import llmrecipes
from llmrecipes.cli.app import run
from llmrecipes.launch.run_options import RunOptions
from llmrecipes.models import merge_formulas
from llmrecipes.models.merge import MergeResult, Output, merge
from llmrecipes.models.merge_formulas import MergedTensors
from llmrecipes.models.merge_options import METHODS, MergeOptions
from llmrecipes.recipe.load import to_yaml
from llmrecipes.workflow.run import Paths, TrainOptions
from llmrecipes.workflow.train import train
from tests.helpers import LLAMA, tiny_on
from tests.refusals import refused, require_message
from tests.unit.test_checkpoint_saver import full_tmpfs

NOWHERE = Path("no-runs"), Path("no-data")
NORM = "model.norm.weight"
VOCABULARY = 300
END = "<end>"
Weights = dict[str, torch.Tensor]
Change = Callable[[Path], None]


def make(folder: Path, seed: int, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A folder as transformers saves it, with random weights."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, **{**shape, "num_key_value_heads": 2, **changes})
    transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**letters, END: len(letters)}, merges=[]))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three models of one shape."""
    return [make(tmp_path_factory.mktemp("models") / name, seed) for seed, name in enumerate("abc")]


def merged(
    models: list[Path], out: Path, method: str = "linear", base: Path | None = None, **options: Any
) -> MergeResult:
    dtype, tokenizer = options.pop("dtype", None), options.pop("tokenizer", True)
    output = Output(out, dtype, tokenizer=tokenizer)
    return merge(
        list(map(str, models)), MergeOptions(method, **options), output, *NOWHERE, None if base is None else str(base)
    )


def weights(folder: Path) -> Weights:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("method", METHODS)
def test_every_tensor_is_what_the_formula_says(folders: list[Path], tmp_path: Path, method: str) -> None:
    one, two, base = folders
    some: dict[str, dict[str, Any]] = {
        "linear": {"weights": [0.3, 0.9]}, "slerp": {"t": 0.3}, "task-arithmetic": {"scale": 0.5},
        "ties": {"density": [0.5]},
    }  # fmt: skip
    numbers = some.get(method, {"density": [0.5, 0.25], "seed": 3})
    made = merged([one, two], tmp_path / "out", method, base if METHODS[method].base else None, **numbers)
    found, a, b, start = (weights(folder) for folder in (tmp_path / "out", one, two, base))
    assert found.keys() == a.keys() and made.tensors == len(a)
    for name, value in found.items():
        each = [a[name], b[name]]
        kept = [merge_formulas.keep(value.shape, p, seed=3, name=name, model=n) for n, p in enumerate((0.5, 0.25))]
        thinned = (start[name], each, [1, 1], [0.5, 0.25], kept)
        expected = {
            "linear": lambda: merge_formulas.linear(each, [0.3, 0.9]),  # noqa: B023 - called at once
            "slerp": lambda: merge_formulas.slerp(a[name], b[name], 0.3),  # noqa: B023
            "task-arithmetic": lambda: merge_formulas.task_arithmetic(start[name], each, [1, 1], scale=0.5),  # noqa: B023
            "ties": lambda: merge_formulas.ties(start[name], each, [1, 1], [0.5, 0.5]),  # noqa: B023
            "dare": lambda: merge_formulas.dare(*thinned),  # noqa: B023
            "dare-ties": lambda: merge_formulas.dare(*thinned, elect=True),  # noqa: B023
        }[method]()
        assert torch.equal(value, expected), name


def test_transformers_loads_the_result(folders: list[Path], tmp_path: Path) -> None:
    merged(folders, tmp_path / "out", weights=[0, 1, 0])
    ids = torch.arange(12)[None]
    loaded, second = (
        transformers.AutoModelForCausalLM.from_pretrained(each) for each in (tmp_path / "out", folders[1])
    )
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, second(ids).logits)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == END
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert "linear" in card and str(tmp_path) not in card and str(folders[0].parent) not in card


@pytest.mark.parametrize("name", ["generation_config.json", "special_tokens_map.json", "tokenizer.json"])
def test_no_file_of_the_machine_is_copied_into_the_result(folders: list[Path], tmp_path: Path, name: str) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(folders[0], model)
    (tmp_path / "secret").write_text("{}")
    for link in (True, False):
        (model / name).unlink(missing_ok=True)
        (model / name).symlink_to(tmp_path / "secret") if link else os.mkfifo(model / name)
        with refused(model / name):
            merged([model, folders[1]], out)
        assert not out.exists()


def test_types_are_mixed_and_chosen(folders: list[Path], tmp_path: Path) -> None:
    half = make(tmp_path / "half", 5, torch.bfloat16)
    merged([half, folders[0]], tmp_path / "first")
    merged([half, folders[0]], tmp_path / "chosen", dtype="fp32")
    name = "model.embed_tokens.weight"
    expected = (weights(half)[name].float() + weights(folders[0])[name]) / 2
    assert torch.equal(weights(tmp_path / "chosen")[name], expected)
    assert torch.equal(weights(tmp_path / "first")[name], expected.bfloat16())


def test_the_command_and_the_function_make_the_same(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, base = map(str, folders)
    command = [
        "merge",
        one,
        two,
        "--method",
        "ties",
        "--base",
        base,
        "--density",
        "0.4",
        "--weights",
        "1,0.5",
        "--json",
    ]
    assert run([*command, "--out", str(tmp_path / "command")]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["merge"] == {
        "method": "ties", "weights": [1, 0.5], "densities": [0.4, 0.4], "scale": 1, "normalize": True,
    }  # fmt: skip
    made = llmrecipes.merge_models(
        [one, two], tmp_path / "api", method="ties", base=base, density=0.4, weights=[1, 0.5]
    )
    for file in ("model.safetensors", "config.json", "README.md", "tokenizer.json"):
        assert (made / file).read_bytes() == (tmp_path / "command" / file).read_bytes()


def test_only_tensors_of_one_name_are_in_memory(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    read = MergedTensors.read

    def noted(self: MergedTensors, name: str) -> torch.Tensor:
        order.append(name)
        return read(self, name)

    monkeypatch.setattr(MergedTensors, "read", noted)
    merged(folders, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert sorted(order) == sorted(file.keys()), "each is made once, and written before the next one"


@pytest.mark.parametrize(
    ("method", "count", "base", "options", "where", "rule"),
    [
        ("mean", 2, False, {}, "--method", "dare-ties"),
        ("linear", 1, False, {}, "--method linear", "2"),
        ("slerp", 3, False, {}, "--method slerp", "2"),
        ("ties", 2, False, {}, "--method ties", "--base"),
        ("linear", 2, True, {}, "--base", "task-arithmetic"),
        ("linear", 2, False, {"weights": [1.0]}, "--weights", "2"),
        ("linear", 2, False, {"weights": [1.0, float("-inf")]}, "--weights", "-inf"),
        ("linear", 2, False, {"weights": [1.0, -1.0]}, "--weights", "--no-normalize"),
        ("linear", 2, False, {"density": [0.5]}, "--density", "dare-ties"),
        ("slerp", 2, False, {"weights": [1.0, 1.0]}, "--weights", "task-arithmetic"),
        ("slerp", 2, False, {"t": 1.5}, "--t", "1.5"),
        ("linear", 2, False, {"t": 0.5}, "--t", "--method"),
        ("linear", 2, False, {"scale": 0.5}, "--lambda", "dare-ties"),
        ("ties", 2, True, {"seed": 1}, "--seed", "dare-ties"),
        ("dare", 2, True, {"seed": -1}, "--seed", "-1"),
        ("dare", 2, True, {"density": [0.0]}, "--density", "0"),
        ("ties", 2, True, {"density": [0.5, 0.5, 0.5]}, "--density", "3"),
        ("linear", 2, False, {"dtype": "int8"}, "--dtype", "bf16"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    folders: list[Path], tmp_path: Path, method: str, count: int, base: bool, options: Any, where: str, rule: str
) -> None:
    spare = folders[2] if base else None
    with refused(where, rule=rule):
        merged(folders[:count], tmp_path / "out", method, spare, **options)
    assert not any(tmp_path.iterdir())


def change_json(folder: Path, file: str, change: Callable[[Any], Any]) -> None:
    path = folder / file
    content = json.loads(path.read_text("utf-8"))
    change(content)
    path.write_text(json.dumps(content), "utf-8")


def change_weights(folder: Path, change: Callable[[Weights], Any]) -> None:
    found = weights(folder)
    change(found)
    save_file(found, folder / "model.safetensors", {"format": "pt"})


def config_of_another_width(folder: Path) -> None:
    change_json(folder, "config.json", lambda config: config.update(rope_theta=5.0, num_key_value_heads=4))


def a_tensor_is_missing(folder: Path) -> None:
    change_weights(folder, lambda found: found.pop(NORM))


def a_tensor_more(folder: Path) -> None:
    change_weights(folder, lambda found: found.update({"one.more": torch.zeros(2)}))


def another_shape(folder: Path) -> None:
    change_weights(folder, lambda found: found.update({NORM: torch.zeros(31)}))


def integers(folder: Path) -> None:
    change_weights(folder, lambda found: found.update({NORM: torch.zeros(32, dtype=torch.int64)}))


def not_finite(folder: Path) -> None:
    change_weights(folder, lambda found: found[NORM].fill_(float("nan")))


def tokens_swapped(folder: Path) -> None:
    def swap(content: Any) -> None:
        vocabulary = content["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    change_json(folder, "tokenizer.json", swap)


def another_splitting(folder: Path) -> None:
    whitespace = {"type": "Whitespace"}
    change_json(folder, "tokenizer.json", lambda content: content.update(pre_tokenizer=whitespace))


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def cut_off(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("change", "where", "rule"),
    [
        (config_of_another_width, "num_key_value_heads", ("4", "2")),
        (a_tensor_is_missing, "changed", NORM),
        (a_tensor_more, "a", "one.more"),
        (another_shape, "changed", (NORM, "31", "32")),
        (integers, "changed", (NORM, "torch.int64")),
        (not_finite, "changed", NORM),
        (tokens_swapped, "tokenizer.json", "'a'"),
        (another_splitting, "tokenizer.json", "pre_tokenizer"),
        (no_tokenizer, "changed", "tokenizer.json"),
        (cut_off, "model.safetensors", ()),
        (pickled, "changed", ()),
    ],
)
def test_models_that_do_not_fit_are_refused(
    folders: list[Path], tmp_path: Path, change: Change, where: str, rule: str | tuple[str, ...]
) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(folders[1], changed)
    change(changed)
    with refused(where, rule=rule):
        merged([folders[0], changed], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["changed"]


def test_what_means_the_same_is_not_refused(folders: list[Path], tmp_path: Path) -> None:
    """Defaults that are left out, another end of an answer, another version; padding in the tokenizer."""
    other = tmp_path / "other"
    shutil.copytree(folders[1], other)
    change_json(other, "config.json", lambda config: (config.pop("attention_bias"), config.update(eos_token_id=7)))
    change_json(other, "tokenizer.json", lambda content: content.update(padding=None, truncation=None, version="2.0"))
    merged([folders[0], other], tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))["eos_token_id"] == 2


def test_integers_that_are_equal_stay(folders: list[Path], tmp_path: Path) -> None:
    copies = [tmp_path / "one", tmp_path / "two"]
    for folder, copy in zip(folders, copies, strict=False):
        shutil.copytree(folder, copy)
        change_weights(copy, lambda found: found.update({"a.table": torch.arange(5)}))
    merged(copies, tmp_path / "out")
    assert weights(tmp_path / "out")["a.table"].tolist() == [0, 1, 2, 3, 4]
    change_weights(copies[1], lambda found: found.update({"a.table": torch.arange(1, 6)}))
    with refused("two", rule="a.table"):
        merged(copies, tmp_path / "again")


def test_the_same_model_twice_is_refused(folders: list[Path], tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folders[0])
    for given in ([folders[0], folders[0]], [folders[0], link]):
        with refused(given[1].name, rule="--weights"):
            merged(given, tmp_path / "out")
    with refused(folders[0].name):
        merged(folders[:2], tmp_path / "out", "ties", folders[0])


def test_nothing_is_overwritten(folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    command = ["merge", *map(str, folders), "--method", "linear", "--out", str(out)]
    assert run(command) == 2
    require_message(capsys.readouterr().err, str(out), rule="--out")
    assert run([*command[:-1], str(tmp_path / "new"), "--weights", "1;2"]) == 2
    require_message(capsys.readouterr().err, "--weights", rule="1;2")
    assert run(["merge", "no-such-run", "other", "--method", "linear", "--out", str(tmp_path / "new")]) == 2
    require_message(capsys.readouterr().err, "runs", rule="no-such-run")
    assert not any(out.iterdir())


def test_a_number_too_large_for_fp16_is_refused(folders: list[Path], tmp_path: Path) -> None:
    with refused("--dtype", rule="bf16"):
        merged(folders[:2], tmp_path / "out", weights=[1e6, 0], normalize=False, dtype="fp16")
    assert not any(tmp_path.iterdir())


def interrupted_after(count: int, action: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the merge do something when it has made some tensors."""
    done: list[str] = []
    read = MergedTensors.read

    def counting(self: MergedTensors, name: str) -> torch.Tensor:
        done.append(name)
        if len(done) > count:
            action()
        return read(self, name)

    monkeypatch.setattr(MergedTensors, "read", counting)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    interrupted_after(3, lambda: os.kill(os.getpid(), number), monkeypatch)
    command = ["merge", *map(str, folders), "--method", "linear", "--out", str(tmp_path / "out")]
    assert run(command) != 0
    assert not any(tmp_path.iterdir())


def test_a_killed_merge_leaves_no_model_and_the_next_one_succeeds(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    child = os.fork()
    if child == 0:
        interrupted_after(3, lambda: os.kill(os.getpid(), signal.SIGKILL), monkeypatch)
        try:
            merged(folders, out)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not out.exists() and any(tmp_path.iterdir())
    merged(folders, out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_leaves_nothing(folders: list[Path], tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with full_tmpfs(disk):
        (disk / "other").write_bytes(bytes(950_000))
        with refused(disk):
            merged(folders, disk / "out")
        assert not (disk / "out").exists() and not list(disk.glob(".out*"))


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory, data_dir: Path, corpus: Path) -> Paths:
    """Where a run of three steps is that saved all of them."""
    paths = Paths(tmp_path_factory.mktemp("runs"), data_dir)
    recipe = tiny_on(
        corpus, "runs", model=LLAMA, train={"train_iters": 3}, checkpoint={"save_interval": 1, "most_recent_k": 3}
    )
    assert train(recipe, paths, TrainOptions(run_id="one", run=RunOptions(sample=False)), print) == 0
    return paths


def test_checkpoints_of_a_run_are_averaged(paths: Paths, tmp_path: Path) -> None:
    """And the average, as a folder, can be merged with a run again."""
    run_dir = paths.runs_dir / "runs" / "one"
    opened = llmrecipes.open_run(run_dir, runs_dir=paths.runs_dir, data_dir=paths.data_dir)
    steps = [weights(opened.export(tmp_path / str(step), step=step)) for step in (2, 3)]
    places: dict[str, Any] = {"runs_dir": paths.runs_dir, "data_dir": paths.data_dir}
    average = llmrecipes.merge_models(["runs/one@2", "runs/one@3"], tmp_path / "mean", method="linear", **places)
    for name, value in weights(average).items():
        torch.testing.assert_close(value, (steps[0][name] + steps[1][name]) / 2)
    assert transformers.AutoTokenizer.from_pretrained(average).decode([5, 6, 7])
    again = llmrecipes.merge_models([average, "runs/one@1"], tmp_path / "again", method="slerp", **places)
    assert transformers.AutoModelForCausalLM.from_pretrained(again).config.vocab_size == 512
    with refused("runs/one", rule="runs/one@3"):
        llmrecipes.merge_models(["runs/one@3", "runs/one"], tmp_path / "twice", method="linear", **places)


def test_checkpoints_of_a_run_become_a_run(
    paths: Paths, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the average, training resumes from it, and other models are refused."""
    places = ["--runs-dir", str(paths.runs_dir), "--data-dir", str(paths.data_dir)]
    command = ["merge", "runs/one@2", "runs/one@3", "--method", "linear", *places]
    monkeypatch.setattr("llmrecipes.tracking.progress.SECONDS_BEFORE_COUNTING", 0.0)
    assert run([*command, "--to", "run", "--run-id", "mean"]) == 0
    assert "parameters  " in capsys.readouterr().err
    assert run([*command, "--out", str(tmp_path / "mean")]) == 0
    opened = llmrecipes.open_run("runs/mean", runs_dir=paths.runs_dir, data_dir=paths.data_dir)
    assert [checkpoint.step for checkpoint in opened.checkpoints] == [0] and opened.status.step == 0
    same, found = weights(tmp_path / "mean"), weights(opened.export(tmp_path / "run"))
    assert found.keys() == same.keys() and all(torch.equal(found[name], same[name]) for name in same)
    first = llmrecipes.open_run(paths.runs_dir / "runs" / "one").records()[0]["loss"]
    assert run(["train", str(opened.path / "recipe.yaml"), "--run-id", "mean", "--no-sample", *places]) == 0
    assert opened.records()[0]["loss"] < first
    capsys.readouterr()
    assert run([*command, "--to", "run", "--run-id", "mean"]) == 2
    require_message(capsys.readouterr().err, paths.runs_dir / "runs" / "mean")
    other = opened.recipe.model_copy(update={"model": opened.recipe.model.model_copy(update={"rotary_base": 5000})})
    (paths.runs_dir / "runs" / "other").mkdir()
    shutil.copytree(opened.path / "checkpoints", paths.runs_dir / "runs" / "other" / "checkpoints")
    (paths.runs_dir / "runs" / "other" / "recipe.yaml").write_text(to_yaml(other), "utf-8")
    assert run(["merge", "runs/one", "runs/other", "--method", "linear", "--to", "run", *places]) == 2
    require_message(capsys.readouterr().err, "model.rotary_base", rule="5000.0")
