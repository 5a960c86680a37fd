"""What the engine deepspeed needs is checked before a run starts, and only then."""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from llmrecipes.cli.app import run
from llmrecipes.doctor import examine
from llmrecipes.engine.core.world import model_parallel
from llmrecipes.engine.deepspeed.backend import swap_files
from llmrecipes.engine.requirements import require_packages
from llmrecipes.hardware import builds
from llmrecipes.hardware.cluster import DetectedGpu
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.rules.recipe_rules import check
from llmrecipes.recipe.schema import LayoutKeys, Recipe
from llmrecipes.recipe.sections.zero import Zero
from llmrecipes.workflow import slurm
from llmrecipes.workflow.run import on_one_rank
from tests.helpers import ROOMY, tiny_on, write_recipe
from tests.refusals import refused, require_message

Found = Callable[[str], object]


def with_zero(corpus: Path, **keys: object) -> Recipe:
    return tiny_on(corpus).with_layout(zero=Zero.model_validate({"stage": 3, **keys}), engine="deepspeed")


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed as not installed."""
    found: Found = importlib.util.find_spec
    for module in ("llmrecipes.engine.requirements", "llmrecipes.hardware.builds"):
        monkeypatch.setattr(f"{module}.find_spec", lambda name: None if name == "deepspeed" else found(name))


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """DeepSpeed as installed, with torch's headers: folders in place of both. Returns DeepSpeed's."""
    for name in ("deepspeed", "torch/include"):
        (tmp_path / name).mkdir(parents=True)

    def spec(name: str) -> importlib.machinery.ModuleSpec:
        return importlib.util.spec_from_file_location(name, tmp_path / name / "__init__.py")  # type: ignore[return-value]

    monkeypatch.setattr("llmrecipes.engine.requirements.find_spec", spec)
    monkeypatch.setattr("llmrecipes.hardware.builds.find_spec", spec)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    for name in ("CXX", "CFLAGS", "LDFLAGS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "deepspeed"


@pytest.mark.usefixtures("hidden")
def test_a_missing_package_is_refused_with_its_extra(corpus: Path) -> None:
    require_packages(tiny_on(corpus))
    with refused("layout.engine", rule=("setup-zero", "llmrecipes[zero]")):
        require_packages(with_zero(corpus))


@pytest.mark.usefixtures("hidden")
def test_a_checkpoint_is_read_on_one_rank_without_deepspeed(corpus: Path) -> None:
    """`generate` and `upcycle` of a run that was trained elsewhere, on more ranks."""
    recipe = with_zero(corpus, offload_optimizer="nvme", nvme_path="/not/here", zero_hpz_partition_size=8)
    alone = on_one_rank(recipe)
    require_packages(alone)
    plan = derive(alone, 1, ROOMY)
    assert check(plan.recipe) == []
    assert plan.recipe.layout.use_distributed_optimizer == recipe.layout.use_distributed_optimizer


@pytest.mark.usefixtures("hidden")
def test_a_run_without_deepspeed_starts_nothing(
    corpus: Path, tmp_path: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_recipe(with_zero(corpus, stage=1), tmp_path)
    options = ["--runs-dir", str(tmp_path / "runs"), "--data-dir", str(data_dir)]
    for command in ("train", "smoke", "verify"):
        assert run([command, path, *options]) == 2
        require_message(capsys.readouterr().err, "layout.engine", rule=("setup-zero", "llmrecipes[zero]"))
    arguments = ["--nodes", "1", "--ranks-per-node", "1", "--run-id", "one", *options, path]
    assert slurm.main(["begin", *arguments]) == 2  # on the first node, before its ranks
    require_message(capsys.readouterr().err, "layout.engine", rule=("setup-zero", "llmrecipes[zero]"))
    assert not (tmp_path / "runs").exists()
    assert run(["show", path]) == 0


def tools(folder: Path, **programs: str) -> str:
    """A PATH of these programs, which are shell scripts."""
    folder.mkdir()
    for name, script in programs.items():
        (folder / name.replace("_", "+")).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name.replace("_", "+")).chmod(0o755)
    return str(folder)


COMPILER = 'case "$*" in *-laio*) exit {libaio};; esac'


@pytest.mark.parametrize(
    ("programs", "offload", "key", "token"),
    [
        ({"ninja": "exit 0"}, {"offload_optimizer": "cpu"}, "layout.zero.offload_optimizer", "g++"),
        ({"ninja": "", "c__": "exit 1"}, {"offload_optimizer": "cpu"}, "layout.zero.offload_optimizer", "python3-dev"),
        ({"c__": ""}, {"offload_optimizer": "cpu"}, "layout.zero.offload_optimizer", "setup-zero"),
        (
            {"ninja": "", "c__": COMPILER.format(libaio=1)},
            {"offload_optimizer": "nvme", "nvme_path": "nvme"},
            "layout.zero.offload_optimizer",
            "libaio-dev",
        ),
    ],
)
def test_what_offload_cannot_compile_is_refused(
    shown: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    programs: dict[str, str], offload: dict[str, str], key: str, token: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("PATH", tools(tmp_path / "bin", **programs))
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path / "nowhere"))
    recipe = with_zero(corpus, **offload)
    with refused(key, rule=token):
        require_packages(recipe)
    (finding,) = [each for each in examine.check_zero("0.19.8", recipe) if each.status == "fail"]
    assert key in finding.what and token in finding.fix
    record = "installed_ops={'async_io': 1, 'cpu_adam': True, 'fused_adam': False}\naccelerator_name='cpu'\n"
    (shown / "git_version_info_installed.py").write_text(record)
    require_packages(recipe)
    assert [each.status for each in examine.check_zero("0.19.8", recipe)] == ["ok", "ok", "ok"]


def test_offload_to_nvme_needs_a_fast_local_disk(shown: Path, corpus: Path, tmp_path: Path) -> None:
    (shown / "git_version_info_installed.py").write_text("installed_ops={'async_io': 1, 'cpu_adam': True}\n")
    (tmp_path / "file").touch()
    require_packages(with_zero(corpus, offload_optimizer="nvme", nvme_path=str(tmp_path / "made" / "later")))
    for folder, token in (("/dev/shm/nvme", "/dev/shm"), (str(tmp_path / "file" / "nvme"), str(tmp_path / "file"))):
        with refused("layout.zero.nvme_path", rule=token):
            require_packages(with_zero(corpus, offload_optimizer="nvme", nvme_path=folder))


def test_runs_on_one_node_do_not_share_files_of_offload(tmp_path: Path) -> None:
    zero = Zero.model_validate({"stage": 3, "offload_optimizer": "nvme", "nvme_path": str(tmp_path)})
    with swap_files(zero, 0):
        with swap_files(zero, 1):
            pass
        with refused("layout.zero.nvme_path"), swap_files(zero, 0):
            pass
        state = tmp_path / "zero_stage_3/optimizer/rank0/0.tensor.swp"
        state.parent.mkdir(parents=True)
        state.touch()
    assert not state.parent.exists()
    with swap_files(zero, 0):  # as after a run that was killed
        pass


def test_headers_and_a_writable_folder_are_needed(shown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", tools(tmp_path / "bin", ninja="", c__=COMPILER.format(libaio=0)))
    assert builds.operator_obstacle(builds.ASYNC_IO) is None
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/proc/self/built")
    found = builds.operator_obstacle(builds.CPU_ADAM)
    assert found and "TORCH_EXTENSIONS_DIR" in found.fix
    (tmp_path / "torch" / "include").rmdir()
    found = builds.operator_obstacle(builds.CPU_ADAM)
    assert found and "torch" in found.what and found.fix


def test_ninja_of_an_environment_that_is_not_activated_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = tools(tmp_path / "scripts", ninja="")
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: scripts)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert builds.search_path() == f"{tmp_path}{os.pathsep}{scripts}"
    monkeypatch.setenv("PATH", builds.search_path())
    assert builds.search_path() == os.environ["PATH"]


def test_the_doctor_does_not_require_deepspeed(corpus: Path) -> None:
    assert [each.status for each in examine.check_zero(None, tiny_on(corpus))] == ["skip"]


@pytest.mark.usefixtures("hidden")
def test_the_doctor_fails_a_recipe_whose_engine_is_missing(corpus: Path) -> None:
    (finding,) = [each for each in examine.check_zero(None, with_zero(corpus)) if each.status == "fail"]
    assert "deepspeed" in finding.what and "setup-zero" in finding.fix


def test_a_cpu_build_of_torch_is_refused_on_gpus_before_data_is_prepared(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tiny_on(corpus), tmp_path)
    data = tmp_path / "data"
    gpu = DetectedGpu("NVIDIA H100 80GB HBM3", 80 << 30, 79 << 30, None)
    monkeypatch.setattr(builds, "visible_gpus", lambda: (gpu,) * 8)
    monkeypatch.setattr(builds.metadata, "version", lambda _: "2.13.0+cpu")
    monkeypatch.setattr(builds, "cuda_version", lambda: None)
    assert run(["train", recipe, "--runs-dir", str(tmp_path / "runs"), "--data-dir", str(data)]) == 2
    require_message(capfd.readouterr().err, "torch.cuda", rule=("8", "2.13.0+cpu", "TORCH=cuda"))
    assert not data.exists() and not (tmp_path / "runs").exists()
    # NVIDIA's own build: its version names no CUDA.
    monkeypatch.setattr(builds.metadata, "version", lambda _: "2.13.0a0+8145d630e8.nv26.06")
    monkeypatch.setattr(builds, "cuda_version", lambda: "13.0")
    builds.require_gpu_build()


@pytest.mark.parametrize(
    ("line", "cuda"),
    [
        ("cuda: Optional[str] = '13.0'", "13.0"),
        ("cuda = '12.8'", "12.8"),  # torch before 2.6
        ("cuda: Optional[str] = None", None),
        ("debug = True", None),
        ("cuda: Optional[str] = (", None),
    ],
)
def test_torchs_cuda_is_read_from_its_version_file(tmp_path: Path, line: str, cuda: str | None) -> None:
    """The file is generated by torch's tools/generate_torch_version.py; this is the one of 2.13, shortened."""
    file = tmp_path / "version.py"
    file.write_text(f"from typing import Optional\n__version__ = '2.13.0a0+8145d630e8.nv26.06'\n{line}\n", "utf-8")
    assert builds.cuda_of(file) == cuda


def test_the_installed_torch_says_the_same_as_its_file() -> None:
    import torch

    assert builds.cuda_version() == torch.version.cuda


@pytest.mark.parametrize(
    "text",
    [None, "", "- tp", "tp: 16", "tp: {max_ctas: many}", "tp: {net_name: token-ring}", "tp: {max_cats: 16}", "tp: ["],
)
def test_settings_of_nccl_that_megatron_core_cannot_read_are_refused(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "nccl.yaml"
    if text is not None:
        path.write_text(text, "utf-8")
    layout = LayoutKeys(nccl_communicator_config_path=str(path))
    with refused("layout.nccl_communicator_config_path"), model_parallel(1, layout):
        pass
