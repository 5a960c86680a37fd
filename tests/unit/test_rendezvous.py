"""Forming the process group: who can reach it, and what NCCL is told, which no machine without a GPU can try."""

from __future__ import annotations

import socket
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from llmrecipes.engine.core.platform.process_group import TIMEOUT, connect
from llmrecipes.launch.ranks import Rank
from tests.refusals import refused


def test_nccl_gets_the_device_and_later_groups_are_not_split_off(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    real = dist.init_process_group

    def init(backend: str, *, device_id: torch.device | None, **options: Any) -> None:
        told.update(backend=backend, device_id=device_id)
        real("gloo", **options)
        dist.group.WORLD.bound_device_id = device_id  # type: ignore[union-attr]  # as torch does

    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    gpu: Any = SimpleNamespace(name="cuda", backend="nccl", device=torch.device("cuda", 3))
    connect(gpu, TIMEOUT)
    try:
        assert told == {"backend": "nccl", "device_id": torch.device("cuda", 3)}
        # Bound to a GPU, torch would split later groups off by a collective of all ranks.
        assert dist.group.WORLD.bound_device_id is None  # type: ignore[union-attr]
        assert dist.new_group([0], backend="gloo").size() == 1
    finally:
        dist.destroy_process_group()
    cpu: Any = SimpleNamespace(name="cpu", backend="gloo", device=torch.device("cpu"))
    connect(cpu, TIMEOUT)
    dist.destroy_process_group()
    assert told == {"backend": "gloo", "device_id": None}


def test_ranks_of_one_machine_open_no_port_to_the_network(monkeypatch: pytest.MonkeyPatch, unused_port: int) -> None:
    """torch's store takes keys and values from whoever connects, and would listen on all interfaces."""
    rank = Rank(0, 1, 0, 1, "node1", unused_port)
    for name, value in rank.variables().items():
        monkeypatch.setenv(name, value)
    cpu: Any = SimpleNamespace(name="cpu", backend="gloo", device=torch.device("cpu"))
    before = set(_listening())
    connect(cpu, TIMEOUT)
    try:
        other = dist.TCPStore("127.0.0.1", unused_port, is_master=False, timeout=timedelta(seconds=30))
        other.set("key", "value")
        assert other.get("key") == b"value"
        addresses = set(_listening()) - before
        assert ("127.0.0.1", unused_port) in addresses
        assert {address for address, _ in addresses} == {"127.0.0.1"}
    finally:
        dist.destroy_process_group()


def _listening() -> list[tuple[str, int]]:
    """Addresses on which this process listens."""
    return [
        (connection.laddr.ip, connection.laddr.port)
        for connection in psutil.Process().net_connections()
        if connection.status == psutil.CONN_LISTEN
    ]


def test_a_port_in_use_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu: Any = SimpleNamespace(name="cpu", backend="gloo", device=torch.device("cpu"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for name, value in Rank(0, 2, 0, 2, "node1", port).variables().items():
            monkeypatch.setenv(name, value)
        with refused(f"127.0.0.1:{port}"):
            connect(cpu, TIMEOUT)
