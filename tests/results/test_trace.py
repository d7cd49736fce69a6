"""Observation: traces keep every sample in its place when sequences finish early; live text renders."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch

from convergeflow.cli.live import LiveText, both
from convergeflow.flow.guidance import Controls
from convergeflow.flow.schedule import Linear
from convergeflow.randomness import RowDraws
from convergeflow.results.trace import Trace, percentile_band
from convergeflow.sampling.cohort import Step
from convergeflow.sampling.integration import integrate
from convergeflow.sampling.settings import Freeze, Settings
from exact_predictor import ExactPredictor


def trajectories(settings: Settings, observe: object) -> torch.Tensor:
    prior = torch.full((6,), 1 / 6, dtype=torch.float64)
    predictor = ExactPredictor(prior, 32, Linear())
    noise = RowDraws(range(5)).normal(3, 32, dtype=torch.float64)
    return integrate(predictor, settings, noise, observe=observe).decoded.by("weight")  # type: ignore[arg-type]


def test_a_trace_ends_at_the_decoded_tokens_and_shows_convergence() -> None:
    trace = Trace()
    tokens = trajectories(Settings(nfe=60, controls=Controls(scg=0.0)), trace)
    arrays = trace.arrays()
    assert arrays["token"].shape == (60, 5, 3)
    assert np.array_equal(arrays["token"][-1], tokens.numpy())
    assert abs(arrays["nearest"][-1].mean() - 1) < 0.2 and arrays["second"][-1].min() > 5
    assert arrays["weight"][-1].min() > 0.999 > arrays["weight"][0].max()


def test_finished_sequences_keep_their_tokens_and_have_no_further_distances() -> None:
    trace = Trace()
    tokens = trajectories(Settings(nfe=60, controls=Controls(scg=0.0), freeze=Freeze()), trace)
    arrays = trace.arrays()
    assert np.array_equal(arrays["token"][-1], tokens.numpy())
    assert np.isnan(arrays["nearest"][-1]).any()


def test_live_text_shows_every_token_and_its_step() -> None:
    class Words:
        def tokens(self) -> list[str]:
            return ["zero", "one", "two", "three", "four", "five"]

    from rich.console import Console

    steps: list[Step] = []
    calls: list[int] = []
    trajectories(Settings(nfe=8, controls=Controls(scg=0.0)), both(steps.append, lambda step: calls.append(step.index)))
    assert calls == list(range(8))
    view = LiveText(Words(), Console(quiet=True), samples=2)
    console = Console(width=100, record=True, quiet=False, file=io.StringIO())
    console.print(view.render(steps[-1]))
    text = console.export_text()
    token = steps[-1].last.token
    assert token is not None
    assert all(Words().tokens()[ident] in text for ident in token[:2].flatten().tolist())
    assert "step 8/8" in text


def test_a_band_goes_from_the_1st_to_the_99th_percentile() -> None:
    band = percentile_band(torch.arange(101.0))
    assert (band.low, band.middle, band.high) == pytest.approx((1.0, 50.0, 99.0))
