"""A line on a terminal where a command prints nothing for a while, so that none seems to hang."""

from __future__ import annotations

import atexit
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import TextIO

from llmrecipes.redact import Guarded

LARGE = frozenset({"torch", "megatron", "transformers", "datasets", "mlflow", "optuna", "vllm", "onnx"})
SECONDS = 3.0
"""Without a line."""
_BETWEEN = 0.2
_REFRESH = 1.0
_CONTROL = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")


class _Watch(MetaPathFinder):
    """Finds nothing itself: it sees the first import of a large library."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name in LARGE and self in sys.meta_path:
            sys.meta_path.remove(self)
            threading.Thread(target=self._say, name="loading", daemon=True).start()

    def _say(self) -> None:
        time.sleep(self._seconds)
        before = len(sys.modules)
        time.sleep(_BETWEEN)
        if len(sys.modules) > before or any(_is_loading(name) for name in LARGE):
            print("loading libraries ...", file=sys.stderr, flush=True)


def _is_loading(name: str) -> bool:
    return bool(getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False))


def announce_loading(seconds: float = SECONDS) -> None:
    """From now on, say once on a terminal that large libraries are loaded, if that takes longer than this."""
    if sys.stderr is not None and sys.stderr.isatty():
        sys.meta_path.insert(0, _Watch(seconds))


class Silence:
    """Says on a terminal that a command works, in a line that is gone when the command prints again.

    It is silent while the cursor is within a line (a question, a bar), and while other programs that the command has
    started can write to the terminal.

    Args:
        stream: the terminal.
        seconds: of silence before the line.
    """

    def __init__(self, stream: TextIO, seconds: float = SECONDS) -> None:
        self._stream = stream
        self._seconds = seconds
        self._lock = threading.RLock()  # a signal handler may print while a line is printed
        self._printed = time.monotonic()
        self._at_begin = True
        self._shown = 0
        self._thread = threading.Thread(target=self._watch, name="silence", daemon=True)
        self._ended = threading.Event()

    def begin(self) -> None:
        """Watch the command from now on, in a background thread."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, Guarded) and stream.isatty():
                stream.before_write = self.heard
        os.register_at_fork(after_in_child=self._leave)
        self._thread.start()

    def heard(self, text: str) -> None:
        """The command is about to print something."""
        if self._ended.is_set():
            return
        with self._lock:
            self._clear()
            self._printed, plain = time.monotonic(), _CONTROL.sub("", text)
            self._at_begin = plain.endswith(("\n", "\r")) if plain else self._at_begin

    def _watch(self) -> None:
        while not self._ended.wait(_REFRESH if self._shown else _BETWEEN):
            silent = time.monotonic() - self._printed
            if self._at_begin and silent >= self._seconds and not any(_others(self._stream.fileno())):
                with self._lock:
                    self._show(time.monotonic() - self._printed)

    def _show(self, silent: float) -> None:
        if self._ended.is_set() or silent < self._seconds or not self._at_begin:  # meanwhile it has printed
            return
        what = "loading libraries" if any(map(_is_loading, LARGE)) else "working"
        text = f"{what} ... {silent:.0f} s"
        self._clear()
        self._stream.write(text)
        self._stream.flush()
        self._shown = len(text)

    def _clear(self) -> None:
        if self._shown:
            self._stream.write(f"\r{' ' * self._shown}\r")
            self._stream.flush()
            self._shown = 0

    def end(self) -> None:
        """The command is done."""
        with self._lock:
            self.heard("")
            self._ended.set()
        self._thread.join(_REFRESH)

    def _leave(self) -> None:
        """The thread is not in a copy of the process, and may hold the lock of the event that it waits for."""
        self._ended = threading.Event()
        self._ended.set()


def _others(terminal: int) -> Iterator[bool]:
    """Other programs than this one, started by it, whose output goes to the terminal."""
    try:
        device = os.fstat(terminal).st_rdev
        own = Path("/proc/self/cmdline").read_bytes()
        children = [
            pid for thread in Path("/proc/self/task").iterdir() for pid in (thread / "children").read_text().split()
        ]
    except OSError:
        return
    for pid in children:
        try:  # copies of this program, and those that multiprocessing starts, print nothing
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            if words != own and b"multiprocessing" not in words:
                yield any(Path(f"/proc/{pid}/fd/{number}").stat().st_rdev == device for number in (1, 2))
        except OSError:  # it has ended, or has closed them
            continue


def announce_silence() -> None:
    """From now on, say on a terminal that the command works whenever it prints nothing for some seconds.

    If the output is piped to a program, which may draw on the terminal, only a line about libraries is printed.
    """
    if isinstance(sys.stderr, Guarded) and sys.stderr.isatty():
        if stat.S_ISFIFO(os.fstat(sys.stdout.fileno()).st_mode):
            announce_loading()
            return
        silence = Silence(sys.stderr.unguarded)
        silence.begin()
        atexit.register(silence.end)
