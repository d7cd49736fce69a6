"""Row-wise randomness: streams are independent, named, and blind to the batch."""

from __future__ import annotations

import torch

from convergeflow.randomness import RowDraws, derive_seed


def test_names_separate_streams() -> None:
    seeds = {
        derive_seed(0),
        derive_seed(1),
        derive_seed(0, "a"),
        derive_seed(0, "a", 1),
        derive_seed(0, "a", "1"),
        derive_seed(0, "ab", "c"),
        derive_seed(0, "a", "bc"),
        derive_seed(0, 1),
    }
    assert len(seeds) == 8 and all(0 <= seed < 2**63 for seed in seeds)


def test_a_row_draws_the_same_in_every_batch() -> None:
    together = RowDraws([5, 6, 7])
    alone = RowDraws([6])
    assert torch.equal(together.normal(3, 2)[1], alone.normal(3, 2)[0])
    assert torch.equal(together.uniform(4)[1], alone.uniform(4)[0])
    picked = RowDraws([5, 6, 7]).select([2])
    assert torch.equal(picked.normal(3)[0], RowDraws([7]).normal(3)[0])


def test_uniforms_are_open_on_both_sides_and_even() -> None:
    draws = RowDraws([0]).uniform(200_000)
    assert float(draws.min()) > 0 and float(draws.max()) < 1
    assert abs(float(draws.mean()) - 0.5) < 0.004
    clocks = RowDraws([0]).log_exponential(200_000)
    assert bool(clocks.isfinite().all())
    assert torch.equal(clocks, (-draws.log()).log()), "log E of the same uniform numbers"
