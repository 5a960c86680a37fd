"""Bytes that torch.load would make gigabytes of: refused before they are."""

from __future__ import annotations

import io
import pickle
import resource
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.utils import _create_file_view

from llmrecipes.engine.core.checkpoint.reading import load_plain
from tests.refusals import refused

LARGE = 3 << 29
"""Bytes; more than the memory that the test may have."""
ELEMENTS = b"K\x04tq"
"""In the pickle of `saved`: the number of elements in its storage."""


def saved(change: Callable[[str, bytes], bytes] = lambda _, content: content, kind: int = zipfile.ZIP_STORED) -> bytes:
    """Of torch.save, with other contents of its members."""
    plain, changed = io.BytesIO(), io.BytesIO()
    torch.save({"weight": torch.ones(4)}, plain)
    with zipfile.ZipFile(plain) as archive, zipfile.ZipFile(changed, "w", kind, compresslevel=1) as other:
        for name in archive.namelist():
            other.writestr(
                name, change(name.rpartition("/")[2] if "/data/" not in name else "storage", archive.read(name))
            )
    return changed.getvalue()


def calling(what: bytes) -> bytes:
    """A value that is something called with a number."""
    call = b"\x80\x02c" + what + b"\nJ" + LARGE.to_bytes(4, "little") + b"\x85R."
    return saved(lambda name, content: call if name == "data.pkl" else content)


def compressed() -> bytes:
    def change(name: str, content: bytes) -> bytes:
        if name == "storage":
            return bytes(LARGE)
        return content.replace(ELEMENTS, b"J" + (LARGE // 4).to_bytes(4, "little") + b"tq")

    return saved(change, zipfile.ZIP_DEFLATED)


def legacy() -> bytes:
    stream = io.BytesIO()
    torch.save(torch.ones(4), stream, _use_new_zipfile_serialization=False)
    return stream.getvalue()


@pytest.fixture
def little_memory() -> Iterator[None]:
    """An allocation of `LARGE` bytes fails."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


CALLED = [b"builtins\nbytearray", b"__builtin__\nbytearray", b"torch\nTensor", b"torch\nFloatTensor",
          b"torch.storage\nUntypedStorage", b"torch\nstorage.UntypedStorage"]  # fmt: skip


@pytest.fixture
def content(request: pytest.FixtureRequest) -> bytes:
    """Made for its test alone: to compress gigabytes takes seconds, and every process of a run imports this module."""
    made: bytes = request.param()
    return made


@pytest.mark.parametrize(
    "content",
    [compressed, legacy, *(partial(calling, what) for what in CALLED)],
    ids=["compressed", "legacy", *map(repr, CALLED)],
    indirect=True,
)
def test_a_few_bytes_do_not_take_gigabytes(content: bytes, little_memory: None, tmp_path: Path) -> None:
    path = tmp_path / "part.distcp"
    for stream in (io.BytesIO(content), _create_file_view(io.BytesIO(b"xx" + content + b"yy"), 2, len(content))):
        with refused(path):
            load_plain(stream, path)


def test_plain_values_of_every_kind_load_from_a_file_and_a_range_of_it(tmp_path: Path) -> None:
    kinds = torch.float32, torch.bfloat16, torch.int64
    text = "cbuiltins\nlist\nctorch\nfloat32\n" * 100  # looks like the operations of a pickle
    values = {
        "text": text, "numbers": [1, 2.5, 1 << 80, None, True, 1j], "bytes": b"\x00\xff" * 9, "size": torch.Size([2]),
        "tensors": [torch.arange(6, dtype=kind).view(2, 3).t() for kind in kinds],
        "same": [torch.zeros(100)[:3]] * 2, "empty": torch.empty(0), "parameter": torch.nn.Parameter(torch.ones(1)),
    }  # fmt: skip
    stream = io.BytesIO()
    torch.save(values, stream)
    content = stream.getvalue()
    stream.seek(0)
    views = [stream, _create_file_view(io.BytesIO(b"xx" + content + b"yy"), 2, len(content))]
    for loaded in (load_plain(view, tmp_path) for view in views):
        assert loaded.keys() == values.keys() and loaded["text"] == text and loaded["numbers"] == values["numbers"]
        assert all(torch.equal(*pair) for pair in zip(loaded["tensors"], values["tensors"], strict=True))


def test_the_numbers_are_taken_by_a_reader_that_trusts() -> None:
    """torch's own, with a number that does no harm."""
    call = b"\x80\x02cbuiltins\nbytearray\nK\x05\x85R."
    content = saved(lambda name, content: call if name == "data.pkl" else content)
    assert torch.load(io.BytesIO(content), weights_only=True) == bytearray(5)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(io.BytesIO(content.replace(b"bytearray", b"breakpoin")), weights_only=True)
