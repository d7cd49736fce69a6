"""The sampler of Section 3.2, written once, as a generator.

A trajectory carries rows that share a plan from noise to tokens. It yields the network calls that it needs and receives
predictions; a driver (`driver.py`) makes network passes of the calls. So batches, serving, counting and observation
are no business of this file, and what a trajectory remembers are local variables.

At grid point i the recursion is u = mu(x, t, none), then K_i times p = (1 - w) u + w mu(x, t, p): the guided prediction
is the next condition (Eqs. 24, 25). p drives the solver. At the last point the K-th refinement is read off as it is,
without extrapolation, and no step follows.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from convergeflow.flow.schedule import Coefficients
from convergeflow.model.fused import Weighted
from convergeflow.model.head import LogF
from convergeflow.sampling.decoding import Decoded, decode
from convergeflow.sampling.freezing import NEVER, Stop
from convergeflow.sampling.kernel import close, follow_kernel
from convergeflow.sampling.plan import Plan, Point
from convergeflow.sampling.wrappers import Predictor


@dataclass(frozen=True)
class Call:
    """A network call that a trajectory waits for."""

    predictor: Predictor
    x: Tensor
    """[rows, L, d]"""
    point: Point
    condition: Tensor | None
    closing: bool
    """Whether this may be the last call at its point."""


@dataclass(frozen=True)
class Prediction:
    """The answer to a call."""

    mu: Tensor
    """In the state's format: extrapolation amplifies rounding."""
    weights: Weighted
    log_f: LogF


@dataclass(frozen=True)
class Guided:
    """The prediction that drives a step, and the two calls that it was made of."""

    mu: Tensor
    unconditional: Prediction
    last: Prediction


@dataclass(frozen=True)
class Arrival:
    """A trajectory knows where it goes from a grid point: the moment that observers see."""

    predictor: Predictor
    x: Tensor
    point: Point
    guided: Guided


@dataclass(frozen=True)
class End:
    """The end of trajectories: the last state, the prediction that tokens are read from, the tokens by every rule."""

    x: Tensor
    weights: Weighted
    decoded: Decoded
    logits: Callable[[], Tensor]

    @classmethod
    def at(cls, level: Coefficients, x: Tensor, weights: Weighted, log_f: LogF, predictor: Predictor) -> End:
        """Where tokens are read off at a noise level."""
        end = predictor.schedule(torch.ones((), dtype=torch.float64))
        decoded = decode(weights, x, level, end, predictor.table)
        return cls(x, weights, decoded, lambda: log_f.logits(x, level.expand(len(x))))

    @classmethod
    def joined(cls, parts: Sequence[End], dim: int) -> End:
        """The ends of several trajectories as one, along rows (0) or positions (1)."""
        if len(parts) == 1:
            return parts[0]

        found = [part.decoded.tokens for part in parts]
        return cls(
            torch.cat([part.x for part in parts], dim),
            Weighted.joined([part.weights for part in parts], dim),
            Decoded({rule: torch.cat([tokens[rule] for tokens in found], dim) for rule in found[0]}),
            lambda: torch.cat([part.logits() for part in parts], dim),
        )


Flow = Generator[Any, Any, End]
"""Yields `Call` (and is sent a `Prediction`), `Arrival` (and is sent nothing) or, between blocks, `blocks.Read`."""


def trajectory(plan: Plan, x: Tensor, predictor: Predictor, stop: Stop = NEVER) -> Flow:
    """From noise x [rows, L, d] to the end of the plan, or to where `stop` finds every row decided."""
    solver = plan.solver
    condition: Tensor | None = None
    history: tuple[Tensor, Coefficients] | None = None
    for point in plan:
        here = yield from guide(predictor, x, point, stop, condition)
        yield Arrival(predictor, x, point, here)
        if solver.kernel:
            if point.then is None:
                closed, x, weights = close(x, here.last.log_f, point, plan.schedule)
                return End.at(closed, x, weights, here.last.log_f, predictor)
            x = follow_kernel(x, here, point, plan.schedule)
            condition = here.last.log_f.weigh(x, point.then.expand(len(x))).mu if plan.feeds_back else None
            continue
        if point.then is None:
            return End.at(point.at, x, here.last.weights, here.last.log_f, predictor)
        moved = solver.advance(x, here.mu, point.at, point.then, w_ug=point.w_ug, history=history)
        latest, condition = here, here.mu if plan.feeds_back else None
        if point.corrected:
            latest = yield from guide(predictor, moved, plan[point.index + 1], stop, condition)
            moved = solver.correct(x, here.mu, latest.mu, point.at, point.then, w_ug=point.w_ug)
            condition = latest.mu if plan.feeds_back else None
        x, history = moved, (here.mu, point.at)
        if stop.decided(latest.last.weights, here.mu):
            return End.at(point.then, x, latest.last.weights, latest.last.log_f, predictor)
    raise AssertionError("a plan has a last point")


def guide(
    predictor: Predictor, x: Tensor, point: Point, stop: Stop, condition: Tensor | None
) -> Generator[Call, Prediction, Guided]:
    """Self-conditioning guidance with iterative refinement at one state (Eqs. 24, 25)."""
    u = yield Call(predictor, x, point, condition, closing=point.refinements == 0)
    p, last = u.mu, u
    stop.begin()
    for k in range(point.refinements):
        last = yield Call(predictor, x, point, p, closing=stop.may_end_early or k == point.refinements - 1)
        before, p = p, torch.lerp(u.mu, last.mu, point.w_scg)
        if stop.refined(before, p):
            break
    return Guided(p, u, last)
