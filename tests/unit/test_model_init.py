"""Initial weights: they follow from the seed and the name, and have the distribution they should."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from llmrecipes.engine.base import Slice
from llmrecipes.engine.core.model import init, philox
from llmrecipes.engine.core.model.init import values as drawn
from llmrecipes.recipe.schema import Model
from tests.helpers import LLAMA, MODEL, built, tiny

QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
OUT = "decoder.layers.1.self_attention.linear_proj.weight"
DOWN = "decoder.layers.0.mlp.linear_fc2.weight"
WORDS = "embedding.word_embeddings.weight"
SHAPES = {
    QKV: (768, 256), OUT: (256, 256), DOWN: (256, 1024), WORDS: (512, 256),
    "decoder.layers.0.mlp.linear_fc1.bias": (1024,), "decoder.final_layernorm.weight": (256,),
    "decoder.final_layernorm.bias": (256,),
}  # fmt: skip


def values(init_method: str, seed: int = 1, names: list[str] | None = None, **model: int) -> dict[str, torch.Tensor]:
    section = Model.model_validate({**MODEL, "init_method": init_method, "init_method_std": 0.02, **model})
    return {name: whole(name, section, seed) for name in names or list(SHAPES)}


def whole(name: str, section: Model, seed: int) -> torch.Tensor:
    return drawn(name, SHAPES[name], section, seed, [0] * len(SHAPES[name]), SHAPES[name])


def test_values_follow_from_seed_and_name_alone() -> None:
    torch.manual_seed(5)
    one = values("normal")
    torch.manual_seed(6)
    other = values("normal", names=list(reversed(SHAPES)))
    assert all(torch.equal(one[name], other[name]) for name in SHAPES)
    assert torch.equal(values("normal", names=[DOWN])[DOWN], one[DOWN])
    assert not torch.equal(values("normal", seed=2)[QKV], one[QKV])
    assert not torch.equal(one[QKV][:256], one[OUT] * 2)


@pytest.mark.parametrize("init_method", ["normal", "xavier_uniform", "kaiming_normal"])
@pytest.mark.parametrize("name", [QKV, DOWN])
def test_a_box_has_the_values_of_the_whole(init_method: str, name: str) -> None:
    section = Model.model_validate({**MODEL, "init_method": init_method})
    expected = whole(name, section, 1)
    rows, columns = SHAPES[name]
    for offset, size in (((rows // 2, 0), (rows // 2, columns)), ((0, columns // 4), (rows, columns // 4))):
        box = tuple(slice(first, first + length) for first, length in zip(offset, size, strict=True))
        assert torch.equal(drawn(name, SHAPES[name], section, 1, offset, size), expected[box])


def test_a_rank_draws_its_part_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    bits = philox.bits

    def counted(key: int, shape: Sequence[int], offset: Sequence[int], size: Sequence[int]) -> Any:
        asked.append(math.prod(size))
        return bits(key, shape, offset, size)

    monkeypatch.setattr(philox, "bits", counted)
    monkeypatch.setattr(init, "DRAWN_AT_ONCE", 1 << 18)
    section = Model.model_validate(MODEL)
    parts = [torch.full((128, 32, 8192), math.nan)[:, 0], torch.full((16, 16384), math.nan)]
    shape = (16384, 16384)
    init.draw([Slice(QKV, (256, 8192), shape, part) for part in parts[:1]], section, 1)
    assert (sum(asked), max(asked)) == (128 * 8192, 1 << 18)
    init.draw([Slice(QKV, (256, 0), shape, parts[1])], section, 1)
    assert torch.equal(parts[0][:16], parts[1][:, 8192:])


@pytest.mark.parametrize("init_method", ["normal", "xavier_uniform", "kaiming_normal"])
@pytest.mark.parametrize("name", [WORDS, "output_layer.weight"])
def test_rows_that_pad_the_vocabulary_change_no_value(init_method: str, name: str) -> None:
    section = Model.model_validate({**MODEL, "init_method": init_method})
    one, other = (drawn(name, (rows, 64), section, 1, (0, 0), (100, 64)) for rows in (128, 1024))
    assert torch.equal(one, other)


def test_normal_with_scaled_output_projections() -> None:
    found = values("normal", num_layers=8)
    for name, std in ((QKV, 0.02), (WORDS, 0.02), (OUT, 0.02 / 4), (DOWN, 0.02 / 4)):
        assert found[name].std().item() == pytest.approx(std, rel=0.02), name
        assert abs(found[name].mean().item()) < std / 50, name


def test_xavier_stays_in_its_bounds_and_embeddings_are_normal() -> None:
    found = values("xavier_uniform", num_layers=2)
    bound = math.sqrt(6 / (768 + 256))
    assert found[QKV].abs().max().item() == pytest.approx(bound, rel=0.01)
    assert found[QKV].abs().max().item() <= bound
    assert found[OUT].abs().max().item() <= math.sqrt(6 / 512) / 2
    assert found[WORDS].std().item() == pytest.approx(0.02, rel=0.02)


def test_kaiming_has_the_variance_that_keeps_relus_activations() -> None:
    found = values("kaiming_normal", num_layers=2)
    assert found[QKV].std().item() == pytest.approx(math.sqrt(2 / 256), rel=0.02)
    assert found[DOWN].std().item() == pytest.approx(math.sqrt(2 / 1024) / 2, rel=0.02)


def test_norms_are_one_and_biases_zero() -> None:
    found = values("kaiming_normal")
    assert torch.equal(found["decoder.final_layernorm.weight"], torch.ones(256))
    assert not found["decoder.final_layernorm.bias"].any()
    assert not found["decoder.layers.0.mlp.linear_fc1.bias"].any()


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("shape", [{}, LLAMA], ids=["gpt", "llama"])
def test_every_parameter_of_a_real_model_is_filled_alike_in_any_precision_and_depth(shape: dict[str, object]) -> None:
    full = dict(built(tiny(model=shape)).module.named_parameters())
    half = dict(built(tiny(model=shape, train={"precision": "bf16"})).module.named_parameters())
    deep = dict(built(tiny(model={**shape, "num_layers": 3})).module.named_parameters())
    for name, parameter in full.items():
        assert torch.equal(half[name], parameter.to(torch.bfloat16)), name
        if not name.endswith(("linear_proj.weight", "linear_fc2.weight")):  # these depend on the depth
            assert torch.equal(deep[name], parameter), name
        if parameter.dim() > 1:
            assert 0.002 < parameter.std().item() < 0.021, name
        else:
            assert parameter.unique().tolist() == [float(name.endswith("weight"))], name
