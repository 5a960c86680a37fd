"""Binary units of bytes."""

from __future__ import annotations

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def gib(size: int) -> str:
    """Bytes as GiB with one digit, or MiB below one."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"
