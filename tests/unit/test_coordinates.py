"""The coordinate check: activations are flat over widths with the maximal-update parametrisation, and grow without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmrecipes.cli.app import run
from llmrecipes.recipe.variants.width import at_width
from llmrecipes.verify.coordinates import MOST_GROWTH, Coordinates
from tests.helpers import LLAMA, tiny, tiny_on, write_recipe
from tests.refusals import refused, require_message

MUP = ["model.use_mup=true", "model.mup_base_hidden_size=64", "model.mup_base_head_dim=16"]


@pytest.fixture
def arguments(corpus: Path, data_dir: Path, tmp_path: Path) -> list[str]:
    recipe = tiny_on(corpus, model={"share_embeddings_and_output_weights": False}, optimizer={"lr": 1e-2})
    return [write_recipe(recipe, tmp_path), "--data-dir", str(data_dir)]


@pytest.mark.rotating
def test_flat_with_it_and_growing_without(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    def growth(code: int, *more: str) -> dict[str, float]:
        assert run(["coordinates", *arguments, *more, "--widths", "32,64,128,256", "--iters", "4", "--json"]) == code
        found = json.loads(capsys.readouterr().out)
        assert found["widths"] == [32, 64, 128, 256]
        return {name: values["growth"][-1] for name, values in found["activations"].items()}

    flat, growing = growth(0, *MUP), growth(1)
    assert set(flat) == {
        "embedding", "logits", *(f"layer {n}{part}" for n in (1, 2) for part in ("", " attention", " MLP"))
    }  # fmt: skip
    assert max(flat.values()) <= MOST_GROWTH
    for name in ("logits", "layer 2", "layer 2 attention", "layer 2 MLP"):
        assert growing[name] > flat[name] + 0.3, name


def test_growth_is_the_exponent() -> None:
    found = Coordinates((64, 128, 256), {"a": [[1.0, 2.0, 4.0], [3.0, 3.0, 3.0]], "b": [[1.0] * 3, [1.0, 0.0, 1.0]]})
    assert [found.growth("a", 0), found.growth("a")] == pytest.approx([1.0, 0.0])
    assert found.worst == "b"
    assert not found.ok


@pytest.mark.parametrize("widths", ["64", "64,64", "a,b", "0,64", "64,100"])
def test_widths_that_cannot_be_compared(widths: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["coordinates", *arguments, "--widths", widths]) == 2
    require_message(capsys.readouterr().err, "model.num_attention_heads" if widths == "64,100" else "--widths")


def test_a_wider_recipe_keeps_its_heads_and_its_base() -> None:
    wide = at_width(tiny(model={**LLAMA, "use_mup": True}), 256).model
    assert (wide.num_attention_heads, wide.num_query_groups, wide.ffn_hidden_size) == (16, 8, 704)
    assert wide.mup_base_hidden_size == 64
    assert at_width(tiny(), 256).model.ffn_hidden_size is None
    multi_query = at_width(tiny(model={"num_query_groups": 1, "kv_channels": 32}), 128).model
    assert (multi_query.num_query_groups, multi_query.kv_channels, multi_query.num_attention_heads) == (1, 32, 8)
    with refused("model.num_attention_heads"):
        at_width(tiny(), 72)
