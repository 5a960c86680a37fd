"""Make the virtual environment that the Makefile's targets run in.

Run by `make setup` with the Python to use; needs nothing but that Python. The environment is exactly one lock file from
requirements/ plus this checkout (editable). DeepSpeed, which PyPI has only as source, is left out until
`make setup-zero` builds it from the same lock file. A second run compares `setup.json` inside the environment with what
is wanted and ends at once. uv, from the lock file, does the installing with the user's pip configuration (mirrors,
certificates); where it cannot, pip does.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from installer import ROOT, Installer, SetupError, pip_instead, shown, use_uv

OLDEST = (3, 11)
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_TORCH = r"torch==\S+\+cpu"
UV = r"uv==\S+"
ZERO = r"deepspeed==\S+"


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


def take_block(lock: str, pinned: str) -> tuple[str, str]:
    """Take one requirement (a regular expression) with its hashes out of a lock file: (that block, everything else)."""
    found = re.search(rf"^{pinned}(?=\s).*\n(?:[ \t]+.*\n)*", lock, re.MULTILINE)
    if not found:
        return "", lock
    return found.group(), lock[: found.start()] + lock[found.end() :]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_state(venv: Path) -> dict[str, str]:
    """What the environment was made from: `root` and `lock` alone before it is finished, nothing if it is not ours."""
    try:
        state = json.loads((venv / "setup.json").read_text())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def write_state(venv: Path, state: Mapping[str, str]) -> None:
    (venv / "setup.json").write_text(json.dumps(state, indent=2) + "\n")


def check_place(venv: Path, state: Mapping[str, str]) -> None:
    """Refuse to touch what `make setup` did not make.

    A symbolic link is used where it points to an empty folder or to an environment of this checkout.

    Raises:
        SetupError: there is something else.
    """
    name = shown(venv)
    rule = f"  rule: {name} is made by make setup, or a link to an empty folder, and nothing else is in it\n"
    if venv.is_symlink():
        target = venv.readlink()
        what = f"{name} is a symbolic link to {target}"
        if not venv.exists():
            raise SetupError(f"{what}, which does not exist\n{rule}  fix:  mkdir -p {target}, or rm {name}")
        if not venv.is_dir() or (any(venv.iterdir()) and state.get("root") != str(ROOT)):
            whose = f", which belongs to {state['root']}" if "root" in state else ", which is not empty"
            raise SetupError(f"{what}{whose}\n{rule}  fix:  rm {name} (only the link), then make setup")
    elif venv.exists() and not venv.is_dir():
        raise SetupError(f"{name} is a file\n{rule}  fix:  move it away, then make setup")
    elif venv.is_dir() and any(venv.iterdir()) and not state and not (venv / "pyvenv.cfg").is_file():
        raise SetupError(f"{name} is a folder with other things in it\n{rule}  fix:  move it away, then make setup")


def make_venv(venv: Path, state: Mapping[str, str]) -> None:
    """An empty virtual environment in place of the one there is; `state` marks it as ours from the start."""
    venv.mkdir(exist_ok=True)
    # What tells that it is ours goes last, so that an interrupted run can be repeated.
    for path in sorted(venv.iterdir(), key=lambda path: path.name in ("pyvenv.cfg", "setup.json")):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != "setup.json":
            path.unlink()
    write_state(venv, state)
    # venv itself refuses a link
    done = subprocess.run(
        [sys.executable, "-m", "venv", str(venv.resolve())], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SetupError(
            f"{sys.executable} cannot make a virtual environment in {venv}:\n{(done.stdout + done.stderr).strip()}\n"
            "  fix: on Debian and Ubuntu, apt-get install python3-venv"
        )


def install_uv(installer: Installer, block: str) -> None:
    """The lock's own uv; without it, pip does everything."""
    installer.say(block.split(maxsplit=1)[0])
    path = installer.venv / "uv.txt"
    path.write_text(block)
    if installer.pip("--no-deps", "--require-hashes", "--only-binary=:all:", "-r", str(path)):
        use_uv(installer)
    else:
        pip_instead(installer, f"it cannot be installed, {shown(installer.log)} says why")


def install_torch_cpu(installer: Installer, block: str, index: str) -> None:
    """The CPU wheel of torch: from the user's own pip sources, and where they do not have it from PyTorch's index."""
    pinned = block.split(maxsplit=1)[0]
    installer.say(pinned)
    if installer.requirements(block, "torch.txt", absent=pinned):
        return
    if not installer.lacks(pinned):
        raise installer.failure(f"Installing {pinned}")
    installer.note(f"not on your pip's index, taking it from {index}")
    if not installer.requirements(block, "torch.txt", index=index):
        raise installer.failure(f"Installing {pinned} from {index}")


def install(installer: Installer, lock: Path, index: str, fresh: bool, unfinished: Mapping[str, str]) -> None:
    """Install a lock file, without DeepSpeed, and this checkout.

    Args:
        installer: of the environment.
        lock: lock file to install.
        index: where torch's CPU wheel is looked for second.
        fresh: make the environment anew; otherwise only this checkout's own metadata is renewed.
        unfinished: state of the environment until all is done.

    Raises:
        SetupError: a step failed.
    """
    if fresh:
        torch, rest = take_block(lock.read_text(), CPU_TORCH)
        _, rest = take_block(rest, ZERO)
        uv, _ = take_block(rest, UV)
        installer.say(f"{installer.venv.name}: virtual environment for Python {platform.python_version()}")
        make_venv(installer.venv, unfinished)
        if uv:
            install_uv(installer, uv)
        if torch:
            install_torch_cpu(installer, torch, index)
        count = len(re.findall(r"^[a-z0-9].*==", rest, re.MULTILINE))
        installer.say(f"{count} packages from {lock.relative_to(lock.parent.parent)}")
        if not installer.requirements(rest, "packages.txt"):
            raise installer.failure(f"Installing {lock.name}")
        if installer.uv:
            installer.compile(installer.site())
    write_state(installer.venv, unfinished)
    installer.say("llmrecipes (editable)")
    editable = ["--no-build-isolation", "--no-index", "-e", str(ROOT)]
    if not installer.install(editable, editable):
        raise installer.failure("Installing llmrecipes")


def install_zero(installer: Installer, block: str) -> None:
    """DeepSpeed, built from its hashed archive with the setuptools and torch of the environment.

    Raises:
        SetupError: it could not be built.
    """
    pinned = block.split(maxsplit=1)[0]
    installer.say(f"{pinned}, built from source")
    if installer.uv is None and (installer.venv / "bin" / "uv").exists():
        use_uv(installer)
    path = installer.venv / "zero.txt"
    path.write_text(block)
    arguments = ["--require-hashes", "--no-build-isolation", "-r", str(path)]
    if not installer.install(arguments, arguments):
        raise installer.failure(f"Installing {pinned}")
    if installer.uv:
        installer.compile(installer.site() / "deepspeed")


def set_up(venv: Path, lock_name: str | None, index: str, zero: bool = False) -> None:
    """Bring the environment to the wanted state, or do nothing when it is there already.

    An environment with DeepSpeed keeps it, also where a changed lock file makes everything anew.
    """
    state = read_state(venv)
    check_place(venv, state)
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
    extra = {"zero": "deepspeed"} if zero or "zero" in state else {}
    if state == wanted | extra:
        return
    started = time.monotonic()
    text = lock.read_text()
    block, _ = take_block(text, ZERO)
    if extra and not block:
        raise SetupError(f"{shown(lock)} has no deepspeed.\n  fix: make lock")
    fresh = any(state.get(key) != value for key, value in wanted.items() if key != "project_sha256")
    renewed = fresh or state["project_sha256"] != wanted["project_sha256"]
    build = bool(extra) and (fresh or "zero" not in state)
    first = 2 + sum(bool(take_block(text, pinned)[0]) for pinned in (CPU_TORCH, UV)) if fresh else 0
    installer = Installer(venv, first + renewed + build)
    if renewed:
        install(installer, lock, index, fresh, {"root": str(ROOT), "lock": name, **extra})
        write_state(venv, wanted if build else wanted | extra)
    if build:
        install_zero(installer, block)
        write_state(venv, wanted | extra)
    print(f"ready in {time.monotonic() - started:.0f} s, log in {shown(venv / 'setup.log')}", flush=True)
    if renewed:
        print(f"for `llmrecipes` on the PATH: source {shown(venv / 'bin' / 'activate')}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the virtual environment of this checkout.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment")
    parser.add_argument("--lock", help="name of a lock file in requirements/; chosen by Python and machine if absent")
    parser.add_argument("--torch-index", default=PYTORCH_CPU_INDEX, help="where to look second for torch's CPU wheel")
    parser.add_argument("--zero", action="store_true", help="build DeepSpeed too, for the engine deepspeed")
    options = parser.parse_args()
    venv = options.venv.absolute()
    os.chdir(ROOT)  # what relative paths in pip's configuration start from, whoever reads them
    try:
        # Two targets started at once must not build the same environment twice.
        with venv.with_name(f"{venv.name}.lock").open("w") as mutex:
            fcntl.flock(mutex, fcntl.LOCK_EX)
            set_up(venv, options.lock or None, options.torch_index, options.zero)
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
