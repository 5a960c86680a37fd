"""Install packages into the environment of `make setup`: with uv where it can, else with pip. Output goes to a log."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pip_settings

ROOT = Path(__file__).resolve().parent.parent
TAIL_LINES = 20
# DeepSpeed's setup.py asks GPU and nvcc what it can compile ahead of time. It is told to compile nothing: its operators
# are compiled at first use, for the processor that they run on.
ZERO_BUILD = {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "TORCH_CUDA_ARCH_LIST": "9.0"}
# Half of all files, and a run imports next to none of them; Python compiles those that it meets.
NOT_COMPILED = r"/tests/|/transformers/models/"


class SetupError(Exception):
    """A step that failed; the message is all the user needs."""


def shown(path: Path) -> Path:
    """A path as people like to read it: from the checkout on where it lies inside."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


class Installer:
    """Runs the steps, sends their output to the log and says one line for each. uv installs where it can, else pip."""

    def __init__(self, venv: Path, steps: int) -> None:
        self.venv, self.steps, self.step = venv, steps, 0
        self.log = venv / "setup.log"
        self.uv: pip_settings.Settings | None = None
        self.output = ""  # of the last command

    def say(self, text: str) -> None:
        self.step += 1
        print(f"[{self.step}/{self.steps}] {text}", flush=True)

    def note(self, text: str) -> None:
        print(f"      {text}", flush=True)

    def site(self) -> Path:
        """Folder of the installed packages."""
        return self.venv / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"

    def run(self, command: list[str], environment: Mapping[str, str]) -> bool:
        """Run a command and keep its output; whether it succeeded."""
        with self.log.open("a+", errors="replace") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            start = log.tell()
            try:
                code = subprocess.run(
                    command,
                    cwd=ROOT,
                    env={**environment, **ZERO_BUILD},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    check=False,
                ).returncode
            except OSError as error:  # a program of another machine
                log.write(f"{error}\n")
                code = 1
            log.seek(start)
            self.output = log.read()
        return not code

    def pip(self, *args: str) -> bool:
        """Run the environment's pip; whether it succeeded."""
        environment = {**os.environ, "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        python = str(self.venv / "bin" / "python")
        return self.run([python, "-m", "pip", "install", "--progress-bar", "off", *args], environment)

    def install(self, uv: list[str], pip: list[str], absent: str = "") -> bool:
        """Install with uv, or with pip if uv is not there or fails; whether it succeeded.

        Args:
            uv: arguments of `uv pip install`.
            pip: arguments of `pip install`.
            absent: a requirement that may be missing from the user's indexes; then pip need not look there again.
        """
        if self.uv:
            command = [str(self.venv / "bin" / "uv"), "pip", "install", "--python", str(self.venv / "bin" / "python")]
            command += ["--no-config", "--no-progress", "--no-deps", *self.uv.arguments, *uv]
            if self.run(command, self.uv.environment):
                return True
            if absent and self.lacks(absent):
                return False
            self.note(f"uv failed ({shown(self.log)} says why): pip takes over")
            self.uv = None
        return self.pip("--no-deps", *pip)

    def compile(self, folder: Path) -> None:
        """Compile what uv installed (pip does so itself), before many ranks do it at once or an image is read-only."""
        workers = str(len(os.sched_getaffinity(0)))
        python = [str(self.venv / "bin" / "python"), "-I", "-W", "ignore"]
        # Its exit code is left: packages carry files for other versions of Python.
        self.run([*python, "-m", "compileall", "-qq", "-j", workers, "-x", NOT_COMPILED, str(folder)], os.environ)

    def lacks(self, pinned: str) -> bool:
        """Whether the last command failed because no index has this version."""
        words = " ".join(re.sub(r"[╰─▶│×]", " ", self.output).split())
        name = pinned.partition("==")[0]
        return any(
            phrase in words
            for phrase in (
                f"No matching distribution found for {pinned}",
                f"there is no version of {pinned}",
                f"{pinned} has no wheels with a matching",
                f"Cannot install {pinned} because",  # pip with a constraint
                f"{name} was not found in the",
            )
        )

    def failure(self, what: str) -> SetupError:
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return SetupError(
            "\n".join([f"{what} failed. The end of {shown(self.log)}:", *(f"  {line}" for line in lines)])
        )

    def requirements(self, text: str, name: str, absent: str = "", index: str = "") -> bool:
        """Install pinned and hashed requirements, wheels only: a source build would fetch unpinned build tools."""
        path = self.venv / name
        path.write_text(text)
        common = ["--require-hashes", "--only-binary=:all:", "-r", str(path)]
        uv_index, pip_index = (["--index", index], ["--extra-index-url", index]) if index else ([], [])
        return self.install([*common, *uv_index], [*common, *pip_index], absent)


def use_uv(installer: Installer) -> None:
    """Let the environment's uv install, with pip's configuration in its words."""
    try:
        command = [str(installer.venv / "bin" / "python"), "-m", "pip", "config", "list"]
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
        installer.uv = pip_settings.translate(pip_settings.read(listing), os.environ)
    except (pip_settings.NotTranslatableError, ValueError, SyntaxError) as reason:
        pip_instead(installer, reason)


def pip_instead(installer: Installer, reason: object) -> None:
    installer.note(f"pip installs, more slowly, not uv: {reason}")
