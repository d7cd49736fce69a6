"""The barycentre of a step on toys whose law is known: no network, and every expected number is computed here."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from convergeflow.distillation.barycentre import Barycentre, Span, barycentres, shares, substeps
from convergeflow.flow.guidance import Controls
from convergeflow.flow.schedule import Coefficients, Cosine, Gumbel, Linear, Schedule
from convergeflow.flow.solver import step_data
from convergeflow.model.head import KernelLogF, LogF
from convergeflow.randomness import RowDraws
from convergeflow.sampling.integration import integrate
from convergeflow.sampling.settings import Settings
from convergeflow.studies.reproduce.toys import ToyPredictor, joint_base, random_table, starting_noise

WIDTH, VOCABULARY, BEGIN, END = 6, 5, 0.2, 0.7
SCHEDULES = [Linear(), Cosine(), Gumbel(1.0, 0.9, 1e-3)]
ALONE = Settings(nfe=1, self_condition="none")


def toy(schedule: Schedule) -> ToyPredictor:
    """The exact posterior of two positions with a joint law."""
    table = random_table(VOCABULARY, WIDTH, seed=3)
    joint = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    log_joint = (2.0 * joint).flatten().log_softmax(0).view(VOCABULARY, VOCABULARY)
    return ToyPredictor(table, schedule, joint_base(log_joint, table))


class Conditioned(ToyPredictor):
    """A toy that listens to an earlier prediction, so that guidance and refinement do something."""

    def __call__(self, x: Tensor, at: Coefficients, condition: Tensor | None) -> LogF:
        said = super().__call__(x, at, condition)
        assert isinstance(said, KernelLogF)
        extra = 0.0 if condition is None else condition.to(x.dtype) @ self.table.T
        return KernelLogF(said.h + extra, said.weight, said.bias, said.table)


def levels(schedule: Schedule, time: float, rows: int) -> Coefficients:
    return schedule(torch.tensor(time, dtype=torch.float64)).expand(rows)


def carried(predictor: ToyPredictor, settings: Settings, x: Tensor, times: tuple[float, ...], end: float) -> Tensor:
    """Where the package's own sampler ends that goes through all substeps."""
    calls = 1 + (settings.controls.refine if settings.self_condition == "recursive" else 0)
    states: list[Tensor] = []
    whole = Settings(
        nfe=calls * (len(times) + 1),
        controls=settings.controls,
        self_condition=settings.self_condition,
        grid=(*times, end),
        decode="prediction",
    )
    integrate(predictor, whole, x, observe=lambda step: states.append(step.x_t))
    return states[-1]


def average(predictor: ToyPredictor, settings: Settings, span: Span, count: int, seed: int = 0) -> Barycentre:
    draws = RowDraws(range(seed, seed + len(span.x)))
    return barycentres([predictor], settings, [span], [count], [draws])[0]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: type(schedule).__name__)
@pytest.mark.parametrize("count", [1, 2, 3, 8, 50])
def test_one_step_with_the_barycentre_ends_where_the_teacher_ends(schedule: Schedule, count: int) -> None:
    predictor, x = toy(schedule), starting_noise(16, 2, WIDTH, seed=1)
    shown = average(predictor, ALONE, Span(x, BEGIN, END), count)
    stepped = step_data(x, shown.mu, levels(schedule, BEGIN, 16), levels(schedule, END, 16))
    there = carried(predictor, ALONE, x, substeps(BEGIN, END, count), END)
    assert (stepped - there).abs().max() < 1e-10


@pytest.mark.parametrize("count", [1, 4, 9])
def test_a_guided_and_refined_teacher_is_averaged_alike(count: int) -> None:
    schedule = SCHEDULES[2]
    plain = toy(schedule)
    predictor, x = Conditioned(plain.table, schedule, plain.log_base), starting_noise(16, 2, WIDTH, seed=2)
    guided = Settings(nfe=4, controls=Controls(refine=3, scg=2.5))
    shown = average(predictor, guided, Span(x, BEGIN, END), count)
    stepped = step_data(x, shown.mu, levels(schedule, BEGIN, 16), levels(schedule, END, 16))
    there = carried(predictor, guided, x, substeps(BEGIN, END, count), END)
    assert (stepped - there).abs().max() < 1e-10
    unguided = average(predictor, ALONE, Span(x, BEGIN, END), count)
    assert (unguided.mu - shown.mu).abs().max() > 0.1


def averaged_weights(predictor: ToyPredictor, x: Tensor, count: int, end: float = END) -> Tensor:
    """w_bar by its definition, with Euler steps of its own: [rows, L, V]."""
    schedule, rows = predictor.schedule, len(x)
    times = [BEGIN + (end - BEGIN) * k / count for k in range(count)] + [end]
    rho = [float(schedule(torch.tensor(t, dtype=torch.float64)).signal_to_noise) for t in times]
    total = torch.zeros(*x.shape[:2], VOCABULARY, dtype=torch.float64)
    for k in range(count):
        now, then = levels(schedule, times[k], rows), levels(schedule, times[k + 1], rows)
        scores = now.kernel[:, None, None] * (x @ predictor.table.T)
        weights = (predictor.log_base(x, now) + scores).softmax(-1)
        total += (rho[k + 1] - rho[k]) / (rho[-1] - rho[0]) * weights
        y = x / now.sigma[:, None, None] + (rho[k + 1] - rho[k]) * (weights @ predictor.table)
        x = y * then.sigma[:, None, None]
    return total


@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_barycentre_is_the_mean_under_the_averaged_weights(count: int) -> None:
    predictor, x = toy(SCHEDULES[2]), starting_noise(8, 2, WIDTH, seed=4)
    weights = averaged_weights(predictor, x, count)
    assert (weights.sum(-1) - 1).abs().max() < 1e-12 and bool((weights > 0).all())
    shown = average(predictor, ALONE, Span(x, BEGIN, END), count)
    assert (shown.mu - weights @ predictor.table).abs().max() < 1e-10


def test_drawn_tokens_estimate_the_averaged_weights_without_bias() -> None:
    predictor, count, rows = toy(SCHEDULES[2]), 4, 20_000
    one = starting_noise(1, 2, WIDTH, seed=6)
    weights = averaged_weights(predictor, one, count)[0]
    drawn = average(predictor, ALONE, Span(one.expand(rows, -1, -1), BEGIN, END), count).tokens
    found = torch.nn.functional.one_hot(drawn, VOCABULARY).double().mean(0)
    error = (weights * (1 - weights) / rows).sqrt()
    assert bool(((found - weights).abs() < 4.5 * error).all())
    # A student's cross-entropy: the mean over draws against the exact sum, within its own standard error.
    student = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(1), dtype=torch.float64).log_softmax(
        -1
    )
    each = -student[torch.arange(2), drawn]
    exact, spread = -(weights * student).sum(-1), each.std(0) / math.sqrt(rows)
    assert bool(((each.mean(0) - exact).abs() < 4 * spread).all())
    # This number of draws tells it from the first substep's weights, which a draw without substeps would have.
    first = averaged_weights(predictor, one, 1)[0]
    assert bool(((first - weights).abs() > 10 * error).any())


def test_shares_follow_the_clock_of_the_flow() -> None:
    times = substeps(0.1, 0.5, 4)
    assert times == pytest.approx((0.1, 0.2, 0.3, 0.4))
    rho = [t / (1 - t) for t in (*times, 0.5)]
    expected = [(b - a) / (rho[-1] - rho[0]) for a, b in itertools.pairwise(rho)]
    assert shares(times, 0.5, Linear()).tolist() == pytest.approx(expected, abs=1e-14)


def test_to_the_end_of_the_data_the_last_prediction_counts_alone() -> None:
    predictor, x = toy(Linear()), starting_noise(4, 2, WIDTH, seed=5)
    assert shares(substeps(0.5, 1.0, 3), 1.0, Linear()).tolist() == pytest.approx([0.0, 0.0, 1.0], abs=1e-12)
    last: list[Tensor] = []
    grid = substeps(0.5, 1.0, 3)
    settings = Settings(nfe=3, self_condition="none", grid=grid, decode="prediction")
    integrate(predictor, settings, x, observe=lambda step: last.append(step.mu))
    shown = average(predictor, ALONE, Span(x, 0.5, 1.0), 3)
    assert (shown.mu - last[-1]).abs().max() < 1e-12


def test_spans_share_network_passes_and_do_not_touch_each_other() -> None:
    predictor = toy(SCHEDULES[1])
    spans = [Span(starting_noise(3, 2, WIDTH, seed=n), 0.1 * n, 0.1 * n + 0.3) for n in (1, 2, 3)]
    counts, draws = [1, 4, 2], [RowDraws(range(10 * n, 10 * n + 3)) for n in (1, 2, 3)]
    together = barycentres([predictor] * 3, ALONE, spans, counts, draws)
    for number, (span, count) in enumerate(zip(spans, counts, strict=True), 1):
        alone = average(predictor, ALONE, span, count, seed=10 * number)
        assert (together[number - 1].mu - alone.mu).abs().max() < 1e-12
        assert torch.equal(together[number - 1].tokens, alone.tokens)


def test_the_teacher_goes_on_from_what_the_student_thinks() -> None:
    """One point, K = 2, w = 2.5, by hand: the student's condition takes the place of the first prediction."""
    schedule = SCHEDULES[2]
    plain = toy(schedule)
    predictor, x = Conditioned(plain.table, schedule, plain.log_base), starting_noise(8, 2, WIDTH, seed=9)
    thought = predictor.table[torch.randint(VOCABULARY, (8, 2), generator=torch.Generator().manual_seed(2))]
    at = levels(schedule, BEGIN, 8)

    def mu(condition: Tensor | None) -> Tensor:
        return predictor(x, at, condition).weigh(x, at).mu

    u = mu(None)
    p = torch.lerp(u, mu(thought), 2.5)
    p = torch.lerp(u, mu(p), 2.5)
    guided = Settings(nfe=3, controls=Controls(refine=2, scg=2.5))
    shown = average(predictor, guided, Span(x, BEGIN, END, thought), 1)
    assert (shown.mu - p).abs().max() < 1e-10
    assert (shown.mu - average(predictor, guided, Span(x, BEGIN, END), 1).mu).abs().max() > 0.1
