"""A solver: second-order Adams-Bashforth on d(x/sigma) = mu d(alpha/sigma), the flow in its own clock."""

from dataclasses import dataclass

from convergeflow.flow.solver import Solver, step_guided


@dataclass(frozen=True)
class AdamsBashforth(Solver):
    """Exact wherever the prediction changes linearly in the clock; needs no further network calls."""

    def advance(self, x, mu, now, then, w_ug=0.0, history=None):
        """One step from noise level `now` to `then`; `history` is (prediction, noise level) of the step before."""
        if history is not None and bool((then.sigma > 0).all()):
            previous, before = history
            clock = [float(at.alpha / at.sigma) for at in (before, now, then)]
            mu = mu + 0.5 * (clock[2] - clock[1]) / (clock[1] - clock[0]) * (mu - previous)
        return step_guided(x, mu, now, then, w_ug)


ADAMS = AdamsBashforth()
