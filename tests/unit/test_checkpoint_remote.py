"""Copies of checkpoints in S3 of moto's server: complete or none, through faults of the store and the network."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest

from llmrecipes import stores
from llmrecipes.checkpoint import remote as remote_module
from llmrecipes.checkpoint.manifest import MANIFEST_NAME, CheckpointInfo, Monitored, read_manifest
from llmrecipes.checkpoint.rank_groups import own_share
from llmrecipes.checkpoint.remote import RemoteCheckpoints
from llmrecipes.checkpoint.store import CheckpointStore
from tests.object_store import Proxy, credentials, first, give_up_after, s3_server
from tests.refusals import refused

RANKS = 3
URL, RUN = "s3://runs/folder with a space", "gpt/a"


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    """Port of the server, which has an empty bucket."""
    with pytest.MonkeyPatch.context() as patch, s3_server(patch, "runs") as port:
        yield port


@pytest.fixture
def proxy(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Before the server, whose bucket is empty; few tries, and short ones."""
    credentials(monkeypatch, server)
    store = fsspec.filesystem("s3", skip_instance_cache=True)
    if store.exists("runs/folder with a space"):
        store.rm("runs/folder with a space", recursive=True)
    proxy = Proxy(server)
    credentials(monkeypatch, proxy.port)
    give_up_after(monkeypatch, 20)
    yield proxy
    proxy.close()


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def saved(store: CheckpointStore, step: int, loss: float | None = None, offset: int = 0) -> Path:
    """A checkpoint of three ranks, in files of which one is in a folder."""
    temporary = store.temporary(step)
    (temporary / "folder").mkdir()
    for number in range(RANKS):
        (temporary / f"__{number}_0.distcp").write_bytes(bytes([number, step + offset]) * 50_000)
    (temporary / "folder" / "index.bin").write_bytes(b"index")
    info = CheckpointInfo(
        step=step,
        consumed_samples=step,
        consumed_tokens=step,
        layout={},
        recipe_hash="r",
        monitored=None if loss is None else Monitored(step=step, loss=loss),
    )
    return store.publish(temporary, info, versions={}).path


def copied(folder: Path) -> RemoteCheckpoints:
    """Copy a checkpoint as three ranks do, the first of which sees that the others are done."""
    ranks = [RemoteCheckpoints(URL, RUN) for _ in range(RANKS)]
    files = read_manifest(folder).files
    threads = [
        threading.Thread(target=each.upload, args=(folder, own_share(files, number, RANKS)))
        for number, each in enumerate(ranks)
    ]
    for thread in threads:
        thread.start()
    ranks[0].announce(folder, lambda: False)
    for thread in threads:
        thread.join()
    return ranks[0]


def fetched(remote: RemoteCheckpoints, step: int, store: CheckpointStore) -> Path:
    """Fetch a copy into a store."""
    folder = remote.copies()[step]
    manifest, content = remote.manifest(folder)
    temporary = store.temporary(step, "copy")
    for rank in range(RANKS):
        names = own_share(manifest.files, rank, RANKS)
        remote.fetch(folder, {name: manifest.files[name] for name in names}, temporary)
    store.adopt(temporary, content, step)
    return store.path(step)


def require_same(one: Path, other: Path) -> None:
    names = {path.relative_to(one) for path in one.rglob("*") if path.is_file()}
    assert names == {path.relative_to(other) for path in other.rglob("*") if path.is_file()}
    assert all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


@pytest.mark.usefixtures("proxy")
def test_a_copy_is_none_before_all_of_it_is_there(store: CheckpointStore, tmp_path: Path) -> None:
    folder = saved(store, 10)
    remote = RemoteCheckpoints(URL, RUN)
    assert list(remote.copies()) == []
    files = read_manifest(folder).files
    remote.upload(folder, own_share(files, 0, RANKS))
    missing = own_share(files, 1, RANKS)
    with refused(remote.url) as caught:
        remote.announce(folder, lambda: True)
    assert missing[0] in str(caught.value) and list(remote.copies()) == []
    assert list(copied(folder).copies()) == [10]
    require_same(fetched(remote, 10, CheckpointStore(tmp_path / "elsewhere")), folder)


def test_what_is_there_is_not_sent_again(proxy: Proxy, store: CheckpointStore) -> None:
    folder = saved(store, 10)
    remote = RemoteCheckpoints(URL, RUN)
    names = list(read_manifest(folder).files)
    remote.upload(folder, names)
    sent = sum(method in ("PUT", "POST") for method, _ in proxy.asked)
    remote.upload(folder, names)
    assert sent >= len(names) and sum(method in ("PUT", "POST") for method, _ in proxy.asked) == sent


@pytest.mark.parametrize(
    ("number", "fault", "of"),
    [(2, 503, "PUT"), (3, "cut", "PUT"), (1, "hang", "PUT"), (2, 500, "GET")],
)
def test_a_copy_gets_through_faults(
    number: int, fault: int | str, of: str, proxy: Proxy, store: CheckpointStore, tmp_path: Path
) -> None:
    folder = saved(store, 10)
    proxy.fault = first(number, fault, of)
    remote = copied(folder)
    proxy.fault = first(number, fault, "GET")
    require_same(fetched(remote, 10, CheckpointStore(tmp_path / "elsewhere")), folder)


def test_a_large_file_goes_in_parts_that_memory_can_hold(
    proxy: Proxy, store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "_PART", 5 << 20)  # S3 takes no smaller ones
    temporary = store.temporary(10)
    (temporary / "__0_0.distcp").write_bytes(bytes(range(256)) * (52 << 10))
    info = CheckpointInfo(step=10, consumed_samples=1, consumed_tokens=1, layout={}, recipe_hash="r")
    folder = store.publish(temporary, info, versions={}).path
    remote = RemoteCheckpoints(URL, RUN)
    remote.upload(folder, ["__0_0.distcp"])
    remote.announce(folder, lambda: False)
    assert sum("partNumber=" in path for _, path in proxy.asked) == 3
    require_same(fetched(remote, 10, CheckpointStore(tmp_path / "elsewhere")), folder)


@pytest.mark.parametrize("fault", [403, 507, "hang", "cut"])
def test_a_store_that_does_not_take_it_is_one_message_in_time(
    fault: int | str, proxy: Proxy, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(store, 10)
    remote = RemoteCheckpoints(URL, RUN)
    monkeypatch.setattr(stores, "PATIENCE_SECONDS", 2.0)
    proxy.fault = first(10_000, fault)
    with refused(remote.url) as caught:
        remote.upload(folder, ["__0_0.distcp"])
    assert "very-secret" not in str(caught.value)
    with refused(remote.url):
        remote.announce(folder, lambda: False)
    proxy.fault = first(0, 0)
    assert list(RemoteCheckpoints(URL, RUN).copies()) == []


@pytest.mark.usefixtures("proxy")
def test_a_bucket_that_is_not_there_is_one_message(store: CheckpointStore) -> None:
    remote = RemoteCheckpoints("s3://none", RUN)
    assert list(remote.copies()) == []
    with refused(remote.url):
        remote.upload(saved(store, 10), ["__0_0.distcp"])


@pytest.mark.parametrize("damage", ["changed", "shorter", "gone", "manifest"])
def test_a_damaged_copy_is_not_fetched(damage: str, proxy: Proxy, store: CheckpointStore, tmp_path: Path) -> None:
    remote = copied(saved(store, 10))
    s3: Any = fsspec.filesystem("s3", skip_instance_cache=True)
    file = f"runs/folder with a space/{RUN}/{remote.copies()[10]}/__1_0.distcp"
    content = s3.cat_file(file)
    manifest = file.replace("__1_0.distcp", MANIFEST_NAME)
    if damage == "changed":
        s3.pipe_file(file, b"\xff" + content[1:])
    elif damage == "shorter":
        s3.pipe_file(file, content[1:])
    elif damage == "gone":
        s3.rm_file(file)
    else:
        s3.pipe_file(manifest, s3.cat_file(manifest).replace(b'"step": 10', b'"step": 11'))
    elsewhere = CheckpointStore(tmp_path / "elsewhere")
    with refused(f"{remote.url}/{remote.copies()[10]}"):
        fetched(remote, 10, elsewhere)
    assert elsewhere.entries() == []


def test_old_copies_go_as_checkpoints_do(proxy: Proxy, store: CheckpointStore) -> None:
    for step, loss in ((5, 3.0), (10, 1.0), (15, 2.0), (20, 2.5), (25, 2.0)):
        remote = copied(saved(store, step, loss))
    proxy.asked.clear()
    assert remote.prune(2, 15, keep_best=True, before=25) == [5]
    deleted = [path for method, path in proxy.asked if method in ("DELETE", "POST")]
    assert re.search(f"step-00000005-[0-9a-f]+/{MANIFEST_NAME}", deleted[0])  # first: a copy that is half gone is none
    assert list(remote.copies()) == [10, 15, 20, 25]
    assert remote.prune(2, None, keep_best=False, before=25) == [10, 15]


@pytest.mark.usefixtures("proxy")
def test_a_step_that_is_saved_again_does_not_mix_with_what_was_there(store: CheckpointStore, tmp_path: Path) -> None:
    """Files have the sizes of before: a run has gone back, and its first attempt was copied, or uploaded in part."""
    first_time = saved(store, 10)
    remote = copied(first_time)
    store.withdraw(5)
    again = saved(store, 10, offset=1)
    remote.upload(again, own_share(read_manifest(again).files, 0, RANKS))
    with refused(remote.url):
        remote.announce(again, lambda: True)
    assert list(remote.copies()) == [10], "the earlier one stays until the later one is complete"
    copied(again)
    require_same(fetched(remote, 10, CheckpointStore(tmp_path / "elsewhere")), again)


@pytest.mark.usefixtures("proxy")
def test_what_a_killed_upload_has_left_is_deleted_with_old_copies(store: CheckpointStore) -> None:
    remote = RemoteCheckpoints(URL, RUN)
    remote.upload(saved(store, 5), ["__0_0.distcp"])
    copied(saved(store, 10))
    remote.prune(2, None, keep_best=False, before=10)
    s3 = fsspec.filesystem("s3", skip_instance_cache=True)
    assert [Path(path).name for path in s3.ls(f"runs/folder with a space/{RUN}")] == [remote.copies()[10]]


@pytest.mark.usefixtures("proxy")
def test_copies_go_as_their_run_goes_back(store: CheckpointStore) -> None:
    for step in (5, 10, 15):
        remote = copied(saved(store, step))
    remote.delete_after(10)
    assert list(remote.copies()) == [5, 10]
    remote.set_aside()
    assert not remote.copies()
    copied(saved(store, 20))
    remote.prune(2, None, keep_best=False, before=20)
    s3 = fsspec.filesystem("s3", skip_instance_cache=True)
    aside = s3.glob(f"runs/folder with a space/{RUN}/step-0000001*/__0_0.distcp")
    assert len(aside) == 1, "what is set aside is not deleted"
