"""Make the virtual environment that the Makefile's targets run in.

Run by `make setup` with the Python to use; needs nothing but that Python. The environment is exactly
requirements/lock.txt plus this checkout (editable); without a GPU, torch's small CPU wheel from
requirements/torch-cpu.txt replaces torch with its CUDA packages where it can be had. DeepSpeed, which PyPI has only as
source, is left out until `make setup-zero` builds it from the same lock file. A second run compares `setup.json` inside
the environment with what is wanted and ends at once. uv, from the lock file, does the installing with the user's pip
configuration (mirrors, certificates); where it cannot, pip does.
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
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from installer import ROOT, Installer, SetupError, pip_instead, shown, use_uv
from runtime_lock import without_cuda

OLDEST = (3, 12)
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
REACHED_SECONDS = 10
CPU_SIZE = "192 MB"
CUDA_SIZE = "the environment takes 6.6 GB instead of 2 GB"
LOCK = ROOT / "requirements" / "lock.txt"
TORCH_CPU = ROOT / "requirements" / "torch-cpu.txt"
UV = r"uv==\S+"
ZERO = r"deepspeed==\S+"


def check_python(version: tuple[int, int]) -> None:
    """Refuse a Python that megatron-core does not support.

    Raises:
        SetupError: it is too old.
    """
    if version < OLDEST:
        oldest = f"{OLDEST[0]}.{OLDEST[1]}"
        raise SetupError(
            f"Python {version[0]}.{version[1]} is too old: llmrecipes needs {oldest} or newer.\n"
            f"  fix: make setup, which looks for one, or make setup PYTHON=python{oldest}"
        )


def choose_torch(asked: str, system: str, machine: str, gpu: bool, present: str | None) -> str:
    """Which build of torch the environment gets: `cpu` or `cuda`.

    Args:
        asked: the user's choice; empty without one.
        system: `platform.system()`.
        machine: `platform.machine()`.
        gpu: whether `nvidia-smi` lists a GPU here.
        present: choice that the environment was made with, if there is one: CUDA packages are kept on a machine without
            a GPU, so that a login node does not undo what a GPU node of the same shared folder needs.
    """
    has_cpu_wheel = system == "Linux" and machine in ("x86_64", "aarch64")
    return asked or ("cuda" if gpu or present == "cuda" or not has_cpu_wheel else "cpu")


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


def sha256(*paths: Path) -> str:
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()


def read_state(venv: Path) -> dict[str, str]:
    """What the environment was made from: `root` and `torch` alone before it is finished, nothing if it is not ours."""
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


def install_torch_cpu(installer: Installer, block: str, index: str) -> bool:
    """The CPU wheel of torch: from the user's own pip sources, and where they do not have it from PyTorch's index.

    Returns:
        Whether it is installed; False where neither can be reached.

    Raises:
        SetupError: it is there, and could not be installed.
    """
    pinned = next(line for line in block.splitlines() if line.startswith("torch==")).split(maxsplit=1)[0]
    installer.say(f"{pinned} ({CPU_SIZE})")
    if installer.requirements(block, "torch.txt", absent=pinned):
        return True
    if not installer.lacks(pinned):
        raise installer.failure(f"Installing {pinned}")
    if not reached(index):
        installer.note(f"not on your pip's index, and {index} cannot be reached: taking torch with CUDA instead")
        installer.note(f"it also runs without a GPU; {CUDA_SIZE}")
        return False
    installer.note(f"not on your pip's index, taking it from {index}")
    if not installer.requirements(block, "torch.txt", index=index):
        raise installer.failure(f"Installing {pinned} from {index}")
    return True


def reached(index: str) -> bool:
    """Whether an index answers, by whatever proxy the user has: asking pip takes a minute of retries."""
    if index.startswith("file:"):
        return Path(urllib.request.url2pathname(urllib.parse.urlparse(index).path)).is_dir()
    try:
        with urllib.request.urlopen(index, timeout=REACHED_SECONDS):  # noqa: S310 - PyTorch's, or what the user gave
            return True
    except (OSError, ValueError) as error:
        return isinstance(error, urllib.error.HTTPError)


def install(installer: Installer, torch: str, index: str, fresh: bool, unfinished: Mapping[str, str]) -> None:
    """Install the lock file, without DeepSpeed, and this checkout.

    Args:
        installer: of the environment.
        torch: `cpu` or `cuda`.
        index: where torch's CPU wheel is looked for second.
        fresh: make the environment anew; otherwise only this checkout's own metadata is renewed.
        unfinished: state of the environment until all is done.

    Raises:
        SetupError: a step failed.
    """
    if fresh:
        _, rest = take_block(LOCK.read_text(), ZERO)
        uv, _ = take_block(rest, UV)
        installer.say(f"{installer.venv.name}: virtual environment for Python {platform.python_version()}")
        make_venv(installer.venv, unfinished)
        if uv:
            install_uv(installer, uv)
        if torch == "cpu" and install_torch_cpu(installer, TORCH_CPU.read_text(), index):
            rest = without_cuda(rest)
        count = len(re.findall(r"^[a-z0-9].*==", rest, re.MULTILINE))
        installer.say(f"{count} packages from {shown(LOCK)}")
        if not installer.requirements(rest, "packages.txt"):
            raise installer.failure(f"Installing {LOCK.name}")
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


def set_up(venv: Path, asked: str, index: str, zero: bool = False) -> None:
    """Bring the environment to the wanted state, or do nothing when it is there already.

    An environment with DeepSpeed keeps it, also where a changed lock file makes everything anew.
    """
    check_python(sys.version_info[:2])
    state = read_state(venv)
    check_place(venv, state)
    torch = choose_torch(asked, platform.system(), platform.machine(), has_gpu(), state.get("torch"))
    wanted = {
        "python": platform.python_version(),
        "base": sys.base_prefix,
        "root": str(ROOT),
        "torch": torch,
        "lock_sha256": sha256(LOCK, TORCH_CPU),
        "project_sha256": sha256(ROOT / "pyproject.toml"),
    }
    extra = {"zero": "deepspeed"} if zero or "zero" in state else {}
    if state == wanted | extra:
        return
    started = time.monotonic()
    text = LOCK.read_text()
    block, _ = take_block(text, ZERO)
    if extra and not block:
        raise SetupError(f"{shown(LOCK)} has no deepspeed.\n  fix: make lock")
    fresh = any(state.get(key) != value for key, value in wanted.items() if key != "project_sha256")
    renewed = fresh or state["project_sha256"] != wanted["project_sha256"]
    build = bool(extra) and (fresh or "zero" not in state)
    first = 2 + (torch == "cpu") + bool(take_block(text, UV)[0]) if fresh else 0
    installer = Installer(venv, first + renewed + build)
    if renewed:
        install(installer, torch, index, fresh, {"root": str(ROOT), "torch": torch, **extra})
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
    parser.add_argument("--torch", choices=("cpu", "cuda", ""), default="", help="build of torch; default: by machine")
    parser.add_argument("--torch-index", default=PYTORCH_CPU_INDEX, help="where to look second for torch's CPU wheel")
    parser.add_argument("--zero", action="store_true", help="build DeepSpeed too, for the engine deepspeed")
    options = parser.parse_args()
    venv = options.venv.absolute()
    os.chdir(ROOT)  # what relative paths in pip's configuration start from, whoever reads them
    try:
        # Two targets started at once must not build the same environment twice.
        with venv.with_name(f"{venv.name}.lock").open("w") as mutex:
            fcntl.flock(mutex, fcntl.LOCK_EX)
            set_up(venv, options.torch, options.torch_index, options.zero)
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
