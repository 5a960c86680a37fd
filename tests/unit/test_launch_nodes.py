"""Which of several machines this is, and the ranks that it starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmrecipes.launch.local import run_ranks
from llmrecipes.launch.ranks import Node, Rank, node
from tests.refusals import refused

PROGRAM = """
import json, os, sys
from pathlib import Path
(Path(sys.argv[1]) / f"{os.environ['RANK']}.json").write_text(json.dumps(dict(os.environ)))
print("rank", os.environ["RANK"], flush=True)
"""


def test_options_say_it() -> None:
    assert node(4, 2, "node-0:29500", {}) == Node(2, 4, "node-0", 29500)
    assert node(2, 0, "[fd00::1]:29500", {}).master_addr == "fd00::1"


def test_a_pod_knows_it() -> None:
    job = {"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "run-0.run", "MASTER_PORT": "29500"}
    assert node(2, None, None, job) == Node(1, 2, "run-0.run", 29500)
    trainer = {"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "run-node-0-0.run", "PET_MASTER_PORT": "29400"}
    assert node(2, None, None, {**trainer, "JOB_COMPLETION_INDEX": "0"}) == Node(1, 2, "run-node-0-0.run", 29400)
    assert node(2, 0, "here:1", job) == Node(0, 2, "here", 1), "what is said wins"


@pytest.mark.parametrize(
    ("number", "rendezvous", "where"),
    [
        (None, "a:1", "--node-rank"),
        (2, "a:1", "--node-rank"),
        (-1, "a:1", "--node-rank"),
        (0, None, "--rdzv"),
        (0, "a", "--rdzv"),
        (0, ":1", "--rdzv"),
        (0, "a:99999", "--rdzv"),
        (0, "a:b", "--rdzv"),
    ],
)
def test_what_is_missing_or_wrong_is_named(number: int | None, rendezvous: str | None, where: str) -> None:
    with refused(where):
        node(2, number, rendezvous, {"JOB_COMPLETION_INDEX": "x"})


def test_ranks_count_over_the_nodes() -> None:
    assert Node(1, 3, "a", 7).ranks(2) == [Rank(2, 6, 0, 2, "a", 7), Rank(3, 6, 1, 2, "a", 7)]


def test_a_node_starts_its_own_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank_program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    here = Node(1, 2, "node-0", 29500)
    assert run_ranks("rank_program", [str(tmp_path)], world_size=4, threads=1, logs=tmp_path, node=here) == 0
    started = sorted(path.stem for path in tmp_path.glob("*.json"))
    assert started == ["2", "3"]
    found = json.loads((tmp_path / "3.json").read_text())
    assert (found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"], found["WORLD_SIZE"]) == ("1", "2", "4")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("node-0", "29500")
    assert "GLOO_SOCKET_IFNAME" not in found, "the other nodes are not on the loopback interface"
    assert capfd.readouterr().out == "rank 2\n"
    assert (tmp_path / "rank-3.log").read_text() == "rank 3\n"
