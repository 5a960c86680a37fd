"""A run in one file: the same bytes each time, no secret in any of them, read safely, and trained again."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmrecipes.bundle import archive
from llmrecipes.bundle.archive import SUMS, BundleWriter, opened
from llmrecipes.bundle.bundle_options import BundleOptions
from llmrecipes.bundle.make import bundle as make
from llmrecipes.bundle.rerun import LossComparison, losses_of
from llmrecipes.cli import app as cli
from llmrecipes.hardware.process import start_ticks
from llmrecipes.recipe.schema import Recipe
from llmrecipes.rundir import Run
from tests.helpers import lines, no_file_above, tiny_on, train_lines, write_recipe
from tests.refusals import refused, require_message

TOKEN = "hf_" + "a1B2" * 9
SECRETS = {
    "HF_TOKEN": TOKEN,
    "MLFLOW_TRACKING_URI": "https://bob:hunter2-hunter2@mlflow.example.org",
    "NCCL_AUTH_TOKEN": "sesame-sesame",
}
URL = "https://alice:open-sesame@example.org/data"
SECRET_WORDS = (TOKEN, "hunter2-hunter2", "sesame-sesame", "open-sesame")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with `corpus`, `data`, and the run `runs/handed/r` of six steps, in which secrets are everywhere."""
    folder = tmp_path_factory.mktemp("bundle")
    (folder / "corpus").mkdir()
    for number in range(60):
        text = "".join(f"{TOKEN} word {number * line % 97} {URL}\n" for line in range(20))
        (folder / "corpus" / f"{number:02d}.txt").write_text(text)
    train = {"train_iters": 6, "eval_interval": 3, "eval_iters": 1}
    recipe = tiny_on(folder / "corpus", "handed", train=train, checkpoint={"save_interval": 3})
    path = write_recipe(recipe.model_copy(update={"description": "for sesame-sesame"}), folder)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        paths = ["--runs-dir", str(folder / "runs"), "--data-dir", str(folder / "data")]
        assert cli.run(["train", path, "--run-id", "r", "--no-sample", *paths]) == 0
    run = Run(folder / "runs/handed/r")
    with run.metrics.open("a") as metrics:
        metrics.write(json.dumps({"step": 6, "event": "x", "details": {"url": URL}}) + "\n")
        metrics.write('{"step": 7, "loss": 1.0')  # cut off, as while a line is written
    run.evaluations.write_text(json.dumps({"task": "t", "step": 6, "time": 1.0, "metrics": {}, "why": URL}) + "\n")
    (run.logs / "rank.log").write_text(f"{URL} failed\n")
    environment = json.loads((run.path / "env.json").read_text())
    environment["git"] = {"commit": "0" * 40, "dirty": True, "diff": f"+API_KEY={TOKEN}\n"}
    (run.path / "env.json").write_text(json.dumps(environment))
    yield folder


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Command:
    """Run `llmrecipes …`; exit code, stdout and stderr."""

    def run(*arguments: str | Path, runs: Path = folder / "runs", data: Path = folder / "data") -> tuple[int, str, str]:
        capfd.readouterr()
        code = cli.run([*map(str, arguments), "--runs-dir", str(runs), "--data-dir", str(data)])
        captured = capfd.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def sound(folder: Path) -> Path:
    """A bundle of the run."""
    path = folder / "sound.tar"
    make(Run(folder / "runs/handed/r"), BundleOptions(out=path), folder / "data")
    return path


@pytest.fixture
def bundle(sound: Path, tmp_path: Path) -> Path:
    """A copy of it, to change."""
    return Path(shutil.copy(sound, tmp_path / "b.tar"))


def contents(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {each.name: tar.extractfile(each).read() for each in tar}  # type: ignore[union-attr]


def rewrite(path: Path, changes: dict[str, Any]) -> Path:
    """A valid bundle with other contents; None leaves a member out."""
    members = {**contents(path), **changes}
    with path.open("wb") as stream:
        writer = BundleWriter(stream)
        for name, content in members.items():
            if name != SUMS and content is not None:
                writer.add(name, [content if isinstance(content, bytes) else json.dumps(content).encode()])
        writer.close()
    return path


def test_a_bundle_has_all_of_a_run_and_no_secret(command: Command, folder: Path, tmp_path: Path) -> None:
    one = tmp_path / "one.tar"
    code, out, _ = command("bundle", "handed/r", "--checkpoint", "3", "--out", one, "--json")
    told = json.loads(out)
    assert (code, told["run"], told["steps"], told["checkpoint"], told["absent"]) == (0, "handed/r", 6, 3, [])
    members = contents(one)
    assert list(members) == [*told["members"], SUMS]
    assert {name.partition("/")[0] for name in members} == {
        "recipe.yaml", "recipe-short.yaml", "plan.json", "env.json", "packages.txt", "code.diff", "metrics.jsonl",
        "evaluations.jsonl", "status.json", "report.html", "data", "checkpoints", "bundle.json", SUMS,
    }  # fmt: skip
    run = folder / "runs/handed/r"
    assert not [word for word in SECRET_WORDS for name, text in members.items() if word.encode() in text]
    assert b"<hidden>" in members["code.diff"] and b"<hidden>" in members["data/sample.txt"]
    variables = json.loads(members["env.json"])["variables"]
    assert variables["NCCL_AUTH_TOKEN"] == "<hidden>" and not variables.keys() & {"HF_TOKEN", "PATH", "HOME"}
    assert b"megatron-core==" in members["packages.txt"] and b"typer==" in members["packages.txt"]
    assert [json.loads(line) for line in members["metrics.jsonl"].splitlines()[:-1]] == lines(run)[:-1]
    held_out = json.loads(members["data/manifest.json"])["held_out"]["valid"]["bytes"]
    assert 0 < len(members["data/sample.txt"]) <= held_out // 10
    # Named otherwise, from elsewhere, and later: the same bytes.
    two = tmp_path / "two.tar"
    assert command("bundle", run.relative_to(Path.cwd(), walk_up=True), "--checkpoint", "3", "--out", two)[0] == 0
    assert one.read_bytes() == two.read_bytes()
    assert (
        "data/sample.txt"
        not in json.loads(command("bundle", "r", "--no-sample", "--out", tmp_path / "3", "--json")[1])["members"]
    )


def test_an_extracted_bundle_is_a_run(command: Command, tmp_path: Path) -> None:
    assert command("bundle", "r", "--checkpoint", "best", "--out", tmp_path / "b.tar")[0] == 0
    run = Run(tmp_path / "runs/handed/there")
    with tarfile.open(tmp_path / "b.tar") as tar:
        tar.extractall(run.path, filter="data")
    newest = run.require_checkpoint()
    assert newest.step in (3, 6) and run.recipe().name == "handed"
    assert command("diagnose", "there", "--json", runs=tmp_path / "runs")[0] == 0
    assert run.status()["state"] == "finished"


def test_a_run_is_trained_again_bit_for_bit_after_it_was_deleted(
    command: Command, bundle: Path, folder: Path, tmp_path: Path
) -> None:
    shutil.move(folder / "runs", tmp_path / "gone")
    try:
        code, out, err = command("rerun", bundle, "--json", "--no-sample", "--run-id", "again", runs=tmp_path / "again")
    finally:
        shutil.move(tmp_path / "gone", folder / "runs")
    told = json.loads(out)
    assert code == 0, err
    assert (told["losses"]["steps"], told["losses"]["done"], told["losses"]["first"]) == (6, 6, None)
    assert told["data"].startswith("equal") and told["run"] == "handed/again"
    assert "git.commit" in told["differences"] and "torch" not in told["differences"]
    trained = [line["loss"] for line in train_lines(tmp_path / "again/handed/again")]
    assert trained == [line["loss"] for line in train_lines(folder / "runs/handed/r")]


def test_a_run_that_has_not_ended_is_compared_until_its_last_step(
    command: Command, bundle: Path, tmp_path: Path
) -> None:
    metrics = contents(bundle)["metrics.jsonl"].splitlines(keepends=True)
    begun = b"".join(line for line in metrics if json.loads(line)["step"] <= 2)
    loss = json.loads(next(line for line in metrics if b'"step": 2, "loss"' in line))["loss"]
    other = begun.replace(str(loss).encode(), str(loss * (1 + 1e-9)).encode())
    assert other != begun
    code, out, _ = command("rerun", rewrite(bundle, {"metrics.jsonl": other}), "--no-sample", runs=tmp_path / "runs")
    assert code == 1
    last = out.splitlines()[-1]
    assert "2 steps" in last and "step 2" in last and "8 digits" in last and repr(loss) in last
    (run,) = Run.all(tmp_path / "runs")
    assert train_lines(run.path)[-1]["step"] == 2


@pytest.mark.rotating
def test_on_two_ranks_the_losses_are_equal_within_rounding(command: Command, bundle: Path, tmp_path: Path) -> None:
    arguments = ("rerun", bundle, "--nproc", "2", "--tolerance", "1e-5", "--json")
    code, out, err = command(*arguments, runs=tmp_path / "runs")
    assert code == 0, err
    told = json.loads(out)
    assert told["differences"]["ranks"] == ["1", "2"]
    assert told["losses"]["done"] == 6 and told["losses"]["worst"] < 1e-5


def test_what_differs_on_this_machine_is_said(command: Command, bundle: Path, tmp_path: Path) -> None:
    members = contents(bundle)
    environment = json.loads(members["env.json"])
    environment["packages"] |= {"torch": "9.9", "typer": "0.0", "gone-since": "1"}
    environment |= {"python": "2.7\x1b[31m", "gpus": [{"name": "H200"}] * 8}
    plan = json.loads(members["plan.json"]) | {"world_size": 1024}
    rewrite(bundle, {"env.json": environment, "plan.json": plan})
    code, out, _ = command("rerun", bundle, "--check", "--json", runs=tmp_path / "none")
    told = json.loads(out)
    assert code == 0 and told["losses"] is None
    differs = told["differences"]
    assert (
        differs["torch"][0] == "9.9" and differs["python"][0] == "2.7?[31m" and differs["gpus"] == ["8 × H200", "none"]
    )
    assert differs["ranks"] == ["1024", "1"] and differs["other packages"][1].split()[0] == "2"
    assert "megatron-core" not in differs and differs["code.diff"][0] == "1 lines"
    code, out, _ = command("rerun", bundle, "--check", runs=tmp_path / "none")
    assert code == 0 and "9.9" in out and "8 × H200" in out
    assert not (tmp_path / "none").exists()
    code, out, _ = command("rerun", rewrite(bundle, {"env.json": None, "plan.json": None}), "--check", "--json")
    assert code == 0 and json.loads(out)["differences"]["torch"][0] == "unknown"


def test_changed_data_is_said(command: Command, bundle: Path, folder: Path, tmp_path: Path) -> None:
    there, data = tmp_path / "there", tmp_path / "data"
    shutil.copytree(folder / "corpus", there)
    moved = ("rerun", bundle, "--check", "--json", "--data", there)
    told = json.loads(command(*moved, data=data)[1])["data"]
    assert told.startswith("not prepared") and str(there) in told
    with (there / "07.txt").open("a") as file:
        file.write("one more line\n")

    def prepare() -> int:
        source = f"data.sources.0.path={there}"
        return cli.run(["prepare", str(folder / "handed.yaml"), source, "--data-dir", str(data)])

    assert prepare() == 0
    assert json.loads(command(*moved, data=data)[1])["data"].startswith("different: 00-")
    shutil.rmtree(data)
    shutil.copy(folder / "corpus" / "07.txt", there)
    assert prepare() == 0
    assert json.loads(command(*moved, data=data)[1])["data"].startswith("equal")
    (tokens,) = data.glob("*/00-train.bin")
    content = bytearray(tokens.read_bytes())
    content[40] ^= 1
    tokens.write_bytes(content)
    code, out, _ = command(*moved, data=data)
    assert code == 2 and "00-train.bin" in json.loads(out)["where"]
    without = rewrite(bundle, {"data/manifest.json": None})
    assert json.loads(command("rerun", without, "--check", "--json")[1])["data"].startswith("unknown")


def test_nothing_is_overwritten_and_a_full_disk_leaves_nothing(command: Command, bundle: Path, tmp_path: Path) -> None:
    before = bundle.read_bytes()
    code, _, err = command("bundle", "r", "--out", bundle, "--no-sample")
    assert (code, bundle.read_bytes()) == (2, before)
    require_message(err, bundle, rule="--force")
    assert command("bundle", "r", "--out", bundle, "--no-sample", "--force")[0] == 0
    assert bundle.read_bytes() != before
    code, _, err = command("bundle", "r", "--out", tmp_path, "--force")
    assert code == 2
    require_message(err, tmp_path)
    with no_file_above(50_000):
        code, _, err = command("bundle", "r", "--checkpoint", "last", "--out", tmp_path / "full.tar")
    assert code == 2
    require_message(err, tmp_path / "full.tar", rule="--out")
    assert [path.name for path in tmp_path.iterdir()] == [bundle.name]


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Run:
    """A copy of the run, to change its files."""
    run = Run(tmp_path / "runs/handed/r")
    shutil.copytree(folder / "runs/handed/r", run.path)
    return run


def test_what_cannot_be_bundled_is_refused(command: Command, copied: Run, tmp_path: Path) -> None:
    out = tmp_path / "x.tar"

    def code_and_error(*arguments: str) -> str:
        code, _, err = command("bundle", copied.path, "--out", out, *arguments)
        assert code == 2 and not [path for path in tmp_path.iterdir() if path.name != "runs"]
        return err

    require_message(code_and_error("--checkpoint", "newest"), "--checkpoint", rule="'newest'")
    require_message(code_and_error("--checkpoint", "4"), copied.checkpoints, rule=("3, 6",))
    tensors = copied.checkpoints / "step-00000003/__0_0.distcp"
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    require_message(code_and_error("--checkpoint", "3"), tensors)
    copied.metrics.write_text('{"step": 0, "event": "started"}\n')
    require_message(code_and_error(), copied.metrics)
    copied.metrics.unlink()
    require_message(code_and_error(), copied.metrics)


def test_the_url_of_the_copy_of_a_checkpoint(command: Command, copied: Run, tmp_path: Path) -> None:
    text = copied.recipe_file.read_text()
    copied.recipe_file.write_text(text.replace("copy_to: null", "copy_to: s3://bucket/runs/"))
    (copied.path / "env.json").write_text("{")
    told = json.loads(command("bundle", copied.path, "--out", tmp_path / "x.tar", "--json")[1])
    assert told["copy"].startswith("s3://bucket/runs/handed/r/step-00000006-") and told["checkpoint"] is None
    assert [text.partition(":")[0] for text in told["absent"]] == ["env.json"]
    code, out, _ = command("rerun", tmp_path / "x.tar", "--check", "--json")  # which neither fetches nor copies
    assert code == 0 and json.loads(out)["data"].startswith("equal")


def test_a_run_that_still_trains_is_taken_until_its_last_whole_line(
    command: Command, copied: Run, tmp_path: Path
) -> None:
    status = json.loads(copied.status_file.read_text())
    mine = {"state": "running", "pid": os.getpid(), "pid_ticks": start_ticks(os.getpid())}
    copied.status_file.write_text(json.dumps({**status, **mine}))
    told = json.loads(command("bundle", copied.path, "--out", tmp_path / "x.tar", "--json")[1])
    assert told["steps"] == 6
    assert json.loads(contents(tmp_path / "x.tar")["status.json"])["state"] == "running"


def test_weights_that_the_recipe_does_not_make_are_refused(command: Command, copied: Run, tmp_path: Path) -> None:
    (copied.path / "upcycled.json").write_text(json.dumps({"run_dir": str(copied.path), "dense_run": "x"}))
    assert command("bundle", copied.path, "--out", tmp_path / "x.tar")[0] == 0
    code, _, err = command("rerun", tmp_path / "x.tar")
    assert code == 2
    require_message(err, tmp_path / "x.tar", rule="--checkpoint")


# -- files from others -------------------------------------------------------------------------------------------------


def _changed(place: Callable[[bytes], int]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[place(bytes(content))] ^= 1
        path.write_bytes(content)

    return change


def _tar(**header: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        member = tarfile.TarInfo("recipe.yaml")
        for name, value in header.items():
            setattr(member, name, value)
        with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
            tar.addfile(member)

    return write


def _cut(bytes_left: Callable[[int], int]) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, bytes_left(path.stat().st_size))


def _instead(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


def _other_header(**changes: Any) -> Callable[[Path], None]:
    """Another header of the first member, whose content and sum stay."""

    def change(path: Path) -> None:
        content = path.read_bytes()
        header = tarfile.TarInfo.frombuf(content[:512], "ascii", "strict")
        for name, value in changes.items():
            setattr(header, name, value)
        path.write_bytes(header.tobuf(tarfile.GNU_FORMAT) + content[512:])

    return change


def _with_name(name: str) -> Callable[[Path], None]:
    """A member of this name, and its sum."""

    def change(path: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(archive, "_NAME", re.compile(".*"))
            rewrite(path, {name: b"x"})

    return change


def _twice(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: -2 * 512] + content)


def _huge(path: Path) -> None:
    header = tarfile.TarInfo("recipe.yaml")
    header.size = 1 << 60
    path.write_bytes(header.tobuf(tarfile.GNU_FORMAT) + bytes(512))


HOSTILE: dict[str, Callable[[Path], object]] = {
    "a byte of a member": _changed(lambda content: content.index(b"num_layers")),
    "a byte behind a member": _changed(lambda content: content.index(b"recipe-short.yaml") - 1),
    "a byte of the sums": _changed(lambda content: content.rindex(b"  recipe.yaml") - 1),
    "a byte of the end": _changed(lambda content: len(content) - 1),
    "the time in a header": _changed(lambda _: 140),
    "cut in a member": _cut(lambda size: size // 2),
    "cut behind a member": _cut(lambda size: 512),
    "without its end": _cut(lambda size: size - 1024),
    "twice": _twice,
    "empty": _cut(lambda size: 0),
    "zeros": lambda path: path.write_bytes(bytes(1 << 20)),
    "text": lambda path: path.write_text("a bundle" * 100),
    "a folder": _instead(Path.mkdir),
    "a FIFO": _instead(os.mkfifo),
    "a device": _instead(lambda path: path.symlink_to("/dev/zero")),
    "absent": lambda path: path.unlink(),
    "a long name": _tar(name="a" * 200),
    "up, with its sum": _with_name("../recipe.yaml"),
    "up within, with its sum": _with_name("data/../../recipe.yaml"),
    "absolute, with its sum": _with_name("/etc/cron.d/x"),
    "deep, with its sum": _with_name("/".join("abcdefghi")),
    "a control character, with its sum": _with_name("a\x1b[31m"),
    "a link that has its sum": _other_header(type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "a device that has its sum": _other_header(type=tarfile.CHRTYPE),
    "an owner that has its sum": _other_header(uid=1000),
    "a hard link": _tar(type=tarfile.LNKTYPE, linkname="/etc/passwd"),
    "a folder inside": _tar(type=tarfile.DIRTYPE),
    "a size beyond its end": _huge,
    "a negative size": _tar(size=-1),
    "another tar": _tar(),
    "a newer version": lambda path: rewrite(path, {"bundle.json": {"format": 2}}),
    "no facts": lambda path: rewrite(path, {"bundle.json": None}),
    "facts that are none": lambda path: rewrite(path, {"bundle.json": [1]}),
    "deep facts": lambda path: rewrite(path, {"bundle.json": b"[" * 100_000}),
    "no recipe": lambda path: rewrite(path, {"recipe.yaml": None}),
    "a wrong recipe": lambda path: rewrite(path, {"recipe.yaml": b"name: [x"}),
    "a name that leads out": lambda path: rewrite(path, {"recipe.yaml": b"name: ../x\n"}),
    "a large recipe": lambda path: rewrite(path, {"recipe.yaml": b"#" * (2 << 20)}),
    "a wrong manifest of data": lambda path: rewrite(path, {"data/manifest.json": {"files": {"/etc/passwd": 1}}}),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_an_invalid_bundle_is_refused(
    command: Command, bundle: Path, tmp_path: Path, change: Callable[[Path], object]
) -> None:
    change(bundle)
    runs = tmp_path / "runs"
    code, _, err = command("rerun", bundle, runs=runs)
    assert code == 2, err
    require_message(err, bundle)
    assert len(err) < 1500 and not runs.exists()


def test_a_bundle_of_many_members_or_one_long_line_is_refused(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(bundle) as sound, refused(bundle):
        monkeypatch.setattr(archive, "LINE", 64)
        list(sound.lines("metrics.jsonl"))
    monkeypatch.setattr(archive, "MOST_MEMBERS", 5)
    with refused(bundle, rule="5"), opened(bundle):
        pass


def test_a_bundle_does_not_choose_where_a_rerun_reports(
    command: Command, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = contents(bundle)["recipe.yaml"].decode()
    for mine, theirs in {
        "copy_to: null": "copy_to: s3://theirs/runs",
        "wandb_save_dir: null": f"wandb_save_dir: {tmp_path / 'theirs'}",
        "wandb: false": "wandb: true",
        "prometheus: false": "prometheus: true",
    }.items():
        assert mine in text
        text = text.replace(mine, theirs)
    started: list[Any] = []

    def train(recipe: Recipe, *_: object) -> int:
        started.append(recipe)
        return 0

    monkeypatch.setattr("llmrecipes.bundle.rerun.train", train)
    code, out, _ = command("rerun", rewrite(bundle, {"recipe.yaml": text.encode()}), runs=tmp_path / "runs")
    (recipe,) = started
    assert (recipe.checkpoint.copy_to, recipe.tracking.wandb, recipe.tracking.wandb_save_dir) == (None, False, None)
    assert (recipe.tracking.prometheus, recipe.tracking.mlflow) == (False, False)
    assert code == 1 and "0 of 6" in out  # nothing was trained


# -- losses ------------------------------------------------------------------------------------------------------------


def compared(then: list[Any], now: list[Any]) -> LossComparison:
    return LossComparison.of(*(losses_of([json.dumps(line).encode() for line in each]) for each in (then, now)))


def test_losses_are_compared_step_by_step() -> None:
    steps = [{"step": n, "loss": 4.0, "grad_norm": 1.0} for n in (1, 2, 3)]
    evaluation = {"step": 2, "valid_loss": 2.0}
    same = compared([*steps, evaluation], [*steps, evaluation])
    assert (same.steps, same.done, same.first, same.worst, same.digits) == (3, 3, None, 0.0, None)
    parted = compared(
        [*steps, evaluation], [*steps[:2], {"step": 3, "loss": 4.004}, {"step": 2, "valid_loss": 2.00002}]
    )
    assert (parted.first, parted.then, parted.now) == (("valid", 2), 2.0, 2.00002)
    assert parted.worst == pytest.approx(1e-3) and parted.digits in (2, 3)
    assert compared(steps, steps[:2]).done == 2
    infinite = {"step": 1, "loss": None, "non_finite": ["loss"]}
    assert compared([infinite], [infinite]).first is None
    diverged = compared(steps, [infinite])
    assert math.isinf(diverged.worst) and diverged.digits == 0
