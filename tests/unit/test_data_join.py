"""Encoding and joining shards by several processes: the bytes of one, whoever is killed and whatever is made twice."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import random
import resource
import shutil
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
from pydantic import create_model

from llmrecipes.data.folder.leaks import check_near_copies
from llmrecipes.data.preparation import pipeline
from llmrecipes.data.preparation import shards as shards_module
from llmrecipes.data.preparation.executor import ThisProcess
from llmrecipes.data.preparation.shards import Shards
from llmrecipes.data.prepare import Prepared, _shards, fingerprint, prepare
from llmrecipes.data.sources import file_parts
from llmrecipes.errors import UserError
from llmrecipes.recipe.schema import Chat, Data, Recipe
from llmrecipes.recipe.sections.data_steps import DuplicatesStep
from llmrecipes.recipe.sections.source import AnySource, make_source
from tests.refusals import refused
from tests.unit.data_recipes import FUSED, corpus, made_step, recipe


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[AnySource, ...]:
    """Text and JSON lines with copies in a shard, in other shards and in another source, and documents to drop."""
    root = tmp_path_factory.mktemp("sources")
    text = corpus(root / "text")
    texts = [path.read_text() for path in sorted((root / "text").iterdir())]
    (root / "jsonl").mkdir()
    for n in range(12):
        rows = [texts[3 * n], f"Row {n} is new. " * 9, f"Row {n} is new. " * 9, f"Row {n // 2} is older. " * 9, "", "x"]
        lines = [json.dumps({"text": row}) for row in rows]
        (root / "jsonl" / f"{n:02}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return text, make_source(type="jsonl", path=str(root / "jsonl"))


def of(sources: tuple[AnySource, ...]) -> Recipe:
    made = recipe(*sources)
    steps = (made_step({"type": "length", "min_characters": 3}),)
    data = made.data.model_copy(update={"split": (80.0, 10.0, 10.0), "steps": steps})
    return made.model_copy(update={"data": data})


@pytest.fixture(scope="module")
def expected(sources: tuple[AnySource, ...], tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(of(sources), tmp_path_factory.mktemp("one"), workers=1)


@pytest.fixture(scope="module")
def copied(sources: tuple[AnySource, ...], tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A recipe with both steps that compare, and a source of near-copies of near-copies, in many shards."""
    letters = str.maketrans("0123456789", "abcdefghij")  # digits are all the same to `duplicates`
    rng, words = random.Random(7), [f"word{n}".translate(letters) for n in range(3000)]
    texts = [rng.choices(words, k=60) for _ in range(50)]
    for _ in range(100):
        copy = rng.choice(texts).copy()
        copy[rng.randrange(60)] = rng.choice(words)
        texts.append(copy)
    rng.shuffle(texts)
    folder = tmp_path_factory.mktemp("copied")
    for n in range(15):
        lines = [json.dumps({"text": " ".join(text)}) for text in texts[10 * n : 10 * n + 10]]
        (folder / f"{n:02}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    used = of((*sources, make_source(type="jsonl", path=str(folder))))
    steps = (
        *used.data.steps,
        DuplicatesStep(type="duplicates"),
        made_step({"type": "near_duplicates", "threshold": 0.7, "shingle_words": 2}),
    )
    return used.model_copy(update={"data": used.data.model_copy(update={"steps": steps})})


@pytest.fixture(scope="module")
def expected_of_copied(copied: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(copied, tmp_path_factory.mktemp("one"), workers=99)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_parts, "PART_BYTES", 4000)


@pytest.fixture
def larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_parts, "PART_BYTES", 12_000)


def content(prepared: Prepared) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in prepared.path.iterdir() if path.is_file() and path.name[0] != "."}


def begun(used: Recipe, data: Path) -> Shards:
    data.mkdir()
    return _shards(used, data / fingerprint(used), ThisProcess(), lambda line: None)


def run(stage: Any) -> None:
    """Do all that a stage needs, in this process."""
    while missing := stage.needed():
        stage.work(missing[0])


@pytest.mark.usefixtures("small")
def test_processes_join_to_the_bytes_of_one(
    sources: tuple[AnySource, ...], expected: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_SMALL_BYTES", 0)
    [text, rows] = expected.manifest.sources
    assert rows.duplicates == 30 and rows.steps == {"length": 12} and rows.empty == 12 and text.splits["valid"].tokens
    lines: list[str] = []
    several = prepare(of(sources), tmp_path / "data", workers=2, progress=lines.append)
    assert content(several) == content(expected)
    assert (several.path / "dropped.jsonl").exists()
    assert [line for line in lines if "documents kept" in line]
    assert [path.name for path in (tmp_path / "data").iterdir() if path.name.endswith("shards")] == []
    several.verify()


@pytest.mark.usefixtures("small")
@pytest.mark.rotating
def test_shards_join_what_is_equal_but_for_case(sources: tuple[AnySource, ...], tmp_path: Path) -> None:
    """Documents that repeat an earlier one in every byte, and those that the step drops, which have samples."""
    used = of(sources)
    steps = (*used.data.steps, DuplicatesStep(type="duplicates"))
    text = Path(sources[0].location, "0003.txt").read_text()
    rows = [json.dumps({"text": each}) for each in (text.upper(), text, "a new one " * 99)]
    (tmp_path / "more.jsonl").write_text("\n".join(rows), encoding="utf-8")
    more = make_source(type="jsonl", path=str(tmp_path / "more.jsonl"))
    change = {"steps": steps, "sources": (*used.data.sources, more), "split": (98.0, 1.0, 1.0)}
    data = used.data.model_copy(update=change)
    used = used.model_copy(update={"data": data})
    one = prepare(used, tmp_path / "one", workers=99)
    several = prepare(used, tmp_path / "several", workers=2)
    assert content(several) == content(one)
    assert [source.duplicates for source in several.manifest.sources] == [85, 45, 2]
    samples = [json.loads(line) for line in (several.path / "dropped.jsonl").read_text().splitlines()]
    assert sum(row["step"] == "duplicates" for row in samples) == 20


@pytest.mark.usefixtures("larger")
def test_shards_join_near_duplicates(copied: Recipe, expected_of_copied: Prepared, tmp_path: Path) -> None:
    """Whose copies are in other shards; what is dropped is counted, and has samples."""
    record = expected_of_copied.manifest.sources[2]
    assert record.read == 150 and 80 <= record.steps["near_duplicates"] <= 100
    several = prepare(copied, tmp_path / "data", workers=2)
    assert content(several) == content(expected_of_copied)
    samples = [json.loads(line) for line in (several.path / "dropped.jsonl").read_text().splitlines()]
    assert sum(row["step"] == "near_duplicates" for row in samples) == 20
    several.verify()
    copies = check_near_copies(several)
    assert copies is not None and copies.held_out > 20 and copies.above == 0


@pytest.mark.usefixtures("larger")
@pytest.mark.rotating
@pytest.mark.parametrize("share", [0.9, 2])
def test_shards_join_a_last_source_up_to_max_tokens(
    copied: Recipe, expected_of_copied: Prepared, tmp_path: Path, share: float
) -> None:
    """Up to the document that one process reads last, also if more shards have to be encoded than have as many tokens,
    because copies are dropped."""
    last = copied.data.sources[-1]
    kept = sum(counts.tokens for counts in expected_of_copied.manifest.sources[-1].splits.values())
    limited = last.model_copy(update={"max_tokens": int(share * kept)})
    data = copied.data.model_copy(update={"sources": (*copied.data.sources[:-1], limited), "split": (98.0, 1.0, 1.0)})
    used = copied.model_copy(update={"data": data})
    shards, lines = begun(used, tmp_path / "data"), list[str]()
    for stage in pipeline.rounds(shards):
        run(stage)
    assert share == 2 or len(list(shards.folder.glob("first-*"))) > 1
    assert (len(shards.published()) < len(shards.shards)) == (share < 2)
    several = prepare(used, tmp_path / "data", workers=1, progress=lines.append)
    assert any("max_tokens" in line for line in lines) == (share < 2)
    assert content(several) == content(prepare(used, tmp_path / "one", workers=99))


@pytest.mark.usefixtures("larger")
@pytest.mark.rotating
def test_shards_join_several_sources_up_to_max_tokens(
    copied: Recipe, expected_of_copied: Prepared, tmp_path: Path
) -> None:
    """What is behind the end of a source is seen by no document of a later one, as copies of it in the second show; a
    source may have fewer tokens."""
    kept = [sum(c.tokens for c in source.splits.values()) for source in expected_of_copied.manifest.sources]
    # The first ends in front of documents that the second has too; of those before, more shards are encoded.
    shares = (0.1, 3.0, 2.0)
    limited = tuple(
        source.model_copy(update={"max_tokens": int(share * tokens)})
        for source, share, tokens in zip(copied.data.sources, shares, kept, strict=True)
    )
    for number, every in enumerate((limited, (*limited[:2], copied.data.sources[2]))):
        data = copied.data.model_copy(update={"sources": every, "split": (98.0, 1.0, 1.0)})
        used = copied.model_copy(update={"data": data})
        shards, lines = begun(used, tmp_path / f"data{number}"), list[str]()
        for stage in pipeline.rounds(shards):
            run(stage)
        assert len(list(shards.folder.glob("first-*/*.end"))) == 2 and len(shards.published()) < len(shards.shards)
        several = prepare(used, tmp_path / f"data{number}", workers=1, progress=lines.append)
        assert sum("max_tokens" in line for line in lines) == 2
        assert content(several) == content(prepare(used, tmp_path / f"one{number}", workers=99))


@pytest.mark.usefixtures("small")
@pytest.mark.rotating
def test_held_out_texts_are_compressed_in_members(
    sources: tuple[AnySource, ...], expected: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which do not begin where shards do, and are the same by one process."""
    for module in ("write", "join"):
        monkeypatch.setattr(f"llmrecipes.data.preparation.{module}.MEMBER_BYTES", 700)
    used = of(sources)
    shards = begun(used, tmp_path / "data")
    run(shards)
    for stage in pipeline.stages(shards):
        run(stage)
    assert len(list(shards.folder.glob("*.packed"))) > 5
    several = prepare(used, tmp_path / "data", workers=1)
    assert content(several) == content(prepare(used, tmp_path / "one", workers=99))
    for split in ("valid", "test"):
        texts = [gzip.decompress((each.path / f"{split}.txt.gz").read_bytes()) for each in (several, expected)]
        assert texts[0] == texts[1] and several.manifest.held_out[split].bytes == len(texts[0]) > 700


@pytest.mark.usefixtures("small")
@pytest.mark.rotating
def test_a_large_file_is_several_shards(sources: tuple[AnySource, ...], tmp_path: Path) -> None:
    """Of JSON lines and Parquet; of a compressed file one, and the output says so. The bytes are those of one process
    that reads whole files."""
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    rows = [json.loads(line) for file in sorted(Path(sources[1].location).iterdir()) for line in file.open()]
    one = make_source(type="jsonl", path=str(tmp_path / "one.jsonl"))
    table = make_source(type="parquet", path=str(tmp_path / "one.parquet"))
    packed = make_source(type="jsonl", path=str(tmp_path / "packed.jsonl.gz"))
    (tmp_path / "one.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    texts = [f"{n} of a table, {random.Random(n).random()}" for n in range(400)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "one.parquet", row_group_size=50)
    noise = (json.dumps({"text": f"packed {random.Random(n).random()}"}) for n in range(900))
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress("\n".join(noise).encode()))
    used, lines = of((one, table, packed)), list[str]()
    data = tmp_path / "data"
    several = prepare(used, data, workers=2, progress=lines.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_parts, "PART_BYTES", 1 << 30)
        whole = prepare(used, tmp_path / "whole", workers=1)
    assert content(several) == content(whole)
    assert [line for line in lines if "packed.jsonl.gz" in line and line.startswith("note")]
    cut = shards_module.cut(used.data.sources)
    assert [sum(shard.source == n for shard in cut) > 2 for n in range(3)] == [True, True, False]


@pytest.mark.usefixtures("small")
@pytest.mark.rotating
def test_a_killed_call_is_continued_unless_a_source_has_changed(
    sources: tuple[AnySource, ...], expected: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, lines = of(sources), list[str]()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("llmrecipes.data.prepare._fill", interrupted)
        prepare(used, tmp_path / "data", workers=1)
    [folder] = (tmp_path / "data").glob(".*.shards")
    shutil.copytree(folder, tmp_path / "other" / folder.name)
    assert content(prepare(used, tmp_path / "data", workers=1, progress=lines.append)) == content(expected)
    assert not any("trained" in line for line in lines)
    plan = tmp_path / "other" / folder.name / "plan.json"
    plan.write_text(plan.read_text().replace('"version": "', '"version": "0'))
    assert content(prepare(used, tmp_path / "other", workers=1, progress=lines.append)) == content(expected)
    assert any("trained" in line for line in lines)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "place",
    ["preparation.pipeline.EncodingProgress.add", "preparation.pipeline.EncodingProgress.stage", "prepare._fill"],
)
def test_a_call_that_fails_keeps_what_the_same_call_goes_on_with(
    sources: tuple[AnySource, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Nothing if the recipe or a source has to be mended, which gives other shards."""
    for again in (True, False):

        def fail(*arguments: object, again: bool = again) -> None:
            raise UserError("failed", where="place", again=again)

        monkeypatch.setattr(f"llmrecipes.data.{place}", fail)
        with refused("place"):
            prepare(of(sources), tmp_path / "data", workers=1)
        assert len(list((tmp_path / "data").glob(".*.shards"))) == again
        assert not list((tmp_path / "data").glob(".*.part"))


@pytest.mark.usefixtures("small")
def test_an_item_whose_worker_was_killed_is_done_again(
    sources: tuple[AnySource, ...], expected: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever it is at; the others go on."""
    lines, chance = list[str](), random.Random(os.urandom(8))

    def kill(most: int) -> None:
        if sum("killed" in line for line in lines) < most and (children := multiprocessing.active_children()):
            chance.choice(children).kill()

    monkeypatch.setattr(pipeline, "_SMALL_BYTES", 0)
    monkeypatch.setattr(pipeline.EncodingProgress, "add", lambda progress, reading: kill(1))
    monkeypatch.setattr(pipeline.EncodingProgress, "stage", lambda progress, name, done, count: kill(2))
    assert content(prepare(of(sources), tmp_path / "data", workers=3, progress=lines.append)) == content(expected)
    assert sum("killed" in line for line in lines) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_workers_killed_at_some_documents(copied: Recipe, expected_of_copied: Prepared, tmp_path: Path) -> None:
    """Three of five, wherever they are; the bytes are those of an uninterrupted call."""
    fuses, lines = tmp_path / "fuses", list[str]()
    fuses.mkdir()
    numbers = [path.read_text().split()[1] for path in Path(copied.data.sources[0].location).iterdir()]
    for number in random.Random(os.urandom(8)).sample(numbers, 3):
        (fuses / number).touch()
    fields: Any = {"fused": (Annotated[str | None, FUSED], None)}
    section: Any = create_model("Fused", __base__=Data, **fields)
    values = {name: getattr(copied.data, name) for name in Data.model_fields}
    used = copied.model_copy(update={"data": section(**values, fused=str(fuses))})
    several = prepare(used, tmp_path / "data", workers=5, progress=lines.append)
    assert not list(fuses.iterdir()) and any("killed" in line for line in lines)
    for path in expected_of_copied.path.glob("0*"):
        assert (several.path / path.name).read_bytes() == path.read_bytes()


@pytest.mark.usefixtures("larger")
@pytest.mark.rotating
def test_what_is_made_twice_and_half_made_changes_nothing(
    copied: Recipe, expected_of_copied: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Items of every stage are made again behind the others; then the call itself is killed."""
    used = copied
    shards = begun(used, tmp_path / "data")
    run(shards)
    chance = random.Random(os.urandom(8))
    for stage in pipeline.stages(shards):
        run(stage)
        files = sorted(shards.folder.glob(f"*.{stage.name}"))
        lost = chance.sample(files, min(3, len(files)))
        before = {path: path.read_bytes() for path in lost}
        for path in lost:
            path.unlink()
        assert len(stage.needed()) == len(lost)
        run(stage)
        assert {path: path.read_bytes() for path in lost} == before
    # A worker that was believed to be dead goes on behind all others.
    shards.work(1)
    pipeline.stages(shards)[-1].work(0)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("llmrecipes.data.folder.checked.describe", interrupted)
        prepare(used, tmp_path / "data", workers=1)
    assert content(prepare(used, tmp_path / "data", workers=1)) == content(expected_of_copied)


def interrupted(*arguments: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.usefixtures("small")
@pytest.mark.rotating
def test_damaged_digests_and_shards_are_refused(sources: tuple[AnySource, ...], tmp_path: Path) -> None:
    used = of(sources)
    shards = begun(used, tmp_path / "data")
    run(shards)
    digests = shards.folder / "000003.digests"
    right = digests.read_bytes()
    for wrong in (right[:-1], right[:-1] + bytes([right[-1] ^ 1]), b""):
        digests.write_bytes(wrong)
        with refused(digests):
            for number in range(shards.ranges):
                shards.keys(3, number)
    digests.write_bytes(right)
    for stage in pipeline.stages(shards)[:3]:
        run(stage)
    shard = shards.published()[2][0]
    ids = bytearray(shard.read_bytes())
    header = int(np.frombuffer(ids[:8], "<u8")[0])
    ids[48 + header] ^= 1  # the first byte of the ids, which counting does not read
    shard.write_bytes(ids)
    with refused(shard):
        prepare(used, tmp_path / "data", workers=1)
    shard.unlink()
    assert prepare(used, tmp_path / "data", workers=1).manifest.sources[0].read == 200


@pytest.mark.usefixtures("larger")
@pytest.mark.rotating
def test_documents_that_are_cut_are_the_same_in_many_shards(copied: Recipe, tmp_path: Path) -> None:
    """What happens to one depends on which were kept before: one item decides, also up to `max_tokens`."""
    rng, words = random.Random(3), [f"{a}{b}{c}" for a in "bdfgkl" for b in "aeiou" for c in "mnrst"]
    common = "Ten words that are said here again and once more. " * 3
    own = (". ".join(" ".join(rng.choices(words, k=9)) for _ in range(6)) for _ in range(90))
    rows = [{"text": f"{common}{text}."} for text in own]
    (tmp_path / "spans.jsonl").write_text("\n".join(map(json.dumps, rows)))
    cut = made_step({"type": "duplicates", "span_sentences": 3, "cut_spans": True, "min_words": 5})
    first = make_source(type="jsonl", path=str(tmp_path / "spans.jsonl"), max_tokens=1000)
    every = (first, copied.data.sources[0], copied.data.sources[2])
    data = copied.data.model_copy(update={"sources": every, "steps": (cut, copied.data.steps[-1])})
    used = copied.model_copy(update={"data": data})
    several = prepare(used, tmp_path / "several", workers=2)
    assert several.manifest.sources[0].rules["duplicates.cut_sentences"] > 20 and several.manifest.sources[0].read < 90
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_parts, "PART_BYTES", 1 << 30)
        assert content(several) == content(prepare(used, tmp_path / "one", workers=1))


@pytest.mark.rotating
def test_conversations_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their answers and counts; of a source that ends at `max_tokens` too."""
    rows = [{"prompt": f"What is {n}?", "completion": f"A number, {n * n}."} for n in range(200)]
    bad = [{"prompt": "What?", "completion": " "}, {"prompt": "<|im_end|>", "completion": "x"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, [*rows[:120], *bad, *rows[120:], rows[0]])))
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({**row, "prompt": "So?"}) for row in rows))
    first = make_source(type="jsonl", path=str(tmp_path / "a.jsonl"), max_tokens=5000)
    talks = recipe(first, make_source(type="jsonl", path=str(tmp_path / "b.jsonl")))
    talks = talks.model_copy(update={"data": talks.data.model_copy(update={"chat": Chat(template="chatml")})})
    one = prepare(talks, tmp_path / "one", workers=1)
    monkeypatch.setattr(file_parts, "PART_BYTES", 2000)
    two = prepare(talks, tmp_path / "two", workers=2)
    assert one.manifest.chat is not None and one.manifest.sources[0].read < len(rows)
    assert [(each.unanswered, each.special_tokens) for each in one.manifest.chat.sources] == [(1, 1), (0, 0)]
    assert two.manifest == one.manifest and content(two) == content(one)


@pytest.mark.rotating
def test_sources_that_change_meanwhile_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = recipe(corpus(tmp_path / "text"))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("llmrecipes.data.prepare._fill", interrupted)
        prepare(used, tmp_path / "data", workers=1)
    (tmp_path / "text" / "new.txt").write_text("more")
    assert prepare(used, tmp_path / "data", workers=1).manifest.sources[0].read == 201


@pytest.mark.rotating
def test_damaged_files_are_skipped_up_to_a_share(tmp_path: Path) -> None:
    """From the damage on, and the same by whoever reads them."""
    (tmp_path / "jsonl").mkdir()
    for n in range(10):
        rows = [json.dumps({"text": " ".join(f"{n * k + k:x}" for k in range(row, row + 50))}) for row in range(20)]
        if n in (3, 7):
            rows[10] = rows[10][:20]
        (tmp_path / "jsonl" / f"{n}.jsonl").write_text("\n".join(rows))
    source = make_source(type="jsonl", path=str(tmp_path / "jsonl"))

    def allowing(share: float) -> Recipe:
        used = recipe(source)
        return used.model_copy(update={"data": used.data.model_copy(update={"max_unreadable": share})})

    for workers in (1, 2):
        with refused(f"{tmp_path}/jsonl/3.jsonl:11"):
            prepare(allowing(0), tmp_path / "none", workers=workers)
        assert not list((tmp_path / "none").glob(".*.shards"))
        with refused("data.sources[0]", rule=("2", "10", "data.max_unreadable=0.1")):
            prepare(allowing(0.1), tmp_path / "some", workers=workers)
    one, two = (prepare(allowing(0.2), tmp_path / f"{n}", workers=n) for n in (1, 2))
    assert (one.manifest.sources[0].read, one.manifest.sources[0].unreadable) == (180, 2)
    assert content(two) == content(one)


@pytest.mark.rotating
def test_a_file_system_that_takes_no_more_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is half-published, and the next call goes on."""
    monkeypatch.setattr(file_parts, "PART_BYTES", 4000)
    used = recipe(corpus(tmp_path / "text"))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("llmrecipes.data.prepare._fill", interrupted)
        prepare(used, tmp_path / "data", workers=1)
    folder = tmp_path / "data" / f".{fingerprint(used)}.shards"
    for shard in [*folder.glob("*.shard")][:20]:
        shard.unlink()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with refused(tmp_path / "data"):
            prepare(used, tmp_path / "data", workers=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (folder / "plan.json").exists()
    assert prepare(used, tmp_path / "data", workers=2).manifest.sources[0].read == 200
