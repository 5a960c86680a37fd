"""Kernels of a step by what they are for (`benchmarks.kernels`), counted in the real code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llmrecipes.plan.derive import derive
from llmrecipes.recipe.load import load
from tests.helpers import ROOMY, ROOT, environment

SMALL = ["model.num_layers=2", "layout.micro_batch_size=1"]


@pytest.mark.slow
def test_products_are_those_of_the_plan_and_a_fusion_saves_kernels(tmp_path: Path) -> None:
    """A program, because its patches hold for a whole process."""
    subprocess.run(
        [sys.executable, "-m", "benchmarks.kernels", "gpt-1b", *SMALL, "--json", str(tmp_path / "found.json")],
        cwd=ROOT,
        env=environment() | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    found = json.loads((tmp_path / "found.json").read_text("utf-8"))
    plan = derive(load("gpt-1b", [*SMALL, "train.global_batch_size=1"]).recipe, 1, ROOMY)
    base, unfused = found["as planned"], found["without bias_activation_fusion"]
    counted = sum(group["flops"] for group in base.values())
    assert counted == pytest.approx(plan.flops_per_token_causal * plan.tokens_per_step, rel=0.01)
    assert unfused["MLP"]["elementwise"] > base["MLP"]["elementwise"]
    assert unfused["MLP"]["elementwise_bytes"] > 1.5 * base["MLP"]["elementwise_bytes"]
    assert all(group["one_pass_bytes"] <= group["elementwise_bytes"] for group in base.values())
    # Four matrices and two norms of each layer, the last norm, and the embedding; the output layer's come in chunks.
    assert base["gradients into the buffer"]["elementwise"] == 6 * 2 + 2
