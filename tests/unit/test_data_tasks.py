"""`prepare --tasks`: shards that any number of processes encode, kill any of them at any time."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import create_model

from llmrecipes.data import parts
from llmrecipes.data import tasks as tasks_module
from llmrecipes.data.prepare import Prepared, _shards, fingerprint, prepare
from llmrecipes.launch import lease as leases
from llmrecipes.recipe.data_steps import Step
from llmrecipes.recipe.schema import Chat, Data, Recipe, Source
from tests.refusals import refused
from tests.unit.data_recipes import FUSED, corpus, recipe


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, ...]:
    """Text, JSON lines and Parquet, with copies and near-copies across their shards; one source with `max_tokens`."""
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    root = tmp_path_factory.mktemp("sources")
    text, other = corpus(root / "text"), corpus(root / "other", seed=1, word="Wörter")
    texts = [path.read_text() for path in sorted((root / "text").iterdir())]
    (root / "jsonl").mkdir()
    for n in range(8):
        rows = [
            texts[3 * n],
            texts[3 * n + 1] + " once more",
            " ".join(f"{word * n + word:x}" for word in range(7, 99)),
            texts[3 * n].upper(),
        ]
        lines = [json.dumps({"text": row}) for row in rows]
        (root / "jsonl" / f"{n}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    table = pa.table({"text": [f"row {n} of parquet, {n * n}" for n in range(300)] + texts[:9]})
    pq.write_table(table, root / "rows.parquet")
    return (
        text,
        Source(type="jsonl", path=str(root / "jsonl")),
        other.model_copy(update={"max_tokens": 6000}),
        Source(type="parquet", path=str(root / "rows.parquet")),
    )


def of(sources: tuple[Source, ...], fuses: Path | None = None) -> Recipe:
    """A recipe with steps that compare; with fuses, tasks are killed at some documents."""
    steps = (Step(type="duplicates"), Step.model_validate({"type": "near_duplicates", "threshold": 0.7}))
    fields: Any = {"fused": (Annotated[str | None, FUSED], None)}
    section: Any = create_model("Fused", __base__=Data, **fields)
    data = section(sources=sources, split=(90.0, 5.0, 5.0), steps=steps, fused=None if fuses is None else str(fuses))
    return recipe(*sources).model_copy(update={"data": data})


def content(prepared: Prepared) -> dict[str, bytes]:
    """Every file of the tokens, without the record of the recipe and the card, which have the fuses."""
    files = [path for path in prepared.path.iterdir() if path.is_file() and path.suffix not in (".json", ".md")]
    sources = json.dumps([record.model_dump() for record in prepared.manifest.sources])
    return {"sources": sources.encode(), **{path.name: path.read_bytes() for path in files}}


def without_fuse(files: dict[str, bytes]) -> dict[str, bytes]:
    """Counts of a step that dropped nothing say only that it was there."""
    return files | {"sources": files["sources"].replace(b'"fused": 0, ', b"")}


@pytest.mark.slow
def test_killed_tasks_leave_the_bytes_of_an_uninterrupted_one(
    sources: tuple[Source, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four tasks are killed in the middle of a shard; then all of four, and the next call goes on."""
    expected = content(prepare(of(sources), tmp_path / "one", workers=1))
    records = json.loads(expected["sources"])
    assert records[1]["duplicates"] >= 5
    assert records[1]["steps"]["near_duplicates"] >= 5
    monkeypatch.setattr(parts, "PART_BYTES", 2000)
    chance = random.Random(os.urandom(8))
    numbers = sorted(int(path.read_text().split()[1]) for path in Path(sources[0].path or "").iterdir())
    for killed, name in ((3, "three"), (4, "four")):
        fuses = tmp_path / f"fuses-{name}"
        fuses.mkdir()
        for number in chance.sample(numbers, killed):
            (fuses / str(number)).touch()
        used, data, lines = of(sources, fuses), tmp_path / name, list[str]()
        if killed == 4:
            with refused("--tasks", rule="4"):
                prepare(used, data, tasks=4, progress=lines.append)
            assert not (data / fingerprint(used)).exists()
        prepared = prepare(used, data, tasks=4, progress=lines.append)
        assert not list(fuses.iterdir())
        assert sum("exit code -9" in line for line in lines) == killed
        assert without_fuse(content(prepared)) == expected
        assert not list(data.glob(".*.shards"))


@pytest.mark.rotating
def test_a_second_call_encodes_only_what_is_missing(
    sources: tuple[Source, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 2000)
    used = of(sources)
    tasks_module.run(_shards(used, tmp_path / fingerprint(used), lambda line: None, shared=True))
    folder = tmp_path / f".{fingerprint(used)}.shards"
    files = sorted(folder.glob("*.shard"))
    assert len(files) > 20
    # Of the source with max_tokens, those behind it are not encoded.
    assert len(files) < len(json.loads((folder / "plan.json").read_text())["shards"])
    files[7].unlink()
    damaged = files[9].read_bytes()
    files[9].write_bytes(damaged[:-1])
    with refused(files[9]):
        prepare(used, tmp_path, tasks=1)
    assert not (tmp_path / fingerprint(used)).exists()
    files[9].unlink()
    encoded = len(list(folder.glob("*.shard")))
    lines: list[str] = []
    prepared = prepare(used, tmp_path, tasks=2, progress=lines.append)
    assert any(f"{encoded} of" in line for line in lines)
    assert content(prepared) == content(prepare(used, tmp_path / "one", workers=1))


def interrupted(*arguments: Any, **options: Any) -> None:
    """In place of the process that joins the shards."""
    raise KeyboardInterrupt


@pytest.mark.rotating
def test_conversations_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their answers and counts; of a source that ends at `max_tokens` too."""
    monkeypatch.setattr(parts, "PART_BYTES", 2000)
    rows = [{"prompt": f"What is {n}?", "completion": f"A number, {n * n}."} for n in range(200)]
    bad = [{"prompt": "What?", "completion": " "}, {"prompt": "<|im_end|>", "completion": "x"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, [*rows[:120], *bad, *rows[120:], rows[0]])))
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({**row, "prompt": "So?"}) for row in rows))
    first = Source(type="jsonl", path=str(tmp_path / "a.jsonl"), max_tokens=5000)
    talks = recipe(first, Source(type="jsonl", path=str(tmp_path / "b.jsonl")))
    talks = talks.model_copy(update={"data": talks.data.model_copy(update={"chat": Chat(template="chatml")})})
    one = prepare(talks, tmp_path / "one", workers=99)
    two = prepare(talks, tmp_path / "two", tasks=2)
    assert one.manifest.chat is not None and one.manifest.sources[0].read < len(rows)
    assert [(each.unanswered, each.special_tokens) for each in one.manifest.chat.sources] == [(1, 1), (0, 0)]
    assert two.manifest == one.manifest and content(two) == content(one)


@pytest.mark.rotating
def test_sources_that_change_meanwhile_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = recipe(corpus(tmp_path / "text"))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("llmrecipes.data.prepare._build", interrupted)
        prepare(used, tmp_path / "data", tasks=1)
    (tmp_path / "text" / "new.txt").write_text("more")
    folder = tmp_path / "data" / f".{fingerprint(used)}.shards"
    with refused(folder):
        prepare(used, tmp_path / "data", tasks=1)
    shutil.rmtree(folder)
    assert prepare(used, tmp_path / "data", tasks=1).manifest.sources[0].read == 201


def test_a_lease_of_another_machine_is_taken_over_only_when_it_is_not_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock of who waits: what the file says of the time does not matter."""
    watch, claim, now = tasks_module.Watch(), tmp_path / "000001.claim", [0.0]
    monkeypatch.setattr("llmrecipes.hardware.process.time.monotonic", lambda: now[0])
    claim.mkdir()
    leases.take(claim, "1-1-other")
    file = next(claim.rglob("lease.json"))
    file.write_text(json.dumps({"token": "1-1-other", "host": "other", "boot_id": "b", "pid_namespace": "p"}))
    os.utime(file, (0, 0))
    assert not tasks_module._claimed(claim, "mine", watch)
    now[0] += leases.LEASE_SECONDS - 1
    os.utime(file, (1, 1))  # renewed, by a clock of 1970
    assert not tasks_module._claimed(claim, "mine", watch)
    now[0] += leases.LEASE_SECONDS - 1
    assert not tasks_module._claimed(claim, "mine", watch)
    now[0] += 2
    left, other = tmp_path / ".000001-1-1-other.part", tmp_path / ".000002-1-1-other.part"
    left.touch()
    other.touch()
    assert tasks_module._claimed(claim, "mine", watch)
    assert not left.exists() and other.exists()
    assert (lease := leases.read(claim)) is not None and lease.token == "mine"


@pytest.mark.rotating
def test_damaged_files_are_skipped_up_to_a_share(tmp_path: Path) -> None:
    """From the damage on, and the same by whoever reads them."""
    (tmp_path / "jsonl").mkdir()
    for n in range(10):
        rows = [json.dumps({"text": " ".join(f"{n * k + k:x}" for k in range(row, row + 50))}) for row in range(20)]
        if n in (3, 7):
            rows[10] = rows[10][:20]
        (tmp_path / "jsonl" / f"{n}.jsonl").write_text("\n".join(rows))
    source = Source(type="jsonl", path=str(tmp_path / "jsonl"))

    def allowing(share: float) -> Recipe:
        used = recipe(source)
        return used.model_copy(update={"data": used.data.model_copy(update={"max_unreadable": share})})

    for tasks in (None, 2):
        with refused(f"{tmp_path}/jsonl/3.jsonl:11"):
            prepare(allowing(0), tmp_path / "none", workers=1, tasks=tasks)
        assert tasks or not list((tmp_path / "none").glob(".*.shards"))
        with refused("data.sources[0]", rule=("2", "10", "data.max_unreadable=0.1")):
            prepare(allowing(0.1), tmp_path / "some", workers=1, tasks=tasks)
    one, two = (prepare(allowing(0.2), tmp_path / f"{n}", workers=1, tasks=n) for n in (None, 2))
    assert (one.manifest.sources[0].read, one.manifest.sources[0].unreadable) == (180, 2)
    assert content(two) == content(one)


@pytest.mark.rotating
def test_a_file_system_that_takes_no_more_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is half-published, and the next call goes on."""
    used = recipe(corpus(tmp_path / "text"))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("llmrecipes.data.prepare._build", interrupted)
        prepare(used, tmp_path / "data", tasks=1)
    folder = tmp_path / "data" / f".{fingerprint(used)}.shards"
    next(folder.glob("*.shard")).unlink()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with refused(folder):
            prepare(used, tmp_path / "data", tasks=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    # The first task to fail ends the other, which may leave a claim.
    assert {"plan.json", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    assert not list(folder.glob("*.shard"))
    assert prepare(used, tmp_path / "data", tasks=2).manifest.sources[0].read == 200
