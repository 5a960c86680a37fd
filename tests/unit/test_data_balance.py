"""The step `balance`: shares of sources by temperature, the limit of passes, and what a run then draws."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from llmrecipes.data.folder.prepared import fingerprint
from llmrecipes.data.prepare import prepare
from llmrecipes.data.read.dataset import build
from llmrecipes.data.sources import sources
from llmrecipes.data.steps.balance import balanced
from llmrecipes.recipe.load import load
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.source import make_source
from tests.refusals import refused
from tests.unit.data_recipes import corpus, made_step, recipe


@pytest.mark.parametrize(
    ("tokens", "factors", "temperature", "max_epochs", "expected"),
    [
        ([900, 100], [1, 1], 1, 99, [0.9, 0.1]),
        ([900, 100], [1, 3], 1, 99, [0.75, 0.25]),
        ([900, 100], [1, 1], 2, 99, [0.75, 0.25]),  # 30 : 10
        ([900, 100], [1, 1], 1e9, 99, [0.5, 0.5]),
        ([900, 100], [1, 1], 2, 2, [0.8, 0.2]),  # 1000 are drawn: the smaller one twice
        ([10_000, 100, 100], [1, 1, 1], 1e9, 1, [0.8, 0.1, 0.1]),
        ([500, 300, 200], [1, 1, 1], 1e9, 1, [0.5, 0.3, 0.2]),  # all at their limit
        ([10_000, 300, 100], [1, 1, 2], 1e9, 1.5, [0.425, 0.425, 0.15]),  # one at its limit, the others by factor
    ],
)
def test_shares(
    tokens: list[int], factors: list[float], temperature: float, max_epochs: float, expected: list[float]
) -> None:
    shares = balanced(tokens, factors, 1000, temperature=temperature, max_epochs=max_epochs)
    assert shares == pytest.approx(expected, rel=1e-6)
    assert sum(shares) == pytest.approx(1)
    assert all(share * 1000 <= max_epochs * count * (1 + 1e-9) for share, count in zip(shares, tokens, strict=True))


def test_too_few_tokens_are_refused() -> None:
    with refused("data.steps[].max_epochs", rule="max_epochs=2"):
        balanced([300, 100], [1, 1], 1000, temperature=1, max_epochs=2)


def balance(used: Recipe, **keys: float) -> Recipe:
    step = made_step({"type": "balance", **keys})
    return used.model_copy(update={"data": used.data.model_copy(update={"steps": (step,)})})


def test_a_run_draws_in_these_shares(tmp_path: Path) -> None:
    """From tokens that are prepared once, whatever the temperature."""
    large, small = corpus(tmp_path / "large", 160), corpus(tmp_path / "small", 40, seed=1, word="other")
    plain = recipe(large, small, train_iters=20)
    by_tokens, equal = balance(plain), balance(plain, temperature=1e9)
    assert {fingerprint(each) for each in (by_tokens, equal)} == {fingerprint(plain)}
    lines: list[str] = []
    for used, least, most in ((by_tokens, 0.15, 0.25), (equal, 0.49, 0.51)):
        prepared = prepare(used, tmp_path / "data", workers=1, progress=lines.append)
        samples = build(used, prepared, "train")
        assert samples is not None
        drawn: Counter[int] = Counter(np.asarray(samples.dataset_index[:160]).tolist())  # type: ignore[union-attr]
        assert least <= drawn[1] / 160 <= most
        assert prepared.weights[1] == pytest.approx(drawn[1] / 160, abs=0.01)
    assert sum("small" in line and "50.0%" in line for line in lines) == 1
    with refused("data.steps[].max_epochs"):
        prepare(balance(plain, max_epochs=0.01), tmp_path / "data")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_corpus_is_balanced_by_label(kind: str, tmp_path: Path) -> None:
    rows = [{"text": f"{'ein' if n % 5 else 'one'} {n} " * 60, "tag": n % 5 > 0, "more": [n]} for n in range(200)]
    file = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), file)
    of = [make_source(type=kind, path=str(file), label_key="tag", label_value=value) for value in ("True", "False")]
    made = prepare(balance(recipe(*of), temperature=1e9, max_epochs=99), tmp_path / "data", workers=1)
    assert [source.read for source in made.manifest.sources] == [160, 40]
    assert [source.label.rpartition(" ")[2] for source in made.manifest.sources] == ["[tag=True]", "[tag=False]"]
    assert made.weights == pytest.approx((0.5, 0.5), rel=1e-6)
    assert sources.text_bytes(of[0]) is None
    with refused(f"{file}:1" if kind == "jsonl" else file, rule=("data.sources[].label_key", "'lang'")):
        list(sources.documents(of[0].model_copy(update={"label_key": "lang"})))


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ("{type: jsonl, path: a, label_key: b}", "label_key"),
        ("{type: jsonl, path: a, label_value: b}", "label_value"),
        ("{type: stdlib, label_key: a, label_value: b}", "label_key"),
    ],
)
def test_labels_that_cannot_be_meant_are_refused(source: str, where: str) -> None:
    with refused(f"data.sources.0.{where}"):
        load("gpt-tiny", [f"data.sources=[{source}]"])
