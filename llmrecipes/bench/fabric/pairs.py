"""Which nodes measure with each other at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

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
    found: list[tuple[Kind, Pairs]] = [("neighbours", pairs) for pairs in (even[::2], even[1::2], odd) if pairs]
    if count >= 4:
        half = count // 2
        found.append(("halves", [(nodes[at], nodes[at + half]) for at in range(half)]))
    return found
