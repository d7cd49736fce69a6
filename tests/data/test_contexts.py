from __future__ import annotations

import numpy as np
import pytest

from convergeflow.data.contexts import SHARE, context_vectors, mixed


def text_of_twins(num: int = 4000, seed: int = 0) -> np.ndarray:
    """Pairs (noun, verb): nouns 0 to 4, verbs 5 to 9, drawn apart; 10 is never said."""
    draw = np.random.default_rng(seed)
    return np.stack([draw.integers(0, 5, num), draw.integers(5, 10, num)], 1).reshape(-1)


def test_tokens_that_stand_in_the_same_places_have_the_same_direction() -> None:
    rows = context_vectors(text_of_twins(20_000), 11, 2)
    alike = rows @ rows.T
    assert alike[:5, :5].min() > 0.5 and alike[5:10, 5:10].min() > 0.5
    assert alike[:5, 5:10].max() < -0.5


def test_rows_have_length_one_and_silence_is_zero() -> None:
    rows = context_vectors(text_of_twins(), 11, 4)
    np.testing.assert_allclose(np.linalg.norm(rows[:10], axis=1), 1.0)
    assert not rows[10].any()
    wider = context_vectors(text_of_twins(), 11, 64)  # more columns than the text has directions
    assert wider.shape == (11, 64) and np.isfinite(wider).all()


def test_the_same_text_gives_the_same_rows() -> None:
    first, again = (context_vectors(text_of_twins(), 11, 4) for _ in range(2))
    np.testing.assert_array_equal(first, again)


def test_a_row_keeps_its_length_and_its_own_part() -> None:
    own, text = np.random.default_rng(1).normal(size=(11, 512)), text_of_twins(20_000)
    rows = mixed(own, text)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), np.linalg.norm(own, axis=1))
    np.testing.assert_allclose(rows[10], own[10])  # of which nothing is known
    # Random rows of this width are nearly orthogonal to everything: what is left is the part of the vector.
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    vectors = context_vectors(text, *own.shape)
    assert (unit * vectors).sum(1)[:10] == pytest.approx(SHARE**0.5, abs=0.15)
