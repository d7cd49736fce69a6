from __future__ import annotations

import pytest
import torch
from torch import nn

from convergeflow.training.config import EmaConfig
from convergeflow.training.ema import WeightAverage, decay_at


def test_decay_formula() -> None:
    warm = EmaConfig(decay=0.9999)
    assert decay_at(warm, 1) == 2 / 11
    assert decay_at(warm, 90) == 91 / 100
    assert decay_at(warm, 10**6) == 0.9999
    assert decay_at(EmaConfig(decay=0.9999, warmup=False), 1) == 0.9999


def test_average_equals_the_closed_form() -> None:
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 1.0)
    average = WeightAverage(model, EmaConfig(decay=0.5, warmup=False))
    for update, value in enumerate([2.0, 3.0, 5.0], start=1):
        nn.init.constant_(model.weight, value)
        average.update(model, update)
    # 1/8 + 2/8 + 3/4 + 5/2
    assert average.model.weight.item() == pytest.approx(1 / 8 + 2 / 8 + 3 / 4 + 5 / 2, abs=1e-12)
    assert model.weight.item() == 5.0 and not average.model.weight.requires_grad


def test_frozen_parameters_are_adopted_not_averaged() -> None:
    model = nn.Linear(2, 2)
    average = WeightAverage(model, EmaConfig())
    with torch.no_grad():
        model.weight.add_(1.0)
    model.weight.requires_grad_(False)
    average.update(model, 1)
    assert not torch.equal(average.model.weight, model.weight)
    average.adopt_frozen(model)
    assert torch.equal(average.model.weight, model.weight)


def test_buffers_follow() -> None:
    model = nn.BatchNorm1d(2)
    average = WeightAverage(model, EmaConfig())
    model.running_mean.fill_(3.0)
    average.update(model, 1)
    assert torch.equal(average.model.running_mean, model.running_mean)
