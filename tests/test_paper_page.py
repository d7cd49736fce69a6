"""The page of the method (`paper.py`) and the core are equal, so that neither can drift; golden cases hold both.

Both get the same network, `log f` of the golden model with random weights, and the same noise, in float64.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from convergeflow import paper
from convergeflow.errors import UserError
from convergeflow.flow.budget import allocate
from convergeflow.flow.grid import midpoint_grid
from convergeflow.flow.guidance import Controls
from convergeflow.flow.path import sample_path
from convergeflow.flow.schedule import Gumbel
from convergeflow.flow.solver import step_data, step_noise
from convergeflow.interop.langflow import load_langflow
from convergeflow.model.head import KernelLogF
from convergeflow.objective.losses import Objective, flow_loss
from convergeflow.randomness import RowDraws
from convergeflow.sampling.cohort import Step
from convergeflow.sampling.integration import Endpoint, integrate
from convergeflow.sampling.settings import Settings
from convergeflow.systems.convergeflow import ConvergeFlowModel

GOLDEN = Path(__file__).parent / "golden"
CASES = json.loads((GOLDEN / "sampler.json").read_text())
SCHEDULE = Gumbel(4.9563, 0.9637)
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


@pytest.fixture(scope="module")
def model() -> ConvergeFlowModel:
    return load_langflow(GOLDEN / "langflow_tiny").double().eval()


def page_network(model: ConvergeFlowModel) -> tuple[paper.LogF, Tensor]:
    """log f of the core's network as the page wants it, without any kernel, and the table."""

    def log_f(x: Tensor, gamma: Tensor, c: Tensor) -> Tensor:
        answer = model.network(x, model.schedule.at_gamma(gamma.double()), c)
        assert isinstance(answer, KernelLogF)
        assert answer.bias is not None
        return answer.h.double() @ answer.weight.T + answer.bias

    return log_f, model.network.embedding.rows().detach()


def noise_of(model: ConvergeFlowModel, rows: int = 3, length: int = 24) -> Tensor:
    return RowDraws(range(rows)).normal(length, model.config.width, dtype=torch.float64)


def test_the_schedule_and_the_path() -> None:
    t = torch.cat([torch.tensor([0.0, 1e-7, 1.0], dtype=torch.float64), midpoint_grid(64)])
    gamma, at = paper.gumbel(t, SCHEDULE.loc, SCHEDULE.scale), SCHEDULE(t)
    torch.testing.assert_close(gamma, SCHEDULE.gamma(t), **CLOSE)
    alpha, sigma = paper.coefficients(gamma)
    torch.testing.assert_close(alpha[:, 0, 0], at.alpha, **CLOSE)
    torch.testing.assert_close(sigma[:, 0, 0], at.sigma, **CLOSE)
    x_star, z = torch.randn(2, len(t), 5, 8, dtype=torch.float64)
    torch.testing.assert_close(paper.path(x_star, z, gamma), sample_path(x_star, z, at), **CLOSE)


def test_the_steps_with_and_without_unconditional_guidance() -> None:
    x, mu = torch.randn(2, 4, 5, 8, dtype=torch.float64)
    now, then = torch.full((4,), 6.0, dtype=torch.float64), torch.full((4,), 4.5, dtype=torch.float64)
    at, next_at = SCHEDULE.at_gamma(now), SCHEDULE.at_gamma(then)
    torch.testing.assert_close(paper.step(x, mu, now, then), step_data(x, mu, at, next_at), **CLOSE)
    epsilon = (x - at.alpha[:, None, None] * mu) / at.sigma[:, None, None]
    expected = step_noise(x, epsilon, at, next_at, 0.3)
    torch.testing.assert_close(paper.step(x, mu, now, then, 0.3), expected, **CLOSE)


def test_the_weights_are_eq_21_written_out(model: ConvergeFlowModel) -> None:
    """The page's inner product is the paper's Gaussian kernel, and both are the core's."""
    log_f, table = page_network(model)
    x, c = noise_of(model), 0.5 * noise_of(model).flip(1)
    gamma = torch.tensor([3.0, 5.0, 8.0], dtype=torch.float64)
    alpha, sigma = paper.coefficients(gamma)
    squared = (x[:, :, None] - alpha[..., None] * table).square().sum(-1)
    f = torch.softmax(log_f(x, gamma, c), -1)
    kernel = torch.exp(-(squared - squared.min(-1, keepdim=True).values) / (2 * sigma**2))
    written_out = f * kernel / (f * kernel).sum(-1, keepdim=True)
    torch.testing.assert_close(paper.weights(log_f, table, x, gamma, c), written_out, **CLOSE)

    core = model.network(x, model.schedule.at_gamma(gamma), c)
    at = model.schedule.at_gamma(gamma)
    torch.testing.assert_close(core.logits(x, at).softmax(-1), written_out, **CLOSE)
    mu = paper.predict(log_f, table, x, gamma, c)
    torch.testing.assert_close(mu, core.weigh(x, at).mu, **CLOSE)
    torch.testing.assert_close(mu, torch.einsum("blv,vd->bld", written_out, table), **CLOSE)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_loss_and_its_gradient(model: ConvergeFlowModel, share: float) -> None:
    rows, length = 6, 24
    tokens = torch.randint(0, model.config.vocabulary, (rows, length), generator=torch.Generator().manual_seed(1))
    times = midpoint_grid(rows)
    log_f, table = page_network(model)
    model.requires_grad_(True)
    model.network.embedding.weight.requires_grad_(False)

    def gradient(value: Tensor) -> Tensor:
        model.zero_grad()
        value.backward()
        parts = [parameter.grad for parameter in model.network.parameters() if parameter.grad is not None]
        return torch.cat([part.flatten() for part in parts])

    core = flow_loss(
        model.network, SCHEDULE, Objective("mse", share), tokens, times=times, draws=RowDraws(range(rows))
    ).total
    draws = RowDraws(range(rows))
    z = draws.normal(length, model.config.width).double()
    conditioned = draws.uniform() < share
    page = paper.loss(log_f, table, tokens, paper.gumbel(times, SCHEDULE.loc, SCHEDULE.scale), z, conditioned)
    assert 0.0 < share < 1.0 or bool(conditioned.all()) == (share == 1.0)
    torch.testing.assert_close(page, core.double(), rtol=1e-6, atol=0.0)  # the core adds up its loss in float32
    torch.testing.assert_close(gradient(page), gradient(core), rtol=1e-5, atol=1e-7)


def run_both(model: ConvergeFlowModel, settings: Settings, noise: Tensor) -> tuple[paper.Sample, Endpoint, list[Step]]:
    """The same settings through the page and through the core's driver."""
    steps: list[Step] = []
    core = integrate(model.bind(), settings, noise, observe=steps.append)
    plan = settings.plan(model.schedule)
    gammas = torch.cat([plan.points.gamma, SCHEDULE.gamma(1.0)[None]])
    log_f, table = page_network(model)
    page = paper.sample(
        log_f,
        table,
        noise,
        gammas,
        torch.tensor(plan.allocation.refinements),
        paper.adapted(settings.controls.scg, settings.controls.scg_schedule, plan.points.gamma),
        paper.adapted(settings.controls.ug, settings.controls.ug_schedule, plan.points.gamma),
        previous=plan.feeds_back,
    )
    return page, core, steps


SETTINGS = {
    "A": Settings(nfe=12, controls=Controls.configuration("A", refine=2, scg=1.5)),
    "B": Settings(nfe=20, controls=Controls.configuration("B", refine=9, scg=4.0, ug=0.1)),
    "C": Settings(nfe=20, controls=Controls.configuration("C", refine=30, scg=9.0, ug=0.2)),
    "without self-conditioning": Settings(nfe=8, self_condition="none"),
    "previous step": Settings(nfe=8, self_condition="previous"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_states_weights_and_tokens_of_the_sampler(model: ConvergeFlowModel, name: str) -> None:
    noise = noise_of(model)
    page, core, steps = run_both(model, SETTINGS[name], noise)
    assert len(page.states) == len(steps) > 3
    for mine, step in zip(page.states, steps, strict=True):
        torch.testing.assert_close(mine, step.x_t, rtol=1e-7, atol=1e-7)
    assert torch.equal(paper.by_weight(page), core.decoded.by("weight"))
    assert torch.equal(paper.by_distance(page, model.network.embedding.rows()), core.decoded.by("distance"))
    torch.testing.assert_close(page.w.max(-1).values, steps[-1].last.top_weight, rtol=1e-6, atol=1e-9)
    assert len(torch.unique(paper.by_weight(page))) > 10, "one token everywhere would show nothing"


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"case{case['case']}")
def test_golden_trajectories(model: ConvergeFlowModel, case: dict[str, Any]) -> None:
    """Tokens and final weights that an independent implementation computed."""
    golden = np.load(GOLDEN / "sampler.npz")
    controls = Controls.configuration(case["configuration"], refine=case["K"], scg=case["w_scg"], ug=case["w_ug"])
    noise = torch.from_numpy(golden[f"noise_{case['case']}"])
    page, _, _ = run_both(model, Settings(nfe=case["nfe"], controls=controls), noise)
    assert np.array_equal(paper.by_weight(page).numpy(), golden[f"tokens_{case['case']}"])
    # Weights give logits up to a constant per position; the difference is the golden implementation's float32 rounding.
    difference = page.w.log() - torch.from_numpy(golden[f"final_logits_{case['case']}"]).double()
    assert float((difference.amax(-1) - difference.amin(-1)).max()) / 2 < 1e-2


@pytest.mark.parametrize(("configuration", "K"), [("A", 4), ("B", 10), ("C", 50)])
def test_refinements_are_the_budgets_where_it_is_spent_exactly(configuration: str, K: int) -> None:
    exact = 0
    for num_steps in range(1, 30):
        gammas = paper.gumbel(midpoint_grid(num_steps), SCHEDULE.loc, SCHEDULE.scale)
        found = paper.refinements(K, configuration, gammas)
        nfe = int((found + 1).sum())
        try:
            allocation = allocate(nfe, Controls.configuration(configuration, refine=K, scg=2.0), SCHEDULE)
        except UserError:
            continue
        if allocation.num_steps == num_steps:
            exact += 1
            assert list(allocation.refinements) == found.tolist()
    assert exact > 20


def test_the_page_stands_alone_and_is_one_page() -> None:
    source = Path(paper.__file__).read_text(encoding="utf-8")
    roots = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            roots.add(str(node.module).split(".")[0])
        elif isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
    assert roots <= {"__future__", "collections", "itertools", "math", "typing", "torch"}
    assert len(source.splitlines()) <= 170


def test_it_runs_and_every_position_ends_at_an_embedding(capsys: pytest.CaptureFixture[str]) -> None:
    paper.main()
    said = capsys.readouterr().out
    assert "100% of the positions end at a token embedding" in said
    assert "rules agree at 100%" in said
    words = set(" ".join(said.splitlines()[:4]).split())
    assert words <= set(paper.TEXT.split())
