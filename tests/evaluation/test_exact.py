"""The exact scores of stories: real text sits at the entropy, damage shows where it was done."""

from __future__ import annotations

import math

import numpy as np
import pytest

from convergeflow.data.stories import stories_law
from convergeflow.data.tokenizer import stories_tokenizer
from convergeflow.evaluation.exact import EPS, exact_scores


def test_mean_nll_of_the_data_is_its_entropy() -> None:
    law = stories_law()
    scores = exact_scores(law.sample(np.random.default_rng(0), 400, 40), law)
    excess = scores.metrics["clean_excess"]
    assert scores.entropy == pytest.approx(law.block_entropy(40) / 40)
    assert abs(excess.value) < 4 * excess.se and 0 < excess.se < 0.01
    for name in ("valid", "valid_stories", "valid_sentences", "facts_kept", "stories_with_facts_kept"):
        assert scores.metrics[name].value == 1.0
    # The smoothed law pays log(1/(1 - eps)) per clean word, a little less where a wrong word explains the right one.
    cost = scores.metrics["smoothed_nll"].value - scores.metrics["clean_nll"].value
    assert 0 < cost <= -math.log(1 - EPS) + 1e-9
    # A finite sample of the law itself has KL about (choices - 1)/(2 n) per slot: small, never negative.
    assert 0 < scores.metrics["slot_kl"].value < 0.05
    assert all(value is None or value > -1e-12 for value in scores.slots.values())


def test_one_wrong_fact_is_seen_by_the_law_and_by_the_facts() -> None:
    law = stories_law()
    story = "Once there was a little girl named Mia. She had a red kite. One day, the {} kite was gone."
    good, bad = (np.array([stories_tokenizer().encode(story.format(colour))]) for colour in ("red", "blue"))
    right, wrong = exact_scores(good, law), exact_scores(bad, law)
    assert right.metrics["valid"].value == 1.0 and wrong.metrics["valid"].value == 0.0
    assert wrong.metrics["valid_sentences"].value == 1.0  # each sentence is fine on its own
    assert right.metrics["facts_kept"].value == 1.0 and wrong.metrics["facts_kept"].value < 1.0
    assert np.isinf(law.clean_nll(bad)[0])
    assert (wrong.metrics["smoothed_nll"].value - right.metrics["smoothed_nll"].value) * good.shape[1] > 3
    assert right.metrics["clean_nll"].value * good.shape[1] == pytest.approx(float(law.clean_nll(good)[0]))


def test_invalid_samples_leave_the_clean_nll_without_a_number() -> None:
    law = stories_law()
    noise = np.random.default_rng(0).integers(0, len(law.vocabulary), (8, 20))
    scores = exact_scores(noise, law)
    assert scores.metrics["clean_nll"].n == 0 and math.isnan(scores.metrics["clean_nll"].value)
    assert scores.metrics["clean_nll"].describe()["value"] is None and scores.metrics["smoothed_nll"].value > 5


def test_wrong_choice_frequencies_show_in_the_slots_alone() -> None:
    law = stories_law()
    blocks = law.sample(np.random.default_rng(4), 1500, 24)
    chosen = blocks[(blocks == law.word_id["tom"]).any(1)]
    scores = exact_scores(chosen, law)
    assert len(chosen) > 20 and scores.metrics["valid"].value == 1.0
    share = law.slot_marginals()["boy"][0]
    # every boy is the first of the list: KL = log(1/share) up to stories with a second hero
    assert scores.slots["boy"] is not None and scores.slots["boy"] > 0.6 * math.log(1 / share)
