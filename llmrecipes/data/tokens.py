"""Reading the tokens of a `.bin` file while training."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np

from llmrecipes.untrusted import open_file


class TokenFile:
    """Reads slices of a `.bin` file, for megatron-core's `IndexedDataset.bin_reader`.

    Not memory-mapped: if a mapped file is truncated or its disk fails, the process is killed by SIGBUS; here the read
    fails with an `OSError` that names the file. Forked processes share the open file.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._stream = open_file(file)

    def read(self, dtype: Any, count: int, offset: int) -> np.ndarray:
        """`count` ids from a byte offset.

        Raises:
            OSError: they cannot be read, or the file is too short.
        """
        missing = int(count) * np.dtype(dtype).itemsize
        parts: list[bytes] = []
        while missing:
            try:
                part = os.pread(self._stream.fileno(), missing, int(offset))
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._file)) from error
            if not part:
                raise OSError(errno.EIO, f"ends at byte {offset:,}", str(self._file))
            parts.append(part)
            missing -= len(part)
            offset += len(part)
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), dtype)
