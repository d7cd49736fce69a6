"""The index of a training text against the exact search: nothing missed, as many found by chance as it says."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from convergeflow.data.corpus import Corpus
from convergeflow.data.prepare import prepare
from convergeflow.evaluation import overlap
from convergeflow.evaluation.metrics import measure, training_overlap
from convergeflow.evaluation.ngrams import ngram_codes, present_in
from convergeflow.evaluation.overlap import NgramIndex
from convergeflow.evaluation.reference import corpus_reference


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """Tokens at random in a vocabulary so large that no 8-gram comes twice by chance."""
    rng = np.random.default_rng(1)
    place = tmp_path / "flat"
    place.mkdir()
    rng.integers(0, 257, 200 * 64).astype("<u2").tofile(place / "train.bin")
    rng.integers(0, 257, 40 * 64).astype("<u2").tofile(place / "val.bin")
    return prepare(place, tmp_path / "corpus", tokenizer="byte", length=64)


def copies(corpus: Corpus, share: float, num: int = 50) -> np.ndarray:
    """Samples of which a share is copied from the training text from a random place on."""
    rng = np.random.default_rng(2)
    ids = rng.integers(0, 257, (num, 64))
    taken = round(share * 64)
    ids[:, :taken] = corpus.train[rng.choice(len(corpus.train), num), :taken]
    return ids


def test_nothing_that_is_there_is_missed(corpus: Corpus) -> None:
    index = NgramIndex(corpus, 8)
    assert index.contains(ngram_codes(np.asarray(corpus.train), 8, 257)).all()
    assert index.num_ngrams == 200 * 57


def test_as_many_are_found_by_chance_as_the_filter_says(corpus: Corpus) -> None:
    index = NgramIndex(corpus, 8)
    others = np.random.default_rng(3).integers(0, 257, (4000, 64))
    codes = ngram_codes(others, 8, 257)
    assert not present_in(codes, corpus.train, 8, 257).any()
    found, expected = index.contains(codes).mean(), index.false_positives
    # 228,000 questions: five standard errors of the share.
    assert abs(found - expected) < 5 * (expected * (1 - expected) / codes.size) ** 0.5
    assert 0.002 < expected < 0.012


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_overlap_is_the_exact_one_within_its_error(corpus: Corpus, share: float) -> None:
    ids, index = copies(corpus, share), NgramIndex(corpus, 8)
    exact = training_overlap(ids, corpus.train, 8, 257)
    found = training_overlap(ids, index, 8, 257)
    chance = index.false_positives
    bound = 5 * (chance * (1 - chance) / (len(ids) * 57)) ** 0.5 / (1 - chance)
    assert abs(found.value - exact.value) <= bound and found.value >= 0.0
    if share == 1.0:
        assert found.value == pytest.approx(1.0)


def test_it_is_built_once_and_kept_beside_the_corpus(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    index, seen = NgramIndex(corpus, 8), []
    assert not index.is_built
    index.build(seen.append)
    assert seen[-1] == index.num_ngrams and NgramIndex(corpus, 8).is_built
    monkeypatch.setattr(NgramIndex, "_fill", None)  # would fail if called
    NgramIndex(corpus, 8).build()
    assert NgramIndex(corpus, 8).contains(ngram_codes(np.asarray(corpus.train[:3]), 8, 257)).all()


def test_a_filter_of_another_corpus_or_a_torn_one_is_made_again(corpus: Corpus) -> None:
    NgramIndex(corpus, 8).build()
    whole = (corpus.folder / "ngrams-8.bloom").read_bytes()
    (corpus.folder / "ngrams-8.bloom").write_bytes(whole[:-8])
    assert not NgramIndex(corpus, 8).is_built
    NgramIndex(corpus, 8).build()
    assert (corpus.folder / "ngrams-8.bloom").read_bytes() == whole
    facts = json.loads((corpus.folder / "ngrams-8.json").read_text())
    (corpus.folder / "ngrams-8.json").write_text(json.dumps({**facts, "corpus": "another"}))
    assert not NgramIndex(corpus, 8).is_built


def test_parts_that_fit_into_little_memory_make_the_same_filter(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = NgramIndex(corpus, 8)
    whole = np.zeros(index.num_words, dtype=np.uint64)
    share = index._fill(whole, lambda done: None)
    parts = np.zeros_like(whole)
    monkeypatch.setattr(overlap.psutil, "virtual_memory", lambda: SimpleNamespace(available=0))
    monkeypatch.setattr(overlap, "LEAST_MEMORY", whole.nbytes // 3)
    assert index._fill(parts, lambda done: None) == pytest.approx(share, rel=1e-12)
    np.testing.assert_array_equal(parts, whole)


def test_a_corpus_that_cannot_be_written_has_its_filter_in_the_cache(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CONVERGEFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(overlap.os, "access", lambda *_: False)
    NgramIndex(corpus, 8).build()
    assert list((tmp_path / "cache" / "overlap").glob("*/ngrams-8.bloom"))


def test_large_corpora_are_indexed_and_small_ones_searched(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    small = corpus_reference(corpus, 10, 64)
    assert small.training is corpus.train
    monkeypatch.setattr(overlap, "SMALL", 1000)
    large = corpus_reference(corpus, 10, 64)
    assert isinstance(large.training, NgramIndex) and large.describe()["overlap_by"] == "bloom"
    ids = copies(corpus, 0.5)
    exact, found = (measure(ids, reference)["training_overlap_8"] for reference in (small, large))
    assert found["value"] == pytest.approx(exact["value"], abs=0.01)
    assert found["real"] == pytest.approx(exact["real"], abs=0.01)
