"""Output of `bench collectives`."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from llmrecipes.units import GIB, KIB, MIB

if TYPE_CHECKING:
    from llmrecipes.bench.results import Collectives, Comparison, RankSpeeds


def bandwidths(found: Collectives) -> str:
    """Bus bandwidth: a line for each operation and group, a column for each size."""
    sizes = sorted({row.bytes for row in found.rows})
    lines = [f"{found.world_size} ranks over {found.backend}; bus bandwidth in GB/s"]
    if not found.rows:
        return f"{lines[0]}: no group has more than one rank; try --nproc 2"
    lines.append(f"{'operation':15} {'group':9} ranks" + "".join(f"{_size(size):>10}" for size in sizes))
    rows: dict[tuple[str, str, int], dict[int, float]] = {}
    for row in found.rows:
        rows.setdefault((row.operation, row.group, row.ranks), {})[row.bytes] = row.bus_gb_per_s
    for (operation, group, ranks), speeds in sorted(rows.items(), key=lambda each: each[0][1]):
        cells = "".join(f"{speeds[size]:10.3f}" if size in speeds else f"{'':10}" for size in sizes)
        lines.append(f"{operation:15} {group:9} {ranks:5}{cells}")
    return "\n".join(lines)


def rank_speeds(found: RankSpeeds) -> str:
    """The speeds of all ranks in one line, and one for each that is slow."""
    from llmrecipes.bench.results import slow_ranks

    speeds = [found.flops / seconds / 1e12 for seconds in found.seconds]
    middle = statistics.median(speeds)
    lines = [
        f"warning: rank {rank} on {found.hosts[rank]}: {speeds[rank]:.3g} TFLOP/s, {share:.0%} of the median"
        for rank, share in slow_ranks(found).items()
    ]
    spread = f"{min(speeds):.3g}-{max(speeds):.3g}"
    return "\n".join([*lines, f"{len(speeds)} ranks: {middle:.3g} TFLOP/s in the median, {spread}"])


def comparison(name: str, compared: list[Comparison]) -> str:
    """Results below those of the profile, one line each."""
    from llmrecipes.bench.results import LEAST
    from llmrecipes.hardware.profile import LINK_BYTES

    if not compared:
        return (
            f"nothing to compare with {name}: no such row in its measured, and links count from {_size(LINK_BYTES)} on"
        )
    short = [f"warning: {each.as_text()}" for each in compared if not each.ok]
    summary = f"{len(compared) - len(short)} of {len(compared)} have at least {LEAST:.0%} of what {name} says"
    return "\n".join([*short, summary])


def _size(size: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"
