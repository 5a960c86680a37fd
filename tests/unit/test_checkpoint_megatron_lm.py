"""Checkpoints of Megatron-LM: weights and arguments, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llmrecipes.engine.megatron.megatron_lm.folder import open_saved
from llmrecipes.engine.megatron.megatron_lm.weights import SavedWeights
from llmrecipes.plan.derive import derive
from tests import megatron_lm
from tests.helpers import ROOMY, engine_of, steps, tiny

pytestmark = pytest.mark.usefixtures("world")


def test_try(tmp_path):
    engine = engine_of(tiny())
    steps(engine, 1)
    path = megatron_lm.save(engine, tmp_path, megatron_lm.arguments(engine.recipe))
    print(sorted(p.name for p in path.iterdir()))
    saved = open_saved(tmp_path)
    print(saved.iteration, saved.arguments)
    print(list(saved.index.tensors)[:400])
    print(list(saved.index.objects))
    weights = SavedWeights(saved)
    weights.require_fit(derive(engine.recipe, 1, ROOMY))
    for name, p in engine.modules[0].named_parameters():
        assert torch.equal(weights.read(name, tuple(0 for _ in p.shape), tuple(p.shape)), p), name
    assert 0
