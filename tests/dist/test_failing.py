"""A rank that fails while the others wait for it, or has another device than they have."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmrecipes.launch.local.processes import reserved_port
from tests.dist.failing import fail_alone, join_with_another_device
from tests.dist.worlds import GlooWorld


@pytest.mark.parametrize(
    ("what", "code", "text"), [("defect", 1, "RuntimeError"), ("mistake", 93, "error: "), ("stuck", 1, "RuntimeError")]
)
@pytest.mark.rotating
def test_a_rank_that_fails_reports_and_leaves_without_waiting_for_the_others(
    worlds: dict[int, GlooWorld], tmp_path: Path, what: str, code: int, text: str
) -> None:
    with reserved_port() as port:
        running = worlds[2].start(fail_alone, port, tmp_path, what, group=False)
        running.said()
        codes = running.end()
    assert sorted(codes) == [1, code]  # the other rank finds that its peer has gone
    assert text in (tmp_path / "1.err").read_text("utf-8")


def test_ranks_with_and_without_a_gpu_are_refused_before_they_connect(
    worlds: dict[int, GlooWorld], tmp_path: Path
) -> None:
    with reserved_port() as port:
        found = worlds[2].start(join_with_another_device, port, tmp_path, group=False).result()
    assert found == "torch.cuda"
