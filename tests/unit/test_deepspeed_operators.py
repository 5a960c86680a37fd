"""How DeepSpeed's operators are compiled; the compiler itself is not run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmrecipes.engine.deepspeed.build import load_operators
from llmrecipes.recipe.sections.zero import Zero


@pytest.mark.slow
@pytest.mark.deepspeed
def test_no_operator_waits_for_a_compilation_that_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also none that another one loads by itself: torch waits as long as the file `lock` is there."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.ops.op_builder.builder import OpBuilder
    from torch.utils.cpp_extension import _get_build_directory

    def lock(name: str) -> Path:
        return Path(_get_build_directory(name, False)) / "lock"

    names = ("cpu_adam", "pin_memory", AsyncIOBuilder().name)
    for name in names:
        lock(name).touch()
    compiled: dict[str, bool] = {}

    def compile_operator(builder: Any, *_args: Any, **_options: Any) -> SimpleNamespace:
        compiled[builder.name] = lock(builder.name).exists()
        return SimpleNamespace(__file__=None)

    monkeypatch.setattr(OpBuilder, "jit_load", compile_operator)
    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})
    monkeypatch.setattr(sys, "_deepspeed_pin_memory_op_module", None, raising=False)
    load_operators(Zero.model_validate({"stage": 3, "offload_optimizer": "nvme", "nvme_path": "/"}))
    assert compiled == dict.fromkeys(names, False)
