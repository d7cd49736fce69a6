"""The sampler of Section 3.2, written once, as a generator.

A trajectory carries rows that share a plan from noise to tokens. It yields the network calls that it needs and receives
predictions; a driver (`driver.py`) makes network passes of the calls. So batches, serving, counting and observation
are no business of this file, and what a trajectory remembers are local variables.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from convergeflow.flow.solver import History
from convergeflow.model.fused import Weighted
from convergeflow.sampling.events import Call, End, Flow, Guided, Prediction
from convergeflow.sampling.plan import Plan, Point
from convergeflow.sampling.wrappers import Wrapped


class Stop:
    """When to stop early. This one never does, like the paper's sampler; `freezing.Freezing` does."""

    may_end_early = False
    """Whether a refinement may end before its last pass."""

    def refined(self, k: int, before: Tensor, after: Tensor) -> bool:
        """Whether the passes to come would change nothing, given the conditions before and after the k-th one."""
        return False

    def decided(self, weights: Weighted, mu: Tensor) -> bool:
        """Whether every position is settled after a step that mu drove."""
        return False


NEVER = Stop()


def trajectory(plan: Plan, x: Tensor, predictor: Wrapped, stop: Stop = NEVER) -> Flow:
    """From noise x [rows, L, d] to the end of the plan, or to where `stop` finds every row decided."""
    condition: Tensor | None = None
    history: History = None
    for point in plan:
        here = yield from guide(predictor, x, point, stop, condition)
        yield here  # for observers
        if point.then is None:
            return End.at(point.at, x, here.last.weights, here.last.log_f, predictor)
        moved = plan.solver.advance(x, here.mu, point.at, point.then, point.w_ug, history)  # Eqs. 26, 32
        latest = here
        condition = here.mu if plan.feeds_back else None  # Eq. 29
        if point.corrected:  # Heun: predict again at the end of the step
            latest = yield from guide(predictor, moved, plan[point.index + 1], stop, condition)
            moved = plan.solver.advance(x, 0.5 * (here.mu + latest.mu), point.at, point.then, point.w_ug)
            condition = latest.mu if plan.feeds_back else None
        x, history = moved, (here.mu, point.at)
        if stop.decided(latest.last.weights, here.mu):
            return End.at(point.then, x, latest.last.weights, latest.last.log_f, predictor)
    raise AssertionError("a plan has a last point")


def guide(
    predictor: Wrapped, x: Tensor, point: Point, stop: Stop, condition: Tensor | None
) -> Generator[Call, Prediction, Guided]:
    """Self-conditioning guidance with iterative refinement at one state (Eqs. 30, 31).

    u = mu(x, t, none), then K_i times p = (1 - w) u + w mu(x, t, p): the guided prediction is the next condition. p
    drives the solver. At the last grid point the K-th refinement is read off as it is, without extrapolation.
    """
    u = yield Call(predictor, x, point, condition, closing=point.refinements == 0)
    p, last = u.mu, u
    for k in range(point.refinements):
        last = yield Call(predictor, x, point, p, closing=stop.may_end_early or k == point.refinements - 1)
        before, p = p, torch.lerp(u.mu, last.mu, point.w_scg)
        if stop.refined(k, before, p):
            break
    return Guided(predictor, x, point, p, u, last)
