"""Values in Slurm's notation: time limits and generic resources."""

from __future__ import annotations

import re

TIME = re.compile(r"[0-9]+(:[0-9]+){0,2}|[0-9]+-[0-9]+(:[0-9]+){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
TIME_RULE = (
    "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes or days-hours:minutes:seconds"
)
_FACTORS = {1: (60,), 2: (60, 1), 3: (3600, 60, 1)}
_AFTER_DAYS = (3600, 60, 1)


def limit_seconds(text: str) -> int | None:
    """A time limit in seconds, rounded up to a minute as Slurm does; None if there is no limit, which 0 means too.

    Args:
        text: a value that `TIME` matches, or another word: NONE, N/A.
    """
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdecimal() for part in (*parts, *([days] if dash else []))):
        return None
    factors = _AFTER_DAYS if dash else _FACTORS[len(parts)]
    seconds = 86400 * int(days or 0) + sum(int(part) * factor for part, factor in zip(parts, factors, strict=False))
    return -(-seconds // 60) * 60 or None


def gpus_of(gres: str) -> int | None:
    """GPUs per node of a list of generic resources, such as `gpu:h100:8,nvme:1`; None if it names none."""
    counts = [
        _count(name.removeprefix("gres/").replace("=", ":").split(":")[1:])
        for name in gres.split(",")
        if re.match(r"(gres/)?gpu(?![\w-])", name)
    ]
    return sum(counts) if counts else None


def _count(words: list[str]) -> int:
    """Count in the words after `gpu`, which are a type, a count or both; without a count it is 1."""
    return int(words[-1]) if words and words[-1].isdecimal() else 1
