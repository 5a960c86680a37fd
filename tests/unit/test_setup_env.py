"""`make setup`: which lock it takes, that it does nothing twice, and what it says when a package is missing."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


TOOLS = ("setup_env.py", "installer.py", "pip_settings.py", "runtime_lock.py")


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


pip_settings = load_tool("pip_settings")
load_tool("installer")
runtime_lock = load_tool("runtime_lock")
setup_env = load_tool("setup_env")


@pytest.mark.parametrize(
    ("asked", "system", "machine", "gpu", "present", "torch"),
    [
        ("", "Linux", "x86_64", False, None, "cpu"),
        ("", "Linux", "x86_64", True, None, "cuda"),
        ("", "Linux", "x86_64", True, "cpu", "cuda"),
        ("", "Linux", "x86_64", False, "cuda", "cuda"),
        ("", "Linux", "aarch64", False, None, "cpu"),
        ("", "Linux", "ppc64le", False, None, "cuda"),
        ("cuda", "Linux", "x86_64", False, "cpu", "cuda"),
        ("cpu", "Linux", "x86_64", True, "cuda", "cpu"),
    ],
)
def test_torch_follows_the_machine_unless_asked(
    asked: str, system: str, machine: str, gpu: bool, present: str | None, torch: str
) -> None:
    assert setup_env.choose_torch(asked, system, machine, gpu, present) == torch


def test_old_python_is_refused_with_the_fix() -> None:
    with pytest.raises(setup_env.SetupError, match=r"3\.11 is too old(.|\n)*PYTHON=python3\.12"):
        setup_env.check_python((3, 11))
    setup_env.check_python((3, 13))


FIND = ROOT / "tools" / "find_python.sh"


def find_python(
    folder: Path, *options: str, home: Path | None = None, path: str = ""
) -> subprocess.CompletedProcess[str]:
    """The tool in a checkout of its own, where only `folder/bin` has Pythons and `home` has those of pyenv and uv."""
    (folder / "tools").mkdir(exist_ok=True)
    (folder / "tools" / FIND.name).write_bytes(FIND.read_bytes())
    environment = {"PATH": f"{folder}/bin:/usr/bin:/bin{path}", "HOME": str(home or folder)}
    command = ["bash", str(folder / "tools" / FIND.name), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def fake_python(path: Path, *, works: bool = True) -> str:
    """A program that answers as a Python with venv does, or as a shim of pyenv whose version is not selected."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\nexit {0 if works else 127}\n")
    path.chmod(0o755)
    return str(path)


def test_the_newest_python_that_runs_is_taken(tmp_path: Path) -> None:
    assert find_python(tmp_path).stdout.strip() in ("", "/usr/bin/python3.12", "/usr/bin/python3.13")
    of_uv = fake_python(tmp_path / ".local/share/uv/python/cpython-3.12.9-linux/bin/python3.12")
    assert find_python(tmp_path, "3.12").stdout.strip() == of_uv
    of_pyenv = fake_python(tmp_path / ".pyenv/versions/3.12.1/bin/python3.12")
    assert find_python(tmp_path, "3.12").stdout.strip() == of_pyenv
    fake_python(tmp_path / "bin/python3.13", works=False)
    assert find_python(tmp_path, "3.12").stdout.strip() == of_pyenv
    newest = fake_python(tmp_path / "bin/python3.13")
    assert find_python(tmp_path).stdout.strip() == newest
    # an environment that runs keeps its Python
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "pyvenv.cfg").write_text(f"home = x\nexecutable = {of_pyenv}\n")
    assert find_python(tmp_path).stdout.strip() == of_pyenv
    fake_python(Path(of_pyenv), works=False)
    assert find_python(tmp_path).stdout.strip() == newest


def test_no_python_is_one_message_with_three_ways(tmp_path: Path) -> None:
    done = find_python(tmp_path, "3.99", "--install")
    assert (done.returncode, done.stdout) == (0, "\n")
    done = find_python(tmp_path, "--install")
    if done.returncode:  # unless the machine has one in /usr/bin
        assert done.returncode == 2 and not done.stdout
        assert all(way in done.stderr for way in ("apt-get", "pyenv install", "uv python install", "PYTHON="))


def test_the_lock_brings_its_own_uv() -> None:
    block, _ = setup_env.take_block(setup_env.LOCK.read_text(), r"uv==\S+")
    assert block.startswith("uv==") and "--hash=sha256:" in block


def test_without_cuda_nothing_else_is_missing() -> None:
    text = setup_env.LOCK.read_text()
    every, kept = (set(runtime_lock.entries(each)) for each in (text, runtime_lock.without_cuda(text)))
    assert {"torch", "triton", "nvidia-cudnn-cu13", "cuda-toolkit"} <= every - kept
    assert all(name in ("torch", "triton") or name.startswith(("nvidia-", "cuda-")) for name in every - kept)
    assert {"nvidia-ml-py", "sympy", "networkx", "emerging-optimizers"} <= kept


def make_wheel(folder: Path, name: str, version: str, script: str = "") -> str:
    """Write a real, nearly empty wheel and a simple index page for it; returns its SHA-256.

    Args:
        folder: of the index.
        name: of the package.
        version: of the package.
        script: text of a program of the same name, if it has one.
    """
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if script:
        files[f"{name}-{version}.data/scripts/{name}"] = script
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
            entry = zipfile.ZipInfo(path)
            entry.external_attr = 0o100755 << 16  # pip makes a script executable where the archive says so
            archive.writestr(entry, content)
    (page / "index.html").write_text(f'<a href="{wheel.name.replace("+", "%2B")}">{wheel.name}</a>')
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def make_archive(folder: Path, name: str, version: str) -> str:
    """Write a source distribution that builds itself without setuptools, and an index page; returns its SHA-256."""
    files = {
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
        "backend.py": SOURCE_BACKEND.replace("NAME", name).replace("VERSION", version),
    }
    page = folder / name
    page.mkdir(parents=True)
    archive = page / f"{name}-{version}.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for path, content in files.items():
            entry = tarfile.TarInfo(f"{name}-{version}/{path}")
            entry.size = len(content.encode())
            tar.addfile(entry, io.BytesIO(content.encode()))
    (page / "index.html").write_text(f'<a href="{archive.name}">{archive.name}</a>')
    return hashlib.sha256(archive.read_bytes()).hexdigest()


SOURCE_BACKEND = """
import os, zipfile
def build_wheel(directory, config_settings=None, metadata_directory=None):
    name, info = "NAME-VERSION-py3-none-any.whl", "NAME-VERSION.dist-info"
    files = {
        "NAME/__init__.py": f"BUILT = {os.environ.get('DS_BUILD_OPS')!r}\\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\\nName: NAME\\nVersion: VERSION\\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }
    files[f"{info}/RECORD"] = "\\n".join(f"{path},," for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(f"{directory}/{name}", "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return name
"""


class Checkout:
    """A small checkout with the real setup tool, a lock of two made-up wheels, and two indexes on disk."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        self.user_index, self.torch_index = folder / "user", folder / "pytorch"
        (self.root / "tools").mkdir(parents=True)
        (self.root / "requirements").mkdir()
        for tool in TOOLS:
            (self.root / "tools" / tool).write_bytes((ROOT / "tools" / tool).read_bytes())
        self.project('version = "1"')
        (self.root / "llmrecipes.py").touch()
        self.hashes = {
            "torch==9.9": make_wheel(self.user_index, "torch", "9.9"),
            "other==1.0": make_wheel(self.user_index, "other", "1.0"),
        }
        self.lock(self.hashes)
        cpu = make_wheel(self.torch_index, "torch", "9.9+cpu")
        (self.root / "requirements" / "torch-cpu.txt").write_text(
            f"# of uv\ntorch==9.9+cpu \\\n    --hash=sha256:{cpu}\n"
        )

    def project(self, version: str) -> None:
        lines = ["[build-system]", 'requires = ["none"]', 'build-backend = "backend"', 'backend-path = ["."]']
        (self.root / "pyproject.toml").write_text("\n".join([*lines, "[project]", 'name = "llmrecipes"', version, ""]))
        # A backend of twelve lines: the test needs an editable install, not setuptools.
        (self.root / "backend.py").write_text(BACKEND)

    def lock(self, hashes: dict[str, str]) -> None:
        text = "".join(f"{pin} \\\n    --hash=sha256:{value}\n    # via test\n" for pin, value in hashes.items())
        (self.root / "requirements" / "lock.txt").write_text(text)

    def uv(self, script: str) -> None:
        """Put a package uv with this program into the user's index and the lock."""
        self.lock({**self.hashes, "uv==1.0": make_wheel(self.user_index, "uv", "1.0", script)})

    def setup(self, *options: str, torch_index: Path | None = None) -> subprocess.CompletedProcess[str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
        environment = {**clean, "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": self.user_index.as_uri()}
        environment |= {"UV_CACHE_DIR": str(self.root.parent / "uv-cache"), "UV_NO_VERIFY_HASHES": "1"}
        index = (torch_index or self.torch_index).as_uri()
        command = [sys.executable, str(self.root / "tools" / "setup_env.py"), "--torch", "cpu", "--torch-index", index]
        command += options
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
@pytest.mark.rotating
def test_setup_refuses_a_wrong_hash_starts_over_and_is_idempotent(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    state = checkout.root / ".venv" / "setup.json"
    checkout.lock({**checkout.hashes, "other==1.0": "0" * 64})
    refused = checkout.setup()
    assert refused.returncode == 2
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in refused.stderr
    assert "packages.txt" in refused.stderr and ".venv/setup.log:" in refused.stderr
    assert len(refused.stderr.splitlines()) <= 25 and "Traceback" not in refused.stderr
    assert "python" not in json.loads(state.read_text())

    checkout.lock(checkout.hashes)
    first = checkout.setup()
    assert first.returncode == 0, first.stdout + first.stderr
    # the user's index has no CPU wheel of torch: the second place is named, not used in silence
    assert f"not on your pip's index, taking it from {checkout.torch_index.as_uri()}" in first.stdout
    assert [line[:5] for line in first.stdout.splitlines() if line.startswith("[")] == [
        f"[{n}/4]" for n in (1, 2, 3, 4)
    ]
    assert checkout.value("import torch, other, llmrecipes; print(torch.VERSION, other.VERSION)") == "9.9+cpu 1.0"
    assert json.loads(state.read_text())["torch"] == "cpu"

    before = state.stat().st_mtime_ns
    again = checkout.setup()
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert state.stat().st_mtime_ns == before

    checkout.project('version = "2"')
    renewed = checkout.setup()
    assert renewed.returncode == 0
    assert renewed.stdout.startswith("[1/1] llmrecipes (editable)\n")


REAL_UV = f"#!/bin/sh\nexec '{Path(sys.executable).parent / 'uv'}' \"$@\"\n"


@pytest.mark.slow
@pytest.mark.rotating
def test_uv_installs_with_pips_configuration_and_checks_hashes(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    checkout.uv(REAL_UV)
    done = checkout.setup()
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"not on your pip's index, taking it from {checkout.torch_index.as_uri()}" in done.stdout
    assert "[5/5] llmrecipes" in done.stdout and "pip takes over" not in done.stdout
    assert done.stdout.endswith("source .venv/bin/activate\n")
    assert checkout.value("import torch, other, llmrecipes; print(torch.VERSION, other.VERSION)") == "9.9+cpu 1.0"
    assert checkout.value("import other; print(__import__('os').path.exists(other.__cached__))") == "True"
    log = (checkout.root / ".venv" / "setup.log").read_text()
    assert log.count("-m pip install") == 1  # uv itself

    # a wrong hash: neither uv, whatever the user's variables say, nor pip after it installs the file
    wheel = make_wheel(tmp_path / "elsewhere", "uv", "1.0", REAL_UV)
    checkout.lock({**checkout.hashes, "uv==1.0": wheel, "other==1.0": "0" * 64})
    refused = checkout.setup()
    assert refused.returncode == 2
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in refused.stderr and "uv" in refused.stdout


@pytest.mark.slow
@pytest.mark.rotating
def test_deepspeed_is_built_on_request_and_stays(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    state = checkout.root / ".venv" / "setup.json"
    checkout.hashes["deepspeed==9.9"] = make_archive(checkout.user_index, "deepspeed", "9.9")
    checkout.uv(REAL_UV)
    plain = checkout.setup()
    assert plain.returncode == 0, plain.stdout + plain.stderr
    installed = "import importlib.util as u; print(bool(u.find_spec('deepspeed')))"
    assert checkout.value(installed) == "False"

    built = checkout.setup("--zero")
    assert built.returncode == 0, built.stdout + built.stderr
    assert built.stdout.startswith("[1/1] deepspeed==9.9, built from source\nready in ")
    assert checkout.value("import deepspeed; print(deepspeed.BUILT)") == "0"
    assert checkout.value("import deepspeed; print(__import__('os').path.exists(deepspeed.__cached__))") == "True"
    before = state.stat().st_mtime_ns
    for again in (checkout.setup("--zero"), checkout.setup()):
        assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert state.stat().st_mtime_ns == before

    checkout.project('version = "2"')
    assert checkout.setup().stdout.startswith("[1/1] llmrecipes (editable)\n")
    assert (checkout.setup("--zero").stdout, checkout.value(installed)) == ("", "True")

    lock = checkout.root / "requirements" / "lock.txt"
    lock.write_text(lock.read_text() + "# changed\n")
    renewed = checkout.setup()
    assert renewed.returncode == 0, renewed.stdout + renewed.stderr
    assert "[6/6] deepspeed==9.9" in renewed.stdout and checkout.value(installed) == "True"

    # an archive with another hash is not built, and what is there without it stays usable
    lock.write_text(lock.read_text().replace(checkout.hashes["deepspeed==9.9"], "0" * 64))
    refused = checkout.setup()
    assert refused.returncode == 2 and "Installing deepspeed==9.9 failed" in refused.stderr
    assert (checkout.setup().stdout, checkout.value(installed)) == ("", "False")


@pytest.mark.slow
@pytest.mark.rotating
def test_pip_is_the_fallback_if_uv_does_not_run(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    checkout.uv("\x7fELF of another machine")
    done = checkout.setup()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("pip takes over") == 1
    assert checkout.value("import torch, other; print(torch.VERSION, other.VERSION)") == "9.9+cpu 1.0"


@pytest.mark.slow
@pytest.mark.rotating
def test_without_pytorchs_index_the_locks_own_torch_is_taken(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    nowhere = tmp_path / "nowhere"
    done = checkout.setup(torch_index=nowhere)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{nowhere.as_uri()} cannot be reached" in done.stdout and "6.6 GB" in done.stdout
    assert checkout.value("import torch; print(torch.VERSION)") == "9.9"
    assert checkout.setup(torch_index=nowhere).stdout == ""


@pytest.mark.slow
@pytest.mark.rotating
def test_an_index_without_the_wheel_is_an_error(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    done = checkout.setup(torch_index=empty)
    assert done.returncode == 2
    assert f"Installing torch==9.9+cpu from {empty.as_uri()} failed" in done.stderr


def refused(checkout: Checkout) -> str:
    done = checkout.setup()
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    assert ".venv" in done.stderr and "rule:" in done.stderr and "fix:" in done.stderr
    return done.stderr


def test_what_setup_did_not_make_is_left_alone(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    venv, precious = checkout.root / ".venv", tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("all of it")
    (precious / "pyvenv.cfg").touch()  # of another project
    venv.symlink_to(precious)
    assert str(precious) in refused(checkout)
    assert sorted(path.name for path in precious.iterdir()) == ["pyvenv.cfg", "thesis.tex"]

    (precious / "setup.json").write_text('{"root": "/another/checkout"}')
    assert "/another/checkout" in refused(checkout)
    assert (precious / "thesis.tex").read_text() == "all of it"

    venv.unlink()
    venv.symlink_to(tmp_path / "purged")
    assert str(tmp_path / "purged") in refused(checkout)

    venv.unlink()
    venv.write_text("a note")
    refused(checkout)
    assert venv.read_text() == "a note"

    venv.unlink()
    venv.mkdir()
    (venv / "data.bin").write_text("bytes")
    refused(checkout)
    assert (venv / "data.bin").read_text() == "bytes"


@pytest.mark.slow
@pytest.mark.rotating
def test_an_environment_may_lie_elsewhere_behind_a_link(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "setup.json").write_text(json.dumps({"root": str(checkout.root)}))  # of a run that was interrupted
    (scratch / "old").touch()
    (checkout.root / ".venv").symlink_to(scratch)
    done = checkout.setup()
    assert done.returncode == 0, done.stdout + done.stderr
    assert (checkout.root / ".venv").is_symlink() and (scratch / "bin" / "python").exists()
    assert not (scratch / "old").exists()
    assert checkout.value("import other, llmrecipes; print(other.VERSION)") == "1.0"


def pip_config(folder: Path, text: str, **variables: str) -> dict[str, str]:
    """What pip itself makes of a configuration file and variables, as read by the tool."""
    (folder / "pip.conf").write_text(text)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "PIP_CONFIG_FILE": str(folder / "pip.conf"),
        **variables,
    }
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    found: dict[str, str] = pip_settings.read(listing)
    return found


def test_pips_own_reading_of_its_configuration_is_translated(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    text = f"""
[global]
index-url = https://me:s%%40crêt@mirror.example/simple
extra-index-url =
    file:///one/simple
    https://two.example/simple
find-links = {tmp_path}/wheels {tmp_path}/gone https://links.example/
cert = /etc/mirror.pem
timeout = 5
[install]
trusted-host = a.example
    b.example:8443
[download]
timeout = 7
"""
    options = pip_config(tmp_path, text, PIP_DEFAULT_TIMEOUT="180", PIP_PROXY="proxy.example:3128", PIP_NO_INDEX="")
    settings = pip_settings.translate(options, {"HOME": "/h", "UV_NO_VERIFY_HASHES": "1", "UV_LINK_MODE": "copy"})
    variables = settings.environment
    assert variables["UV_DEFAULT_INDEX"] == "https://me:s%%40crêt@mirror.example/simple"
    assert variables["UV_INDEX"] == "file:///one/simple https://two.example/simple"
    assert variables["UV_FIND_LINKS"] == f"{tmp_path}/wheels,https://links.example/"
    assert variables["UV_INSECURE_HOST"] == "a.example b.example:8443"
    assert variables["SSL_CERT_FILE"] == "/etc/mirror.pem" and "UV_SYSTEM_CERTS" not in variables
    assert variables["HTTPS_PROXY"] == variables["https_proxy"] == "http://proxy.example:3128"
    assert variables["UV_INDEX_STRATEGY"] == "unsafe-best-match"
    assert (variables["HOME"], variables["UV_LINK_MODE"]) == ("/h", "copy")
    assert "UV_NO_VERIFY_HASHES" not in variables and settings.arguments == []


@pytest.mark.parametrize(
    ("options", "environ", "expected"),
    [
        ({"timeout": "5", "retries": "2"}, {}, {"UV_HTTP_TIMEOUT": "5", "UV_HTTP_RETRIES": "2"}),
        ({}, {}, {"UV_SYSTEM_CERTS": "true"}),
        ({}, {"REQUESTS_CA_BUNDLE": "/b.pem"}, {"SSL_CERT_FILE": "/b.pem"}),
        ({"cert": "/"}, {"REQUESTS_CA_BUNDLE": "/b.pem"}, {"SSL_CERT_DIR": "/"}),
        ({"client-cert": "/c.pem"}, {}, {"SSL_CLIENT_CERT": "/c.pem"}),
        ({"no-cache-dir": "true"}, {}, {"UV_NO_CACHE": "true"}),
        ({"cache-dir": "/scratch/pip"}, {}, {"UV_CACHE_DIR": "/scratch/pip/uv"}),
        ({"cache-dir": "/scratch/pip"}, {"UV_CACHE_DIR": "/mine"}, {"UV_CACHE_DIR": "/mine"}),
        ({"keyring-provider": "subprocess"}, {}, {"UV_KEYRING_PROVIDER": "subprocess"}),
    ],
)
def test_settings_of_pip_as_variables_of_uv(
    options: dict[str, str], environ: dict[str, str], expected: dict[str, str]
) -> None:
    assert expected.items() <= pip_settings.translate(options, environ).environment.items()


def test_no_index_and_what_uv_has_nothing_like() -> None:
    settings = pip_settings.translate({"no-index": "1", "index-url": "https://x"}, {})
    assert settings.arguments == ["--no-index"] and "UV_DEFAULT_INDEX" not in settings.environment
    with pytest.raises(pip_settings.NotTranslatableError, match="keyring-provider import"):
        pip_settings.translate({"keyring-provider": "import"}, {})


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
