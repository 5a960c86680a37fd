"""Contenders that take turns: each in a process of its own, alive for the whole benchmark, working only when ordered.

So all of them see the same machine at nearly the same time, and start and compilation are paid once and reported apart.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.common import ROOT


class Session:
    """The contender's side. Orders (numbers of steps) come on stdin, answers (JSON lines) leave on stdout.

    What libraries print goes to stderr.
    """

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._wanted = 0
        self._seconds: list[float] = []
        self._losses: list[float] = []
        self._last = 0.0
        self._processor = 0.0

    def begin(self, **facts: Any) -> bool:
        """Say that the first step can be taken; whether to take it."""
        self._answer(facts)
        return self._next_order()

    def stepped(self, loss: float, **facts: Any) -> bool:
        """To be called at the end of each step with its loss; whether to take another one."""
        now = time.perf_counter()
        self._seconds.append(now - self._last)
        self._losses.append(loss)
        self._last = now
        if len(self._seconds) < self._wanted:
            return True
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        processor = time.process_time() - self._processor
        self._answer(
            {
                "seconds": self._seconds,
                "losses": self._losses,
                "core_seconds": processor,
                "peak_memory": memory,
                **facts,
            }
        )
        return self._next_order()

    def _answer(self, values: Mapping[str, Any]) -> None:
        print(json.dumps(values), file=self._answers, flush=True)

    def _next_order(self) -> bool:
        self._wanted = int(sys.stdin.readline() or 0)
        self._seconds, self._losses = [], []
        self._processor = time.process_time()
        self._last = time.perf_counter()
        return self._wanted > 0


class Contender:
    """The benchmark's side: starts `python -m <module> <arguments>` and gives it orders.

    Args:
        module, arguments: what to start.
        environment: added to this process's.

    Raises:
        RuntimeError: it ended early; with the end of what it wrote to stderr.
    """

    def __init__(self, module: str, arguments: list[str], environment: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed with the contender)
        started = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            env={**os.environ, **environment},
        )
        self._arguments = arguments
        self.facts = self._read()
        self.start_seconds = time.perf_counter() - started

    def take(self, steps: int) -> dict[str, Any]:
        """Let it take some steps: `seconds` and `losses` of each, `core_seconds` of all, `peak_memory` in bytes."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            raise RuntimeError(f"{' '.join(self._arguments)} ended early:\n{self._log.read()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # reads as an order of no steps
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()


def write_job(folder: str, name: str, text: str) -> Path:
    """A file a contender is told to read."""
    path = Path(folder) / name
    path.write_text(text, "utf-8")
    return path
