"""What a reference or a teacher says, computed before training: the same run without that model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from llmrecipes.data.folder import data_manifest
from llmrecipes.data.read import precomputed
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.rules.recipe_rules import check
from llmrecipes.recipe.schema import Recipe
from llmrecipes.workflow import precompute
from llmrecipes.workflow.precompute import REQUEST, _parts, work_folder
from tests.conftest import Command
from tests.helpers import ROOMY, tiny, tiny_on, train_lines, write_recipe
from tests.refusals import refused, require_message

ANSWERS = "no", "yes"


def pairs(folder: Path) -> Path:
    """60 pairs of texts."""
    path = folder / "pairs.jsonl"
    rows = [{"prompt": f"Is {n} odd?", "chosen": f" {ANSWERS[n % 2]}.", "rejected": f" It is {n}, so {n % 7}."}
            for n in range(60)]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def preferring(source: Path, folder: Path | None = None, *, packing: bool = True, **sections: Any) -> Recipe:
    data = {
        "sources": [{"type": "jsonl", "path": str(source)}], "split": [80.0, 20.0, 0.0],
        "chat": {"packing": packing, "preference": {}}, "num_workers": 0,
    }  # fmt: skip
    train = {"train_iters": 4, "eval_interval": 2, "eval_iters": 1, "log_interval": 1, "global_batch_size": 4}
    return tiny(
        "pairs", data=data, optimizer={"lr": 1e-2},
        model={"hidden_size": 32, "vocab_size": 300, **sections.pop("model", {})},
        dpo={"beta": 0.5, "reference_log_probs": None if folder is None else str(folder)},
        train={**train, **sections.pop("train", {})}, **sections,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("precomputed")


@pytest.fixture(scope="module")
def source(folder: Path) -> Path:
    return pairs(folder)


def numbers(folder: Path, run: str) -> list[tuple[Any, ...]]:
    lines = train_lines(folder / "runs/pairs" / run)
    return [(line["loss"], line["grad_norm"], line["rewards"]) for line in lines]


@pytest.mark.parametrize("packing", [True, False])
def test_a_run_is_the_one_with_the_reference(source: Path, folder: Path, command: Command, packing: bool) -> None:
    values = folder / f"values-{packing}"
    live = write_recipe(preferring(source, packing=packing), folder)
    assert command("train", live, "--run-id", f"live-{packing}")[0] == 0
    recipe = write_recipe(preferring(source, values, packing=packing), folder)
    code, printed = command("train", recipe)
    assert code == 2
    require_message(printed, "dpo.reference_log_probs")
    assert command("precompute", recipe)[0] == 0
    record = json.loads((values / "precomputed.json").read_text("utf-8"))
    arrays = [np.load(values / name, allow_pickle=False) for name in record["files"]]
    assert sum(map(len, arrays)) == 60 and all((array < 0).all() for array in arrays)
    assert not work_folder(values).exists()
    assert command("train", recipe, "--run-id", f"read-{packing}")[0] == 0
    assert numbers(folder, f"read-{packing}") == numbers(folder, f"live-{packing}")
    if packing:  # another order of pairs in sequences, with adapters: the same values serve
        again = ("lora={rank: 2, alpha: 4.0}", "layout.micro_batch_size=1", "optimizer.lr=5e-3")
        assert command("train", recipe, *again, "--run-id", "lora")[0] == 0
        assert command("train", live, *again, "dpo.reference_log_probs=null", "--run-id", "lora-live")[0] == 0
        for one, other in zip(numbers(folder, "lora"), numbers(folder, "lora-live"), strict=True):
            assert one[:2] == pytest.approx(other[:2], rel=1e-5)


def test_a_killed_computation_goes_on(
    source: Path, folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = folder / "whole", folder / "parts"
    recipe = write_recipe(preferring(source, whole), folder)
    assert command("precompute", recipe)[0] == 0
    written: list[str] = []

    def write(path: Path, *arguments: Any) -> None:
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(path.name)
        real(path, *arguments)

    real = precompute._write_part
    with monkeypatch.context() as patch:
        patch.setattr(precompute, "_write_part", write)
        assert command("precompute", recipe, f"dpo.reference_log_probs={parts}")[0] != 0
    assert not parts.exists()
    assert sorted(path.name for path in (work_folder(parts) / "parts").iterdir()) == sorted(written)

    def write_and_note(path: Path, *rest: Any) -> None:
        written.append(path.name)
        real(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(precompute, "_write_part", write_and_note)
        assert command("precompute", recipe, f"dpo.reference_log_probs={parts}")[0] == 0
    assert len(written) == len(set(written)) > 3
    for path in whole.glob("*.npy"):
        assert path.read_bytes() == (parts / path.name).read_bytes()
    code, printed = command("precompute", recipe, f"dpo.reference_log_probs={parts}", "--json")
    assert code == 0 and '"seconds": 0.0' in printed


def test_values_of_something_else_start_nothing(source: Path, folder: Path, command: Command) -> None:
    values = folder / "of-one"
    recipe = write_recipe(preferring(source, values), folder)
    assert command("precompute", recipe)[0] == 0
    before = sorted((folder / "runs/pairs").glob("*"))
    for override, name in {
        "train.seed=5": "model.weights", "model.num_layers=1": "model.num_layers",
        "data.split=[70,30,0]": "data.folder", "train.precision=bf16": "train.precision",
    }.items():  # fmt: skip
        for which in ("train", "precompute"):
            code, printed = command(which, recipe, override)
            assert code == 2, printed
            require_message(printed, "dpo.reference_log_probs", rule=name)
    code, printed = command("precompute", recipe, f"dpo.reference_log_probs={source / 'in-a-file'}")
    assert code == 2
    require_message(printed, source)
    array = next(values.glob("*.npy"))
    content = bytearray(array.read_bytes())
    content[-1] ^= 1
    array.write_bytes(content)
    code, printed = command("train", recipe)
    assert code == 2
    require_message(printed, str(array))
    assert sorted((folder / "runs/pairs").glob("*")) == before
    code, printed = command("precompute", recipe, "dpo.reference_log_probs=null")
    assert code == 2
    require_message(printed, "recipe pairs", rule="dpo.reference_log_probs=DIR")


def test_a_plan_is_without_the_reference(source: Path, folder: Path) -> None:
    read, none = (
        derive(recipe, 1, ROOMY)
        for recipe in (preferring(source, folder), tiny_without_reference(source))
    )  # fmt: skip
    assert read.memory == none.memory and read.memory.teacher == 0
    assert read.flops_per_token_full == none.flops_per_token_full


def tiny_without_reference(source: Path) -> Recipe:
    recipe = preferring(source)
    assert recipe.dpo is not None
    return recipe.model_copy(update={"dpo": recipe.dpo.model_copy(update={"reference_free": True})})


# -- a teacher's logits -----------------------------------------------------------------------------------------------


def taught(corpus: Path, name: str, folder: Path | None = None, **sections: Any) -> Recipe:
    train = {"train_iters": 3, "eval_interval": 3, "eval_iters": 1, "log_interval": 1, "global_batch_size": 4}
    distill = {"teacher": "teacher", "model": {"hidden_size": 64}, "top_k": 8, "temperature": 2.0,
               "logits": None if folder is None else str(folder)}  # fmt: skip
    return tiny_on(
        corpus, name, train={**train, **sections.pop("train", {})}, optimizer={"lr": 1e-2}, data={"num_workers": 0},
        model={"hidden_size": 32, "vocab_size": 300, "seq_length": 32, **sections.pop("model", {})},
        **({"distill": {**distill, **sections.pop("distill", {})}} if name == "student" else {}), **sections,
    )  # fmt: skip


def test_a_student_is_the_one_with_its_teacher(corpus: Path, folder: Path, command: Command) -> None:
    teacher = write_recipe(taught(corpus, "teacher", model={"hidden_size": 64}, train={"train_iters": 1}), folder)
    assert command("train", teacher, "--run-id", "one")[0] == 0
    values = folder / "logits"
    live, runs = write_recipe(taught(corpus, "student"), folder), folder / "runs/student"
    assert command("train", live, "--run-id", "live")[0] == 0
    recipe = write_recipe(taught(corpus, "student", values), folder)
    code, printed = command("precompute", recipe, "--json")
    assert code == 0 and '"values": 12, "unit": "samples"' in printed, printed
    form = precomputed.read_record(values, "")[0].logits
    assert form is not None and form.sample_bytes == 32 * 8 * (2 + 4) + 4
    assert sum(path.stat().st_size for path in values.rglob("*.bin")) == 12 * form.sample_bytes
    # The teacher need not be there.
    (folder / "runs/teacher").rename(folder / "runs/elsewhere")
    code, printed = command("train", recipe, "--run-id", "read")
    assert code == 0, printed
    losses = [[(line["loss"], line["grad_norm"]) for line in train_lines(runs / name)] for name in ("read", "live")]
    assert len(losses[0]) == 3 and losses[0] == losses[1]
    for override, key in {"distill.top_k=9": "distill.top_k", "train.seed=5": "order.train.seed",
                          "train.global_batch_size=8": "order.samples",
                          "data.curriculum={score: length}": "order.data.curriculum.score"}.items():  # fmt: skip
        code, printed = command("train", recipe, override)
        assert code == 2, printed
        require_message(printed, "distill.logits", rule=key)
    part = next(values.rglob("*.bin"))
    content = bytearray(part.read_bytes())
    part.write_bytes(content[:-1])
    assert command("train", recipe)[0] == 2
    content[7] ^= 1
    part.write_bytes(content)
    code, printed = command("train", recipe)
    assert code == 93
    require_message(printed, str(part))


def test_parts_stay_as_they_are_whatever_the_micro_batch(tmp_path: Path) -> None:
    (tmp_path / REQUEST).write_text('{"facts": {}}')
    kind: Any = SimpleNamespace(lengths={"train": 60}, sample_bytes=0)
    begun = _parts(tmp_path, kind, micro=4, replicas=1)
    assert [(part.first, part.end) for part in begun][-2:] == [(48, 56), (56, 60)]
    assert _parts(tmp_path, kind, micro=3, replicas=2) == begun


def test_a_form_without_parts_is_refused(tmp_path: Path) -> None:
    form = {"samples": 1, "length": 5, "top_k": 3, "ids": "uint16", "logits": "float16", "part": 0}
    (tmp_path / precomputed.NAME).write_text(json.dumps({"format": 1, "facts": {}, "logits": form}))
    with refused(tmp_path / precomputed.NAME):
        precomputed.read_record(tmp_path, "")


@pytest.mark.parametrize("name", ["/etc/passwd", "../other/secret", "logits/../../x", "a\x1b[2J"])
def test_files_outside_of_the_folder_are_refused_by_every_record(tmp_path: Path, name: str) -> None:
    listed = {name: {"bytes": 1, "sha256": "0" * 64}}
    (tmp_path / precomputed.NAME).write_text(json.dumps({"format": 1, "facts": {}, "files": listed}))
    (tmp_path / data_manifest.LISTING).write_text(json.dumps(listed))
    with refused(tmp_path / precomputed.NAME):
        precomputed.read_record(tmp_path, "")
    with refused(tmp_path / data_manifest.LISTING):
        data_manifest.read_listing(tmp_path)
    with pytest.raises(ValueError, match="files"):
        data_manifest.DataManifest.model_validate({"files": listed})


def test_what_a_folder_says_of_itself_is_shown_in_short() -> None:
    facts = {"data\x1b[2J": "x\n" * 5_000_000, "key" * 1000: ["y" * 5_000_000]}
    with refused("dpo.reference_log_probs") as caught:
        precomputed.require_same(facts, {"data": "x"}, "dpo.reference_log_probs: there")
    message = str(caught.value)
    assert len(message) < 2500 and all(line.isprintable() for line in message.splitlines())


def test_samples_are_read_as_they_were_written() -> None:
    ids, logits = torch.randint(0, 1 << 17, (5, 3)), torch.randn(5, 3)
    for id_type, logit_type, size in (("uint32", "bfloat16", 6), ("uint32", "float32", 8), ("uint16", "float16", 4)):
        form = precomputed.LogitsForm.model_validate(
            {"samples": 1, "length": 5, "top_k": 3, "ids": id_type, "logits": logit_type, "part": 1}
        )
        data = form.packed(ids % (1 << 16 if id_type == "uint16" else 1 << 17), logits)
        assert len(data) == form.sample_bytes == 5 * 3 * size + 4
        again, values = form.unpacked(data)
        assert torch.equal(again.long(), ids % (1 << 16 if id_type == "uint16" else 1 << 17))
        assert torch.equal(values, logits.to(getattr(torch, logit_type)).float())
        with pytest.raises(ValueError, match="checksum"):
            form.unpacked(bytes([data[0] ^ 1]) + data[1:])


def test_a_plan_is_without_the_teacher(corpus: Path, folder: Path) -> None:
    read = taught(corpus, "student", folder)
    plan, alone = (derive(each, 1, ROOMY) for each in (read, read.model_copy(update={"distill": None})))
    assert plan.memory.teacher == 0 and plan.flops_per_token_full == alone.flops_per_token_full
    assert not check(read)
    assert [problem.key for problem in check(taught(corpus, "student", folder, distill={"top_k": None}))] == [
        "distill.top_k"
    ]
