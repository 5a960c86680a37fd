"""Binary units of bytes."""

from __future__ import annotations

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def gib(size: int) -> str:
    """Bytes as GiB with one digit, or MiB below one."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"
