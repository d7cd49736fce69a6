from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from convergeflow.errors import UserError
from convergeflow.randomness import RowDraws
from convergeflow.systems.categorical import draw, tempered


def test_tail_frequencies_of_a_zipf_law_are_right() -> None:
    V, positions, rows = 4000, 800, 5
    log_p = -torch.arange(1, V + 1, dtype=torch.float64).log()
    p = log_p.softmax(0).numpy()
    found = draw(log_p.expand(rows, positions, V), RowDraws(range(rows))).flatten().numpy()
    # Bins of about 5 % of the mass, most of them in the tail.
    edges = np.unique(np.searchsorted(p.cumsum(), np.linspace(0, 1, 21)[1:-1])) + 1
    expected = np.array([part.sum() for part in np.split(p, edges)]) * rows * positions
    counts = np.bincount(np.searchsorted(edges, found, side="right"), minlength=len(expected))
    assert stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue > 1e-3


class FixedDraws:
    """Uniform numbers chosen by the test."""

    def __init__(self, numbers: list[float]) -> None:
        self.numbers = torch.tensor(numbers, dtype=torch.float64)

    def log_exponential(self, positions: int, vocabulary: int, dtype: torch.dtype) -> Tensor:
        return (-self.numbers.log()).log().expand(1, positions, vocabulary)


def test_a_rare_token_wins_its_race_only_in_float64() -> None:
    # Clock of the rare token 1e-12 / 1e-10 = 0.01, of the common one log 2. Float32 would round 1 - 1e-12 to 1 - 6e-8,
    # the clock to 600, and the rare token could never win.
    log_p = torch.tensor([[[0.0, 1e-10]]], dtype=torch.float64)
    log_p[..., 1] = np.log(1e-10)
    assert draw(log_p, FixedDraws([0.5, 1 - 1e-12])).tolist() == [[1]]  # type: ignore[arg-type]
    assert draw(log_p, FixedDraws([0.5, float(np.float32(1 - 6e-8))])).tolist() == [[0]]  # type: ignore[arg-type]


def test_impossible_tokens_are_never_drawn_and_rows_are_independent_of_the_batch() -> None:
    log_p = torch.zeros(4, 50, 6)
    log_p[..., 2] = -torch.inf
    together = draw(log_p, RowDraws(range(4)))
    assert not bool((together == 2).any())
    alone = draw(log_p[2:3], RowDraws([2]))
    assert torch.equal(together[2:3], alone)


def test_temperature_has_defined_ends() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0])
    assert torch.allclose(tempered(logits, 1.0), logits.log_softmax(-1))
    assert tempered(logits, 0.0).exp().tolist() == [0.0, 1.0, 0.0]
    assert torch.allclose(tempered(logits, 1000.0).exp(), torch.full((3,), 1 / 3), atol=1e-3)
    for wrong in (-0.1, 1e-300, float("inf"), float("nan")):
        with pytest.raises(UserError, match="temperature"):
            tempered(logits, wrong)


def test_nucleus_keeps_the_smallest_sufficient_set() -> None:
    log_p = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert torch.allclose(tempered(log_p, 1.0, 0.8).exp(), torch.tensor([0.625, 0.375, 0.0, 0.0]))
    assert torch.allclose(tempered(log_p, 1.0, 0.81).exp(), torch.tensor([0.5, 0.3, 0.15, 0.0]) / 0.95)
    assert tempered(log_p, 1.0, 0.01).exp().tolist() == [1.0, 0.0, 0.0, 0.0]
    with pytest.raises(UserError, match="nucleus"):
        tempered(log_p, 1.0, 0.0)
