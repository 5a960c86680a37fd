"""Transfers between nodes, and what follows from them: pure functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from llmrecipes.bench.fabric.perftest import What
from llmrecipes.bench.results import LEAST
from llmrecipes.doctor.check_result import Finding, bad_nodes, fail, warn

End = tuple[str, str]
"""A host, and a port of it such as `mlx5_0/1`."""
TRANSFERS_SHOWN = 3


@dataclass(frozen=True)
class Transfer:
    """From one port to another: what was measured, or why it was not."""

    kind: Kind
    sender: str
    sender_port: str
    receiver: str
    receiver_port: str
    latency_us: float | None = None
    """Half a round trip of a small message: the median."""
    latency_99_us: float | None = None
    gb_per_s: float | None = None
    """1e9 bytes a second."""
    error: str = ""

    def has(self, what: What) -> bool:
        """Whether this was measured."""
        return (self.latency_us if what == "latency" else self.gb_per_s) is not None

    @property
    def ends(self) -> tuple[End, End]:
        return (self.sender, self.sender_port), (self.receiver, self.receiver_port)


def percent(share: float) -> str:
    """A share with three digits at most."""
    return "<0.1%" if share < 0.001 else f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


@dataclass(frozen=True)
class Report:
    """What all nodes have measured and found; `expected_gb_per_s` is the profile's bandwidth of a port.

    `nodes` is the number of those of the job, `measured_nodes` of those that had a port to measure.
    """

    profile: str | None
    expected_gb_per_s: float | None
    nodes: int
    measured_nodes: int
    transfers: list[Transfer]
    findings: list[Finding]

    @property
    def bad_nodes(self) -> list[str]:
        return bad_nodes(self.findings)

    def share(self, transfer: Transfer) -> float | None:
        """Share of the expected bandwidth."""
        if transfer.gb_per_s is None or self.expected_gb_per_s is None:
            return None
        return transfer.gb_per_s / self.expected_gb_per_s

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "ok": not self.bad_nodes,
            "bad_nodes": self.bad_nodes,
            "profile": self.profile,
            "nodes": self.nodes,
            "measured_nodes": self.measured_nodes,
            "expected_gb_per_s": self.expected_gb_per_s,
            "transfers": [{**asdict(transfer), "share": self.share(transfer)} for transfer in self.transfers],
            "findings": [finding.as_dict() for finding in self.findings],
        }


def judge(
    transfers: Sequence[Transfer], expected_gb_per_s: float | None, profile: str | None, known: Sequence[Finding]
) -> list[Finding]:
    """Which ports are to blame for transfers that failed or were slow.

    A port is to blame if nothing with it worked: a good one is fine with its other neighbour.

    Args:
        expected_gb_per_s: of a port; None: nothing is slow.
        known: failures that the nodes reported; they explain the transfers of those ports and nodes.
    """
    explained = {
        (finding.node, finding.check.removeprefix("adapter ")) for finding in known if finding.status == "fail"
    }
    gone = {finding.node for finding in known if finding.status == "fail" and finding.check == "node"}

    def is_explained(transfer: Transfer) -> bool:
        return any(end in explained or end[0] in gone for end in transfer.ends)

    # A slow one too: over a link that goes down, perftest ends with a small figure after its time.
    open_ones = [transfer for transfer in transfers if not is_explained(transfer)]
    findings = list(_failed(open_ones))
    if expected_gb_per_s is not None:
        findings += _slow(open_ones, expected_gb_per_s, profile or "the profile")
    return findings


def _failed(transfers: Sequence[Transfer]) -> Iterator[Finding]:
    by_end = _by_end(transfers)
    bad = {end for end, failed in by_end.items() if all(transfer.error for transfer in failed)}
    # Where both ends work with others, the way between them does not: the sender names it.
    bad |= {transfer.ends[0] for transfer in transfers if transfer.error and not set(transfer.ends) & bad}
    for host, port in sorted(bad):
        failed = [transfer for transfer in by_end[host, port] if transfer.error]
        what = "; ".join(f"{_other(transfer, host)}: {transfer.error}" for transfer in failed[:TRANSFERS_SHOWN])
        fix = "ping the other end over this interface; compare GID, MTU and VLAN of both; cable and switch port; dmesg"
        yield _at(host, fail(f"adapter {port}", f"{_count(failed, by_end[host, port])} failed: {what}", fix))


def _slow(transfers: Sequence[Transfer], expected: float, profile: str) -> Iterator[Finding]:
    by_end = _by_end([transfer for transfer in transfers if transfer.gb_per_s is not None])
    for (host, port), measured in sorted(by_end.items()):
        slow = [transfer for transfer in measured if (transfer.gb_per_s or 0) < LEAST * expected]
        if len(slow) < len(measured):
            continue
        speeds = "; ".join(
            f"{_other(transfer, host)}: {transfer.gb_per_s:.3g} GB/s" for transfer in slow[:TRANSFERS_SHOWN]
        )
        best = max(transfer.gb_per_s or 0 for transfer in slow) / expected
        what = f"{speeds}; at most {percent(best)} of {expected:g} GB/s a port ({profile})"
        fix = "width and generation of PCIe (lspci -vv), error counters (perfquery), cable, congestion of the switches"
        yield _at(host, warn(f"adapter {port}", what, fix))


def _by_end(transfers: Sequence[Transfer]) -> dict[End, list[Transfer]]:
    by_end: dict[End, list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        for end in transfer.ends:
            by_end[end].append(transfer)
    return by_end


def _other(transfer: Transfer, host: str) -> str:
    if host == transfer.sender:
        return f"to {transfer.receiver} {transfer.receiver_port}"
    return f"from {transfer.sender} {transfer.sender_port}"


def _count(some: Sequence[Transfer], all_transfers: Sequence[Transfer]) -> str:
    return f"{len(some)} of {len(all_transfers)} transfers"


def _at(host: str, finding: Finding) -> Finding:
    return Finding(finding.check, finding.status, finding.what, finding.fix, host)


Kind = Literal["neighbours", "halves"]
Pairs = list[tuple[int, int]]


def rounds(nodes: Sequence[int]) -> list[tuple[Kind, Pairs]]:
    """Rounds of pairs (sender, receiver); in each, a node is in one pair at most, and all pairs measure at once.

    A ring first, so that every node sends to one neighbour and receives from the other: a bad port is slow with both.
    Then the first half with the second one, across the switches above them. The number of rounds does not depend on
    that of the nodes: 2 to 4.

    Args:
        nodes: numbers of the nodes that take part, in the order of the job.
    """
    count = len(nodes)
    if count < 2:
        return []
    ring = [(nodes[at], nodes[(at + 1) % count]) for at in range(count)]
    odd = ring[-1:] if count % 2 else []
    even = ring[: count - len(odd)]
    stages: list[tuple[Kind, Pairs]] = [("neighbours", pairs) for pairs in (even[::2], even[1::2], odd) if pairs]
    if count >= 4:
        half = count // 2
        stages.append(("halves", [(nodes[at], nodes[at + half]) for at in range(half)]))
    return stages
