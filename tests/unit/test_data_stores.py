"""Sources in stores: listed and read by ranges over real HTTP, through outages; S3 of moto's server."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import fsspec  # type: ignore[import-untyped]
import pytest

from llmrecipes import stores
from llmrecipes.data.prepare import Prepared, prepare
from llmrecipes.data.sources import sources
from llmrecipes.recipe.sections.source import AnySource, make_source
from tests.object_store import s3_server
from tests.refusals import refused
from tests.unit.data_recipes import recipe


class Handler(SimpleHTTPRequestHandler):
    """Folders as lists of links, as web servers have them; and ranges of files, which Python's server has not."""

    def do_GET(self) -> None:
        file = Path(self.translate_path(self.path))
        if "forbidden" in self.path:
            self.send_error(403)
        elif file.is_file():
            content, asked = file.read_bytes(), self.headers.get("Range")
            first, last = asked.removeprefix("bytes=").split("-") if asked else ("0", "")
            part = content[int(first) : int(last) + 1 if last else None]
            self.send_response(206 if asked else 200)
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            self.wfile.write(part)
        else:
            super().do_GET()

    def log_message(self, *_: object) -> None: ...


@contextmanager
def serving(folder: Path, port: int = 0) -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """JSON lines, some of them compressed, and Parquet."""
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    root = tmp_path / "corpus"
    (root / "rows").mkdir(parents=True)
    for n in range(6):
        rows = "\n".join(json.dumps({"text": f"Document {n} {k}: " + f"{k * k + n:x} " * 40}) for k in range(30))
        if n % 2:
            (root / f"rows/{n}.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
        else:
            (root / f"rows/{n}.jsonl").write_text(rows)
    pq.write_table(pa.table({"text": [f"row {n} of parquet, {n * n}" for n in range(300)]}), root / "table.parquet")
    return root


def both(root: str) -> tuple[AnySource, ...]:
    return make_source(type="jsonl", path=f"{root}/rows/"), make_source(type="parquet", path=f"{root}/table.parquet")


def tokens(prepared: Prepared) -> dict[str, str]:
    """Hashes of the files that do not name the source."""
    return {name: file.sha256 for name, file in prepared.manifest.files.items() if not name.endswith(".md")}


@pytest.mark.rotating
def test_a_store_gives_the_tokens_of_the_files(corpus: Path, tmp_path: Path) -> None:
    local = prepare(recipe(*both(str(corpus))), tmp_path / "local", workers=1)
    with serving(corpus) as port:
        remote = both(f"http://127.0.0.1:{port}")
        made = prepare(recipe(*remote), tmp_path / "remote", workers=1)
    assert tokens(made) == tokens(local)
    assert [source.files for source in made.manifest.sources] == [source.files for source in local.manifest.sources]
    prepare(recipe(*remote), tmp_path / "remote")  # prepared: nobody asks the store, which is away


def test_files_of_a_store_by_folder_name_and_glob(corpus: Path) -> None:
    (corpus / "rows/deeper").mkdir()
    (corpus / "rows/deeper/7.jsonl").write_text('{"text": "x"}')
    (corpus / "rows/.hidden.jsonl").write_text("no JSON")
    (corpus / "rows/notes.txt").write_text("no JSON")
    with serving(corpus) as port:
        for path in ("rows/", "rows/1.jsonl.gz", "rows/*.jsonl", "rows/**/*.jsonl", "rows/[0-2].jsonl*"):
            names = [
                [
                    (file.name, sources.size_of(file))
                    for file in sources.files(make_source(type="jsonl", path=f"{root}/{path}"))
                ]
                for root in (str(corpus), f"http://127.0.0.1:{port}")
            ]
            assert names[0] == names[1], path


def test_a_store_that_is_away_is_asked_again(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a file; it comes back when it has been missed."""
    monkeypatch.setattr(stores, "_RANGE", 512)
    expected = list(sources.documents(both(str(corpus))[0]))
    missed = threading.Event()
    monkeypatch.setattr(stores.logger, "warning", lambda *_: missed.set())
    with serving(corpus) as port:
        reading = sources.documents(both(f"http://127.0.0.1:{port}")[0])
        read = [next(reading) for _ in range(40)]

    def return_when_missed() -> None:
        assert missed.wait(60)
        with serving(corpus, port):
            ended.wait(60)

    ended = threading.Event()
    thread = threading.Thread(target=return_when_missed)
    thread.start()
    try:
        read += reading
    finally:
        ended.set()
        thread.join()
    assert missed.is_set() and read == expected


def test_what_a_store_refuses_is_one_message(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "PATIENCE_SECONDS", 1.0)
    with serving(corpus) as port:
        root = f"http://127.0.0.1:{port}"
        for path in (f"{root}/none.jsonl", f"{root}/forbidden/"):
            with refused(path):
                sources.files(make_source(type="jsonl", path=path))
        with refused("data.sources"):
            sources.files(make_source(type="parquet", path=f"{root}/rows/"))
        for path in (f"http://me:secret@127.0.0.1:{port}/rows/", f"{root}/rows/?X-Amz-Signature=secret"):
            with refused("data.sources") as caught:
                sources.files(make_source(type="jsonl", path=path))
            assert "secret" not in str(caught.value)
    with refused(f"{root}/rows/"):
        sources.files(make_source(type="jsonl", path=f"{root}/rows/"))
    with refused("data.sources"):
        sources.files(make_source(type="jsonl", path="nostore://bucket/"))
    for path in ("ftp://127.0.0.1:1/x/", "zip://x", "hdfs://x/y"):  # these connect, or open, before they are asked
        with refused(path):
            sources.files(make_source(type="jsonl", path=path))
    for path in ("reference://x", "dir://x", "jupyter://x", "dbfs://x", "generic://x", "simplecache://x"):
        with refused("data.sources", rule=path.partition("x")[0]):
            sources.files(make_source(type="jsonl", path=path))
    if find_spec("gcsfs") is None:
        with refused("data.sources", rule=f"gcsfs=={fsspec.__version__}"):
            sources.files(make_source(type="jsonl", path="gs://bucket/"))


@pytest.fixture
def s3(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """A server that has the corpus in `s3://corpus/web/`, with its credentials in the environment. The class of the
    file system, through which s3fs forgets credentials that are gone."""
    with s3_server(monkeypatch, "corpus"):
        store = fsspec.filesystem("s3")
        store.put(f"{corpus}/", "corpus/web/", recursive=True)
        yield type(store)


def test_s3(corpus: Path, s3: type, monkeypatch: pytest.MonkeyPatch) -> None:
    for local, remote in zip(both(str(corpus)), both("s3://corpus/web"), strict=True):
        assert list(sources.documents(remote)) == list(sources.documents(local))
    with refused("s3://none/"):
        sources.files(make_source(type="jsonl", path="s3://none/"))
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.delenv(f"AWS_{name}")
    s3.clear_instance_cache()  # type: ignore[attr-defined]
    with refused("s3://corpus/"):
        sources.files(make_source(type="jsonl", path="s3://corpus/"))


@pytest.mark.rotating
@pytest.mark.usefixtures("s3")
def test_s3_by_processes(corpus: Path, tmp_path: Path) -> None:
    local = prepare(recipe(*both(str(corpus))), tmp_path / "local", workers=1)
    made = prepare(recipe(*both("s3://corpus/web")), tmp_path / "remote", workers=2)
    assert tokens(made) == tokens(local)
    assert not any(b"very-secret" in path.read_bytes() for path in made.path.rglob("*") if path.is_file())
