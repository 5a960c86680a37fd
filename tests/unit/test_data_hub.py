"""Datasets of the Hub are read by files, from a server with its routes; one that fails is asked again."""

from __future__ import annotations

import gzip
import io
import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from llmrecipes import stores
from llmrecipes.data.preparation.shards import cut
from llmrecipes.data.prepare import prepare
from llmrecipes.data.sources import file_parts, hub, sources
from llmrecipes.recipe.sections.source import make_source
from tests.refusals import refused
from tests.unit.data_recipes import recipe

_SHA = "0123456789abcdef0123456789abcdef01234567"
_NAME = "some/set"


class _Hub(ThreadingHTTPServer):
    """A server with the routes of the Hub that a dataset of files takes."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.failing, self.asked, self.read = files, dict[str, list[str]](), list[str](), Counter[str]()
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    def _send(self, code: int, content: bytes, **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._send(404, b"{}")

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(f"{self.command} {self.path}")
        if path == f"/api/datasets/{_NAME}" or path.startswith(f"/api/datasets/{_NAME}/revision/"):
            files = [{"rfilename": name} for name in self.server.files]
            self._send(200, json.dumps({"id": _NAME, "_id": "1", "sha": _SHA, "siblings": files}).encode())
        elif path.startswith(f"/api/datasets/{_NAME}/tree/"):
            folder = path.split("/tree/", 1)[1].partition("/")[2]
            inside = {n: c for n, c in self.server.files.items() if not folder or n.startswith(f"{folder}/")}
            prefix = f"{folder}/" if folder else ""
            folders = {prefix + n.removeprefix(prefix).split("/")[0] for n in inside} - set(inside)
            direct = "recursive=true" not in self.path.lower()
            tree: list[dict[str, object]] = [{"type": "directory", "path": n, "oid": "0" * 40} for n in folders]
            tree += [
                {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
                for name, content in inside.items()
                if not (direct and "/" in name.removeprefix(prefix))
            ]
            self._send(200, json.dumps(tree).encode())
        elif path.startswith(f"/datasets/{_NAME}/resolve/{_SHA}/"):
            self._file(path.split(f"/resolve/{_SHA}/", 1)[1])
        else:
            self._send(404, b"{}", X_Error_Code="EntryNotFound")

    def _file(self, name: str) -> None:
        if name not in self.server.files:
            self._send(404, b"{}", X_Error_Code="EntryNotFound")
            return
        if fault := self.server.failing.get(name) and self.server.failing[name].pop(0):
            if fault == "reset":
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self._send(int(fault), b"{}")
            return
        content, code, headers = self.server.files[name], 200, {"ETag": '"1"', "X_Repo_Commit": _SHA}
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            headers["Content_Range"] = f"bytes {first}-{last}/{len(content)}"
            content, code = content[int(first) : int(last) + 1], 206
        self.server.read[name] += len(content)
        self._send(code, content, **headers)


def _parquet(texts: list[str]) -> bytes:
    made = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), made)
    return made.getvalue()


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Hub]:
    from huggingface_hub import constants, hf_file_system
    from huggingface_hub.utils import _http

    texts = [f"{shard} {number} " + "word " * 60 for shard in range(3) for number in range(40)]
    server = _Hub({f"data/train-{n}.parquet": _parquet(texts[40 * n : 40 * n + 40]) for n in range(3)})
    threading.Thread(target=server.serve_forever, daemon=True).start()
    at = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", at)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", at + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", at)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(_http.http_backoff.__kwdefaults__, "max_retries", 0)  # its own retries take 23 s
    hf_file_system.HfFileSystem.clear_instance_cache()
    hub._data_files.cache_clear()
    yield server
    server.shutdown()
    server.server_close()
    hub._data_files.cache_clear()


def _texts(server: _Hub) -> list[str]:
    tables = (pq.read_table(io.BytesIO(server.files[name])) for name in sorted(server.files))
    return [text for table in tables for text in table.column("text").to_pylist()]


def test_files_are_shared_by_workers_and_asked_for_again(served: _Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_source(type="hub", path=_NAME)
    served.failing["data/train-1.parquet"] = ["500", "reset"]
    assert list(sources.documents(source)) == _texts(served)
    assert served.failing["data/train-1.parquet"] == []
    monkeypatch.setattr(file_parts, "PART_BYTES", max(map(len, served.files.values())))
    shards = cut((source,))
    assert len(shards) == 3
    read = [text for shard in shards for text in sources.documents(source, parts=shard.parts(source))]
    assert read == _texts(served)
    served.read.clear()
    assert next(sources.documents(source)) == read[0]
    assert served.read["data/train-0.parquet"] and not served.read["data/train-1.parquet"]


@pytest.mark.parametrize("fault", ["503", "reset", "403"])
def test_a_hub_that_stays_away_is_one_message_and_nothing_is_published(
    served: _Hub, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "PATIENCE_SECONDS", 1.5)
    served.failing["data/train-2.parquet"] = [fault] * 1000
    with refused(f"hf://datasets/{_NAME}@{_SHA}/data/train-2.parquet"):
        prepare(recipe(make_source(type="hub", path=_NAME)), tmp_path / "data", workers=1)
    assert not [path for path in (tmp_path / "data").iterdir() if path.is_dir()]
    asked = 1000 - len(served.failing["data/train-2.parquet"])
    assert asked == 1 if fault == "403" else asked >= 2


def test_a_dataset_that_is_not_there_ends_at_once(served: _Hub) -> None:
    with refused("data.sources", rule=("'no-such/set'", "HF_ENDPOINT")):
        sources.files(make_source(type="hub", path="no-such/set"))
    with refused("data.sources", rule=repr(_NAME)):
        list(sources.documents(make_source(type="hub", path=_NAME, split="validation")))


def test_lines_of_json_and_other_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "lines").mkdir()
    with gzip.open(tmp_path / "lines" / "train.jsonl.gz", "wt") as stream:
        stream.write('{"text": "one"}\n{"text": "two", "more": 1}\n')
    lines = make_source(type="hub", path=str(tmp_path / "lines"))
    assert sources.by_file(lines) and list(sources.documents(lines)) == ["one", "two"]
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "train.csv").write_text("text\nthree\n")
    table = make_source(type="hub", path=str(tmp_path / "table"))
    assert not sources.by_file(table) and list(sources.documents(table)) == ["three"]
