"""The `kernel` solver: between network calls log f stays as it is and the exact kernel is followed. Not the paper's.

The Gaussian kernel is known at every state without a call, so a step follows d(x/sigma) = mu(x) d(alpha/sigma) with
mu's own kernel, in as many substeps as its length asks for (`flow.solver.follow`). At the end the flow goes on, without
a call, to where the kernel decides every token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from convergeflow.flow.path import spread
from convergeflow.flow.schedule import Coefficients, Schedule
from convergeflow.flow.solver import closing_gamma, follow, opening_gamma, substeps
from convergeflow.model.head import LogF, no_weights
from convergeflow.sampling.events import Arrival, End, Flow, Guided
from convergeflow.sampling.plan import Plan, Point
from convergeflow.sampling.trajectory import NEVER, guide
from convergeflow.sampling.wrappers import Predictor

Shares = list[tuple[float, LogF]]
"""What drives a step: how much of which call's log f."""


def kernel_trajectory(plan: Plan, x: Tensor, predictor: Predictor) -> Flow:
    """From noise x [rows, L, d] to where the kernel decides every token."""
    condition: Tensor | None = None
    for point in plan:
        here = yield from guide(predictor, x, point, NEVER, condition)
        yield Arrival(predictor, x, point, here)
        log_f = here.last.log_f
        if point.then is None:
            # What is read off is not extrapolated.
            end = min(closing_gamma(x.shape[-1]), float(point.at.gamma))
            x = _followed(x, [(1.0, log_f)], point, end, plan.schedule)
            closed = plan.schedule.at_gamma(torch.tensor(end, dtype=torch.float64))
            return End.at(closed, x, log_f.weigh(x, closed.expand(len(x)), details=True), log_f, predictor)
        x = _followed(x, _shares(here, point), point, float(point.then.gamma), plan.schedule, point.w_ug)
        condition = log_f.weigh(x, point.then.expand(len(x))).mu if plan.feeds_back else None
    raise AssertionError("a plan has a last point")


def _shares(here: Guided, point: Point) -> Shares:
    """(1 - w) of the unconditional call and w of the latest one: guidance, for all states of the step."""
    if point.refinements == 0 or point.w_scg == 1.0:
        return [(1.0, here.last.log_f)]
    return [(1.0 - point.w_scg, here.unconditional.log_f), (point.w_scg, here.last.log_f)]


def _followed(x: Tensor, shares: Shares, point: Point, end: float, schedule: Schedule, w_ug: float = 0.0) -> Tensor:
    if not all(log_f.has_weights for _, log_f in shares):
        raise no_weights()
    start = float(point.at.gamma)
    # Noise alone at the first grid point lacks the word that the path would already hold there.
    late = point.index == 0 and start < (opening := opening_gamma(x.shape[-1]))
    levels = substeps(schedule, opening if late else start, end, len(x), leap=late)
    if late:
        x = x * spread(levels[0].sigma, x)

    def driving(x: Tensor, at: Coefficients) -> Tensor:
        mu = sum(share * log_f.weigh(x, at).mu.to(x.dtype) for share, log_f in shares)
        assert isinstance(mu, Tensor)
        return mu

    return follow(x, driving, levels, w_ug=w_ug)
