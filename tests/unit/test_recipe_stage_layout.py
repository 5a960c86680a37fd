"""The notation of pipeline stages, against megatron-core's own reader and checks."""

from __future__ import annotations

import random
from typing import Any

import pytest

from llmrecipes.recipe.derived.stage_layout import parse, text
from llmrecipes.recipe.rules.recipe_rules import check
from llmrecipes.recipe.schema import Recipe
from tests.dist.worlds import GlooWorld

KNOWN = (
    "Et*3|(tt|)*29,m|L", "Et|(tt|)*30mL", "Et*3|(tt|)*29,mL", "Ettt|tL", "E|t*4|L", "Et,t|,t,tL", "xy(ab)*2",
    "E(t|t|)*3L", "(E)*1t|tL", "E((t|)*2)*3L", "Et*0|t*2L", "(tt|)*0EtttL", "*3", "t*", "()*2", "E t|tL", "et|tl", "|",
    "E||L", "auto", "Et*2*3|L", "(t*2|)*2EL", "E|(t*2,t|)*2L", "decoder", "Et\n|tL", "(t)*2*2",
)  # fmt: skip


def drawn() -> list[str]:
    """Notations of random pieces, most of them valid."""
    draw = random.Random(0)

    def group() -> str:
        inner = "".join(draw.choice(("t", "tt", "|", "t*2", ",", "m")) for _ in range(draw.randint(1, 4)))
        return f"({inner})*{draw.randint(0, 4)}"

    pieces = ("E", "t", "tt|", "|", "t*3", "m", "L", ",", "*2", "(", ")", "x")
    weights = (4, 9, 9, 9, 9, 2, 3, 3, 1, 1, 1, 1)
    return [
        "".join(group() if draw.random() < 0.3 else draw.choices(pieces, weights)[0] for _ in range(draw.randint(1, 8)))
        for _ in range(400)
    ]


def placed() -> list[tuple[str, int, int, int, int]]:
    """Stages of models with four layers at most: notation, stages, chunks, layers, predictions; some are wrong."""
    draw = random.Random(1)
    found: list[tuple[str, int, int, int, int]] = []
    for _ in range(600):
        stages, chunks, predictions = draw.choice((2, 3, 4)), draw.choice((1, 1, 2)), draw.choice((0, 0, 1, 2))
        layers = draw.randint(1, 4)
        parts = ["E", *"t" * layers, *"m" * predictions, "L"]
        for _ in range(draw.choice((0, 0, 0, 1))):  # some in a wrong place, or more often
            parts.insert(draw.randrange(len(parts) + 1), draw.choice((*"tmEL", parts.pop(draw.randrange(len(parts))))))
        for _ in range(stages * chunks - 1):
            parts.insert(draw.randint(1, len(parts) - draw.choice((0, 1, 1))), "|")
        found.append(("".join(parts), stages, chunks, layers, predictions))
    return found


def measure() -> dict[str, Any]:
    """megatron-core's reading of KNOWN and `drawn`, None where it refuses; and whether it accepts `placed`."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    def read(notation: str) -> list[list[str]] | None:
        try:
            return [[part.name for part in stage] for stage in PipelineParallelLayerLayout.parse_str_to_list(notation)]
        except AssertionError:
            return None

    def accepted(notation: str, stages: int, _chunks: int, layers: int, predictions: int) -> str:
        try:
            alone = PipelineParallelLayerLayout(notation, stages).validate_layer_layout(layers, predictions or None)
        except AssertionError:
            return "refused"
        return "predictions alone" if alone else "accepted"

    return {"read": [read(each) for each in (*KNOWN, *drawn())], "accepted": [accepted(*each) for each in placed()]}


@pytest.fixture(scope="module")
def theirs(worlds: dict[int, GlooWorld]) -> dict[str, Any]:
    found: dict[str, Any] = worlds[1].start(measure, group=False).result()
    return found


def test_notations_are_read_as_megatron_core_reads_them(theirs: dict[str, Any]) -> None:
    names = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
    valid = 0
    for notation, expected in zip((*KNOWN, *drawn()), theirs["read"], strict=True):
        try:
            ours = [[names[part] for part in stage] for stage in parse(notation)]
        except ValueError:
            assert expected is None, notation
            continue
        assert ours == expected, notation
        assert parse(text(parse(notation))) == parse(notation)
        valid += 1
    assert 200 < valid < len(theirs["read"])


def make(notation: str, stages: int, chunks: int, layers: int, predictions: int) -> Recipe:
    model: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 64,
        "vocab_size": 257,
    }
    model |= {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False}
    parallelism: dict[str, Any] = {
        "pipeline_model_parallel_size": stages,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
        "pipeline_model_parallel_layout": notation,
    }
    train = {"train_iters": 1, "global_batch_size": 12}
    return Recipe.model_validate(
        {
            "name": "t", "model": {**model, "mtp_num_layers": predictions or None},
            "layout": parallelism,
            "train": train,
            "optimizer": {"lr": 1e-3},
        }
    )  # fmt: skip


def test_the_rules_allow_nothing_that_megatron_core_refuses(theirs: dict[str, Any]) -> None:
    """And refuse only what it accepts without computing it: parts where it does not look for them."""
    allowed = 0
    for case, verdict in zip(placed(), theirs["accepted"], strict=True):
        problems = check(make(*case))
        if problems:
            parts = case[0].split("|")
            elsewhere = "E" not in parts[0] or "L" not in parts[-1] or "" in parts
            assert verdict in ("refused", "predictions alone") or elsewhere, (case, problems)
            assert all(problem.fix for problem in problems)
        else:
            assert verdict == "accepted", case
            allowed += 1
    assert allowed > 100


@pytest.mark.timeout(30)
@pytest.mark.parametrize("notation", ["(" * 90_000, "(t" * 45_000])
def test_parentheses_without_end_are_refused_at_once(notation: str) -> None:
    with pytest.raises(ValueError, match=r"'\('"):
        parse(notation)


@pytest.mark.parametrize("notation", ["E(t*9999|)*9999L", "t*" + "9" * 5000, "(t|)*100001"])
def test_absurd_repetitions_are_refused_at_once(notation: str) -> None:
    with pytest.raises(ValueError, match="100,000"):
        parse(notation)


def test_stages_are_written_shortly() -> None:
    stages = ("Et", *["tt"] * 30, "mL")
    assert text(stages) == "Et|(tt|)*30mL"
    assert text(("E", "t" * 12, "t" * 12, "L")) == "E|t*12|t*12|L"
    assert text(("E", *["t" * 12] * 4, "L")) == "E|(t*12|)*4L"
