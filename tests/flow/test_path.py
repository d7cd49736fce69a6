"""The path: its ends, and the noise that a data prediction implies."""

from __future__ import annotations

import pytest
import torch

from convergeflow.flow import path
from convergeflow.flow.schedule import Cosine, Gumbel, Linear

SCHEDULES = [Linear(), Cosine(), Gumbel()]
DATA = torch.randn(4, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
NOISE = torch.randn(4, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TIMES = torch.tensor([0.1, 0.4, 0.7, 0.95], dtype=torch.float64)


def test_time_zero_is_noise_and_one_is_data() -> None:
    ends = path.sample_path(DATA[:2], NOISE[:2], Linear()(torch.tensor([0.0, 1.0])))
    torch.testing.assert_close(ends[0], NOISE[0])
    torch.testing.assert_close(ends[1], DATA[1])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_true_data_implies_the_true_noise(schedule: object) -> None:
    at = schedule(TIMES)  # type: ignore[operator]
    x_t = path.sample_path(DATA, NOISE, at)
    torch.testing.assert_close(path.noise_from_data(DATA, x_t, at), NOISE)


def test_a_noise_level_per_position_broadcasts() -> None:
    times = torch.rand(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    whole = path.sample_path(DATA, NOISE, Linear()(times))
    for b in range(4):
        for i in range(3):
            expected = times[b, i] * DATA[b, i] + (1 - times[b, i]) * NOISE[b, i]
            torch.testing.assert_close(whole[b, i], expected)


def test_a_noisy_embedding_has_normalised_distance_one() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(200, 1, 4096, generator=generator, dtype=torch.float64)
    at = Linear()(torch.full((200,), 0.7, dtype=torch.float64))
    distance = (0.3 * noise).norm(dim=-1)
    torch.testing.assert_close(
        path.normalised_distance(distance, at, 4096), torch.ones(200, 1, dtype=torch.float64), rtol=0.06, atol=0
    )
