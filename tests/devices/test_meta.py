"""Every loss, sampler and training step with its network on a device, and without waiting for that device."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from host_reads import META, HostReads
from published import SOURCES, published
from ten_sentences import LENGTH, TOKENS, fresh, stage

from convergeflow import device
from convergeflow.device import Placement
from convergeflow.flow import GRIDS, SOLVERS
from convergeflow.flow.grid import training_times
from convergeflow.randomness import RowDraws
from convergeflow.sampling.settings import PRESETS, Settings
from convergeflow.sampling.wrappers import Clamp
from convergeflow.systems import METHODS, rivals
from convergeflow.training import estimate as cost
from convergeflow.training.ahead import Ahead
from convergeflow.training.config import EmaConfig, OptimizerConfig, StageConfig, from_dict
from convergeflow.training.ema import WeightAverage
from convergeflow.training.optimizer import StageOptimizer
from convergeflow.training.recipes import read_recipe
from convergeflow.training.sharding import gradient_norm
from convergeflow.training.trainer import Trainer

SMALL_SCALE = {"head_init": 0.02, "context_free_input": True, "neighbours": 2, "pool_evidence": True}


def prepared(name: str, objective: str, changes: dict[str, Any], options: dict[str, Any]) -> tuple[Any, StageConfig]:
    model = fresh(name, **changes)
    if name == "elf":
        model.encoder_passes += 1
    chosen = stage(objective, 10).model_copy(update=options)
    model.enter_stage(chosen)
    return model.to(META).train(), chosen


LOSSES = [
    *((name, objective, {}, {}) for name in METHODS for objective in ("ce", "mse")),
    *(
        ("convergeflow", objective, changes, options)
        for objective in ("ce", "mse")
        for changes, options in (
            ({}, {"position_noise": 0.7}),
            ({}, {"clean_context": 0.5}),
            ({"block_length": 4}, {}),
            (SMALL_SCALE, {"clean_context": 0.5, "position_noise": 0.5}),
            ({**SMALL_SCALE, "block_length": 4}, {}),
            ({}, {"learn_table": False, "self_condition": 0.0}),
        )
    ),
    ("convergeflow", "mse", {"predictor": "direct"}, {"learn_schedule": False}),
    ("convergeflow", "mse", {"schedule": {"kind": "cosine"}}, {}),
]


@pytest.mark.parametrize("case", LOSSES, ids=str)
def test_a_loss_stays_on_its_device_and_asks_nothing_of_it(case: Any) -> None:
    model, _ = prepared(*case)
    tokens = TOKENS.to(META)
    with HostReads() as reads:
        times, draws = training_times(len(tokens), seed=0), RowDraws(range(len(tokens)), META)
        loss = model.loss(tokens, times=times, draws=draws)
        loss.total.backward()
    assert reads.seen == []
    assert loss.total.is_meta and all(part.is_meta for part in loss.parts.values())


@pytest.mark.parametrize("name", METHODS)
def test_monitor_and_bound_run_on_a_device(name: str) -> None:
    model = fresh(name).to(META)
    with HostReads():
        assert model.monitor(TOKENS[:4].to(META), draws=RowDraws(range(4), META))
        if model.bound_kind is not None:
            model.bound(TOKENS[:4], draws=RowDraws(range(4), META), repeats=2)


def reads_of(model: Any, nfe: int, **how: Any) -> list[str]:
    with HostReads() as reads:
        length = how.pop("length", LENGTH)
        model.sample(3, length, seeds=range(3), nfe=nfe, **how)
    return reads.seen


@pytest.mark.parametrize("name", rivals())
def test_a_rival_samples_without_waiting(name: str) -> None:
    model = fresh(name).to(META)
    if name == "ar":  # a call per token, whatever the budget
        assert reads_of(model, 1, length=12) == reads_of(model, 1, length=6)
    else:
        assert reads_of(model, 12) == reads_of(model, 6)


@pytest.mark.parametrize("name", SOURCES)
def test_a_published_system_samples_without_waiting(name: str) -> None:
    model = published(name).to(META)
    if name == "ar":
        assert reads_of(model, 1, length=12) == reads_of(model, 1, length=6)
    else:
        assert reads_of(model, 13, length=16) == reads_of(model, 7, length=16)


def test_a_published_system_goes_on_from_a_prompt_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = published("elf").to(META)
    monkeypatch.setattr(model, "encode", lambda tokens: torch.zeros(*tokens.shape, model.config.latent, device=META))
    clamp = Clamp(torch.zeros(16, dtype=torch.long), torch.arange(16) < 4)
    with HostReads():
        model.sample(2, 16, seeds=[0, 1], nfe=9, text_guidance=2.0, clamp=clamp)


def settings(**changes: Any) -> dict[str, Any]:
    return changes


SAMPLERS = [
    *(settings(solver=name) for name in SOLVERS),
    *(settings(grid=name) for name in GRIDS),
    *(settings(self_condition=kind) for kind in ("recursive", "previous", "none")),
    settings(temperature=0.7, base_temperature=0.9),
    *(settings(decode=rule) for rule in ("weight", "prediction", "distance")),
]


@pytest.mark.parametrize("changes", [{}, SMALL_SCALE], ids=["paper", "small scale"])
@pytest.mark.parametrize("how", SAMPLERS, ids=str)
def test_a_flow_samples_without_waiting(how: dict[str, Any], changes: dict[str, Any]) -> None:
    model = fresh("convergeflow", **changes).to(META)
    few, many = (reads_of(model, nfe, settings=Settings(nfe=nfe, **how)) for nfe in (8, 16))
    assert few == many


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "words"])
def test_presets_sample_without_waiting(name: str) -> None:
    model = fresh("convergeflow").to(META)
    few, many = (reads_of(model, nfe, settings=replace(PRESETS[name], nfe=nfe)) for nfe in (48, 96))
    assert few == many


def test_known_words_and_blocks_sample_without_waiting() -> None:
    known = torch.tensor([True, False] * (LENGTH // 2))
    clamp = Clamp(torch.zeros(LENGTH, dtype=torch.long), known)
    model = fresh("convergeflow").to(META)
    few, many = (reads_of(model, nfe, settings=Settings(nfe=nfe), clamp=clamp) for nfe in (8, 16))
    assert few == many
    blocks = fresh("convergeflow", block_length=2, **SMALL_SCALE).to(META)
    few, many = (reads_of(blocks, nfe, settings=Settings(nfe=nfe)) for nfe in (12, 24))
    assert few == many


def test_an_observer_sees_a_flow_on_a_device() -> None:
    steps: list[Any] = []
    with HostReads():
        fresh("convergeflow").to(META).sample(2, LENGTH, seeds=[0, 1], nfe=6, observe=steps.append)
        assert len(steps) == 3 and steps[0].distances().token.is_meta


@pytest.mark.parametrize("optimizer", ["adamw", "muon-fp32"])
def test_an_optimizer_goes_on_where_its_parameters_are(optimizer: str) -> None:
    config = OptimizerConfig(name=optimizer)
    model, chosen = prepared("convergeflow", "ce", {}, {})
    here = fresh("convergeflow")
    here.enter_stage(chosen)
    before = StageOptimizer(here.named_parameters(), chosen, config)
    here.loss(TOKENS, times=training_times(len(TOKENS), seed=0), draws=RowDraws(range(len(TOKENS)))).total.backward()
    before.step()
    after = StageOptimizer(model.named_parameters(), chosen, config)
    after.load(before.state())
    for part in after.parts:
        counts_there = bool(part.defaults.get("fused"))
        for values in part.state.values():
            assert all(value.is_meta for key, value in values.items() if key != "step" or counts_there)
            assert "step" not in values or values["step"].dtype == torch.float32
    assert any(part.defaults.get("fused") for part in after.parts), "the case that mixed devices must be among these"


@pytest.mark.parametrize("late", [False, True])
def test_tokens_are_sent_without_waiting_where_they_are_read_in_time(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "READS_LATE", ("meta",) if late else ())
    ahead = Ahead(lambda step: TOKENS, META, 3)
    with HostReads() as reads:
        assert ahead(0).is_meta and ahead(1).is_meta
    ahead.close()
    assert len(reads.seen) == (2 if late else 0)


def test_average_norm_and_clipping_ask_nothing_of_the_device() -> None:
    model, _ = prepared("convergeflow", "ce", {}, {})
    average = WeightAverage(model, EmaConfig())
    model.loss(
        TOKENS.to(META), times=training_times(len(TOKENS), seed=0), draws=RowDraws(range(len(TOKENS)), META)
    ).total.backward()
    with HostReads() as reads:
        assert gradient_norm(model.parameters(), clip=1.0).is_meta
        average.update(model, 1)
        average.adopt_frozen(model)
    assert reads.seen == []


def test_the_cost_of_a_run_is_measured_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = Placement(META, torch.bfloat16)
    monkeypatch.setattr(cost, "choose_device", lambda *asked: placement)

    # The memory of a device that is not there cannot be counted.
    monkeypatch.setattr(cost, "_peak_memory", lambda device: contextlib.nullcontext(lambda: 0))
    monkeypatch.setattr("convergeflow.training.optimizer._adamw", lambda groups, betas: torch.optim.AdamW(groups))
    config = from_dict(read_recipe("test"))
    model = fresh("convergeflow")
    with HostReads():
        found = cost.estimate(config, model, vocabulary=len(TOKENS.unique()))
    assert found.device == "meta" and found.parameters > 0


class OneDevice:
    """As much of an accelerator as a training step uses."""

    device, num_processes, process_index, is_main_process = META, 1, 0, True

    def autocast(self) -> Any:
        return torch.autocast("meta", torch.bfloat16)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def reduce(self, values: torch.Tensor, reduction: str) -> torch.Tensor:
        return values

    def prepare_model(self, model: Any) -> Any:
        return model

    def free_memory(self) -> None: ...


class TenSentences:
    train, length = TOKENS.numpy(), LENGTH


@pytest.mark.parametrize("name", ["convergeflow", "plaid"])
def test_a_training_step_reads_once(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convergeflow.training.optimizer._adamw", lambda groups, betas: torch.optim.AdamW(groups))
    config = from_dict({**read_recipe("test"), "batch": 8, "accumulate": 1})
    trainer = Trainer(config, fresh(name), TenSentences(), tmp_path, accelerator=OneDevice())  # type: ignore[arg-type]
    with HostReads():
        trainer._enter_stage(0, first=True)
    tokens = trainer._tokens(0).to(META)
    with HostReads() as reads:
        numbers, stopped = trainer._train_step(0, tokens, False)
    assert len(reads.seen) == 1, reads.seen
    assert numbers["loss"] == numbers["grad_norm"] == 1.0 and stopped, "what the one read gave"
