"""Who a process is, from what its launcher says."""

from __future__ import annotations

import pytest

from llmrecipes.launch.ranks import FIRST_PORT, PORTS, Rank, from_slurm, port_of
from tests.refusals import refused

TASK = {
    "SLURM_JOB_ID": "16001",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "MASTER_ADDR": "node1",
}


def test_a_task_of_srun() -> None:
    assert from_slurm(TASK) == Rank(9, 16, 1, 8, "node1", 12001)
    assert from_slurm({**TASK, "SLURM_STEP_TASKS_PER_NODE": "8"}).local_world_size == 8
    assert from_slurm(TASK).variables() == {
        "RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "node1",
        "MASTER_PORT": "12001",
    }  # fmt: skip


def test_ranks_of_one_machine_listen_to_no_other() -> None:
    alone = from_slurm({**TASK, "SLURM_NTASKS": "8", "SLURM_PROCID": "1", "SLURM_STEP_TASKS_PER_NODE": "8"})
    assert alone.variables().items() >= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}.items()


@pytest.mark.parametrize("name", TASK)
def test_what_is_missing_is_named(name: str) -> None:
    with refused("srun", rule=name):
        from_slurm({key: value for key, value in TASK.items() if key != name})


@pytest.mark.parametrize("job", ["0", "4294967295", "training-x7k2p", "名"])
def test_ports_lie_below_those_that_linux_gives_out(job: str) -> None:
    assert FIRST_PORT <= port_of(job) < FIRST_PORT + PORTS < 32768
    assert port_of(job) == port_of(job)
