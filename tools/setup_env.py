"""Make the virtual environment that the Makefile's targets run in.

Run by `make setup` with the Python to use; needs nothing but that Python. The environment is exactly one lock file from
requirements/ plus this checkout (editable). A second run compares `setup.json` inside the environment with what is
wanted and ends at once. pip does the installing, so that the user's pip configuration (mirrors, certificates) is used.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 11)
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TAIL_LINES = 20


class SetupError(Exception):
    """A step that failed; the message is all the user needs."""


def choose_lock(version: tuple[int, int], system: str, machine: str, gpu: bool, present: str | None) -> str:
    """Name of the lock file for this Python and machine.

    Args:
        version: (major, minor) of the Python that will run.
        system: `platform.system()`.
        machine: `platform.machine()`.
        gpu: whether `nvidia-smi` lists a GPU here.
        present: lock the environment was made from, if there is one: CUDA packages are kept on a machine without a
            GPU, so that a login node does not undo what a GPU node of the same shared folder needs.

    Raises:
        SetupError: this Python is too old.
    """
    if version < OLDEST:
        raise SetupError(
            f"Python {version[0]}.{version[1]} is too old: llmrecipes needs {OLDEST[0]}.{OLDEST[1]} or newer.\n"
            "  fix: make setup PYTHON=python3.11"
        )
    if version >= (3, 12):
        return "py312"
    has_cpu_wheel = system == "Linux" and machine == "x86_64"
    return "py311-cuda" if gpu or present == "py311-cuda" or not has_cpu_wheel else "py311-cpu"


def has_gpu() -> bool:
    """Whether `nvidia-smi -L` lists a GPU."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and "GPU " in done.stdout


def split_cpu_torch(lock: str) -> tuple[str, str]:
    """Take the `torch==…+cpu` requirement (with its hashes) out of a lock file: (that block, everything else)."""
    found = re.search(r"^torch==\S+\+cpu\b.*\n(?:[ \t]+.*\n)*", lock, re.MULTILINE)
    if not found:
        return "", lock
    return found.group(), lock[: found.start()] + lock[found.end() :]


def shown(path: Path) -> Path:
    """A path as people like to read it: from the checkout on where it lies inside."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_state(venv: Path) -> dict[str, str]:
    """What the environment was made from; empty when there is none or it was not finished."""
    try:
        state = json.loads((venv / "setup.json").read_text())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


class Installer:
    """Runs the steps, sends their output to the log and says one line for each."""

    def __init__(self, venv: Path, steps: int) -> None:
        self.venv, self.steps, self.step = venv, steps, 0
        self.log = venv / "setup.log"

    def say(self, text: str) -> None:
        self.step += 1
        print(f"[{self.step}/{self.steps}] {text}", flush=True)

    def pip(self, *args: str) -> bool:
        """Run the environment's pip; whether it succeeded."""
        command = [str(self.venv / "bin" / "python"), "-m", "pip", "install", "--progress-bar", "off", *args]
        environment = {**os.environ, "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            return not subprocess.run(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False
            ).returncode

    def failure(self, what: str) -> SetupError:
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return SetupError(
            "\n".join([f"{what} failed. The end of {shown(self.log)}:", *(f"  {line}" for line in lines)])
        )

    def requirements(self, text: str, name: str, *args: str) -> bool:
        """Install pinned and hashed requirements, wheels only: a source build would fetch unpinned build tools."""
        path = self.venv / name
        path.write_text(text)
        return self.pip("--no-deps", "--require-hashes", "--only-binary=:all:", *args, "-r", str(path))


def make_venv(venv: Path) -> None:
    """An empty virtual environment in place of whatever is there."""
    done = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(venv)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SetupError(
            f"{sys.executable} cannot make a virtual environment in {venv}:\n{(done.stdout + done.stderr).strip()}\n"
            "  fix: on Debian and Ubuntu, apt-get install python3-venv"
        )


def install_torch_cpu(installer: Installer, block: str, index: str) -> None:
    """The CPU wheel of torch: from the user's own pip sources, and where they do not have it from PyTorch's index."""
    pinned = block.split(maxsplit=1)[0]
    installer.say(pinned)
    if installer.requirements(block, "torch.txt"):
        return
    if f"No matching distribution found for {pinned}" not in installer.log.read_text(errors="replace"):
        raise installer.failure(f"Installing {pinned}")
    print(f"      not on your pip's index, taking it from {index}", flush=True)
    if not installer.requirements(block, "torch.txt", "--extra-index-url", index):
        raise installer.failure(f"Installing {pinned} from {index}")


def install(venv: Path, lock: Path, index: str, fresh: bool) -> None:
    """Carry out the steps that are needed.

    Args:
        venv: folder of the environment.
        lock: lock file to install.
        index: where torch's CPU wheel is looked for second.
        fresh: make the environment anew; otherwise only this checkout's own metadata is renewed.

    Raises:
        SetupError: a step failed.
    """
    torch, rest = split_cpu_torch(lock.read_text())
    installer = Installer(venv, (4 if torch else 3) if fresh else 1)
    (venv / "setup.json").unlink(missing_ok=True)
    if fresh:
        installer.say(f"{venv.name}: virtual environment for Python {platform.python_version()}")
        make_venv(venv)
        if torch:
            install_torch_cpu(installer, torch, index)
        count = len(re.findall(r"^[a-z0-9].*==", rest, re.MULTILINE))
        installer.say(f"{count} packages from {lock.relative_to(lock.parent.parent)}")
        if not installer.requirements(rest, "packages.txt"):
            raise installer.failure(f"Installing {lock.name}")
    installer.say("llmrecipes (editable)")
    if not installer.pip("--no-deps", "--no-build-isolation", "--no-index", "-e", str(ROOT)):
        raise installer.failure("Installing llmrecipes")


def set_up(venv: Path, lock_name: str | None, index: str) -> None:
    """Bring the environment to the wanted state, or do nothing when it is there already."""
    state = read_state(venv)
    name = lock_name or choose_lock(
        sys.version_info[:2], platform.system(), platform.machine(), has_gpu(), state.get("lock")
    )
    lock = ROOT / "requirements" / f"{name}.txt"
    if not lock.is_file():
        names = ", ".join(sorted(path.stem for path in lock.parent.glob("*.txt")))
        raise SetupError(f"There is no lock file {lock}.\n  fix: LOCK is one of {names}")
    wanted = {
        "python": platform.python_version(),
        "base": sys.base_prefix,
        "root": str(ROOT),
        "lock": name,
        "lock_sha256": sha256(lock),
        "project_sha256": sha256(ROOT / "pyproject.toml"),
    }
    if state == wanted:
        return
    started = time.monotonic()
    kept = ("python", "base", "root", "lock", "lock_sha256")
    install(venv, lock, index, fresh=any(state.get(key) != wanted[key] for key in kept))
    (venv / "setup.json").write_text(json.dumps(wanted, indent=2) + "\n")
    print(f"ready in {time.monotonic() - started:.0f} s, log in {shown(venv / 'setup.log')}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the virtual environment of this checkout.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment")
    parser.add_argument("--lock", help="name of a lock file in requirements/; chosen by Python and machine if absent")
    parser.add_argument("--torch-index", default=PYTORCH_CPU_INDEX, help="where to look second for torch's CPU wheel")
    options = parser.parse_args()
    venv = options.venv.absolute()
    try:
        # Two targets started at once must not build the same environment twice.
        with venv.with_name(f"{venv.name}.lock").open("w") as mutex:
            fcntl.flock(mutex, fcntl.LOCK_EX)
            set_up(venv, options.lock or None, options.torch_index)
    except SetupError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; make setup starts anew", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"{venv}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
