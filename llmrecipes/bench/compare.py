"""Comparison of measured bandwidths with those of a cluster profile: pure functions."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any, Literal

from llmrecipes.bench.spec import Collectives, RankSpeeds
from llmrecipes.hardware.profile import LINK_BYTES, Measured, Profile

LEAST = 0.8
"""Fraction of the expected bandwidth below which something is wrong."""
LEAST_OF_MEDIAN = 0.9
"""Share of the median rank's speed below which a rank slows the others down."""


@dataclass(frozen=True)
class Comparison:
    """One collective compared with the profile."""

    measured: Measured
    expected_gb_per_s: float
    source: Literal["measured", "intra_node", "inter_node"]
    """Key of the profile with the expected value."""

    @property
    def share(self) -> float:
        """Measured over expected bandwidth."""
        return self.measured.bus_gb_per_s / self.expected_gb_per_s

    @property
    def ok(self) -> bool:
        """Whether it is at least `LEAST`."""
        return self.share >= LEAST

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        own = {key: value for key, value in asdict(self).items() if key != "measured"}
        return {**self.measured.model_dump(mode="json"), **own, "share": self.share, "ok": self.ok}

    def as_text(self) -> str:
        """One line of text."""
        row = self.measured
        expected = f"{self.expected_gb_per_s:.3g} GB/s ({self.source})"
        what = f"{row.operation} in groups {row.group} of {row.ranks}, {row.bytes} bytes"
        return f"{what}: {row.bus_gb_per_s:.3g} GB/s, {self.share:.0%} of {expected}"


def slow_ranks(found: RankSpeeds) -> dict[int, float]:
    """Speed relative to the median, of the ranks that are slower than `LEAST_OF_MEDIAN` of it."""
    middle = statistics.median(found.seconds)
    shares = {rank: middle / seconds for rank, seconds in enumerate(found.seconds)}
    return {rank: share for rank, share in shares.items() if share < LEAST_OF_MEDIAN}


def compare(found: Collectives, profile: Profile) -> list[Comparison]:
    """Compare with an earlier measurement, or else, from `LINK_BYTES` on, with the slowest link that a group uses.

    Args:
        found: the measurement.
        profile: of the site; a `measured` row applies if operation, group, ranks and bytes are the same, and the
            ranks on a node, where the row has them.
    """
    before = {row.key: row.bus_gb_per_s for row in profile.measured}
    compared = []
    for row in found.rows:
        if (known := before.get(row.key, before.get(row.unplaced.key))) is not None:
            compared.append(Comparison(row, known, "measured"))
        elif row.bytes >= LINK_BYTES:
            near = profile.nvlink_domain or found.ranks_per_node
            if found.reach[row.group] < near:
                compared.append(Comparison(row, profile.intra_node.gb_per_s, "intra_node"))
            else:
                compared.append(Comparison(row, profile.inter_node.gb_per_s, "inter_node"))
    return compared
