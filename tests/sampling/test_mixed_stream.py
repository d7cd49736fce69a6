"""Requests of every kind in one stream of network passes: each gets exactly the tokens that it has alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from convergeflow.flow.guidance import Controls
from convergeflow.model.network import FlowNetwork
from convergeflow.sampling.driver import Driver
from convergeflow.sampling.integration import cohort, initial_noise, integrate
from convergeflow.sampling.plan import preset_for
from convergeflow.sampling.settings import Freeze, Settings
from convergeflow.sampling.wrappers import Clamp
from convergeflow.zoo import load_model

MODEL = load_model("stories-small", device="cpu")
LENGTH = 24
PROMPT = Clamp(torch.arange(LENGTH) + 5, torch.arange(LENGTH) < 6)


def scheduled(name: str, nfe: int) -> Settings:
    return preset_for(name, MODEL.schedule, nfe=nfe)


REQUESTS: list[tuple[Settings, int, dict[str, Any]]] = [
    (Settings(nfe=16), 2, {}),
    (scheduled("headline", 32), 1, {}),
    (scheduled("config-b", 24), 3, {}),
    (Settings(nfe=12, solver="heun"), 1, {}),
    (Settings(nfe=9, solver="multistep", self_condition="previous"), 2, {}),
    (Settings(nfe=6, solver="kernel", self_condition="none"), 1, {}),
    (scheduled("sharp", 24), 2, {}),
    (Settings(nfe=18, base_temperature=0.8), 1, {}),
    (Settings(nfe=20, controls=Controls.configuration("A", refine=4, scg=1.5), freeze=Freeze()), 3, {}),
    (Settings(nfe=16), 2, {"clamp": PROMPT}),
]
"""(settings, rows, more): other grids, noise levels, refinement counts, solvers, temperatures, known tokens."""


def noise_of(number: int) -> torch.Tensor:
    rows = REQUESTS[number][1]
    return initial_noise(range(100 * number, 100 * number + rows), LENGTH, MODEL.config.width, torch.device("cpu"))


@pytest.fixture(scope="module")
def alone() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and counted calls of each request when nothing else runs."""
    ends = [
        integrate(MODEL.bind(), settings, noise_of(number), **more)
        for number, (settings, _, more) in enumerate(REQUESTS)
    ]
    return [(end.decoded.by("weight"), end.calls) for end in ends]


@pytest.mark.parametrize(
    "order", [range(len(REQUESTS)), reversed(range(len(REQUESTS)))], ids=["first-last", "last-first"]
)
def test_a_mixed_stream_gives_each_request_the_tokens_it_has_alone(order: Any, alone: Any) -> None:
    """Requests join one by one while others run, and leave when they are done."""
    predictor, driver = MODEL.bind(), Driver()
    batches, widest, passes, counted = {}, 0, 0, []

    def count(module: FlowNetwork, inputs: tuple[Any, ...], output: Any) -> None:
        counted.append(len(inputs[0]))

    handle = MODEL.network.register_forward_hook(count)
    try:
        for number in order:
            settings, _, more = REQUESTS[number]
            batches[number] = cohort(predictor, settings, noise_of(number), **more)
            driver.add(batches[number])
            driver.step()
            widest = max(widest, len(driver.cohorts))
        driver.run()
    finally:
        handle.remove()
    passes = len(counted)
    assert widest > 5, "the stream was to be mixed"
    assert not driver.cohorts and not driver.step()
    for number, (tokens, calls) in enumerate(alone):
        assert torch.equal(batches[number].end().decoded.by("weight"), tokens), REQUESTS[number]
        assert torch.equal(batches[number].calls, calls), REQUESTS[number]
    # One pass carries everything that waits: as many passes as the slowest request needs after it joined.
    last_start = {number: place for place, number in enumerate(batches)}
    needed = max(last_start[number] + int(calls.max()) for number, (_, calls) in enumerate(alone))
    assert passes == needed
    assert sum(counted) == sum(int(calls.sum()) for _, calls in alone)


def test_rows_of_two_models_never_meet_in_one_pass() -> None:
    other = load_model("stories-small", device="cpu")
    with torch.no_grad():
        other.network.head.bias.add_(torch.linspace(0, 5, len(other.network.head.bias)))
    noise = noise_of(0)
    driver = Driver()
    mine, theirs = (cohort(model.bind(), Settings(nfe=8), noise) for model in (MODEL, other))
    driver.add(mine, theirs)
    driver.run()
    assert torch.equal(
        theirs.end().decoded.by("weight"), integrate(other.bind(), Settings(nfe=8), noise).decoded.by("weight")
    )
    assert not torch.equal(theirs.end().decoded.by("weight"), mine.end().decoded.by("weight"))
