"""Checkpoints from someone with bad intentions, who also makes the sums fit: nothing in them runs."""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import shutil
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from llmrecipes.checkpoint.manifest import (
    MANIFEST_NAME,
    CheckpointInfo,
    FileRecord,
    InvalidCheckpoint,
    build,
    compare,
    digest,
    dump,
    read_manifest,
)
from llmrecipes.checkpoint.rank_groups import Ranks
from llmrecipes.checkpoint.saver import AsyncSaver
from llmrecipes.checkpoint.store import CheckpointStore, Entry
from llmrecipes.engine.core.checkpoint import loader, pickled_index
from llmrecipes.engine.core.checkpoint.format import ShardedFormat
from llmrecipes.engine.core.checkpoint.index import INDEX_NAME, JSON_NAME, MAGIC, Header, Index, decode
from llmrecipes.engine.core.checkpoint.loader import load
from llmrecipes.engine.core.checkpoint.reading import read_index
from tests.refusals import refused

INFO = CheckpointInfo(step=1, consumed_samples=1, consumed_tokens=1, layout={}, recipe_hash="r")


def state(fill: float = 0.0) -> dict[str, Any]:
    return {
        "weight": ShardedTensor.from_rank_offsets("weight", torch.full((4, 2), fill)),
        "scalar": ShardedTensor.from_rank_offsets("scalar", torch.tensor(fill)),
        "rng": ShardedObject("rng", [1, 2], (1,), (0,)),
        "step": 1,
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, group: Ranks) -> CheckpointStore:
    store = CheckpointStore(tmp_path_factory.mktemp("saved") / "checkpoints")
    with AsyncSaver(store, group, ShardedFormat(), async_save=False) as saver:
        saver.save(state(fill=7.0), INFO)
    return store


@pytest.fixture
def checkpoint(tmp_path: Path, saved: CheckpointStore) -> Path:
    """A copy for each test, which changes its files."""
    store = CheckpointStore(tmp_path / "checkpoints")
    shutil.copytree(saved.path(1), store.path(1))
    return store.path(1)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """What an attack makes."""
    return tmp_path / "pwned"


def seal(path: Path, number: int = 2) -> Entry:
    """Make the manifest fit the files, in the format of now or in that of older versions, and find the checkpoint."""
    if number == 1:
        (path / INDEX_NAME).unlink()  # which no older version has written
    names = [file.name for file in path.iterdir() if file.name != MANIFEST_NAME]
    manifest = build(INFO, {}, {name: digest(path / name) for name in names})
    old = manifest.model_copy(update={"format": 1}).model_dump_json(indent=1, exclude={"recipe"})
    (path / MANIFEST_NAME).write_bytes(dump(manifest) if number == 2 else old.encode())
    entry = CheckpointStore(path.parent).latest_valid()
    assert entry is not None, "the sums fit: they are no protection against intent"
    assert entry.manifest.format == number
    return entry


def require_refused(entry: Entry, file: str = "", *, rule: str = "") -> None:
    """Loading ends with a message about the checkpoint, or a file of it."""
    with refused(entry.path / file if file else entry.path.name, rule=rule or ()) as caught:
        load(entry, state())
    assert caught.value.rule
    assert len(str(caught.value)) < 1000


def assert_whole(loaded: dict[str, Any]) -> None:
    assert torch.equal(loaded["weight"], torch.full((4, 2), 7.0))
    assert torch.equal(loaded["scalar"], torch.tensor(7.0))
    assert loaded["rng"] == [1, 2]
    assert loaded["step"] == 1


MKDIR = f"{os.mkdir.__module__}.mkdir"


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


# -- the pickled index ---------------------------------------------------------------------------------------------


def named(module: str, name: str) -> str:
    return f"c{module}\n{name}\n"


def text(value: str) -> str:
    return f"V{value}\n"


def call(function: str, *arguments: str) -> str:
    return f"{function}({''.join(arguments)}tR"


def slots(thing: str, **values: dict[str, str]) -> str:
    """Set attributes of a thing, as the slots of an object are restored."""
    state = "".join(
        text(name) + "}" + "".join(key + inner + "s" for key, inner in value.items()) + "s"
        for name, value in values.items()
    )
    return f"{thing}(N}}{state}tb"


def index_that_runs_code(code: str) -> bytes:
    """A pickle in front of a pickle: for the audit of older versions all of it is members of one enumeration."""
    enumeration = named("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING")
    attribute = named("builtins", "getattr")
    first = "K\x00"
    path = ("_generate_next_value_", "__globals__", "get")
    poison = slots(
        enumeration,
        _member_map_={text(name): enumeration for name in (*path, "exec")},
        _value2member_map_={first: call(enumeration, first), text("bltns"): enumeration, text(code): enumeration},
    )
    found = enumeration
    for name in path:
        found = call(attribute, found, text(name))
    builtins = call(found, text("bltns"))
    return (poison + "0" + call(call(attribute, builtins, text("exec")), text(code)) + "0").encode("latin-1")


@pytest.fixture
def poisoned(checkpoint: Path, marker: Path) -> Path:
    real = (checkpoint / ".metadata").read_bytes()
    (checkpoint / ".metadata").write_bytes(index_that_runs_code(f"import os; os.mkdir({str(marker)!r})") + real)
    return checkpoint


def test_the_attack_works_on_a_reader_that_trusts(poisoned: Path, marker: Path) -> None:
    maps = {name: getattr(_MEM_FORMAT_ENCODING, name) for name in ("_member_map_", "_value2member_map_")}
    try:
        found = dcp.FileSystemReader(poisoned).read_metadata()
    finally:
        for name, value in maps.items():
            setattr(_MEM_FORMAT_ENCODING, name, value)
    assert "weight" in found.state_dict_metadata, "it hands on the real index"
    assert marker.exists()


def test_code_in_front_of_the_pickled_index_is_never_read(poisoned: Path, marker: Path) -> None:
    assert_whole(load(seal(poisoned), state()))
    assert not marker.exists()


def test_code_in_front_of_the_pickled_index_of_an_older_checkpoint_is_refused(poisoned: Path, marker: Path) -> None:
    before = dict(vars(_MEM_FORMAT_ENCODING))
    require_refused(seal(poisoned, 1), ".metadata", rule="_MEM_FORMAT_ENCODING")
    assert not marker.exists()
    assert dict(vars(_MEM_FORMAT_ENCODING)) == before


def hostile_pickles(marker: Path) -> dict[str, bytes]:
    metadata = "torch.distributed.checkpoint.metadata"
    make = named("os", "mkdir"), text(str(marker))
    size, path = named("torch", "Size"), named("pathlib", "Path")
    return {
        "call": pickle.dumps(Bomb(marker)),
        "another attribute": (call(named("builtins", "getattr"), path, text("home")) + ".").encode(),
        "attribute of a class by state": (named(metadata, "Metadata") + "}" + text("a") + "Nsb.").encode(),
        "attribute of a class by slots": (slots(path, home={text("a"): "N"}) + ".").encode(),
        "__setstate__ of a class": (slots(named(metadata, "Metadata"), __setstate__={text("a"): "N"}) + ".").encode(),
        "class of an object": (f"{call(path)}(N}}{text('__class__')}{size}stb.").encode(),
        "instance of a function": (f"({make[1]}ios\nmkdir\n.").encode(),
        "dtype that is called": (call(named("torch", "float32"), text("1")) + ".").encode(),
        "function of torch": (call(named("torch", "load"), text("x")) + ".").encode(),
        "dotted name": b"\x80\x04\x8c\x0btorch.Size_\x8c\x08__init__\x93.",
        "nothing": b"",
        "cut": pickle.dumps(list(range(100)))[:50],
        "noise": bytes(range(256)) * 20,
        "another type": pickle.dumps({"state_dict_metadata": {}, "storage_data": {}}),
        "deep": b"(" * 100_000 + b"t" * 100_000 + b".",
    }


@pytest.mark.parametrize("name", sorted(hostile_pickles(Path("x"))))
def test_nothing_but_an_index_is_read_from_a_pickle(checkpoint: Path, marker: Path, name: str) -> None:
    (checkpoint / ".metadata").write_bytes(hostile_pickles(marker)[name])
    require_refused(seal(checkpoint, 1), ".metadata")
    assert not marker.exists()


def alter(checkpoint: Path, change: Callable[[Any], None]) -> None:
    metadata = dcp.FileSystemReader(checkpoint).read_metadata()
    change(metadata)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def place_of(metadata: Any, name: str) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn.startswith(name))


def outside(metadata: Any) -> None:
    place_of(metadata, "rng").relative_path = "../../elsewhere"


def negative(metadata: Any) -> None:
    place_of(metadata, "weight").offset = -8


def transformed(metadata: Any) -> None:
    place_of(metadata, "weight").transform_descriptors = ["zstd"]


def without_place(metadata: Any) -> None:
    metadata.storage_data.clear()


def no_list(metadata: Any) -> None:
    metadata.state_dict_metadata["weight"].chunks = 3


@pytest.mark.parametrize("change", [outside, negative, transformed, without_place, no_list])
def test_a_pickled_index_is_checked_like_any_other(checkpoint: Path, change: Callable[[Any], None]) -> None:
    alter(checkpoint, change)
    require_refused(seal(checkpoint, 1))


class AsPython3112(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, found: object) -> Any:
        return (getattr, (type(found), found.name)) if isinstance(found, Enum) else NotImplemented


def test_older_checkpoints_load_with_a_note(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger=loader.__name__):
        assert_whole(load(seal(checkpoint, 1), state()))
    (note,) = caplog.records
    assert "older version" in note.getMessage()
    assert str(checkpoint) in note.getMessage()


def test_older_checkpoints_of_debian_12_load(checkpoint: Path) -> None:
    stream = io.BytesIO()
    AsPython3112(stream).dump(dcp.FileSystemReader(checkpoint).read_metadata())
    assert b"getattr" in stream.getvalue()
    (checkpoint / ".metadata").write_bytes(stream.getvalue())
    assert_whole(load(seal(checkpoint, 1), state()))


def test_all_forms_of_the_index_agree(checkpoint: Path) -> None:
    found = flat(read_index(seal(checkpoint)))
    write_json(checkpoint)
    assert flat(read_index(seal(checkpoint))) == found
    (checkpoint / JSON_NAME).rename(checkpoint / INDEX_NAME)
    assert flat(read_index(seal(checkpoint, 1))) == found


def flat(index: Index) -> dict[str, Any]:
    return {
        "files": index.files,
        "objects": index.objects,
        **{
            name: (each.dtype, each.shape, each.longest, [column.tolist() for column in each.columns])
            for name, each in index.tensors.items()
        },
    }


def test_torchs_own_loader_reads_it(checkpoint: Path) -> None:
    found = {"weight": torch.zeros(4, 2), "scalar": torch.tensor(0.0)}
    dcp.load(found, checkpoint_id=checkpoint, no_dist=True)
    assert torch.equal(found["weight"], torch.full((4, 2), 7.0))
    assert found["scalar"] == 7.0


# -- the index as a table ---------------------------------------------------------------------------------------------

Edit = Callable[[dict[str, Any], list[list[int]]], Any]
"""Changes the header, or the columns; what it returns, if not None, are the types of the columns."""


def edit_table(checkpoint: Path, change: Edit) -> None:
    """Change the index; numbers need not fit the types of their columns."""
    table = decode((checkpoint / INDEX_NAME).read_bytes())
    columns = [column.tolist() for column in table.columns]
    header = Header(files=table.files, objects=table.objects, tensors=table.tensors, columns=["i8"] * len(columns))
    changed = header.model_dump()
    kinds = change(changed, columns) or ["i8"] * len(columns)
    changed["columns"] = kinds
    (checkpoint / INDEX_NAME).write_bytes(table_bytes(changed, [np.asarray(column, np.int64) for column in columns]))


def table_bytes(header: object, columns: list[np.ndarray]) -> bytes:
    text = json.dumps(header).encode()
    return b"".join((MAGIC, len(text).to_bytes(8, "little"), text, *(column.tobytes() for column in columns)))


def number(column: int, value: int) -> Edit:
    """Change a number of the only part of "weight": file, first byte, bytes, offset and size of two dimensions."""

    def change(header: dict[str, Any], columns: list[list[int]]) -> None:
        assert header["tensors"][0]["name"] == "weight" and header["tensors"][0]["rows"] == 1
        columns[column][0] = value

    return change


def head(key: str, value: object, tensor: int = 0) -> Edit:
    return lambda header, columns: header["tensors"][tensor].update({key: value})


def field(key: str, value: object) -> Edit:
    return lambda header, columns: header.update({key: value})


def boxes(*rows: tuple[int, int, int, int], longest: int = 4) -> Edit:
    """Put several parts in place of the one of "weight": offset and size in either dimension."""

    def change(header: dict[str, Any], columns: list[list[int]]) -> None:
        header["tensors"][0].update(rows=len(rows), longest=longest)
        for column in columns[:3]:
            column[:1] = column[:1] * len(rows)
        for place, column in enumerate(columns[3:]):
            column[:1] = [row[place] for row in rows]

    return change


def swap_rows(header: dict[str, Any], columns: list[list[int]]) -> None:
    header["tensors"][0]["rows"], header["tensors"][1]["rows"] = 0, 2


def again(header: dict[str, Any], columns: list[list[int]]) -> None:
    header["tensors"].append(header["tensors"][0])
    for column in columns:
        column.append(column[0])


HOSTILE_TABLES: dict[str, Edit] = {
    "file above": field("files", ["../elsewhere"]),
    "absolute file": field("files", ["/etc/passwd"]),
    "file that the manifest lacks": field("files", [MANIFEST_NAME]),
    "file with a zero": field("files", ["a\0b"]),
    "file number": number(0, 1),
    "negative file number": number(0, -1),
    "negative start": number(1, -1),
    "huge start": number(1, (1 << 63) - 1),
    "huge length": number(2, 1 << 40),
    "negative length": number(2, -1),
    "part outside": number(3, 1),
    "negative offset": number(3, -1),
    "part too large": number(4, 5),
    "part of 2⁶³": number(4, (1 << 63) - 1),
    "negative size": number(4, -4),
    "gap": number(4, 3),
    "no parts": boxes(),
    "parts twice": boxes((0, 4, 0, 2), (0, 4, 0, 2)),
    "as many elements, but some twice": boxes((0, 2, 0, 2), (1, 2, 0, 2)),
    "crossing boxes and gaps": boxes((0, 2, 0, 2), (1, 2, 0, 1), (2, 1, 1, 1), (3, 1, 1, 1)),
    "unsorted parts": boxes((2, 2, 0, 2), (0, 2, 0, 2), longest=2),
    "parts longer than said": boxes((0, 3, 0, 2), (3, 1, 0, 2), longest=0),
    "rows of another tensor": swap_rows,
    "more rows than there are": head("rows", 2),
    "2⁶² rows": head("rows", 1 << 62),
    "rows beyond 64 bits": head("rows", 1 << 80),
    "negative rows": head("rows", -1),
    "rows that are no number": head("rows", "1"),
    "another shape": head("shape", [8]),
    "more dimensions than columns": head("shape", [4, 2, 1]),
    "a thousand dimensions": head("shape", [1] * 1000),
    "huge shape": head("shape", [1 << 60, 1 << 60]),
    "negative shape": head("shape", [-4, -2]),
    "dtype that is a function": head("dtype", "load"),
    "dtype that is not the stored one": head("dtype", "int32"),
    "tensor twice": again,
    "another key": field("planner_data", {}),
    "without tensors": field("tensors", []),
    "objects of Python in a column": lambda header, columns: ["O"] * len(columns),
    "fractions in a column": lambda header, columns: ["f8"] * len(columns),
    "a column less": lambda header, columns: columns.pop() and None,
    "one column": lambda header, columns: ["i8"],
    "place of an object outside": lambda header, columns: header["objects"][0].update(place=[0, 0, 1 << 40]),
    "object in no file": lambda header, columns: header["objects"][0].update(place=[7, 0, 1]),
    "object named like a tensor": lambda header, columns: header["objects"][0].update(name="weight"),
    "object twice": lambda header, columns: header["objects"].append(header["objects"][0]),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(HOSTILE_TABLES))
def test_a_table_that_cannot_be_true_is_refused(checkpoint: Path, name: str) -> None:
    edit_table(checkpoint, lambda header, columns: None)
    assert_whole(load(seal(checkpoint), state()))
    edit_table(checkpoint, HOSTILE_TABLES[name])
    require_refused(seal(checkpoint))


def test_parts_may_be_any_that_are_the_whole(checkpoint: Path) -> None:
    table = decode((checkpoint / INDEX_NAME).read_bytes())
    place = [column.tolist()[0] for column in table.columns[:3]]
    torch.save(torch.full((2, 1), 7.0), checkpoint / "quarter.distcp")
    quarter = [1, 0, (checkpoint / "quarter.distcp").stat().st_size]

    def quarters(header: dict[str, Any], columns: list[list[int]]) -> None:
        header["files"].append("quarter.distcp")
        boxes((0, 2, 0, 1), (0, 2, 1, 1), (2, 2, 0, 1), (2, 2, 1, 1), longest=2)(header, columns)
        for column, value in zip(columns, quarter, strict=False):
            column[:4] = [value] * 4

    assert place[0] == 0
    edit_table(checkpoint, quarters)
    assert_whole(load(seal(checkpoint), state()))


@pytest.mark.parametrize("length", [0, 1, 7, 8, 15, 16, 17, 100, -1])
def test_a_table_that_is_cut_is_refused(checkpoint: Path, length: int) -> None:
    whole = (checkpoint / INDEX_NAME).read_bytes()
    (checkpoint / INDEX_NAME).write_bytes(whole[:length])
    require_refused(seal(checkpoint), INDEX_NAME)


@pytest.mark.parametrize(
    "content",
    [
        MAGIC + b"\xff" * 8,
        MAGIC + b"\xff" * 7 + b"\x7f" + b"{}",
        MAGIC + (0).to_bytes(8, "little"),
        MAGIC + (2).to_bytes(8, "little") + b"{}",
        MAGIC + (1 << 20).to_bytes(8, "little") + b"[" * (1 << 20),
        MAGIC[:-1] + b"2" + (2).to_bytes(8, "little") + b"{}",
        b"{}" * 100,
    ],
)
def test_bytes_that_are_no_table_are_refused(checkpoint: Path, content: bytes) -> None:
    (checkpoint / INDEX_NAME).write_bytes(content)
    require_refused(seal(checkpoint), INDEX_NAME)


def test_a_byte_more_is_refused(checkpoint: Path) -> None:
    with (checkpoint / INDEX_NAME).open("ab") as stream:
        stream.write(b"\0")
    require_refused(seal(checkpoint), INDEX_NAME)


# -- the index as JSON, of older versions ------------------------------------------------------------------------------


def write_json(checkpoint: Path) -> None:
    """Put `index.json`, as older versions wrote it, in place of the index."""
    table = decode((checkpoint / INDEX_NAME).read_bytes())
    tensors = []
    for each, rows in zip(table.tensors, table.rows, strict=True):
        width = 3 + 2 * len(each.shape)
        lists = zip(*(column[rows].tolist() for column in table.columns[:width]), strict=True)
        chunks = [[*row[3::2], *row[4::2], *row[:3]] for row in lists]
        tensors.append({"name": each.name, "dtype": each.dtype, "shape": each.shape, "chunks": chunks})
    objects = [each.model_dump() for each in table.objects]
    found = {"format": 1, "files": table.files, "tensors": tensors, "objects": objects}
    (checkpoint / JSON_NAME).write_text(json.dumps(found))
    (checkpoint / INDEX_NAME).unlink()


def edit(checkpoint: Path, change: Callable[[Any], Any]) -> None:
    if (checkpoint / INDEX_NAME).exists():
        write_json(checkpoint)
    found = json.loads((checkpoint / JSON_NAME).read_text())
    (checkpoint / JSON_NAME).write_text(json.dumps(change(found) or found))


def tensor(found: Any, name: str = "weight") -> Any:
    return next(record for record in found["tensors"] if record["name"] == name)


def put(key: str | int, value: object) -> Callable[[Any], None]:
    """Change a field of a tensor, or a number of its only chunk: offset (2), size (2), file, first byte, length."""

    def change(found: Any) -> None:
        (tensor(found) if isinstance(key, str) else tensor(found)["chunks"][0])[key] = value

    return change


def rename_file(name: str) -> Callable[[Any], None]:
    return lambda found: found.update(files=[name])


HOSTILE_JSON: dict[str, Callable[[Any], Any]] = {
    "file above": rename_file("../elsewhere"),
    "absolute file": rename_file("/etc/passwd"),
    "file that the manifest lacks": rename_file("manifest.json"),
    "file with a zero": rename_file("a\0b"),
    "file number": put(4, 1),
    "negative file number": put(4, -1),
    "negative start": put(5, -1),
    "huge start": put(5, 1 << 62),
    "start beyond 64 bits": put(5, 1 << 80),
    "huge length": put(6, 1 << 40),
    "length that is no number": put(6, "12"),
    "length that is a truth value": put(6, True),
    "fractional length": put(6, 1.5),
    "chunk outside": put(0, 1),
    "chunk too large": put(2, 5),
    "gap": put(2, 3),
    "another shape": put("shape", [8]),
    "huge shape": put("shape", [1 << 60, 1 << 60]),
    "negative shape": put("shape", [-4, -2]),
    "no chunks": put("chunks", []),
    "dtype that is a function": put("dtype", "load"),
    "dtype of another module": put("dtype", "os.system"),
    "dtype that is not the stored one": put("dtype", "int32"),
    "place of an object": lambda found: tensor(found).update(chunks=[[0, 0, 4, 2, *found["objects"][0]["place"]]]),
    "object that is a tensor": lambda found: found["objects"][0].update(place=tensor(found)["chunks"][0][4:]),
    "tensor twice": lambda found: found["tensors"].append(tensor(found)),
    "chunk twice": lambda found: tensor(found)["chunks"].append(tensor(found)["chunks"][0]),
    "object named like a tensor": lambda found: found["objects"][0].update(name="weight"),
    "another key": lambda found: found.update(planner_data={}),
    "another format": lambda found: found.update(format=2),
    "no object": lambda found: [found],
    "nothing": lambda found: {"format": 1, "files": [], "tensors": [], "objects": []},
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(HOSTILE_JSON))
def test_an_index_that_cannot_be_true_is_refused(checkpoint: Path, name: str) -> None:
    edit(checkpoint, HOSTILE_JSON[name])
    require_refused(seal(checkpoint))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[" * (1 << 20), b'{"files":' * (1 << 17), b"1" * (1 << 20)]
)
def test_json_that_is_none_is_refused(checkpoint: Path, content: bytes) -> None:
    (checkpoint / INDEX_NAME).unlink()
    (checkpoint / JSON_NAME).write_bytes(content)
    require_refused(seal(checkpoint), JSON_NAME)


def test_a_checkpoint_without_an_index_is_refused(checkpoint: Path) -> None:
    (checkpoint / INDEX_NAME).unlink()
    require_refused(seal(checkpoint), INDEX_NAME)


@pytest.mark.parametrize("name", [INDEX_NAME, "__0_0.distcp"])
def test_a_link_out_of_the_checkpoint_is_not_followed(checkpoint: Path, tmp_path: Path, name: str) -> None:
    entry = seal(checkpoint)
    (checkpoint / name).rename(tmp_path / "elsewhere")
    (checkpoint / name).symlink_to(tmp_path / "elsewhere")
    require_refused(entry, name)
    assert CheckpointStore(checkpoint.parent).latest_valid() is None


@pytest.mark.parametrize("name", [MANIFEST_NAME, "common.pt", INDEX_NAME])
@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_what_is_not_a_file_neither_waits_nor_grows(checkpoint: Path, name: str, kind: str) -> None:
    if name == "common.pt" and not (checkpoint / name).exists():
        name = "__0_0.distcp"  # 0.19 keeps there what is not sharded
    entry = seal(checkpoint)
    (checkpoint / name).unlink()
    {"fifo": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero"), "folder": os.mkdir}[kind](
        checkpoint / name
    )
    if name == MANIFEST_NAME:
        with pytest.raises(InvalidCheckpoint, match=name):
            read_manifest(checkpoint)
    else:
        require_refused(entry, name)
        # A device and a FIFO have no bytes: a manifest that says so must not make them be read.
        empty = entry.manifest.model_copy(update={"files": {name: FileRecord(size=0, sha256="0" * 64)}})
        with pytest.raises(InvalidCheckpoint, match=name):
            compare(checkpoint, empty)
    assert CheckpointStore(checkpoint.parent).latest_valid() is None


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02Nr\xff\xff\xff\x0f.",  # entry 2^28 of the memo: 3 GiB
        b"Np99999999\n.",
        b"\x80\x04\x8e" + (3 << 30).to_bytes(8, "little"),
        b"\x80\x04\x96" + (3 << 30).to_bytes(8, "little") + b".",
        b"\x80\x04\x95" + (3 << 30).to_bytes(8, "little") + b"N.",
        b"\x80\x02\x8b\xff\xff\xff\x7f.",
    ],
)
def test_a_few_bytes_of_a_pickle_do_not_take_gigabytes(content: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError):
        pickled_index.require_bounded(content)
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20), before[1]))
    try:
        with pytest.raises(pickle.UnpicklingError):
            pickled_index.read(io.BytesIO(content))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_operation_of_a_pickle_is_passed_over(protocol: int) -> None:
    several = [{"a": (1, 2.5, b"x" * 300, None, True, 1 << 100, "é" * 300), "b": bytearray(9)}, io.BytesIO, set("ab")]
    content = pickle.dumps([*several, *map(str, range(1000))], protocol)
    pickled_index.require_bounded(content)
    with pytest.raises(pickle.UnpicklingError):
        pickled_index.require_bounded(content[:-1])


def test_a_run_directory_may_be_a_link(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(checkpoint.parent)
    seal(checkpoint)
    entry = CheckpointStore(tmp_path / "link").latest_valid()
    assert entry is not None
    assert_whole(load(entry, state()))


# -- what the files hold ---------------------------------------------------------------------------------------------


def replace_stored(checkpoint: Path, value: object, name: str) -> None:
    """Store something else as an object or a tensor."""
    torch.save(value, checkpoint / "bomb.distcp")

    def change(found: Any) -> None:
        found["files"].append("bomb.distcp")
        place = [len(found["files"]) - 1, 0, (checkpoint / "bomb.distcp").stat().st_size]
        for record in found["objects"]:
            if record["name"].startswith(name):
                record["place"] = place
        for record in found["tensors"]:
            if record["name"] == name:
                record["chunks"][0][-3:] = place

    edit(checkpoint, change)


@pytest.mark.parametrize("name", ["rng", "weight"])
def test_code_in_a_stored_value_is_not_run(checkpoint: Path, marker: Path, name: str) -> None:
    replace_stored(checkpoint, [Bomb(marker)], name)
    require_refused(seal(checkpoint), "bomb.distcp", rule=MKDIR)
    assert not marker.exists()


def test_code_in_what_is_not_sharded_is_not_run(checkpoint: Path, marker: Path) -> None:
    if (checkpoint / "common.pt").exists():
        torch.save({"step": Bomb(marker)}, checkpoint / "common.pt")
    else:
        replace_stored(checkpoint, [{"step": Bomb(marker)}], "common_state")
    require_refused(seal(checkpoint), rule=MKDIR)
    assert not marker.exists()


@pytest.mark.parametrize("value", [{"a": 1}, torch.zeros(2, 4), torch.zeros(4, 2, dtype=torch.float64), 3])
def test_a_stored_tensor_must_match_the_index(checkpoint: Path, value: object) -> None:
    replace_stored(checkpoint, value, "weight")
    require_refused(seal(checkpoint), rule="'weight'")


def test_either_megatron_core_reads_what_the_other_does_not_shard(checkpoint: Path) -> None:
    """0.16 keeps it in common.pt, 0.19 among the objects."""
    key = "common_state/shard_0_1"
    if (checkpoint / "common.pt").exists():
        common = torch.load(checkpoint / "common.pt", weights_only=True)
        (checkpoint / "common.pt").unlink()
        edit(checkpoint, lambda found: found["objects"].append({"name": key, "place": [0, 0, 0]}))
        replace_stored(checkpoint, [common], key)
    else:
        torch.save({"step": 1}, checkpoint / "common.pt")
        edit(
            checkpoint,
            lambda found: found.update(objects=[record for record in found["objects"] if record["name"] != key]),
        )
    assert_whole(load(seal(checkpoint), state()))
