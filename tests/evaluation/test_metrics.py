"""Entropy, diversity and distances against hand-computed values and brute force."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from tiny_model import word_shares

from convergeflow.data.corpus import Corpus
from convergeflow.data.prepare import prepare
from convergeflow.errors import UserError
from convergeflow.evaluation.metrics import (
    METRICS,
    jensen_shannon,
    measure,
    pairwise_overlap,
    repetition,
    sample_entropies,
    training_overlap,
    unigram_entropy,
)
from convergeflow.evaluation.ngrams import ngram_codes
from convergeflow.evaluation.reference import corpus_reference, stories_reference


def test_entropy_by_hand() -> None:
    samples = [[3, 3, 3, 3], [0, 1, 2, 3], [5, 5, 7, 7, 7, 7, 7, 7]]
    expected = [0.0, math.log(4), 0.25 * math.log(4) + 0.75 * math.log(4 / 3)]
    assert sample_entropies(samples) == pytest.approx(expected)
    found = unigram_entropy(samples)
    assert found.value == pytest.approx(np.mean(expected))
    assert found.se == pytest.approx(np.std(expected, ddof=1) / 3**0.5)


@pytest.mark.parametrize("vocabulary", [7, 50257])
@pytest.mark.parametrize("n", [1, 2, 8])
def test_codes_separate_exactly_the_different_ngrams(vocabulary: int, n: int) -> None:
    ids = np.random.default_rng(n).integers(0, min(vocabulary, 5), (20, 30))
    codes = ngram_codes(ids, n, vocabulary)
    grams = [tuple(row[i : i + n]) for row in ids.tolist() for i in range(30 - n + 1)]
    pairs = set(zip(grams, codes.ravel().tolist(), strict=True))
    assert len(pairs) == len(set(grams)) == len(np.unique(codes))


def test_repetition_by_hand() -> None:
    ids = np.array([[1, 2, 1, 2, 1, 2], [1, 2, 3, 4, 5, 6]])
    # the five 2-grams of the first row are 12 21 12 21 12: two different ones
    found = repetition(ids, 2, 10)
    assert found.value == pytest.approx((3 / 5 + 0) / 2)


def test_pairwise_overlap_is_the_mean_jaccard_index() -> None:
    ids = np.random.default_rng(3).integers(0, 4, (6, 12))
    sets = [{tuple(row[i : i + 2]) for i in range(11)} for row in ids.tolist()]
    pairs = [len(a & b) / len(a | b) for i, a in enumerate(sets) for j, b in enumerate(sets) if i != j]
    assert pairwise_overlap(ids, 2, 4).value == pytest.approx(np.mean(pairs))
    assert pairwise_overlap(np.repeat(ids[:1], 5, axis=0), 2, 4).value == pytest.approx(1.0)


def test_training_overlap_counts_ngrams_that_occur_in_the_training_blocks() -> None:
    training = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    ids = np.array([[1, 2, 3, 9], [4, 5, 6, 7]])
    # 3-grams: 123 yes, 239 no; 456 crosses two training blocks and does not count, 567 yes
    assert training_overlap(ids, training, 3, 10).value == pytest.approx(0.5)


def test_jensen_shannon_by_hand_and_at_its_ends() -> None:
    a, b = np.array([[0, 0, 0, 1]]), np.array([[0, 1, 1, 1]])
    p, q = (3 / 4, 1 / 4), (1 / 4, 3 / 4)
    divergence = sum(0.5 * x * math.log(x / 0.5) for x in (*p, *q))
    assert jensen_shannon(a, b, 1, 4).value == pytest.approx(math.sqrt(divergence))
    assert jensen_shannon(a, a, 1, 4).value == pytest.approx(0.0, abs=1e-9)
    assert jensen_shannon(a, b + 2, 1, 4).value == pytest.approx(math.sqrt(math.log(2)))


def test_jensen_shannon_error_is_that_of_repeated_experiments() -> None:
    rng = np.random.default_rng(2)
    reference = rng.choice(5, (500, 20), p=[0.4, 0.3, 0.1, 0.1, 0.1])
    found = [jensen_shannon(rng.choice(5, (50, 20), p=[0.1, 0.2, 0.3, 0.2, 0.2]), reference, 1, 5) for _ in range(200)]
    assert np.mean([each.se for each in found]) == pytest.approx(np.std([each.value for each in found]), rel=0.15)


def test_real_text_stands_beside_every_metric_and_gaming_shows() -> None:
    reference = stories_reference(64, 48)
    law = reference.law
    assert law is not None
    rng = np.random.default_rng(11)
    real = measure(law.sample(rng, 64, 48), reference)
    words = rng.choice(len(law.vocabulary), (64, 48), p=word_shares())
    unigram = measure(words, reference)
    one = law.sample(rng, 1, 48)
    copies = measure(np.repeat(one, 64, axis=0), reference)
    for table in (real, unigram, copies):
        assert set(table) == set(METRICS) - {"training_overlap_8"}
        for row in table.values():
            assert row["real"] is not None and row["real_se"] is not None
    for name, row in real.items():
        if name.startswith("js"):
            assert abs(row["value"] - row["real"]) < 5 * math.hypot(row["se"], row["real_se"]), name
    # Words at random keep the word shares and lose the sentences; copies are each fluent and all alike.
    assert unigram["js_1"]["value"] < 1.5 * unigram["js_1"]["real"]
    assert unigram["js_4"]["value"] > 1.5 * unigram["js_4"]["real"]
    assert copies["pairwise_overlap_4"]["value"] == pytest.approx(1.0)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return prepare("stories", tmp_path_factory.mktemp("corpus") / "stories", length=32, blocks=200, heldout_blocks=40)


def test_reference_blocks_of_a_corpus_are_disjoint_and_fit(corpus: Corpus) -> None:
    reference = corpus_reference(corpus, 15, 24)
    assert reference.real is not None and reference.statistics is not None
    assert reference.real.shape == (15, 24) and reference.statistics.shape == (25, 24)
    again = corpus_reference(corpus, 15, 24)
    assert again.real is not None and (reference.real == again.real).all()
    both = Counter(map(bytes, np.concatenate([reference.real, reference.statistics])))
    assert both == Counter(map(bytes, np.asarray(corpus.heldout[:, :24], dtype=np.int64)))
    with pytest.raises(UserError, match="`length` 33"):
        corpus_reference(corpus, 5, 33)


def test_training_overlap_stands_beside_held_out_text(corpus: Corpus) -> None:
    reference = corpus_reference(corpus, 15, 32)
    row = measure(np.asarray(corpus.train[:20], dtype=np.int64), reference)["training_overlap_8"]
    assert row["value"] == 1.0 and row["real"] < 0.9
