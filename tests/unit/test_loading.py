"""The line on a terminal while large libraries are imported."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

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
