"""What a model's bits per byte are compared with."""

from __future__ import annotations

import math
import random
import zlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmrecipes.checkpoint.manifest import Monitored
from llmrecipes.data.folder.prepared import (
    bits_per_byte,
    bytes_per_token,
    deflate_bits_per_byte,
    drawn_samples,
    gzip_bits_per_byte,
    held_out_text,
)
from llmrecipes.data.prepare import Prepared, prepare
from llmrecipes.data.read.dataset import build
from llmrecipes.data.read.ngram import KneserNey
from llmrecipes.errors import UserError
from llmrecipes.plan.derive import derive
from llmrecipes.recipe.derived.stage_runs import stage_recipes
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.stage_section import Stage
from llmrecipes.train import summary
from llmrecipes.train.summary import Baseline, cheap, counting, table
from tests.helpers import ROOMY
from tests.unit.data_recipes import corpus, recipe


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Prepared]:
    root = tmp_path_factory.mktemp("made")
    used = recipe(corpus(root / "text"))
    return used, prepare(used, root / "data", workers=1)


def bits_of(made: tuple[Recipe, Prepared]) -> Any:
    return partial(bits_per_byte, prepared=made[1], split="valid", seq_length=made[0].model.seq_length)


def test_each_window_is_compressed_by_itself() -> None:
    rng = random.Random(0)
    text = b" ".join(rng.choice([b"alpha", b"beta", b"gamma"]) + b"%d" % rng.randrange(99) for _ in range(2000))

    def deflate(piece: bytes) -> int:
        stream = zlib.compressobj(9, zlib.DEFLATED, -15)
        return len(stream.compress(piece) + stream.flush())

    pieces = [text[n : n + 300] for n in range(0, len(text), 300)]
    assert len(text) % 300
    expected = 8 * sum(map(deflate, pieces)) / len(text)
    assert deflate_bits_per_byte(text, 300) == pytest.approx(expected)
    assert deflate_bits_per_byte(text, 1 << 20) == pytest.approx(8 * deflate(text) / len(text))
    assert deflate_bits_per_byte(text, 100) > expected > deflate_bits_per_byte(text, 3000)


def test_the_window_is_the_models_in_bytes_and_guessing_is_the_vocabularys(made: tuple[Recipe, Prepared]) -> None:
    used, prepared = made
    guess, pieces, whole = cheap(used, prepared, bits_of(made))
    vocab = prepared.manifest.tokenizer.vocab_size
    per_token = bytes_per_token(prepared, "valid", 64)
    assert guess.bits_per_byte == pytest.approx(math.log2(vocab) / per_token)
    text = held_out_text(prepared)
    assert pieces.bits_per_byte == pytest.approx(deflate_bits_per_byte(text, round(64 * per_token)))
    assert whole.bits_per_byte == gzip_bits_per_byte(prepared)


def test_a_window_as_long_as_gzips_has_no_row_of_its_own(
    made: tuple[Recipe, Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "GZIP_WINDOW", 64)
    assert len(cheap(*made, bits_of(made))) == 2


def test_grams_are_counted_in_the_samples_of_the_run(made: tuple[Recipe, Prepared]) -> None:
    used, prepared = made

    def rows(split: Any) -> Any:
        samples = build(used, prepared, split)
        assert samples is not None
        drawn = [samples[n] for n in range(drawn_samples(used, split))]
        return np.array([[*s["tokens"].tolist(), int(s["labels"][-1])] for s in drawn])

    seen, held_out, vocab = rows("train"), rows("valid"), prepared.manifest.tokenizer.vocab_size
    for baseline, order in zip(counting(used, prepared, bits_of(made)), (1, 3), strict=True):
        loss = -np.log(KneserNey(seen, vocab, order).probabilities(held_out)).mean()
        assert baseline.bits_per_byte == pytest.approx(bits_of(made)(loss))
        assert f"the same {used.train.train_iters * used.train.global_batch_size * 64:,} " in baseline.name


def test_a_long_run_is_not_read_to_its_end(made: tuple[Recipe, Prepared], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "COUNTED_TOKENS", 1000)
    monkeypatch.setattr(summary, "COMPRESSED_BYTES", 400)
    used, prepared = made
    assert all("the first 960 training tokens" in row.name for row in counting(used, prepared, bits_of(made)))
    window = round(64 * bytes_per_token(prepared, "valid", 64))
    expected = deflate_bits_per_byte(held_out_text(prepared, max_bytes=400), window)
    assert cheap(used, prepared, bits_of(made))[1].bits_per_byte == pytest.approx(expected)


def test_the_table_goes_from_worst_to_best_and_marks_the_model() -> None:
    model, others = Baseline("this model", 2.0), [Baseline("gzip", 1.6), Baseline("guessing", 3.5)]
    assert [line.split() for line in table(model, others)] == [
        ["3.500", "guessing"],
        [">", "2.000", "this", "model"],
        ["1.600", "gzip"],
    ]


@pytest.mark.parametrize(("platform", "rows"), [("cpu", 6), ("cuda", 4)])
def test_devices_do_not_wait_for_counting(made: tuple[Recipe, Prepared], platform: str, rows: int) -> None:
    lines = summary.learnt(made[1], _loop(made, platform), loss=2.0)
    assert sum(line.startswith((" ", ">")) for line in lines) == rows
    assert any(line.startswith("n-gram") for line in lines) == (platform == "cuda")


def test_a_finished_run_does_not_fail_over_its_baselines(
    made: tuple[Recipe, Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_args: object) -> None:
        raise UserError("is missing", where="00-train.bin")

    monkeypatch.setattr(summary, "counting", unreadable)
    lines = summary.learnt(made[1], _loop(made, "cpu"), loss=2.0)
    assert sum(line.startswith((" ", ">")) for line in lines) == 4
    assert "00-train.bin" in lines[-1]


def test_a_stage_has_seen_fewer_tokens_than_its_run(made: tuple[Recipe, Prepared]) -> None:
    (stage,) = stage_recipes(made[0].model_copy(update={"stages": (Stage(name="all"),)}))
    lines = summary.learnt(made[1], _loop((stage, made[1]), "cpu"), loss=2.0)
    assert not any("trigrams" in line for line in lines) and "stages" in lines[-1]


def _loop(made: tuple[Recipe, Prepared], platform: str) -> Any:
    return SimpleNamespace(
        plan=derive(made[0], 1, ROOMY),
        monitored=Monitored(),
        loaders=SimpleNamespace(bits_per_byte=bits_of(made)),
        engine=SimpleNamespace(platform=SimpleNamespace(name=platform)),
    )
