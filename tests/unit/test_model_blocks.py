"""The blocks of a model's picture against the parameters of the model that megatron-core builds."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest

from llmrecipes.plan import drawing
from llmrecipes.plan.blocks import Graph, graph
from llmrecipes.plan.parameters import count, count_adapters
from llmrecipes.recipe.derived.shape import shape
from llmrecipes.recipe.load import load, names
from llmrecipes.recipe.schema import Recipe
from tests.dist.worlds import GlooWorld
from tests.unit import test_plan_model, test_plan_ranks

SMALLER: dict[str, dict[str, Any]] = {
    "deepseek-v3": {"num_layers": 4, "moe_layer_freq": [0, 1, 0, 1], "num_moe_experts": 16, "mtp_num_layers": 2},
    "qwen3-30b-a3b": {"num_layers": 2, "num_moe_experts": 16},
}
"""Of recipes of full size whose experts take long to construct."""
RECIPES = ("gpt-tiny", "moe-tiny", "gpt-1b", "llama3-8b", "mixtral-8x7b", *SMALLER)
Sizes = dict[str, int]


def recipe_of(model: dict[str, Any], **sections: Any) -> Recipe:
    train = {"train_iters": 1, "global_batch_size": 8, "precision": "fp32"}
    return Recipe.model_validate({"name": "t", "model": model, "train": train, "optimizer": {"lr": 1e-3}, **sections})


def models() -> dict[str, Recipe]:
    tables: dict[str, dict[str, Any]] = {}
    for name, changes in test_plan_model.MODELS.items():
        if not name.startswith("recomputed"):
            of_model = {
                key: value for key, value in changes.items() if key not in ("precision", *test_plan_model.ON_LAYOUT)
            }
            tables[f"plan, {name}"] = {**test_plan_model.BASE, **of_model}
    for name in RECIPES:
        tables[name] = {**load(name).recipe.model.model_dump(), **SMALLER.get(name, {})}
    return {name: recipe_of(model) for name, model in tables.items()}


def built() -> dict[str, Sizes]:
    """Parameters of every model by the names of its modules: job of a rank without a group."""
    from llmrecipes.engine.core.model.gpt import construct_without_memory
    from llmrecipes.engine.core.platform import select
    from llmrecipes.engine.core.world import join
    from llmrecipes.hardware.cluster import Cluster
    from llmrecipes.plan.derive import derive
    from llmrecipes.recipe.schema import LayoutKeys

    platform = select()
    platform.install()
    cpu = Cluster(gpus=(), cpu_cores=1, memory_bytes=1 << 50, memory_available_bytes=1 << 50, disk_free_bytes=1 << 50)
    with join(platform, 1, LayoutKeys()):
        made = {name: construct_without_memory(derive(recipe, 1, cpu)) for name, recipe in models().items()}
        return {name: {key: each.numel() for key, each in model.named_parameters()} for name, model in made.items()}


PREDICTED = re.compile(r"(transformer_layer|mtp_model_layer)\..*")
"""A layer of multi-token prediction; megatron-core 0.19 has another name for it."""


def by_part(parameters: Sizes) -> Counter[str]:
    """Real parameters under the names that the picture has for them."""
    found: Counter[str] = Counter()
    for name, many in parameters.items():
        name = re.sub(r"\.(weight|bias)\d*$", "", name).removeprefix("decoder.")
        name = re.sub(r"experts\.local_experts\.\d+", "experts", name)
        name = re.sub(r"^(layers\.\d+)\.(self_attention|mlp)\.", r"\1.", name).removeprefix("embedding.")
        found[PREDICTED.sub("transformer_layer", re.sub(r"^mtp\.layers\.\d+", "mtp", name))] += many
    return found


def of_picture(made: Graph) -> Counter[str]:
    found: Counter[str] = Counter()
    for block in (made.embedding, made.norm, made.output):
        found.update({part.name: part.parameters for part in block.parts})
    for layers in made.layers:
        for number in layers.numbers:
            found.update({f"layers.{number}.{p.name}": p.parameters for block in layers.blocks for p in block.parts})
    for block in made.prediction:
        found.update({f"mtp.{part.name}": part.parameters * made.predictions for part in block.parts})
    return found


@pytest.fixture(scope="module")
def real(worlds: dict[int, GlooWorld]) -> dict[str, Sizes]:
    found: dict[str, Sizes] = worlds[1].start(built, group=False).result()
    return found


@pytest.mark.parametrize("name", models())
def test_every_weight_of_the_picture_is_one_of_the_model(name: str, real: dict[str, Sizes]) -> None:
    made = graph(models()[name])
    assert of_picture(made) == by_part(real[name])
    assert made.parameters == sum(real[name].values())


@pytest.mark.parametrize("name", names())
def test_blocks_and_stages_have_all_parameters(name: str) -> None:
    recipe = load(name).recipe
    made, s = graph(recipe), shape(recipe.model)
    assert made.parameters == count(recipe.model, s).total
    assert sum(stage.parameters - stage.copies for stage in made.stages) == made.parameters
    added = sum(part.parameters * len(layers.numbers) for layers in made.layers for part in layers.adapters)
    assert added == count_adapters(recipe.lora, recipe.model, s)[0]


WHOLE = [name for name, (_, model, parallelism) in test_plan_ranks.LAYOUTS.items()
         if "tensor_model_parallel_size" not in parallelism and "expert_model_parallel_size" not in parallelism
         and "pipeline_model_parallel_size" in parallelism]  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_stages_hold_what_their_ranks_are_planned_with(name: str) -> None:
    from llmrecipes.hardware.cluster import Cluster
    from llmrecipes.plan.layout import layout
    from llmrecipes.plan.parameters import count_on_rank

    ranks, model, parallelism = test_plan_ranks.LAYOUTS[name]
    recipe = recipe_of({**test_plan_ranks.BASE, **model}, layout=parallelism)
    cpu = Cluster(gpus=(), cpu_cores=1, memory_bytes=1, memory_available_bytes=1, disk_free_bytes=1)
    laid_out, made = layout(recipe, ranks, cpu), graph(recipe)
    for place, stage in enumerate(made.stages):
        assert stage.parameters == count_on_rank(recipe.model, shape(recipe.model), laid_out, place, "cpu").total
        assert stage.chunks == tuple(
            (laid_out.first_layer(place, chunk), many) for chunk, many in enumerate(laid_out.layers_per_stage[place])
        )


class Svg(HTMLParser):
    """Texts of a picture with their places, and its size."""

    def __init__(self, svg: str) -> None:
        super().__init__()
        self.texts: list[tuple[str, float, float, str]] = []
        self.cells, self.tied = 0, False
        self._at: tuple[str, float, float] | None = None
        self.feed(svg)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag == "svg":
            self.wide, self.high = (float(each) for each in values["viewbox"].split()[2:])
            self.label = values["aria-label"]
        elif tag == "text":
            self._at = values["class"], float(values["x"]), float(values["y"])
        elif values.get("class", "").startswith("cell"):
            self.cells += values["d"].count("M")
        self.tied |= values.get("class") == "tied"

    def handle_data(self, data: str) -> None:
        if self._at is not None:
            self.texts.append((*self._at, data))

    def handle_endtag(self, tag: str) -> None:
        self._at = None


UNITS = 6.6
"""Of a letter of eleven or, in bold, twelve: more than its mean in the fonts of a browser."""


@pytest.mark.parametrize("name", names())
def test_a_picture_has_its_numbers_and_no_text_runs_into_another(name: str) -> None:
    made = graph(load(name).recipe)
    seen = Svg(drawing.picture(made))
    assert f"{made.parameters:,}" in seen.label
    lines: dict[float, list[tuple[float, float]]] = {}
    for kind, x, y, words in seen.texts:
        size = len(words) * (UNITS if "small" not in kind else 5)
        left = x - size if "count" in kind else x - size / 2 if "small" in kind else x
        lines.setdefault(y, []).append((left, left + size))
    for spans in lines.values():
        spans.sort()
        assert spans[0][0] >= 0 and spans[-1][1] <= seen.wide
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert max(lines) < seen.high
    ends = sum(len(set(stage.has) - {"final norm"}) for stage in made.stages)
    assert seen.cells == (len(made.kinds()) + ends if len(made.stages) > 1 else 0)
    assert seen.tied == (not made.output.parts)


def test_kinds_that_take_turns_are_shown_in_order() -> None:
    made = graph(load("moe-tiny", ["model.moe_layer_freq=[1,0,0,1]"]).recipe)
    assert made.kinds() == (0, 1, 1, 0)
    assert [drawing.ranges(layers.numbers) for layers in made.layers] == ["1, 4", "2 to 3"]
    assert Svg(drawing.picture(made)).cells == 2 + 4
