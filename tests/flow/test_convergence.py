"""Convergence measures by hand."""

from __future__ import annotations

import pytest
import torch

from convergeflow.flow.convergence import agreement, normalised_distance, percentile_band
from convergeflow.flow.schedule import Linear


def test_a_noisy_embedding_has_normalised_distance_one() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(200, 1, 4096, generator=generator, dtype=torch.float64)
    at = Linear()(torch.full((200,), 0.7, dtype=torch.float64))
    distance = (0.3 * noise).norm(dim=-1)
    torch.testing.assert_close(
        normalised_distance(distance, at, 4096), torch.ones(200, 1, dtype=torch.float64), rtol=0.06, atol=0
    )


def test_bands_and_agreement() -> None:
    band = percentile_band(torch.arange(101.0))
    assert (band.low, band.middle, band.high) == pytest.approx((1.0, 50.0, 99.0))
    assert agreement(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 0, 4])) == 0.75
