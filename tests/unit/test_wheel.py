"""The wheel, installed where there is no checkout: its recipes, profiles, and files for Slurm and Kubernetes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from llmrecipes import __version__
from llmrecipes.files import checkout, folder
from tests.helpers import ROOT

Program = Callable[..., subprocess.CompletedProcess[str]]


def test_a_checkout_uses_its_own_folders() -> None:
    assert checkout() == ROOT
    for name in ("recipes", "slurm", "k8s"):
        assert folder(name) == ROOT / name


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """`llmrecipes` of a new environment with the wheel; its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # setuptools writes beside what it builds
    for name in ("llmrecipes", "recipes", "slurm", "k8s"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}

    def run(*words: str | Path, cwd: Path = folder, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(list(map(str, words)), cwd=cwd, env=environment, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        return done

    build = f"import setuptools.build_meta as backend; backend.build_wheel({str(folder)!r})"
    run(sys.executable, "-c", build, cwd=source)
    shutil.rmtree(source)
    python = folder / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", folder / "venv")
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", *folder.glob("*.whl"))
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
    (Path(site) / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return lambda *words, code=0: run(folder / "venv" / "bin" / "llmrecipes", *words, code=code)


@pytest.mark.slow
def test_a_wheel_has_its_recipes_and_renders_jobs(installed: Program) -> None:
    assert installed("--version").stdout.splitlines()[0] == f"llmrecipes {__version__}"
    listed = [line.split()[0] for line in installed("list").stdout.splitlines()[1:]]
    assert listed == sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
    profiles = [line.split()[0] for line in installed("clusters").stdout.splitlines()[1:]]
    assert profiles == sorted(path.stem for path in (ROOT / "recipes" / "clusters").glob("*.yaml"))
    assert "num_layers" in installed("show", "gpt-1b").stdout

    job = ("submit", "gpt-7b", "--nodes", "4", "--cluster", "h100-ib", "--dry-run")
    script = next(word for word in installed(*job, "--to", "slurm").stdout.split() if word.endswith("/train.sbatch"))
    assert Path(script).read_text("utf-8") == (ROOT / "slurm" / "train.sbatch").read_text("utf-8")
    base = Path(script).parents[1] / "k8s" / "job" / "job.yaml"
    assert (Path(script).parents[2] / "tracking" / "grafana.json").is_file()
    assert base.read_text("utf-8") == (ROOT / "k8s" / "job" / "job.yaml").read_text("utf-8")
    image = f"registry.example.com/llmrecipes@sha256:{'0' * 64}"
    objects = yaml.safe_load_all(installed(*job, "--to", "k8s", "--image", image).stdout.partition("\n---\n")[2])
    assert "Job" in [object_["kind"] for object_ in objects if object_]
    installed("docs", code=2)  # it writes files of a checkout
