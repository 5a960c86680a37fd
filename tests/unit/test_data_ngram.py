"""The n-gram model against sums done by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from llmrecipes.data.read.ngram import MAX_VOCAB, KneserNey


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("ids", [5, 7], ids=["seen", "two never seen"])
def test_probabilities_after_every_context_sum_to_one(order: int, ids: int) -> None:
    vocab = 7
    model = KneserNey(np.random.default_rng(0).integers(0, ids, (20, 12)) ** 2 % ids, vocab, order)
    every = np.array(list(itertools.product(range(vocab), repeat=3)))
    found = model.probabilities(every)
    assert (found > 0).all()
    assert found[:, 1].reshape(-1, vocab).sum(1) == pytest.approx(1.0)  # after two tokens
    assert found[::vocab, 0].reshape(-1, vocab).sum(1) == pytest.approx(1.0)  # after one, at the beginning of a row


def test_bigrams_of_a_tiny_corpus() -> None:
    # 01 and 10 twice, 02 once: the discount is 1 / (1 + 2 × 2). Each token follows one other: below, all are alike.
    model = KneserNey(np.array([[0, 1, 0, 1, 0, 2]]), vocab_size=3, order=2)
    after_0, after_1 = 2 * 0.2 / 3 / 3, 0.2 / 2 / 3
    expected = {
        (0, 0): after_0, (0, 1): 1.8 / 3 + after_0, (0, 2): 0.8 / 3 + after_0,
        (1, 0): 1.8 / 2 + after_1, (1, 1): after_1, (1, 2): after_1,
        (2, 0): 1 / 3, (2, 1): 1 / 3, (2, 2): 1 / 3,
    }  # fmt: skip
    found = model.probabilities(np.array(list(expected)))[:, 0]
    assert dict(zip(expected, found, strict=True)) == pytest.approx(expected)


def test_unigrams_of_a_tiny_corpus() -> None:
    # 0 three times, 1 twice, 2 once, 3 never: the discount is 1 / (1 + 2 × 1); what it takes from three, four share.
    model = KneserNey(np.array([[0, 0, 0], [1, 1, 2]]), vocab_size=4, order=1)
    share = 3 / 3 / 6 / 4
    expected = [(3 - 1 / 3) / 6 + share, (2 - 1 / 3) / 6 + share, (1 - 1 / 3) / 6 + share, share]
    assert model.probabilities(np.array([[0, 0, 1, 2, 3]]))[0] == pytest.approx(expected)


def test_grams_do_not_cross_rows_and_longer_ones_know_more() -> None:
    rows = np.array([[0, 1, 2]] * 8 + [[3, 1, 4]] * 8)
    pairs, triples = KneserNey(rows, 5, order=2), KneserNey(rows, 5, order=3)
    assert pairs.probabilities(np.array([[0, 1, 2]]))[0, 1] == pytest.approx(0.5, abs=0.1)
    assert triples.probabilities(np.array([[0, 1, 2]]))[0, 1] > 0.9
    assert triples.probabilities(np.array([[2, 3]]))[0, 0] < 0.25  # 2 3 is only where two rows meet


@pytest.mark.parametrize(("vocab", "order", "length"), [(MAX_VOCAB[3] + 1, 3, 8), (10, 4, 8), (10, 3, 2)])
def test_what_cannot_be_counted_is_refused(vocab: int, order: int, length: int) -> None:
    with pytest.raises(ValueError, match=f"order {order}"):
        KneserNey(np.zeros((2, length), np.int64), vocab, order)


def test_the_largest_vocabulary_does_not_overflow() -> None:
    last = MAX_VOCAB[3] - 1
    rows = np.full((4, 5), last)
    assert KneserNey(rows, MAX_VOCAB[3]).probabilities(rows)[:, 1:].min() > 0.9
