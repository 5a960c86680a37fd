"""Forming the process group: what NCCL is told, which no machine without a GPU can try."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llmrecipes.engine.megatron.platform.rendezvous import TIMEOUT, connect


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
