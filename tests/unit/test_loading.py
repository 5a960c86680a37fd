"""The line on a terminal while large libraries are imported."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmrecipes.loading import Silence
from llmrecipes.redact import Guarded
from tests.helpers import environment

CODE = "from llmrecipes.loading import announce_loading; announce_loading({seconds}); import torch; print('done')"


@pytest.mark.parametrize(("seconds", "said"), [(0.1, True), (60.0, False)])
def test_slow_imports_are_announced_on_a_terminal_only(seconds: float, said: bool, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import time; time.sleep(1)")
    variables = environment()
    variables["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{variables.get('PYTHONPATH', '')}"
    words = [sys.executable, "-c", CODE.format(seconds=seconds)]
    terminal, end = pty.openpty()
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=end, env=variables, check=True, text=True)
    os.close(end)
    assert done.stdout == "done\n"
    try:
        printed = os.read(terminal, 4096)
    except OSError:  # nothing was written
        printed = b""
    os.close(terminal)
    assert bool(printed) is said
    in_a_file = subprocess.run(words, capture_output=True, env=variables, check=True, text=True)
    assert in_a_file.stderr == ""


WORKING = "working ... "
BAR = "a  1/2  left 3s"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, Guarded]]:
    """Where a terminal is read, and standard error on it, watched for silences of 0.2 s."""
    reading, end = pty.openpty()
    with os.fdopen(end, "w") as stream:
        stderr = Guarded(stream)
        monkeypatch.setattr(sys, "stderr", stderr)
        silence = Silence(stream, 0.2)
        silence.begin()
        yield reading, stderr
        silence.end()
    os.close(reading)


def read(terminal: int, seconds: float, awaited: str | None = None) -> str:
    """What comes within some seconds; not more than a text that is awaited."""
    printed, until = b"", time.monotonic() + seconds
    while (awaited is None or awaited not in printed.decode()) and select.select(
        [terminal], [], [], max(0.0, until - time.monotonic())
    )[0]:
        printed += os.read(terminal, 4096)
    return printed.decode()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", True),
        ("a line\n", True),
        ("Name: ", False),  # a question
        (BAR, False),  # refreshes itself
        (f"\x1b[?25l{BAR}\r\x1b[2K\x1b[?25h", True),  # which is gone
    ],
)
def test_a_silent_command_says_that_it_works_in_a_line_that_goes(
    text: str, said: bool, terminal: tuple[int, Guarded]
) -> None:
    reading, stderr = terminal
    stderr.write(text)
    stderr.flush()
    printed = read(reading, 20, WORKING) if said else read(reading, 0.8)
    assert printed.removeprefix(text.replace("\n", "\r\n")).startswith(WORKING) is said
    stderr.write("end")
    stderr.flush()
    line, cleared, end = read(reading, 20, "end").rpartition("\r")
    assert end == "end" and bool(cleared) is said
    assert not said or line.endswith(" " * len(WORKING))


def test_the_line_does_not_mix_with_those_of_other_programs(terminal: tuple[int, Guarded]) -> None:
    reading, stderr = terminal
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=stderr.fileno()) as process:
        assert read(reading, 0.8) == ""
        process.communicate()
    assert WORKING in read(reading, 20, WORKING)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert WORKING in read(reading, 20, WORKING)
        process.communicate()
