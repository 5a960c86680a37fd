"""Small files written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomic(path: Path, data: str | bytes, *, durable: bool = True) -> None:
    """Replace `path` by rename, so that a reader or a kill never sees half of it.

    Args:
        durable: also survive a power cut (fsync); leave it out for files that are written often.

    Raises:
        OSError: nothing was replaced.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
