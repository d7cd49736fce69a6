"""ConvergeFlow as users hold it: parameter counts, files, half precision, stages."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from convergeflow.errors import UserError
from convergeflow.flow.grid import training_times
from convergeflow.flow.guidance import Controls
from convergeflow.flow.schedule import Gumbel
from convergeflow.randomness import RowDraws
from convergeflow.sampling.settings import Settings
from convergeflow.systems.convergeflow import ConvergeFlowConfig, ConvergeFlowModel
from convergeflow.training.config import OptimizerConfig, StageConfig
from convergeflow.training.optimizer import StageOptimizer


def small(**changes: object) -> ConvergeFlowModel:
    torch.manual_seed(0)
    config = ConvergeFlowConfig.of_size("test", **{"vocabulary": 23, "length": 9, "dropout": 0.0, **changes})
    model = ConvergeFlowModel(config).eval()
    for name, parameter in model.network.named_parameters():
        if "embedding" not in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


X = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(3))
GAMMA = torch.tensor([1.0, 4.0])


def stage(**changes: object) -> SimpleNamespace:
    options = {
        "objective": "mse",
        "self_condition": 0.25,
        "position_noise": 0.0,
        "clean_context": 0.0,
        "learn_table": False,
        "learn_schedule": False,
    }
    return SimpleNamespace(**{**options, **changes})


def test_parameter_counts_of_the_paper() -> None:
    with torch.device("meta"):
        model = ConvergeFlowModel(ConvergeFlowConfig.of_size("base"))
    assert sum(parameter.numel() for parameter in model.parameters()) == 170_805_332
    assert model.num_parameters_without_table() == 132_207_956


def test_a_fresh_model_knows_nothing_but_the_kernel() -> None:
    model = ConvergeFlowModel(ConvergeFlowConfig.of_size("test", vocabulary=50, length=8)).eval()
    x = torch.randn(4, 8, 32)
    noise_only = model(x, torch.full((4,), 40.0)).logits.log_softmax(-1)
    torch.testing.assert_close(noise_only, torch.full_like(noise_only, -math.log(50)), rtol=0, atol=1e-4)
    at = model.schedule.at_gamma(torch.tensor([2.0], dtype=torch.float64))
    expected = float(at.kernel) * x[:1] @ model.network.embedding.rows().T
    torch.testing.assert_close(model(x[:1], torch.tensor([2.0])).logits, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("predictor", ["weighted", "direct"])
def test_saved_and_loaded_models_are_equal(tmp_path: Path, predictor: str) -> None:
    model = small(predictor=predictor)
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.bin")) and (tmp_path / "model.safetensors").is_file()
    loaded = ConvergeFlowModel.from_pretrained(tmp_path)
    before, after = model(X, GAMMA), loaded(X, GAMMA)
    assert torch.equal(before.mu, after.mu) and (before.logits is None) == (predictor == "direct")
    assert before.logits is None or torch.equal(before.logits, after.logits)
    assert loaded.config == model.config and loaded.config.predictor == predictor


def test_half_precision_files_load_as_float32_with_the_rounded_values(tmp_path: Path) -> None:
    model = small()
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    halved = {name: value.half() if value.dim() > 1 else value for name, value in weights.items()}
    save_file(halved, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = ConvergeFlowModel.from_pretrained(tmp_path)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    rounded = small()
    rounded.load_state_dict({name: value.float() for name, value in halved.items()})
    assert torch.equal(loaded(X, GAMMA).logits, rounded(X, GAMMA).logits)


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
def test_wrong_weights_raise_and_name_the_key(tmp_path: Path, change: str) -> None:
    small().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    if change == "missing":
        del weights["network.head.weight"]
    elif change == "unexpected":
        weights["network.extra"] = torch.zeros(2)
    else:
        weights["network.head.weight"] = torch.zeros(5, 5)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((UserError, RuntimeError), match="network.extra" if change == "unexpected" else "head.weight"):
        ConvergeFlowModel.from_pretrained(tmp_path)


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(UserError, match="'gpt2', not 'convergeflow'"):
        ConvergeFlowModel.from_pretrained(tmp_path)


def test_the_learned_schedule_survives_saving(tmp_path: Path) -> None:
    model = small()
    assert model.learned_schedule is not None
    with torch.no_grad():
        model.learned_schedule.loc.fill_(3.21)
        model.learned_schedule.scale.fill_(0.77)
    model.save_pretrained(tmp_path)
    loaded = ConvergeFlowModel.from_pretrained(tmp_path)
    assert loaded.schedule == model.schedule
    assert isinstance(loaded.schedule, Gumbel) and loaded.schedule.loc == pytest.approx(3.21)
    assert loaded.config.schedule["scale"] == pytest.approx(0.77)


def test_stages_decide_what_is_trained() -> None:
    model = small()
    model.enter_stage(stage())
    assert not model.network.embedding.weight.requires_grad
    assert not any(p.requires_grad for p in model.learned_schedule.parameters())  # type: ignore[union-attr]
    model.enter_stage(stage(objective="ce", learn_table=True, learn_schedule=True))
    assert model.network.embedding.weight.requires_grad
    model.enter_stage(stage(learn_schedule=True))  # as in the published code: the loss itself moves the schedule
    assert model.learned_schedule is not None and model.learned_schedule.by_loss
    assert model.learned_schedule.loc.requires_grad and not model.learned_schedule.entropy.requires_grad
    with pytest.raises(UserError, match="gumbel"):
        small(schedule={"kind": "cosine"}).enter_stage(stage(objective="ce", learn_schedule=True))


@pytest.mark.parametrize("objective", ["ce", "mse"])
def test_loss_of_a_row_does_not_depend_on_its_batch(objective: str) -> None:
    model = small()
    model.enter_stage(stage(objective=objective, self_condition=0.5))
    tokens = torch.randint(0, 23, (6, 9), generator=torch.Generator().manual_seed(1))
    times = training_times(6, seed=0)
    whole = model.loss(tokens, times=times, draws=RowDraws(range(6))).total
    parts = [
        model.loss(tokens[i : i + 2], times=times[i : i + 2], draws=RowDraws(range(i, i + 2))).total for i in (0, 2, 4)
    ]
    torch.testing.assert_close(whole, torch.stack(parts).mean(), rtol=1e-5, atol=1e-6)


def test_a_tiny_model_learns_ten_sentences_by_heart_and_says_nothing_else() -> None:
    sentences = torch.randint(0, 40, (10, 6), generator=torch.Generator().manual_seed(5))
    torch.manual_seed(0)
    model = ConvergeFlowModel(
        ConvergeFlowConfig(
            vocabulary=40, width=64, depth=2, heads=2, condition_width=32, length=6, dropout=0.0, gate_init=0.5
        )
    )
    model.set_unigram(torch.bincount(sentences.flatten(), minlength=40))
    shared: dict[str, Any] = {"self_condition": 0.5, "lr_schedule": "linear", "lr_floor": 0.05}
    learn = StageConfig(
        name="ce",
        objective="ce",
        steps=500,
        lr=1e-2,
        matrix_lr=0.03,
        table_lr=1e-4,
        learn_table=True,
        learn_schedule=True,
        position_noise=0.8,
        **shared,
    )
    refine = StageConfig(name="mse", objective="mse", steps=300, lr=3e-3, matrix_lr=1e-2, **shared)
    step = 0
    for part in (learn, refine):
        model.enter_stage(part)
        trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
        optimizer = StageOptimizer(trained, part, OptimizerConfig(name="muon-fp32"))
        model.train()
        for k in range(part.steps):
            optimizer.set_rate(part.rate(k))
            loss = model.loss(
                sentences.repeat(6, 1),
                times=training_times(60, seed=step),
                draws=RowDraws(range(1000 * step, 1000 * step + 60)),
            )
            optimizer.zero_grad()
            loss.total.backward()
            optimizer.step()
            step += 1
    settings = Settings(nfe=96, controls=Controls(refine=5, scg=2.0))
    ids = model.generate(64, seed=0, settings=settings).ids
    known = {tuple(row) for row in sentences.tolist()}
    made = [tuple(row) for row in ids.tolist()]
    assert set(made) <= known, f"{sum(row not in known for row in made)} of 64 are not training sentences"
    assert len(set(made)) >= 8


def test_generation_without_a_tokenizer_gives_ids_only() -> None:
    samples = small().generate(2, nfe=4)
    assert samples.texts is None and samples.ids.shape == (2, 9)


def test_impossible_requests_are_refused() -> None:
    model = small()
    with pytest.raises(UserError, match="seeds"):
        model.sample(2, 9, seeds=[1])
    with pytest.raises(UserError, match="shape"):
        model.sample(1, 9, seeds=[1], noise=torch.zeros(1, 9, 7))
    with pytest.raises(UserError, match="at least 1"):
        ConvergeFlowConfig(vocabulary=0)
    with pytest.raises(UserError, match="multiple of 2 x heads"):
        ConvergeFlowModel(ConvergeFlowConfig(vocabulary=5, width=30, heads=4, depth=1))
    with pytest.raises(UserError, match="no token weights"):
        small(predictor="direct").generate(1, settings=Settings(nfe=2, decode="weight"))


def test_the_direct_predictor_is_read_by_its_prediction_unless_told() -> None:
    samples = small(predictor="direct").generate(1, nfe=2)
    assert torch.equal(samples.ids, samples.extras["ids_prediction"])
