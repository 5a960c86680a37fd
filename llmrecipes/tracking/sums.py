"""Checksums of metrics.jsonl, kept in `logs/metrics.sums.json`, to detect lost or changed lines.

The file is written with every checkpoint, at the end and after a resume, and covers the lines that exist then. A
digest covers a hundred lines, which costs 20 bytes per hundred. Lines written after the last checkpoint of a killed
process are not covered; a resume drops most of them anyway.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

from llmrecipes.io import write_atomic
from llmrecipes.untrusted import read_json

FILE = "metrics.sums.json"
CHUNK = 100
"""Lines per digest."""


@dataclass
class Sums:
    """Digests of the lines of a file, `CHUNK` lines each; the last may have fewer."""

    lines: int = 0
    step: int = 0
    """Step up to which a resume has checked for gaps."""
    chunks: list[str] = field(default_factory=list)
    _running: hashlib.blake2b = field(default_factory=lambda: hashlib.blake2b(digest_size=8))

    def add(self, line: bytes) -> None:
        """Count one more line."""
        if self.lines % CHUNK == 0:
            self._running = hashlib.blake2b(digest_size=8)
            self.chunks.append("")
        self._running.update(line)
        self.lines += 1
        self.chunks[-1] = self._running.hexdigest()

    def write(self, path: Path) -> None:
        """Replace the file at `path`.

        Raises:
            OSError: it stays as it was.
        """
        write_atomic(
            path, json.dumps({"lines": self.lines, "step": self.step, "chunks": self.chunks}) + "\n", durable=False
        )

    def changed(self, recorded: Sums) -> list[tuple[int, int]]:
        """First and last line of every range in which the digests differ, among the lines that both have.

        Args:
            recorded: the earlier sums; this one has no more lines.
        """
        whole = self.lines // CHUNK if self.lines < recorded.lines else len(self.chunks)
        found: list[tuple[int, int]] = []
        for number in range(whole):
            if self.chunks[number] == recorded.chunks[number]:
                continue
            first, last = number * CHUNK + 1, min(number * CHUNK + CHUNK, self.lines)
            if found and found[-1][1] == first - 1:
                first = found.pop()[0]
            found.append((first, last))
        return found


def read(path: Path) -> Sums | None:
    """What `Sums.write` wrote; None if it is missing or damaged, as in a run of an older version."""
    try:
        values = read_json(path, root=path.parent)
        lines, step, chunks = values["lines"], values["step"], values["chunks"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if type(lines) is not int or type(step) is not int or not isinstance(chunks, list):
        return None
    return Sums(lines, step, chunks) if len(chunks) == -(-lines // CHUNK) else None
