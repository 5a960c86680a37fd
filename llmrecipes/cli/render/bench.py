"""Output of `bench`."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from llmrecipes.bench.fabric.transfers import Kind, percent
from llmrecipes.bench.results import LEAST
from llmrecipes.cli.render.table import aligned
from llmrecipes.units import GIB, KIB, MIB

if TYPE_CHECKING:
    from llmrecipes.bench.fabric.transfers import Report, Transfer
    from llmrecipes.bench.results import Collectives, Comparison, RankSpeeds


def bandwidths(measured: Collectives) -> str:
    """Bus bandwidth: a line for each operation and group, a column for each size."""
    sizes = sorted({row.bytes for row in measured.rows})
    lines = [f"{measured.world_size} ranks over {measured.backend}; bus bandwidth in GB/s"]
    if not measured.rows:
        return f"{lines[0]}: no group has more than one rank; try --nproc 2"
    lines.append(f"{'operation':15} {'group':9} ranks" + "".join(f"{_size(size):>10}" for size in sizes))
    rows: dict[tuple[str, str, int], dict[int, float]] = {}
    for row in measured.rows:
        rows.setdefault((row.operation, row.group, row.ranks), {})[row.bytes] = row.bus_gb_per_s
    for (operation, group, ranks), speeds in sorted(rows.items(), key=lambda each: each[0][1]):
        cells = "".join(f"{speeds[size]:10.3f}" if size in speeds else f"{'':10}" for size in sizes)
        lines.append(f"{operation:15} {group:9} {ranks:5}{cells}")
    return "\n".join(lines)


def rank_speeds(measured: RankSpeeds) -> str:
    """The speeds of all ranks in one line, and one for each that is slow."""
    from llmrecipes.bench.results import slow_ranks

    speeds = [measured.flops / seconds / 1e12 for seconds in measured.seconds]
    middle = statistics.median(speeds)
    lines = [
        f"warning: rank {rank} on {measured.hosts[rank]}: {speeds[rank]:.3g} TFLOP/s, {share:.0%} of the median"
        for rank, share in slow_ranks(measured).items()
    ]
    spread = f"{min(speeds):.3g}-{max(speeds):.3g}"
    return "\n".join([*lines, f"{len(speeds)} ranks: {middle:.3g} TFLOP/s in the median, {spread}"])


def comparison(name: str, compared: list[Comparison]) -> str:
    """Results below those of the profile, one line each."""
    from llmrecipes.bench.results import LEAST
    from llmrecipes.hardware.profile import LINK_BYTES

    if not compared:
        return f"{name} has no measurement of this group and size; link figures apply from {_size(LINK_BYTES)}"
    short = [f"warning: {each.as_text()}" for each in compared if not each.ok]
    summary = f"{len(compared) - len(short)} of {len(compared)} have at least {LEAST:.0%} of the figure in {name}"
    return "\n".join([*short, summary])


def _size(size: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"


SHOWN = 24
"""Transfers and findings that are printed; 16,384 GPUs have tens of thousands."""
KINDS: dict[Kind, str] = {"neighbours": "between neighbours", "halves": "between halves"}


def fabric_report(report: Report) -> str:
    """Transfers, slowest first if there are many, the median of each kind of pairs, and what is wrong."""
    lines = [f"{report.measured_nodes} of {report.nodes} nodes; RDMA writes of 64 KiB, sends of 8 bytes; main memory"]
    if report.expected_gb_per_s is not None:
        lines[0] += f"; {report.profile}: {report.expected_gb_per_s:g} GB/s a port"
    ordered = sorted(report.transfers, key=lambda each: (not each.error, each.gb_per_s or 0))
    shown = report.transfers if len(report.transfers) <= SHOWN else ordered[:SHOWN]
    if shown:
        lines += _transfers(report, shown)
    if len(shown) < len(report.transfers):
        lines.append(f"the slowest {len(shown)} of {len(report.transfers)} transfers; all: --json")
    lines += [line for kind, words in KINDS.items() for line in _pairs(report, kind, words)]
    for finding in report.findings[:SHOWN]:
        lines.append(f"{finding.status.upper()} {finding.node}: {finding.check}: {finding.what}")
        if finding.fix:
            lines.append(f"     fix: {finding.fix}")
    if len(report.findings) > SHOWN:
        lines.append(f"and {len(report.findings) - SHOWN} more; all: --json")
    failed, warned = (sum(each.status == status for each in report.findings) for status in ("fail", "warn"))
    where = f" on {', '.join(report.bad_nodes[:SHOWN])}" if report.bad_nodes else ""
    lines.append(f"{failed} failed{where}, {warned} warned, of {len(report.transfers)} transfers")
    return "\n".join(lines)


def _transfers(report: Report, shown: list[Transfer]) -> list[str]:
    head = ["from", "port", "to", "port", "GB/s", "of profile", "latency µs", "99 %", ""]
    rows = [head]
    for each in shown:
        share = report.share(each)
        rows.append([
            each.sender, each.sender_port, each.receiver, each.receiver_port,
            "failed" if each.gb_per_s is None else f"{each.gb_per_s:.3g}",
            "" if share is None else percent(share),
            "" if each.latency_us is None else f"{each.latency_us:.2f}",
            "" if each.latency_99_us is None else f"{each.latency_99_us:.2f}",
            each.error,
        ])  # fmt: skip
    return aligned(rows, right=(4, 5, 6, 7))


def _pairs(report: Report, kind: Kind, words: str) -> list[str]:
    speeds = [each.gb_per_s for each in report.transfers if each.kind == kind and each.gb_per_s is not None]
    if not speeds:
        return []
    middle = statistics.median(speeds)
    line = f"{words}: {middle:.3g} GB/s in the median, {min(speeds):.3g} to {max(speeds):.3g}"
    if report.expected_gb_per_s is None:
        return [line]
    short = sum(speed < LEAST * report.expected_gb_per_s for speed in speeds)
    return [f"{line}; {short} of {len(speeds)} below {LEAST:.0%} of {report.profile}"]
