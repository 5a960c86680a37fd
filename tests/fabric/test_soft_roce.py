"""The doctor and `bench fabric` on real verbs between two machines, with a cable that is pulled."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from llmrecipes.doctor.fabric import FLAPS
from tests.fabric.guests import Ended, Guest

Pair = tuple[Guest, Guest]
SITE = ("--cluster", "/commands/soft-roce.yaml")
SECONDS = 400
"""For a command that starts Python: emulated, and on a busy machine."""
LIMIT, PATIENCE = 15, 120
AMPLE = 120
"""Limit of transfers that do end: a busy machine emulates them slowly."""


def doctor(guest: Guest, *words: str) -> dict[str, Any]:
    """Findings of the doctor, by status and check."""
    command = guest.llmrecipes(
        "doctor", *(words or SITE), "--json", "--runs-dir", "/tmp/runs", "--data-dir", "/tmp/data"
    )
    findings = json.loads(command.end(SECONDS).out)["findings"]
    return {f"{finding['status']} {finding['check']}": finding for finding in findings}


def start_bench(guests: Pair, *words: str, limit: int = LIMIT) -> list[Any]:
    options = (*SITE, "--nodes", "guest1,guest2", "--limit", str(limit), "--patience", str(PATIENCE), *words)
    return [guest.llmrecipes("bench", "fabric", *options) for guest in guests]


def end_bench(commands: list[Any], code: int) -> tuple[Ended, list[str]]:
    """The first node's end; only it has printed, and all have the same exit code."""
    first, *others = [command.end(SECONDS + 4 * AMPLE) for command in commands]
    print(f"{first.out}{first.seconds:.0f} s")
    assert [other.code for other in (first, *others)] == [code] * len(commands), (first, others)
    assert not any(other.out for other in others)
    return first, [line for line in first.out.splitlines() if line.startswith("FAIL")]


def test_the_doctor_reads_a_healthy_port_and_says_which_ones_another_site_would_use(guests: Pair) -> None:
    found = doctor(guests[0])
    assert "rxe0" in found["ok adapters"]["what"] and "12.5 GB/s" in found["ok adapters"]["what"]
    assert not [name for name in found if name.startswith(("fail adapter", "warn adapter", "fail RoCE"))]
    found = doctor(guests[0], "--cluster", "a100-roce")
    assert "25 a port" in found["fail adapter rxe0/1"]["what"]
    assert "fail adapters" in found and "ok adapters" not in found


def test_bandwidth_and_latency_are_shown_beside_the_profile(guests: Pair) -> None:
    first, failed = end_bench(start_bench(guests, limit=AMPLE), 0)
    assert not failed
    rows = [re.split(r" {2,}", line) for line in first.out.splitlines() if line.startswith("guest")]
    assert [(row[0], row[2]) for row in rows] == [("guest1", "guest2"), ("guest2", "guest1")]
    for _, _, _, _, speed, share, typical, slow in rows:
        assert 0 < float(speed) < 12.5 and share.endswith("%")
        assert 0 < float(typical) <= float(slow)
    # An emulation has nothing of 12.5 GB/s: both ports are named, as warnings.
    assert "WARN guest1: adapter rxe0/1" in first.out and "WARN guest2: adapter rxe0/1" in first.out


@contextmanager
def pulled(guest: Guest) -> Iterator[None]:
    guest.link(up=False)
    try:
        yield
    finally:
        guest.link(up=True)


# 500 pings for the latency, then 64 KiB in 16 packets again and again.
@pytest.mark.parametrize(("packets", "seconds"), [(30, 3), (5000, 30)], ids=["latency", "bandwidth"])
def test_a_cable_that_is_pulled_meanwhile_ends_in_a_message_with_node_and_port(
    guests: Pair, packets: int, seconds: int
) -> None:
    counter = f"{guests[1].port}/hw_counters/rcvd_pkts"
    least = int(guests[1].run(f"cat {counter}")) + packets
    running = start_bench(guests, "--seconds", str(seconds))
    guests[1].run(
        f"for i in $(seq 4000); do [ $(cat {counter}) -gt {least} ] && exit; sleep 0.1; done; exit 1", SECONDS
    )
    with pulled(guests[1]):
        first, failed = end_bench(running, 1)
        assert any("guest2: adapter rxe0/1" in line and "DOWN" in line for line in failed)
        assert not any("guest1" in line.partition(": ")[0] for line in failed), "its port is fine"
        # Two rounds, each with two measurements of which one can wait; and the starts of Python and perftest.
        assert first.seconds < 2 * (2 * seconds + LIMIT) + PATIENCE


def test_a_port_that_is_down_is_named_by_the_doctor_and_the_bench(guests: Pair) -> None:
    with pulled(guests[1]):
        found = doctor(guests[1])
        assert "DOWN" in found["fail adapter rxe0/1"]["what"]
        assert "fail adapters" in found and "ok adapters" not in found
        assert "ok adapters" in doctor(guests[0])  # as behind a switch, the far end sees nothing
        _, failed = end_bench(start_bench(guests), 1)
        assert any("guest2: adapter rxe0/1" in line and "DOWN" in line for line in failed)
    assert "ok adapters" in doctor(guests[1])


def test_a_node_that_never_comes_is_named(guests: Pair) -> None:
    options = (*SITE, "--nodes", "guest1,guest2", "--patience", "3")
    ended = guests[0].llmrecipes("bench", "fabric", *options, "--json").end(SECONDS)
    answer = json.loads(ended.out)
    assert (ended.code, answer["bad_nodes"], answer["transfers"]) == (1, ["guest2"], [])
    ended = guests[1].llmrecipes("bench", "fabric", *options).end(SECONDS)
    assert ended.code == 2 and "guest1:12000" in ended.err and "Traceback" not in ended.err


def test_a_link_that_flaps_is_noticed(guests: Pair) -> None:
    for _ in range(FLAPS + 1):
        guests[0].link(up=False)
        guests[0].link(up=True)
    counted = int(guests[0].run(f"cat {guests[0].port}/hw_counters/link_downed"))
    assert counted > FLAPS
    assert str(counted) in doctor(guests[0])["warn adapter rxe0/1"]["what"].split()


def test_an_adapter_by_another_name_is_named(guests: Pair) -> None:
    guest = guests[0]
    guest.run(
        "sed s/rxe0/mlx5_0/ /commands/soft-roce.yaml >/tmp/renamed.yaml; sed -i s/soft-roce/renamed/ /tmp/renamed.yaml"
    )
    words = ("--runs-dir", "/tmp/runs", "--data-dir", "/tmp/data", "--quiet")
    ended = guest.llmrecipes("doctor", "--cluster", "/tmp/renamed.yaml", *words).end(SECONDS)
    print(ended.out)
    failed = [line for line in ended.out.splitlines() if line.startswith("FAIL adapters ")]
    assert ended.code == 1 and len(failed) == 1
    assert "mlx5_0" in failed[0] and "rxe0/1" in failed[0]
