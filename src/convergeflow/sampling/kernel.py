"""The `kernel` solver: between network calls log f stays as it is and the exact kernel is followed. Not the paper's.

The Gaussian kernel is known at every state without a call. So a step keeps log f constant, not mu: it follows
d(x/sigma) = mu(x) d(alpha/sigma) with mu's own kernel, in as many substeps as its length asks for. At the end the flow
goes on, without a call, to where the kernel decides every token. Where log f does not depend on the state (one token
after known ones) that flow draws from f exactly, however few calls there are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from convergeflow.flow.path import spread
from convergeflow.flow.schedule import Coefficients, Schedule
from convergeflow.flow.solver import step_guided
from convergeflow.model.head import LogF, no_weights
from convergeflow.sampling.events import End, Flow, Guided
from convergeflow.sampling.plan import Plan, Point
from convergeflow.sampling.trajectory import NEVER, guide
from convergeflow.sampling.wrappers import Wrapped

SUBSTEP = 0.25
"""Length of a substep in gamma."""
OPENING_SPREAD = 0.05
"""Even substeps begin where kernel scores differ between tokens by this many nats (their standard deviation)."""
OPENING_LEAP = 8.0
"""Before them one substep of this length in gamma comes out of all but pure noise, where mu hardly changes."""
CLOSING_MARGIN = 60.0
"""The flow ends where the kernel puts a token this many nats before the others on average: it decides every one."""

Shares = list[tuple[float, LogF]]
"""What drives a step: how much of which call's log f."""


def kernel_trajectory(plan: Plan, x: Tensor, predictor: Wrapped) -> Flow:
    """From noise x [rows, L, d] to where the kernel decides every token."""
    condition: Tensor | None = None
    for point in plan:
        here = yield from guide(predictor, x, point, NEVER, condition)
        yield here  # for observers
        log_f = here.last.log_f
        if point.then is None:
            # What is read off is not extrapolated. The end: (alpha/sigma)^2 width = CLOSING_MARGIN.
            end = min(math.log(x.shape[-1]) - math.log(CLOSING_MARGIN), float(point.at.gamma))
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
    """The state carried from a grid point to gamma = end."""
    if not all(log_f.has_weights for _, log_f in shares):
        raise no_weights()
    start = float(point.at.gamma)
    # Noise alone at the first grid point lacks the word that the path would already hold there. So it begins earlier,
    # where alpha/sigma sqrt(width) = OPENING_SPREAD, if it would begin later than that.
    opening = math.log(x.shape[-1]) - 2.0 * math.log(OPENING_SPREAD)
    late = point.index == 0 and start < opening
    levels = substeps(schedule, opening if late else start, end, len(x), leap=late)
    if late:
        x = x * spread(levels[0].sigma, x)

    def driving(x: Tensor, at: Coefficients) -> Tensor:
        return torch.stack([share * log_f.weigh(x, at).mu.to(x.dtype) for share, log_f in shares]).sum(0)

    return follow(x, driving, levels, w_ug=w_ug)


def substeps(schedule: Schedule, start: float, end: float, rows: int, *, leap: bool = False) -> list[Coefficients]:
    """Noise levels from gamma = start down to end, both included, evenly and at most SUBSTEP apart.

    With a `leap` they come after one level in all but pure noise.
    """
    count = max(1, math.ceil((start - end) / SUBSTEP))
    gammas = torch.linspace(start, end, count + 1, dtype=torch.float64)
    levels = schedule.at_gamma(torch.cat([gammas[:1] + OPENING_LEAP, gammas]) if leap else gammas)
    return [levels[i].expand(rows) for i in range(len(levels.alpha))]


def follow(
    x: Tensor, predict: Callable[[Tensor, Coefficients], Tensor], levels: Sequence[Coefficients], *, w_ug: float = 0.0
) -> Tensor:
    """The state carried through noise levels by Heun's rule, `predict` giving mu at a state without a network call."""
    mu = predict(x, levels[0])
    for now, then in itertools.pairwise(levels):
        ahead = predict(step_guided(x, mu, now, then, w_ug), then)
        x = step_guided(x, 0.5 * (mu + ahead), now, then, w_ug)
        mu = predict(x, then) if then is not levels[-1] else mu
    return x
