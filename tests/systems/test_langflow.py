from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ten_sentences import TOKENS, fresh, stage
from torch import Tensor
from torch.nn.functional import softplus

from convergeflow.errors import UserError
from convergeflow.flow.guidance import Controls
from convergeflow.flow.schedule import Gumbel
from convergeflow.flow.solver import step_data
from convergeflow.objective.learned_schedule import LearnedGumbel
from convergeflow.randomness import RowDraws
from convergeflow.sampling.settings import Settings
from convergeflow.sampling.wrappers import Tempered
from convergeflow.systems.options import settings_of


def test_step_formula() -> None:
    schedule = Gumbel()
    now, then = (schedule(torch.full((3,), t, dtype=torch.float64)) for t in (0.3, 0.4))
    generator = torch.Generator().manual_seed(0)
    z, x_hat = (torch.randn(3, 4, 5, dtype=torch.float64, generator=generator) for _ in range(2))
    current = z * torch.exp((softplus(now.gamma) - softplus(then.gamma)) / 2)[:, None, None]
    w = torch.exp((then.gamma - now.gamma) / 2)[:, None, None]
    interpolated = torch.lerp(then.alpha[:, None, None] * x_hat, current, w)
    assert torch.allclose(interpolated, step_data(z, x_hat, now, then), atol=1e-12)


def test_schedule_and_its_law_are_inverse() -> None:
    schedule = Gumbel()
    q = torch.linspace(1e-4, 1 - 1e-4, 200, dtype=torch.float64)
    assert torch.allclose(schedule.cdf(schedule.gamma(1 - q)), q, atol=1e-10)
    assert (schedule.gamma_min, schedule.gamma_max) == (pytest.approx(2.641, abs=1e-3), pytest.approx(14.532, abs=1e-3))


def test_a_fresh_model_predicts_by_the_kernel_alone() -> None:
    model = fresh("langflow").eval()
    V = model.config.vocabulary
    x = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(0))
    gamma = torch.tensor([1.0, 2.0])
    skip = torch.exp((softplus(-gamma) - gamma) / 2)[:, None, None] * (x @ model.network.embedding.rows().T)
    assert torch.allclose(model(x, gamma).logits, skip, atol=1e-4)
    noise_end = model(x, torch.tensor([40.0, 40.0])).logits.detach()
    assert float(noise_end.softmax(-1).log().mean()) == pytest.approx(-math.log(V), abs=1e-4)
    with torch.no_grad():  # well separated embeddings at the data end: the kernel alone reads the token
        model.network.embedding.weight.copy_(torch.eye(V, 32) + 0.01 * torch.randn(V, 32))
        table = model.network.embedding.rows()
        star = table[TOKENS[:8]]
        clean = model.schedule.at_gamma(torch.full((8,), -4.0, dtype=torch.float64))
        z = clean.alpha[0].float() * star + clean.sigma[0].float() * torch.randn(star.shape)
        read = model(z, torch.full((8,), -4.0)).logits.log_softmax(-1)
    distinct = TOKENS[:8] < 32
    assert float(-read.gather(-1, TOKENS[:8, :, None])[..., 0][distinct].mean()) < 1e-3


def test_the_gumbel_fit_recovers_the_curve() -> None:
    learned = LearnedGumbel(Gumbel(4.723, 0.852), 7.02).double()
    truth = Gumbel(3.9, 1.1)
    gamma = torch.linspace(0, 12, 400, dtype=torch.float64)
    entropy = 5.5 * truth.cdf(gamma)
    optimizer = torch.optim.LBFGS(learned.parameters(), lr=0.5, max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = learned.fit_loss(gamma, entropy)
        loss.backward()
        return loss

    optimizer.step(closure)
    found = [learned.loc.item(), learned.scale.item(), learned.entropy.item()]
    assert found == pytest.approx([3.9, 1.1, 5.5], abs=1e-2)


def test_own_sampler_and_all_controls() -> None:
    model = fresh("langflow")
    own = model.sample(3, 4, seeds=range(3), nfe=6)
    assert own.settings["self_condition"] == "previous" and own.settings["grid"] == "langflow" and own.nfe == 6
    ours = Settings(nfe=12, controls=Controls.configuration("C", refine=4, scg=3.0))
    controlled = model.sample(3, 4, seeds=range(3), settings=ours)
    assert controlled.settings["self_condition"] == "recursive" and controlled.nfe == 12


def test_every_stage_is_cross_entropy_with_table_and_schedule() -> None:
    model = fresh("langflow")
    model.enter_stage(stage("mse", 5).model_copy(update={"learn_table": False}))
    assert model.objective.kind == "ce" and model.fits_schedule
    assert all(parameter.requires_grad for parameter in model.parameters())
    found = model.bound(TOKENS[:6], draws=RowDraws(range(6)), repeats=4)
    assert 2.0 < found.nats_per_token < 6.0


def test_temperature_acts_on_all_logits() -> None:
    model = fresh("langflow").eval()
    at = model.schedule.at_gamma(torch.full((2,), 1.0, dtype=torch.float64))
    x = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain = model.bind()(x, at, None)
        logits = plain.logits(x, at)
        table = model.network.embedding.rows()
        same, sharper, coldest = (plain.tempered(value, 1.0).weigh(x, at, details=True) for value in (1.0, 0.5, 1e-4))
        weights = logits.softmax(-1)
        squared = weights.square() / weights.square().sum(-1, keepdim=True)
        assert torch.allclose(same.mu, plain.weigh(x, at).mu, atol=1e-4)
        assert torch.allclose(sharper.mu, squared @ table, atol=1e-4)
        assert torch.allclose(coldest.mu, table[logits.argmax(-1)], atol=1e-4)
        positions = torch.tensor([[True, False, False, True], [False, True, False, False]])
        levels = at.wide(4)[positions]
        some = plain[positions].tempered(0.5, 1.0).weigh(x[positions], levels)
        assert torch.allclose(some.mu, sharper.mu[positions], atol=1e-5)
        assert torch.allclose(sharper.top_weight, squared.max(-1).values, atol=1e-4)
        assert torch.allclose(Tempered(0.5).reading(model.bind()(x, at, None)).logits(x, at), 2 * logits, atol=1e-4)
        # Of log f alone: what is left of the logits is the kernel.
        kernel = float(at.kernel[0]) * x @ table.T
        base_alone = Tempered(1.0, 0.5).reading(model.bind()(x, at, None)).logits(x, at)
        assert torch.allclose(base_alone, 2 * (logits - kernel) + kernel, atol=1e-4)
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(UserError, match="positive"):
            model.sample(1, 4, seeds=[0], nfe=4, temperature=wrong)


def test_temperature_one_is_the_published_sampler() -> None:
    model = fresh("langflow").eval()
    plain = model.sample(2, 8, seeds=[0, 1], nfe=5)
    assert torch.equal(plain.ids, model.sample(2, 8, seeds=[0, 1], nfe=5, temperature=1.0).ids)
    cold = model.sample(2, 8, seeds=[0, 1], nfe=5, temperature=0.5)
    assert cold.settings["temperature"] == 0.5 and cold.nfe == plain.nfe == 5


def test_its_temperature_holds_beside_the_controls_of_the_flow() -> None:
    model = fresh("langflow").eval()

    def asked(given: dict[str, Any], controls: dict[str, Any]) -> Any:
        return model.sampling_arguments(given, controls, lambda schedule, own: settings_of(given, schedule, own))

    assert asked({"refine": 2}, {"temperature": 0.5})["settings"].temperature == 0.5
    assert asked({"refine": 2, "temperature": 0.7}, {})["settings"].temperature == 0.7
    for more in ({}, {"refine": 2}):
        with pytest.raises(UserError, match="give one"):
            asked({"temperature": 0.7, **more}, {"temperature": 0.5})
    with pytest.raises(UserError, match="no control 'churn'"):
        asked({"refine": 2}, {"churn": 1.0})
