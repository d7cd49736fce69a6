"""Every loss, bound and sampler on a device that has no float64, as Apple's GPUs: `auto` chooses them on a Mac."""

from __future__ import annotations

import pytest
import torch
from host_reads import META, WithoutFloat64
from published import SOURCES, published
from ten_sentences import LENGTH, TOKENS, fresh, stage

from convergeflow import device
from convergeflow.evaluation.health import health
from convergeflow.flow import SOLVERS
from convergeflow.flow.grid import training_times
from convergeflow.randomness import RowDraws
from convergeflow.sampling.settings import PRESETS, Freeze, Settings
from convergeflow.sampling.wrappers import Clamp
from convergeflow.systems import METHODS


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "WITHOUT_FLOAT64", ("mps", "meta"))


@pytest.mark.parametrize("objective", ["ce", "mse"])
@pytest.mark.parametrize("name", METHODS)
def test_a_loss(name: str, objective: str) -> None:
    model = fresh(name)
    if name == "elf":
        model.encoder_passes += 1
    model.enter_stage(stage(objective, 10))
    tokens, times = TOKENS.to(META), training_times(len(TOKENS), seed=0)
    with WithoutFloat64():
        model.to(META).train()
        model.loss(tokens, times=times, draws=RowDraws(range(len(tokens)), META)).total.backward()


@pytest.mark.parametrize("name", METHODS)
def test_monitor_bound_and_samples(name: str) -> None:
    model = fresh(name)
    with WithoutFloat64():
        model.to(META)
        assert model.monitor(TOKENS[:4].to(META), draws=RowDraws(range(4), META))
        if model.bound_kind is not None:
            model.bound(TOKENS[:4], draws=RowDraws(range(4), META), repeats=2)
        assert model.sample(2, LENGTH, seeds=[0, 1], nfe=4).ids.shape == (2, LENGTH)


WAYS = [
    *(Settings(nfe=8, solver=name) for name in SOLVERS),
    *(PRESETS[name] for name in PRESETS if name != "words"),
    Settings(nfe=8, temperature=0.7),
    Settings(nfe=8, freeze=Freeze(weight=0.9, change=0.1)),
]


@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_a_flow(settings: Settings) -> None:
    known = torch.tensor([True, False] * (LENGTH // 2))
    clamp = Clamp(torch.zeros(LENGTH, dtype=torch.long), known)
    with WithoutFloat64():
        model = fresh("convergeflow").to(META)
        model.sample(2, LENGTH, seeds=[0, 1], settings=settings, observe=lambda step: step.distances())
        model.sample(2, LENGTH, seeds=[0, 1], settings=settings, clamp=clamp)


def test_blocks_and_the_network_as_transformers_calls_it() -> None:
    with WithoutFloat64():
        model = fresh("convergeflow", block_length=2).to(META)
        model.sample(2, LENGTH, seeds=[0, 1], settings=Settings(nfe=12))
        x = torch.zeros(2, LENGTH, model.config.width, device=META)
        assert model(x, torch.zeros(2, device=META)).mu.is_meta
        health(model.network.embedding.rows())


@pytest.mark.parametrize("name", SOURCES)
def test_a_published_system(name: str) -> None:
    model = published(name)
    with WithoutFloat64():
        model.to(META)
        assert model.sample(2, 16, seeds=[0, 1], nfe=9).ids.shape == (2, 16)
        if model.bound_kind is not None:
            tokens = torch.zeros(2, 16, dtype=torch.long)
            model.bound(tokens, draws=RowDraws(range(2), META), repeats=2)
