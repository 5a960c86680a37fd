"""`make setup`: which lock it takes, that it does nothing twice, and what it says when a package is missing."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "tools" / "setup_env.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup_env = load_tool()


@pytest.mark.parametrize(
    ("version", "system", "machine", "gpu", "present", "lock"),
    [
        ((3, 11), "Linux", "x86_64", False, None, "py311-cpu"),
        ((3, 11), "Linux", "x86_64", True, None, "py311-cuda"),
        ((3, 11), "Linux", "x86_64", True, "py311-cpu", "py311-cuda"),
        ((3, 11), "Linux", "x86_64", False, "py311-cuda", "py311-cuda"),
        ((3, 11), "Linux", "aarch64", False, None, "py311-cuda"),
        ((3, 12), "Linux", "x86_64", False, None, "py312"),
        ((3, 13), "Linux", "x86_64", True, "py311-cpu", "py312"),
    ],
)
def test_lock_follows_python_and_machine(
    version: tuple[int, int], system: str, machine: str, gpu: bool, present: str | None, lock: str
) -> None:
    assert setup_env.choose_lock(version, system, machine, gpu, present) == lock
    assert (ROOT / "requirements" / f"{lock}.txt").is_file()


def test_old_python_is_refused_with_the_fix() -> None:
    with pytest.raises(setup_env.SetupError, match=r"3\.10 is too old(.|\n)*PYTHON=python3\.11"):
        setup_env.choose_lock((3, 10), "Linux", "x86_64", False, None)


def test_torch_is_taken_out_of_the_cpu_lock_whole() -> None:
    text = (ROOT / "requirements" / "py311-cpu.txt").read_text()
    torch, rest = setup_env.split_cpu_torch(text)
    assert torch.startswith("torch==2.13.0+cpu \\\n") and "--hash=sha256:" in torch
    assert not any(line.startswith("torch==") for line in rest.splitlines())
    assert sorted((torch + rest).splitlines()) == sorted(text.splitlines())
    cuda = (ROOT / "requirements" / "py311-cuda.txt").read_text()
    assert setup_env.split_cpu_torch(cuda) == ("", cuda)


def make_wheel(folder: Path, name: str, version: str) -> str:
    """Write a real, empty wheel and a simple index page for it; returns its SHA-256."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    for path, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(content)}")
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""])
    page = folder / name
    page.mkdir(parents=True)
    wheel = page / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    (page / "index.html").write_text(f'<a href="{wheel.name.replace("+", "%2B")}">{wheel.name}</a>')
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


class Checkout:
    """A small checkout with the real setup tool, a lock of two made-up wheels, and two indexes on disk."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        self.user_index, self.torch_index = folder / "user", folder / "pytorch"
        (self.root / "tools").mkdir(parents=True)
        (self.root / "requirements").mkdir()
        (self.root / "tools" / "setup_env.py").write_bytes((ROOT / "tools" / "setup_env.py").read_bytes())
        self.project('version = "1"')
        (self.root / "llmrecipes.py").touch()
        hashes = {
            "torch==9.9+cpu": make_wheel(self.torch_index, "torch", "9.9+cpu"),
            "other==1.0": make_wheel(self.user_index, "other", "1.0"),
        }
        self.hashes = hashes
        self.lock(hashes)

    def project(self, version: str) -> None:
        lines = ["[build-system]", 'requires = ["none"]', 'build-backend = "backend"', 'backend-path = ["."]']
        (self.root / "pyproject.toml").write_text("\n".join([*lines, "[project]", 'name = "llmrecipes"', version, ""]))
        # A backend of twelve lines: the test needs an editable install, not setuptools.
        (self.root / "backend.py").write_text(BACKEND)

    def lock(self, hashes: dict[str, str]) -> None:
        text = "".join(f"{pin} \\\n    --hash=sha256:{value}\n    # via test\n" for pin, value in hashes.items())
        (self.root / "requirements" / "test.txt").write_text(text)

    def setup(self, torch_index: Path | None = None) -> subprocess.CompletedProcess[str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
        environment = {**clean, "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": self.user_index.as_uri()}
        index = (torch_index or self.torch_index).as_uri()
        command = [sys.executable, str(self.root / "tools" / "setup_env.py"), "--lock", "test", "--torch-index", index]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    def value(self, code: str) -> str:
        python = self.root / ".venv" / "bin" / "python"
        return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, cwd="/").stdout.strip()


BACKEND = """
import zipfile
def build_editable(directory, config_settings=None, metadata_directory=None):
    name, info = "llmrecipes-1-py3-none-any.whl", "llmrecipes-1.dist-info"
    files = {
        "llmrecipes.pth": __file__.rpartition("/")[0],
        f"{info}/METADATA": "Metadata-Version: 2.1\\nName: llmrecipes\\nVersion: 1\\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }
    files[f"{info}/RECORD"] = "\\n".join(f"{path},," for path in files)
    with zipfile.ZipFile(f"{directory}/{name}", "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return name
"""


@pytest.mark.slow
def test_setup_refuses_a_wrong_hash_starts_anew_and_does_nothing_twice(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    state = checkout.root / ".venv" / "setup.json"
    checkout.lock({**checkout.hashes, "other==1.0": "0" * 64})
    refused = checkout.setup()
    assert refused.returncode == 2
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in refused.stderr
    assert "Installing test.txt failed. The end of .venv/setup.log:" in refused.stderr
    assert len(refused.stderr.splitlines()) <= 25 and "Traceback" not in refused.stderr
    assert not state.exists()

    checkout.lock(checkout.hashes)
    first = checkout.setup()
    assert first.returncode == 0, first.stdout + first.stderr
    # the user's index has no CPU wheel of torch: the second place is named, not used in silence
    assert f"not on your pip's index, taking it from {checkout.torch_index.as_uri()}" in first.stdout
    assert [line[:5] for line in first.stdout.splitlines() if line.startswith("[")] == [
        f"[{n}/4]" for n in (1, 2, 3, 4)
    ]
    assert checkout.value("import torch, other, llmrecipes; print(torch.VERSION, other.VERSION)") == "9.9+cpu 1.0"
    assert json.loads(state.read_text())["lock"] == "test"

    before = state.stat().st_mtime_ns
    again = checkout.setup()
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert state.stat().st_mtime_ns == before

    checkout.project('version = "2"')
    renewed = checkout.setup()
    assert renewed.returncode == 0
    assert renewed.stdout.startswith("[1/1] llmrecipes (editable)\n")


@pytest.mark.slow
def test_torch_that_is_nowhere_is_said_once(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    nowhere = tmp_path / "nowhere"
    nowhere.mkdir()
    done = checkout.setup(torch_index=nowhere)
    assert done.returncode == 2
    assert f"Installing torch==9.9+cpu from {nowhere.as_uri()} failed" in done.stderr


def test_unknown_lock_names_the_choices(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "tools" / "setup_env.py"),
        "--venv",
        str(tmp_path / "venv"),
        "--lock",
        "py310",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "py311-cpu, py311-cuda, py312" in done.stderr and not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ("a=1 --b", ["a=1", "--b"]),
        ("--prompt \"def \" 'x y'", ["--prompt", "def ", "x y"]),
        (
            "$(touch pwned) `touch pwned` ; touch pwned *",
            ["$(touch", "pwned)", "`touch", "pwned`", ";", "touch", "pwned", "*"],
        ),
        ("", []),
    ],
)
def test_args_are_split_and_never_executed(tmp_path: Path, args: str, expected: list[str]) -> None:
    show = "import json, sys; print(json.dumps(sys.argv[1:]))"
    command = [sys.executable, str(ROOT / "tools" / "with_args.py"), sys.executable, "-c", show, "first"]
    done = subprocess.run(
        command, env={**os.environ, "ARGS": args}, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == ["first", *expected]
    assert not list(tmp_path.iterdir())


def test_make_hands_recipe_over_as_data(tmp_path: Path) -> None:
    """Neither make nor the shell expands what stands in RECIPE, RUN or ARGS."""
    trap = tmp_path / "pwned"
    text = f"$(shell touch {trap})$$HOME `touch {trap}` \"; touch {trap}; '"
    makefile = tmp_path / "Makefile"
    lines = (ROOT / "Makefile").read_text().splitlines(keepends=True)
    kept = [line for line in lines if line.startswith(("SHELL", ".SHELLFLAGS", "override", "export"))]
    exported = next(line.split()[1:] for line in kept if line.startswith("export"))
    assert {f"override {name} := $(value {name})\n" for name in exported} == {line for line in kept if "value" in line}
    assert {"RECIPE", "RUN", "ARGS"} <= set(exported)
    makefile.write_text("".join([*kept, "show:\n", "\t@printf '%s' \"$$RECIPE\"\n"]))
    done = subprocess.run(
        ["make", "-s", "-f", str(makefile), f"RECIPE={text}"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout == text
    assert not trap.exists()
