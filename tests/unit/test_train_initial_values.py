"""Initial weights are drawn where a run begins, and nowhere that a checkpoint is loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from llmrecipes.checkpoint.store import CheckpointStore
from llmrecipes.engine.core import backend
from llmrecipes.engine.core.model import gpt, philox
from llmrecipes.engine.core.model.gpt import BuiltModel
from llmrecipes.engine.core.platform import select
from llmrecipes.engine.core.world import join
from llmrecipes.engine.megatron.backend import MegatronBackend
from llmrecipes.hardware.cluster import detect
from llmrecipes.launch.run_options import RunOptions
from llmrecipes.models.upcycle import upcycle
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.load import load as load_recipe
from llmrecipes.recipe.schema import LayoutKeys, Recipe
from llmrecipes.workflow.run import Paths, TrainOptions
from llmrecipes.workflow.train import train

MODEL = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16, "vocab_size": 384,
    "add_bias_linear": False, "gated_linear_unit": True, "activation_func": "silu", "normalization": "RMSNorm",
}  # fmt: skip


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the boxes that have been drawn. What is not filled afterwards is NaN."""
    sizes: list[int] = []
    bits, construct = philox.bits, gpt.construct

    def counted(key: int, shape: Sequence[int], offset: Sequence[int], size: Sequence[int]) -> Any:
        sizes.append(math.prod(size))
        return bits(key, shape, offset, size)

    def without_values(*args: Any) -> BuiltModel:
        built = construct(*args)
        with torch.no_grad():
            for module in built.modules:
                for parameter in module.parameters():
                    parameter.fill_(math.nan)
        return built

    monkeypatch.setattr(philox, "bits", counted)
    for module in (gpt, backend):
        monkeypatch.setattr(module, "construct", without_values)
    return sizes


def test_nothing_is_drawn_where_a_checkpoint_is_loaded(
    drawn: list[int], corpus: Path, data_dir: Path, tmp_path: Path
) -> None:
    paths = Paths(tmp_path, data_dir)
    run_dir = tmp_path / "dense" / "first"

    def run(steps: int, *, from_scratch: bool = False) -> list[int]:
        drawn.clear()
        recipe = Recipe.model_validate(
            {
                "name": "dense",
                "model": MODEL,
                "data": {"sources": [{"type": "text", "path": str(corpus)}], "num_workers": 0},
                "train": {"train_iters": steps, "global_batch_size": 4, "precision": "bf16"},
                "optimizer": {"lr": 1e-2},
                "scheduler": {"lr_decay_iters": 4},
                "tracking": {"mlflow": False, "tensorboard": False},
                "layout": {"micro_batch_size": 2},
            }
        )
        options = TrainOptions(nproc=1, run_id="first", run=RunOptions(sample=False, from_scratch=from_scratch))
        assert train(recipe, paths, options, print) == 0
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()]
        losses = [record["loss"] for record in records if "loss" in record]
        assert all(map(math.isfinite, losses))
        return list(drawn)

    # A save that was interrupted before there was any checkpoint is nothing to load.
    (run_dir / "checkpoints" / ".tmp-step-00000001-ab").mkdir(parents=True)
    first = run(2)
    assert sum(first) == 2 * (3 * 32 * 32 + 32 * 32 + 3 * 32 * 128) + (384 + 16) * 32
    assert run(3) == []
    assert run(3, from_scratch=True) == first
    drawn.clear()
    made = upcycle(run_dir, ["model.num_moe_experts=4"], tmp_path, "made")
    assert drawn == [4 * 32] * 2, "of its routers"
    with join(select(), 1, LayoutKeys()):
        recipe = load_recipe(f"{made.run_dir}/recipe.yaml").recipe
        (entry,) = CheckpointStore(Path(made.run_dir) / "checkpoints").entries()
        model = MegatronBackend().load_weights(derive(recipe, 1, detect()), select(), entry)
        assert drawn == [4 * 32] * 2, "and nothing to sample"
        assert all(parameter.isfinite().all() for parameter in model._built.module.parameters())
