"""The `kernel` solver: between calls log f stays as it is and the exact kernel is followed. Not the paper's.

The Gaussian kernel is known at every state without a call, so a step follows d(x/sigma) = mu(x) d(alpha/sigma) with
mu's own kernel, in as many substeps as its length asks for (`flow.solver.follow`). At the end the flow goes on, without
a call, to where the kernel decides every token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from convergeflow.flow.path import spread
from convergeflow.flow.schedule import Coefficients, Schedule
from convergeflow.flow.solver import closing_gamma, follow, opening_gamma, substeps
from convergeflow.model.fused import Weighted
from convergeflow.model.head import LogF, no_weights
from convergeflow.sampling.plan import Point

if TYPE_CHECKING:
    from convergeflow.sampling.trajectory import Guided

Shares = list[tuple[float, LogF]]
"""What drives a step: how much of which call's log f."""


def follow_kernel(x: Tensor, here: Guided, point: Point, schedule: Schedule) -> Tensor:
    """The state at the next grid point, driven by (1 - w) of the unconditional call and w of the latest one."""
    assert point.then is not None
    w = point.w_scg if point.refinements else 1.0
    shares: Shares = [(1.0, here.last.log_f)]
    if w != 1.0:
        shares = [(1.0 - w, here.unconditional.log_f), (w, here.last.log_f)]
    return _followed(x, shares, point, float(point.then.gamma), schedule, point.w_ug)


def close(x: Tensor, log_f: LogF, point: Point, schedule: Schedule) -> tuple[Coefficients, Tensor, Weighted]:
    """Noise level, state and weights where the kernel decides every token; what is read is not extrapolated."""
    end = min(closing_gamma(x.shape[-1]), float(point.at.gamma))
    x = _followed(x, [(1.0, log_f)], point, end, schedule)
    closed = schedule.at_gamma(torch.tensor(end, dtype=torch.float64))
    return closed, x, log_f.weigh(x, closed.expand(len(x)), details=True)


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
