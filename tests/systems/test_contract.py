"""What every rival promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ten_sentences import LENGTH, TOKENS, fresh, stage

from convergeflow.errors import UserError
from convergeflow.flow.grid import training_times
from convergeflow.randomness import RowDraws
from convergeflow.systems import METHODS, class_of_type, rivals
from convergeflow.systems.protocol import LanguageModel
from convergeflow.training.config import ModelConfig

NAMES = rivals()


@pytest.fixture(params=NAMES)
def model(request: Any) -> Any:
    return fresh(request.param)


def test_registry() -> None:
    assert NAMES == ["ar", "mdlm", "sedd-absorb", "sedd-uniform", "duo", "flm", "langflow", "elf", "plaid"]
    assert list(METHODS) == ["convergeflow", *NAMES]
    with pytest.raises(UserError, match="did you mean 'mdlm'"):
        METHODS["mdln"]
    for wrong in ("convergeflow-nothing", "mdlm"):
        with pytest.raises(UserError, match="model type"):
            class_of_type(wrong)


def test_names(model: Any) -> None:
    assert isinstance(model, LanguageModel)
    assert model.method in NAMES and class_of_type(model.model_type()) is type(model)


def test_loss_is_finite_and_reaches_every_parameter(model: Any) -> None:
    if model.method == "elf":
        model.enter_stage(stage("ce", 10))
        model.encoder_passes += 1
    model.enter_stage(stage("mse", 10))
    model.train()
    loss = model.loss(TOKENS, times=training_times(len(TOKENS), seed=0), draws=RowDraws(range(len(TOKENS))))
    loss.total.backward()
    assert loss.total.dim() == 0 and bool(torch.isfinite(loss.total))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and bool(torch.isfinite(parameter.grad).all()), name


def test_a_row_loss_depends_on_its_own_draws(model: Any) -> None:
    """The mean over a batch is the mean over its halves: no row sees another's noise."""
    model.eval()
    times = training_times(8, seed=0)
    whole = model.loss(TOKENS[:8], times=times, draws=RowDraws(range(8))).total
    halves = [
        model.loss(TOKENS[a : a + 4], times=times[a : a + 4], draws=RowDraws(range(a, a + 4))).total for a in (0, 4)
    ]
    assert float(whole.detach()) == pytest.approx(float(sum(halves).detach()) / 2, rel=1e-4)


def test_samples_do_not_depend_on_the_batch_and_calls_are_counted(model: Any) -> None:
    steps: list[Any] = []
    whole = model.sample(5, LENGTH, seeds=range(10, 15), nfe=7, observe=steps.append)
    split = model.sample(5, LENGTH, seeds=range(10, 15), nfe=7, batch=2)
    alone = model.sample(1, LENGTH, seeds=[13], nfe=7)
    assert torch.equal(whole.ids, split.ids) and torch.equal(whole.ids[3:4], alone.ids)
    expected = LENGTH if model.method == "ar" else 7
    assert whole.nfe == expected and steps[-1].calls == expected
    assert whole.extras["calls"].tolist() == [expected] * 5
    assert whole.ids.shape == (5, LENGTH)
    assert int(whole.ids.min()) >= 0 and int(whole.ids.max()) < model.config.vocabulary
    json.dumps(whole.settings)


def test_wrong_requests_are_refused(model: Any) -> None:
    with pytest.raises(UserError, match="seeds"):
        model.sample(3, LENGTH, seeds=[0], nfe=4)
    with pytest.raises(UserError):
        model.sample(0, LENGTH, seeds=[], nfe=4)
    with pytest.raises(UserError, match="control"):
        model.sample(1, LENGTH, seeds=[0], nfe=4, temprature=0.5)


def test_every_control_is_accepted(model: Any) -> None:
    for controls in model.frontier:
        assert model.sample(2, LENGTH, seeds=[0, 1], nfe=4, **controls).ids.shape == (2, LENGTH)


def test_monitor_and_bound(model: Any) -> None:
    first, again = (model.monitor(TOKENS[:8], draws=RowDraws(range(8))) for _ in range(2))
    assert first == again and all(isinstance(value, float) for value in first.values())
    if model.bound_kind is None:
        with pytest.raises(UserError, match="no likelihood bound"):
            model.bound(TOKENS[:2], draws=RowDraws(range(2)))
        return
    found = model.bound(TOKENS[:16], draws=RowDraws(range(16)), repeats=32)
    # Fresh models know nothing: every bound is at least the entropy of a uniform token, up to sampling error.
    slack = 0.1 if model.method in ("sedd-absorb", "sedd-uniform", "duo") else 0.0  # their times are cut off at 1e-3
    uniform = torch.tensor(float(model.config.vocabulary)).log()
    assert found.nats_per_token > float(uniform) - 4 * found.standard_error - slack - 0.05
    assert found.tokens == 16 * LENGTH


def test_files_come_back_equal(model: Any, tmp_path: Path) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.eval()
    model.save_pretrained(tmp_path)
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(torch.rand(2), expected), "loading draws from the global generator"
    assert loaded.method == model.method and loaded.config == model.config
    for (name, left), (other, right) in zip(model.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert name == other and torch.equal(left, right), name
    before, after = (m.sample(3, LENGTH, seeds=range(3), nfe=5).ids for m in (model, loaded))
    assert torch.equal(before, after)


def test_another_models_folder_is_refused(tmp_path: Path) -> None:
    fresh("mdlm").save_pretrained(tmp_path)
    for name in ("ar", "langflow"):
        with pytest.raises(UserError, match="convergeflow-mdlm"):
            METHODS[name].from_pretrained(tmp_path)
    with pytest.raises(UserError, match="does not hold this model"):
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "depth": 3}))
        METHODS["mdlm"].from_pretrained(tmp_path)


@pytest.mark.parametrize("name", METHODS)
def test_a_run_is_checked_against_the_methods_own_configuration(name: str) -> None:
    shape = {"size": "test", "method": name}
    made = ModelConfig.model_validate(shape).complete(vocabulary=31, length=8)
    assert type(made) is METHODS[name].config_class
    assert made.vocabulary == 31 and made.width == 32 and made.dropout == 0.0
    with pytest.raises(ValueError, match=r"unknown key 'model\.nonsense'"):
        ModelConfig.model_validate({**shape, "nonsense": 1})
