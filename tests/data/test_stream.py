"""The order of the data is a function: whole epochs, no state, ranks that make up the batch."""

from __future__ import annotations

import numpy as np
import pytest

from convergeflow.data.stream import permute, rows


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000, 4097])
def test_permute_is_a_permutation(size: int) -> None:
    for key in (0, 1, 2**62 + 5):
        assert sorted(permute(np.arange(size), size, key)) == list(range(size))


def test_permutations_are_spread_evenly() -> None:
    # Where does place 0 go, over many keys? Chi-square with 9 degrees of freedom; 30 has probability 4e-4.
    places = [int(permute(np.array([0]), 10, key)[0]) for key in range(2000)]
    counts = np.bincount(places, minlength=10)
    assert ((counts - 200) ** 2 / 200).sum() < 30
    # Neighbours do not stay together.
    order = permute(np.arange(10_000), 10_000, 5)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05


def test_every_epoch_shows_every_block_once() -> None:
    num_blocks, batch = 30, 8  # a batch runs over the border of two epochs
    seen = np.concatenate([rows(7, step, batch, num_blocks) for step in range(15)])
    for epoch in range(4):
        assert sorted(seen[epoch * 30 : (epoch + 1) * 30]) == list(range(30))
    assert list(seen[:30]) != list(seen[30:60])


def test_rows_depend_on_seed_and_step_alone() -> None:
    np.testing.assert_array_equal(rows(1, 5, 16, 100), rows(1, 5, 16, 100))
    assert list(rows(1, 5, 16, 100)) != list(rows(2, 5, 16, 100))
    # The same stream cut into other batches is the same stream.
    small = np.concatenate([rows(1, step, 4, 100) for step in range(8)])
    large = np.concatenate([rows(1, step, 16, 100) for step in range(2)])
    np.testing.assert_array_equal(small, large)


def test_ranks_make_up_the_global_batch() -> None:
    parts = [rows(3, 9, 12, 50, rank=rank, world=3) for rank in range(3)]
    np.testing.assert_array_equal(np.concatenate(parts), rows(3, 9, 12, 50))
    with pytest.raises(ValueError, match="3 processes"):
        rows(3, 9, 10, 50, world=3)


def test_a_batch_larger_than_the_corpus() -> None:
    assert sorted(rows(0, 0, 6, 3)) == [0, 0, 1, 1, 2, 2]
