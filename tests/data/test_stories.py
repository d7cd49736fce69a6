"""The stories corpus: its exact entropy against its own draws, and what counts as broken."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from convergeflow.data.program import END_TOKEN
from convergeflow.data.stories import StoriesLaw, stories_law
from convergeflow.data.tokenizer import stories_tokenizer
from convergeflow.evaluation.exact import divergence

STORY = (
    "Once there was a little girl named Mia. She had a red kite. One day she lost her kite near the river. "
    "A dog found it under the tree. Mia thanked the dog."
)


@pytest.fixture(scope="module")
def law() -> StoriesLaw:
    return stories_law()


@pytest.fixture(scope="module")
def data(law: StoriesLaw) -> np.ndarray:
    return law.sample(np.random.default_rng(7), 20_000, 64)


def ids_of(text: str) -> list[list[int]]:
    return [stories_tokenizer().encode(text)]


def nll(law: StoriesLaw, text: str) -> float:
    return float(law.clean_nll(ids_of(text))[0])


def test_vocabulary_is_a_few_hundred_words(law: StoriesLaw) -> None:
    assert law.vocabulary[0] == END_TOKEN
    assert 200 <= len(law.vocabulary) <= 300
    assert len(set(law.vocabulary)) == len(law.vocabulary)
    # Each word of a fact speaks of that fact alone, or the count of kept facts would mean nothing.
    for group in law.groups.values():
        words = [word for value in group for word in value]
        assert len(words) == len(set(words))


def test_the_shape_of_a_story(law: StoriesLaw) -> None:
    ids = law.sample(np.random.default_rng(2), 500, 200)
    stop = law.vocabulary.index(".")
    lengths, sentences = [], []
    for row in ids:
        ends = np.flatnonzero(row == 0)
        for first, last in itertools.pairwise(ends):
            lengths.append(last - first)
            sentences.append(int((row[first:last] == stop).sum()))
    assert set(sentences) == {5, 6}
    assert min(lengths) >= 30 and max(lengths) <= 50


def test_mean_nll_of_the_data_is_the_block_entropy(law: StoriesLaw, data: np.ndarray) -> None:
    nats = law.clean_nll(data)
    error = nats.std(ddof=1) / np.sqrt(len(nats))
    assert error < 0.05
    assert abs(nats.mean() - law.block_entropy(64)) < 4 * error


def test_every_word_occurs(law: StoriesLaw) -> None:
    ids = law.sample(np.random.default_rng(3), 200, 2000)
    assert (np.bincount(ids.ravel(), minlength=len(law.vocabulary)) > 0).all()


def test_data_are_valid_and_keep_their_facts(law: StoriesLaw, data: np.ndarray) -> None:
    valid, total = law.valid_sentences(data[:500])
    np.testing.assert_array_equal(valid, total)
    valid, total = law.valid_stories(data)
    np.testing.assert_array_equal(valid, total)
    for group in law.groups.values():
        report = law.agreement(data, [group])
        assert report["kept"] == report["total"] > 0
        assert report["stories_kept"] == report["stories"] > 0
    together = law.facts_kept(data)
    assert together["kept"] == together["total"] and together["stories_kept"] == together["stories"]


def test_slot_counts_of_the_data_follow_the_law(law: StoriesLaw, data: np.ndarray) -> None:
    marginals = law.slot_marginals()
    for name, count in law.slot_counts(data).items():
        # 2 n KL is chi-square with k - 1 degrees of freedom.
        degrees = len(count) - 1
        kl = divergence(count, marginals[name])
        assert 2 * count.sum() * kl < degrees + 6 * np.sqrt(2 * degrees) + 6, name
        assert count.sum() > 0


def test_smoothing_costs_little_on_the_data(law: StoriesLaw, data: np.ndarray) -> None:
    cost = law.smoothed_nll(data[:64]) - law.clean_nll(data[:64])
    # A valid text loses at most log(1/(1-eps)) a word.
    assert cost.max() <= 64 * -np.log1p(-1e-3) + 1e-9
    assert cost.mean() > 0.04


def test_smoothed_score_is_fast_enough(law: StoriesLaw, data: np.ndarray) -> None:
    rng = np.random.default_rng(0)
    began = time.process_time()
    law.smoothed_nll(data[:128])
    law.smoothed_nll(rng.permutation(data[:128].ravel()).reshape(128, 64))
    assert time.process_time() - began < 10


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Mia thanked", "Anna thanked"),  # another name
        ("she lost", "he lost"),  # another gender
        ("her kite", "her ball"),  # another thing
        ("thanked the dog", "thanked the cat"),  # another animal
        ("thanked the dog", "thanked a dog"),  # no longer new
        ("near the river", "near river"),
    ],
)
def test_a_broken_fact_is_impossible_but_scored(law: StoriesLaw, old: str, new: str) -> None:
    assert np.isfinite(nll(law, STORY))
    broken = STORY.replace(old, new)
    assert broken != STORY and nll(law, broken) == np.inf
    smoothed = law.smoothed_nll(ids_of(broken))[0]
    assert np.isfinite(smoothed) and smoothed > law.smoothed_nll(ids_of(STORY))[0] + 3
    assert int(law.valid_stories(ids_of(broken))[0][0]) == 0


def test_broken_facts_are_counted(law: StoriesLaw) -> None:
    broken = ids_of(STORY.replace("Mia thanked", "Tom thanked"))
    found = {name: law.agreement(broken, [group]) for name, group in law.groups.items()}
    assert found["name"] == {"kept": 0, "total": 1, "stories_kept": 0, "stories": 1}
    # girl, Mia, she, she, her agree; Tom does not.
    assert (found["gender"]["kept"], found["gender"]["total"]) == (4, 5)
    assert found["thing"]["kept"] == found["thing"]["total"] == 1
    together = law.facts_kept(broken)
    assert together["total"] == sum(report["total"] for report in found.values())
    assert (together["stories_kept"], together["stories"]) == (0, 1)


def test_the_colour_may_be_drawn_late(law: StoriesLaw) -> None:
    late = (
        "Tom was a kind boy. He loved his hat. One day he lost his hat near the park. "
        "Soon he saw the blue hat under the tree. Now he was happy."
    )
    assert np.isfinite(nll(law, late))
    early = late.replace("He loved his hat.", "His hat was red.")
    assert nll(law, early) == np.inf
    assert np.isfinite(nll(law, early.replace("blue", "red")))
