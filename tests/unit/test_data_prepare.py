"""`prepare`: what it writes, that it is all or nothing, and that damage is found before it is read."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from pydantic import create_model

from llmrecipes.data.folder.data_manifest import FORMAT, stem
from llmrecipes.data.folder.prepared import (
    bits_per_byte,
    bytes_per_token,
    gzip_bits_per_byte,
    held_out_text,
    index_usable,
)
from llmrecipes.data.preparation import corpus as corpus_module
from llmrecipes.data.preparation import write
from llmrecipes.data.preparation.pipeline import encoding
from llmrecipes.data.prepare import Prepared, fingerprint, open_prepared, prepare
from llmrecipes.data.sources.sources import form
from llmrecipes.data.steps.split import SPLITS, SplitRule, check_disjoint, digest
from llmrecipes.data.steps.steps import Dropped, StepSpec, pipeline, selected
from llmrecipes.data.tokens.tokenizer import EOD
from llmrecipes.recipe.load import load, names
from llmrecipes.recipe.schema import Data, Recipe
from llmrecipes.recipe.sections.plugins import DataStep, declared, resolve
from llmrecipes.recipe.sections.source import AnySource, Source, StdlibSource, make_source
from llmrecipes.recipe.sections.tokenizer_section import BpeTokenizer, HuggingFaceTokenizer, Tokenizer
from tests.helpers import ROOT
from tests.refusals import refused
from tests.unit.data_recipes import WITHOUT, corpus, recipe


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Prepared]:
    """Two sources with a duplicate within, one across, an empty and an undecodable document."""
    root = tmp_path_factory.mktemp("made")
    first, second = corpus(root / "first"), corpus(root / "second", seed=1, word="Wörter")
    (root / "first" / "twin.txt").write_bytes((root / "first" / "0000.txt").read_bytes())
    (root / "second" / "twin.txt").write_bytes((root / "first" / "0001.txt").read_bytes())
    (root / "second" / "blank.txt").write_text(" \n")
    (root / "second" / "latin.txt").write_bytes(b"\xe9t\xe9")
    made = recipe(first, second)
    return made, prepare(made, root / "data", workers=1)


@pytest.fixture
def copied(made: tuple[Recipe, Prepared], tmp_path: Path) -> tuple[Recipe, Path, Path]:
    """The recipe, a data folder to damage, and the prepared folder in it."""
    original = made[1].path
    shutil.copytree(original.parent, tmp_path / "data")
    return made[0], tmp_path / "data", tmp_path / "data" / original.name


def test_manifest_counts_what_was_kept_and_dropped(made: tuple[Recipe, Prepared]) -> None:
    first, second = made[1].manifest.sources
    assert (first.read, first.duplicates, first.empty, first.undecodable) == (201, 1, 0, 0)
    assert (second.read, second.duplicates, second.empty, second.undecodable) == (203, 1, 1, 1)
    for source in (first, second):
        assert sum(counts.documents for counts in source.splits.values()) == 200
        assert all(source.splits[split].documents > 0 for split in SPLITS)
    assert made[1].manifest.dtype == "uint16"
    assert made[1].manifest.versions["megatron-core"]


def test_prepared_data_is_found_without_loading_megatron(made: tuple[Recipe, Prepared]) -> None:
    """Every start of a run does this, on the node that starts its ranks."""
    code = """
import sys
from pathlib import Path
from llmrecipes.data.prepare import prepare
from llmrecipes.recipe.schema import Recipe

prepare(Recipe.model_validate_json(sys.argv[1]), Path(sys.argv[2]))
print([name for name in ("torch", "megatron") if name in sys.modules])
"""
    arguments = [sys.executable, "-c", code, made[0].model_dump_json(), str(made[1].path.parent)]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_tokens_are_the_sources_texts_in_order_each_in_the_split_of_its_hash(made: tuple[Recipe, Prepared]) -> None:
    used, prepared = made
    tokenizer, rule = prepared.tokenizer(), SplitRule(used.data.split)
    for number, source in enumerate(used.data.sources):
        files = sorted(Path(source.location).glob("[0-9]*.txt"))
        texts = [file.read_bytes() for file in files]
        for split in SPLITS:
            expected = [text for text in texts if rule.of(digest(text)) == split]
            tokens = IndexedDataset(str(prepared.path / stem(number, split)))
            documents = [tokens[n].tolist() for n in range(len(tokens))]
            assert all(ids[-1] == tokenizer.eod and tokenizer.eod not in ids[:-1] for ids in documents)
            assert [tokenizer.decode(ids).encode() for ids in documents] == expected
            counts = prepared.manifest.sources[number].splits[split]
            assert counts.tokens == sum(map(len, documents))
            assert counts.bytes == sum(map(len, expected))


def test_verify_passes_and_proves_that_splits_are_disjoint(
    made: tuple[Recipe, Prepared], copied: tuple[Recipe, Path, Path]
) -> None:
    assert made[1].verify() == 400
    path = copied[2]
    leaked = (path / "00-train.sha256").read_bytes()[:32]
    with (path / "01-valid.sha256").open("ab") as stream:
        stream.write(leaked)
    files = [("train", path / "00-train.sha256"), ("valid", path / "01-valid.sha256")]
    with refused(path, rule=("00-train.sha256", "01-valid.sha256")):
        check_disjoint(files)  # type: ignore[arg-type]


def test_progress_of_sources_of_which_nothing_is_kept_yet(made: tuple[Recipe, Prepared]) -> None:
    sources = made[0].data.sources
    assert "left" not in encoding(sources, 0, [0, 0], [0, 0], 5.0)
    assert "left" in encoding(sources, 0, [100, 0], [20, 0], 5.0)


def test_the_split_follows_the_weights() -> None:
    rule = SplitRule((8.0, 1.0, 1.0))
    splits = [rule.of(digest(str(n).encode())) for n in range(20_000)]
    assert [splits.count(split) / 20_000 for split in SPLITS] == pytest.approx([0.8, 0.1, 0.1], abs=0.01)
    assert {SplitRule((1.0, 0.0, 0.0)).of(digest(str(n).encode())) for n in range(1000)} == {"train"}
    assert SplitRule((1.0, 0.0, 0.0)).of(b"\xff" * 32) == "train"
    assert SplitRule((1.0, 1.0, 0.0)).of(b"\xff" * 32) != "test"


def test_held_out_text_and_its_gzip_size(made: tuple[Recipe, Prepared]) -> None:
    used, prepared = made
    rule = SplitRule(used.data.split)
    files = [f for s in used.data.sources for f in sorted(Path(s.location).glob("[0-9]*.txt"))]
    expected = b"".join(f.read_bytes() for f in files if rule.of(digest(f.read_bytes())) == "valid")
    assert held_out_text(prepared) == expected
    assert held_out_text(prepared, "valid", max_bytes=100) == expected[:100]
    assert prepared.manifest.held_out["valid"].gzip_bytes == pytest.approx(len(gzip.compress(expected, 9)), abs=32)
    bits = 8 * prepared.manifest.held_out["valid"].gzip_bytes / len(expected)
    assert gzip_bits_per_byte(prepared) == pytest.approx(bits)
    share = [s.splits["valid"].bytes / s.splits["valid"].tokens for s in prepared.manifest.sources]
    assert bytes_per_token(prepared) == pytest.approx(sum(share) / 2)
    assert bits_per_byte(np.log(2) * 3.0, prepared) == pytest.approx(3.0 / (sum(share) / 2))


def test_preparing_again_does_nothing_and_warns_if_sources_have_changed(tmp_path: Path) -> None:
    used = recipe(corpus(tmp_path / "text"))
    first = prepare(used, tmp_path / "data", workers=1)
    before = {file: file.stat().st_mtime_ns for file in first.path.rglob("*")}
    lines: list[str] = []
    again = prepare(used, tmp_path / "data", workers=1, progress=lines.append)
    assert again == first
    assert {file: file.stat().st_mtime_ns for file in first.path.rglob("*")} == before
    assert not any("changed" in line for line in lines)
    (tmp_path / "text" / "new.txt").write_text("something new")
    prepare(used, tmp_path / "data", workers=1, progress=lines.append)
    assert any("has changed since it was prepared (200 files, now 201)" in line for line in lines)
    shutil.rmtree(tmp_path / "text")
    longer = used.model_copy(update={"train": used.train.model_copy(update={"train_iters": 9})})
    assert prepare(longer, tmp_path / "data", workers=1) == first, "another order needs no source"


def test_the_files_do_not_depend_on_the_number_of_workers(
    tmp_path: Path, made: tuple[Recipe, Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer is trained on the first cleaned texts of each source, and what is read for it is reported."""
    monkeypatch.setattr(corpus_module, "_ALONE", 1)
    monkeypatch.setattr(corpus_module, "_CLEANED_ALONE", 1)
    monkeypatch.setattr(corpus_module, "_BATCH_CHARACTERS", 4096)
    monkeypatch.setattr("llmrecipes.data.prepare.REPORT_SECONDS", -1.0)
    assert prepare(made[0], tmp_path / "plain", workers=2).manifest == made[1].manifest
    # Copies of documents before and behind the end of the first sample: the second source's is without the first.
    first, second = corpus(tmp_path / "first"), corpus(tmp_path / "second", seed=1, word="Wörter")
    for name in ("0000.txt", "0199.txt"):
        shutil.copy(tmp_path / "first" / name, tmp_path / "second" / f"copy-{name}")
    used = recipe(first, second)
    steps = [{"type": "length", "min_characters": 20}, {"type": "duplicates"}]
    used = used.model_copy(update={"data": Data.model_validate(used.data.model_dump() | {"steps": steps})})
    monkeypatch.setattr(corpus_module, "SAMPLE_BYTES", 20_000)
    lines: list[str] = []
    one = prepare(used, tmp_path / "one", workers=1, progress=lines.append)
    assert prepare(used, tmp_path / "two", workers=2).manifest == one.manifest
    assert one.manifest.tokenizer.trained_on_bytes is not None
    assert 20_000 <= one.manifest.tokenizer.trained_on_bytes < 20_800
    assert any(line.startswith("0.0 MiB of text") and line.endswith("second") for line in lines)


def test_a_source_is_read_up_to_its_max_tokens_whatever_the_number_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "_ALONE", 1)
    monkeypatch.setattr(corpus_module, "_BATCH_CHARACTERS", 4096)
    first, second = corpus(tmp_path / "first"), corpus(tmp_path / "second", seed=1, word="Wörter")
    # What the limit cuts off is not a duplicate in a later source; what is kept is.
    for name in ("0000.txt", "0150.txt", "0199.txt"):
        shutil.copy(tmp_path / "first" / name, tmp_path / "second" / f"copy-{name}")
    limited = recipe(first.model_copy(update={"max_tokens": 6000}), second)
    lines: list[str] = []
    one = prepare(limited, tmp_path / "one", workers=1, progress=lines.append)
    assert prepare(limited, tmp_path / "two", workers=2).manifest == one.manifest
    cut, whole = one.manifest.sources
    tokens = sum(counts.tokens for counts in cut.splits.values())
    documents = sum(counts.documents for counts in cut.splits.values())
    assert 6000 <= tokens < 6200 and cut.read == documents < 150
    assert (whole.read, whole.duplicates) == (203, 1)
    assert any("max_tokens 6,000" in line for line in lines)
    kept = IndexedDataset(str(one.path / stem(0, "train")))
    everything = IndexedDataset(
        str(prepare(recipe(first, second), tmp_path / "all", workers=1).path / stem(0, "train"))
    )
    assert all(kept[n].tolist() == everything[n].tolist() for n in range(len(kept)))


def with_step(source: AnySource, word: str | None, **data: Any) -> Recipe:
    """A recipe whose schema has one more key, `without`."""
    fields: Any = {"without": (Annotated[str | None, WITHOUT], None)}
    longer: Any = create_model("WithStep", __base__=Data, **fields)
    return recipe(source).model_copy(
        update={"data": longer(sources=(source,), split=(90.0, 5.0, 5.0), without=word, **data)}
    )


def test_a_data_step_is_one_function_and_one_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in the workers; hash, split, duplicates, held-out text and tokenizer are those of what it returns."""
    monkeypatch.setattr(corpus_module, "_ALONE", 1)
    monkeypatch.setattr(corpus_module, "_BATCH_CHARACTERS", 4096)
    source = corpus(tmp_path / "text", word="Wörter ")
    texts = sorted(path.read_text().replace("Wörter", "") for path in (tmp_path / "text").iterdir())
    (tmp_path / "text" / "twin.txt").write_text(texts[0])  # of one of them without the word
    for name, text in (("word", "Wörter"), ("words", "WörterWörter "), ("short", "abc")):
        (tmp_path / "text" / f"{name}.txt").write_text(text)
    lines: list[str] = []
    used = with_step(source, "Wörter", min_characters=6)
    prepared = prepare(used, tmp_path / "data", workers=2, progress=lines.append)
    record = prepared.manifest.sources[0]
    assert (record.read, record.duplicates, record.empty) == (204, 1, 1)
    assert record.steps == {"min_characters": 1, "without": 1}
    assert any("1 by min_characters, 1 by without" in line for line in lines)
    tokenizer, rule = prepared.tokenizer(), SplitRule(used.data.split)
    for split in SPLITS:
        tokens = IndexedDataset(str(prepared.path / stem(0, split)))
        decoded = sorted(tokenizer.decode(tokens[n].tolist()) for n in range(len(tokens)))
        assert decoded == [text for text in texts if rule.of(digest(text.encode())) == split]
    assert "Wörter" not in held_out_text(prepared).decode()
    assert fingerprint(with_step(source, None)) == fingerprint(recipe(source))
    assert len({fingerprint(with_step(source, word)) for word in (None, "a", "b")}) == 3
    with refused("data.sources[0]", rule=("204 by max_characters", "0 empty")):
        prepare(with_step(source, "Wörter", max_characters=1), tmp_path / "none", workers=1)


def test_a_step_sees_the_text_of_a_conversation() -> None:
    """Not its JSON; the roles stay as they are."""
    talk = '[{"role": "user", "content": "a\\"b"}, {"role": "assistant", "content": "é x"}]'

    def run(*steps: tuple[str, str, str]) -> bytes | str:
        found = pipeline(StepSpec(SplitRule((1.0, 0.0, 0.0)), True, steps))(talk)
        return found.reason if isinstance(found, Dropped) else found.text

    least, most = (
        (key, f"llmrecipes.data.steps.steps:{key}", n) for key, n in (("min_characters", "6"), ("max_characters", "5"))
    )
    assert run(least) == talk.encode()
    assert run(least, most) == "max_characters"
    assert run(("w", WITHOUT.target, '"x"')) == talk.replace("é x", "é ").encode()


def test_every_step_is_declared_with_the_function_that_makes_it() -> None:
    steps = declared(Data, DataStep)
    assert {"min_characters", "max_characters"} <= set(steps)
    assert all(callable(resolve(step.target)) for step in steps.values())
    # At the default there is no step, so every folder from before it is found.
    assert selected(Data()) == {}


def test_preparing_again_uses_the_new_tokenizer(tmp_path: Path) -> None:
    used = recipe(corpus(tmp_path / "text", documents=50))
    shutil.rmtree(prepare(used, tmp_path / "data", workers=1).path)
    shutil.rmtree(tmp_path / "text")
    corpus(tmp_path / "text", documents=50, word="anders")
    prepared = prepare(used, tmp_path / "data", workers=1)
    tokens = IndexedDataset(str(prepared.path / stem(0, "train")))
    assert "anders" in prepared.tokenizer().decode(tokens[0].tolist())


def test_the_fingerprint_names_what_tokens_depend_on(tmp_path: Path) -> None:
    source = make_source(type="text", path="a")
    base = recipe(source)
    same = [
        recipe(source.model_copy(update={"weight": 3.0})),
        recipe(source, seq_length=32),
        recipe(source, seed=1, train_iters=99),
    ]
    other = [
        recipe(source.model_copy(update={"path": "b"})),
        recipe(source, vocab_size=600),
        recipe(source, split=(90.0, 10.0, 0.0)),
        recipe(source, tokenizer=HuggingFaceTokenizer(type="huggingface", path="gpt2")),
    ]
    assert {fingerprint(r) for r in same} == {fingerprint(base)}
    assert len({fingerprint(r) for r in [base, *other]}) == 1 + len(other)


FINGERPRINTS = {
    "deepseek-v3": "6505063ec341ff63", "deepseek-v3-stages": "6505063ec341ff63", "dpo-tiny": "9331fda8bd260a62",
    "gpt-125m": "e8748d117c2e12bc", "gpt-175b": "70595a14fd208982",
    "gpt-1b": "50cf77ce8bf4dab8",
    "gpt-350m": "28e410495dbe5aa3", "gpt-7b": "eb00ecaeac22369b", "gpt-tiny": "619f01c5c4e786c3",
    "gpt-tiny-3d": "619f01c5c4e786c3", "gpt-tiny-clean": "8ed9bd2e007bc37b", "gpt-tiny-continual": "9ad4a700dd16caf0",
    "gpt-tiny-distil": "619f01c5c4e786c3",
    "gpt-tiny-minitron": "619f01c5c4e786c3",
    "gpt-tiny-stages": "162945c0d582c7a4",
    "gpt-tiny-zero": "619f01c5c4e786c3", "llama3-405b": "e9a04ce9369b4268",
    "llama3-405b-stages": "e9a04ce9369b4268",
    "llama3-70b": "a88fa0fbce25a57a", "llama3-70b-lora": "2e20199d94211cd3", "llama3-8b": "05d63dc73c412c24",
    "llama3-8b-sft": "da6555392b4551b1", "lora-tiny": "e93af2d959391b57",
    "mixtral-8x7b": "1029466590c9fb7d", "moe-tiny": "619f01c5c4e786c3", "qwen3-30b-a3b": "5579a4ed6ca3a4c5",
    "sft-tiny": "3643945026750bf7",
}  # fmt: skip


def test_data_prepared_by_earlier_versions_is_found() -> None:
    # A new data key changes these: leave it out of `content` where it has the value that does what was done before.
    assert {name: fingerprint(load(name).recipe) for name in names()} == FINGERPRINTS
    other = load("gpt-tiny", ("data.tokenizer.type=huggingface", "data.tokenizer.path=gpt2", "data.split=[90,5,5]"))
    assert fingerprint(other.recipe) == "0f702118d45f8cea"


@pytest.mark.parametrize("section", ["data", "tokenizer", "source"])
def test_a_new_data_key_makes_other_tokens(section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    new: Any = {"new_key": (int, 0)}
    for base in (Source, Tokenizer):  # which learn of the key of a new type
        monkeypatch.setattr(base, "unset", dict(base.unset))
    source = create_model("NewSource", __base__=StdlibSource, **new)
    tokenizer = create_model("NewTokenizer", __base__=BpeTokenizer, **new)
    fields: Any = {"sources": (tuple[source, ...], ...), "tokenizer": (tokenizer, ...)}  # type: ignore[valid-type]
    longer = create_model("NewData", __base__=Data, **new, **fields)

    def changed(value: int) -> Recipe:
        found: dict[str, dict[str, Any]] = {"data": {}, "tokenizer": {}, "source": {"type": "stdlib"}}
        found[section]["new_key"] = value
        data = longer(sources=(source(**found["source"]),), tokenizer=tokenizer(**found["tokenizer"]), **found["data"])
        return recipe(make_source(type="stdlib")).model_copy(update={"data": data})

    assert fingerprint(changed(1)) == fingerprint(changed(1)) != fingerprint(changed(2))


def test_open_reports_when_nothing_is_prepared(tmp_path: Path) -> None:
    used = recipe(make_source(type="stdlib"))
    with refused(tmp_path / fingerprint(used)) as caught:
        open_prepared(used, tmp_path)
    assert caught.value.fix == f"llmrecipes prepare {used.name} --data-dir {tmp_path}"


def test_a_truncated_bin_is_named_with_both_sizes(copied: tuple[Recipe, Path, Path]) -> None:
    used, data, path = copied
    file = path / "00-train.bin"
    size = file.stat().st_size
    os.truncate(file, size - 2)
    with refused(file, rule=(f"{size - 2:,}", f"{size:,}")):
        open_prepared(used, data)
    file.unlink()
    with refused(file, rule=f"{size:,}"):
        open_prepared(used, data)


def test_a_foreign_index_of_the_same_size_is_found(copied: tuple[Recipe, Path, Path]) -> None:
    used, data, path = copied
    file = path / "00-train.idx"
    original = file.read_bytes()
    documents = int.from_bytes(original[18:26], "little")
    lengths = np.frombuffer(original, np.int32, documents, 34) + 1  # the index of as many, longer documents
    pointers = np.concatenate([[0], np.cumsum(lengths[:-1])]).astype(np.int64) * 2
    foreign = original[:34] + lengths.tobytes() + pointers.tobytes() + original[34 + 12 * documents :]
    assert len(foreign) == len(original)
    file.write_bytes(foreign)
    with refused(file, rule=(f"{documents:,}", "uint16")):
        open_prepared(used, data)
    file.write_bytes(b"x" * len(original))
    with refused(file, rule="megatron-core"):
        open_prepared(used, data)


def test_changed_bytes_are_found_by_the_full_check(copied: tuple[Recipe, Path, Path]) -> None:
    used, data, path = copied
    file = path / "01-train.bin"
    content = bytearray(file.read_bytes())
    content[10] ^= 1
    file.write_bytes(content)
    prepared = open_prepared(used, data)
    with refused(file, rule="SHA-256"):
        prepared.verify()


@pytest.mark.parametrize(
    ("text", "rule"), [("{", "JSON"), ("{}", "format:"), ("foreign", "0" * 16), ("old", ("0", str(FORMAT)))]
)
def test_a_damaged_or_foreign_manifest_is_one_message(
    copied: tuple[Recipe, Path, Path], text: str, rule: str | tuple[str, ...]
) -> None:
    used, data, path = copied
    file = path / "manifest.json"
    manifest = json.loads(file.read_text())
    if text == "foreign":
        text = json.dumps(manifest | {"fingerprint": "0" * 16})
    if text == "old":
        text = json.dumps(manifest | {"format": 0})
    file.write_text(text)
    with refused(file, rule=rule):
        open_prepared(used, data)


def test_opening_is_quick(made: tuple[Recipe, Prepared]) -> None:
    times = list[float]()
    for _ in range(3):  # other threads of this process count too
        started = time.process_time()
        open_prepared(made[0], made[1].path.parent)
        times.append(time.process_time() - started)
    assert min(times) < 0.2


@pytest.mark.slow
def test_a_killed_prepare_leaves_nothing_and_no_workers(tmp_path: Path) -> None:
    corpus(tmp_path / "text", documents=300)
    script = tmp_path / "run.py"
    script.write_text(
        """
import os, pathlib, signal, sys
from tests.unit.data_recipes import recipe
from llmrecipes.data.preparation import corpus as corpus_module, shards
from llmrecipes.data.prepare import prepare
from llmrecipes.recipe.sections.source import make_source

def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)  # the workers wait for more

shards.framed = die
corpus_module._ALONE, corpus_module._BATCH_CHARACTERS = 0, 4096
if __name__ == "__main__":
    os.chdir(sys.argv[1])
    prepare(recipe(make_source(type="text", path="text")), pathlib.Path("data"), workers=2)
"""
    )
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    # Returns only when nobody holds its output any more: the workers have ended too.
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    used = recipe(make_source(type="text", path="text"))
    data = tmp_path / "data"
    assert list((data / f".{fingerprint(used)}.shards").glob(".000000-*.part"))
    with refused(data / fingerprint(used)):
        open_prepared(used, data)

    here = recipe(make_source(type="text", path=str(tmp_path / "text")))
    data.joinpath(f".{fingerprint(used)}.shards").rename(data / f".{fingerprint(here)}.shards")
    data.joinpath(f".{fingerprint(here)}.part").mkdir()
    prepare(here, data, workers=1).verify()
    assert {path.name for path in data.glob(".*")} == {f".{fingerprint(here)}.lock", f".{fingerprint(used)}.lock"}


def test_a_failing_prepare_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "data" / "00-train.bin"))

    monkeypatch.setattr(write.DocumentSink, "add", full)
    with refused(tmp_path / "data" / "00-train.bin"):
        prepare(recipe(corpus(tmp_path / "text")), tmp_path / "data", workers=1)
    assert {f.suffix for f in (tmp_path / "data").iterdir()} == {".lock", ".shards"}


def test_a_data_folder_that_cannot_be_made_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused(tmp_path / "file" / "data"):
        prepare(recipe(corpus(tmp_path / "text")), tmp_path / "file" / "data", workers=1)


def test_sources_without_text_for_training_are_refused(tmp_path: Path) -> None:
    good = corpus(tmp_path / "good")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").write_text("")
    empty = make_source(type="text", path=str(tmp_path / "empty"))
    with refused("data.sources[1]", rule="0 duplicate, 1 empty"):
        prepare(recipe(good, empty), tmp_path / "data", workers=1)

    with refused("data.sources[1]", rule="200 duplicate"):
        prepare(recipe(good, make_source(type="text", path=f"{good.location}/*.txt")), tmp_path / "data", workers=1)

    one = tmp_path / "one"
    one.mkdir()
    rule = SplitRule((1.0, 50.0, 49.0))
    held_out = next(t for t in map(str, range(99)) if rule.of(hashlib.sha256(t.encode()).digest()) != "train")
    (one / "a.txt").write_text(held_out)
    with refused("data.sources[0]", rule="data.split"):
        prepare(recipe(make_source(type="text", path=str(one)), split=rule.weights), tmp_path / "data", workers=1)

    with refused("data.sources[0]", rule=("4,097", "model.seq_length")):
        prepare(recipe(corpus(tmp_path / "tiny", documents=5), seq_length=4096), tmp_path / "data", workers=1)


def test_a_split_too_short_for_a_sequence_is_reported(tmp_path: Path) -> None:
    lines: list[str] = []
    used = recipe(corpus(tmp_path / "text"), split=(99.0, 1.0, 0.0), seq_length=512)
    prepared = prepare(used, tmp_path / "data", workers=1, progress=lines.append)
    assert prepared.usable("train", 512) == [0]
    assert any("the test split has fewer than 513 tokens" in line for line in lines)
    assert index_usable(used, prepared)


def test_a_hugging_face_tokenizer_from_a_folder(tmp_path: Path, made: tuple[Recipe, Prepared]) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "tokenizer"
    file = str(made[1].path / "tokenizer.json")
    PreTrainedTokenizerFast(tokenizer_file=file, eos_token=EOD).save_pretrained(folder)
    section = HuggingFaceTokenizer(type="huggingface", path=str(folder))
    used, lines = recipe(*made[0].data.sources, tokenizer=section), list[str]()
    prepared = prepare(used, tmp_path / "data", workers=1, progress=lines.append)
    assert prepared.manifest.tokenizer.eod == made[1].manifest.tokenizer.eod
    assert any("not by gigatoken" in line for line in lines)  # which does not know the pattern, if it is installed
    name = "00-train.bin"  # the same vocabulary read by the library gives the same tokens
    assert prepared.manifest.files[name] == made[1].manifest.files[name]

    with refused("model.vocab_size", rule=("512", "300")) as caught:
        prepare(recipe(*made[0].data.sources, tokenizer=section, vocab_size=300), tmp_path / "data", workers=1)
    assert caught.value.fix == "model.vocab_size=512"


def test_a_tokenizer_with_the_pattern_of_llama_3(tmp_path: Path, made: tuple[Recipe, Prepared]) -> None:
    used = recipe(*made[0].data.sources, tokenizer=BpeTokenizer(pattern="llama3"))
    prepared = prepare(used, tmp_path / "data", workers=1)
    tokens = IndexedDataset(str(prepared.path / stem(0, "train")))
    text = "x = 12345;\n\n  it's"
    backend = prepared.tokenizer()
    assert backend.backend.pre_tokenizer.pre_tokenize_str(text)[2:6] == [
        ("Ġ", (3, 4)),
        ("123", (4, 7)),
        ("45", (7, 9)),
        (";ĊĊ", (9, 12)),
    ]
    assert tokens[0][:-1].tolist() == backend.encode(backend.decode(tokens[0][:-1].tolist()))
    with refused("data.tokenizer.pattern"):
        load("gpt-tiny", ("data.tokenizer={type: huggingface, path: gpt2, pattern: llama3}",))


def test_a_tokenizer_that_is_not_there_is_one_message(tmp_path: Path) -> None:
    section = HuggingFaceTokenizer(type="huggingface", path=str(tmp_path / "nowhere"))
    with refused("data.tokenizer", rule=(repr(section.path), "HF_ENDPOINT")):
        prepare(recipe(corpus(tmp_path / "text"), tokenizer=section), tmp_path / "data", workers=1)


@pytest.mark.parametrize("name", ["two.txt", "two.jsonl", "two.json", "two.json.xz", "two.parquet"])
def test_data_for_less_than_a_sequence_names_what_was_read(tmp_path: Path, name: str) -> None:
    rows, file = [{"text": "a"}, {"text": "b"}], tmp_path / name
    if name == "two.parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    elif name == "two.txt":
        file.write_text("a b")
    else:
        text = "".join(f"{json.dumps(row)}\n" for row in rows) if name == "two.jsonl" else json.dumps(rows)
        file.write_bytes(lzma.compress(text.encode()) if name.endswith(".xz") else text.encode())
    kind: Any = {"txt": "text", "parquet": "parquet"}.get(name.split(".")[1], "jsonl")
    source = make_source(type=kind, path=str(file))
    documents = 1 if kind == "text" else 2
    read = form(source)
    assert read and ("array" in read) == (name in ("two.json", "two.json.xz"))
    with refused("data.sources[0]", rule=(str(file), f"{documents}", "65")) as caught:
        prepare(recipe(source, split=(1.0, 0.0, 0.0)), tmp_path / "data", workers=1)
    assert read in caught.value.what
