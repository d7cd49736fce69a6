"""What a long step of a teacher amounts to: one prediction, which is again an average of embeddings.

In y = x/sigma and rho = alpha/sigma a flow is dy/d rho = mu(y, rho). A teacher that goes from s to t in substeps moves
by

    y_t - y_s = sum_k (rho_{k+1} - rho_k) mu_k = (rho_t - rho_s) mu_bar,   mu_bar = sum_k (d rho_k / d rho) mu_k

so one Euler step with mu_bar ends where the teacher ends, for any number of substeps. Each mu_k = E^T w_k is a
barycentre of embeddings, hence so is mu_bar = E^T w_bar, with w_bar = sum_k (d rho_k / d rho) w_k: the student of a
long step is an embedding-weighted predictor too. It can learn mu_bar by regression, or w_bar by cross-entropy: draw a
substep with probability d rho_k / d rho and a token from the teacher's weights there, and the token is a draw from
w_bar.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from convergeflow.device import widest
from convergeflow.flow.schedule import Schedule
from convergeflow.randomness import RowDraws
from convergeflow.sampling.cohort import Cohort, Step
from convergeflow.sampling.driver import Driver
from convergeflow.sampling.events import Call, Flow, Guided
from convergeflow.sampling.integration import flow_of
from convergeflow.sampling.settings import Settings
from convergeflow.sampling.wrappers import Predictor, Wrapped

SMALL_VOCABULARY = 1024
"""Up to so many tokens the whole of w_bar is kept."""
LARGEST_RHO = 1e30
"""Stands for rho at data without noise, which is infinite: the last substep then has all the weight."""


@dataclass(frozen=True)
class Span:
    """A step to be learned: states x [rows, L, d] at time `begin`, from where it goes to time `end`."""

    x: Tensor
    begin: float
    end: float
    condition: Tensor | None = None
    """What the student predicted before: the teacher's refinement goes on from there."""


@dataclass(frozen=True)
class Barycentre:
    """What a teacher makes of a span, [rows, L, ...]."""

    mu: Tensor
    """mu_bar."""
    tokens: Tensor
    """One draw from w_bar at every position."""
    weights: Tensor | None = None
    """w_bar itself, where the vocabulary is small enough to keep it."""

    @classmethod
    def joined(cls, parts: Sequence[Barycentre]) -> Barycentre:
        """Several spans as one."""
        kept = [part.weights for part in parts if part.weights is not None]
        return cls(
            torch.cat([part.mu for part in parts]).float(),
            torch.cat([part.tokens for part in parts]),
            torch.cat(kept).float() if len(kept) == len(parts) else None,
        )


def substeps(begin: float, end: float, count: int) -> tuple[float, ...]:
    """The times at which a teacher predicts on its way: `count` even ones, the end left out."""
    return tuple(begin + (end - begin) * number / count for number in range(count))


def shares(times: Sequence[float], end: float, schedule: Schedule) -> Tensor:
    """d rho_k / d rho of substeps that begin at these times, [count] float64: positive, with sum 1."""
    at = schedule(torch.tensor([*times, end], dtype=torch.float64))
    parts = at.signal_to_noise.clamp(max=LARGEST_RHO).diff()
    return parts / parts.sum()


class Average:
    """Observes the substeps of a teacher and averages them; a substep and a token are drawn for every position."""

    whole: Tensor | None = None
    """The averaged weights so far."""

    def __init__(self, weights: Tensor, draws: RowDraws, length: int) -> None:
        self.weights = weights
        chance = draws.uniform(2, length).transpose(0, 1).contiguous()
        # Which substep a position draws its token from.
        self.chosen = torch.searchsorted(weights.cumsum(0), chance[0]).clamp(max=len(weights) - 1)
        self.chance = chance[1]
        self.mu: Tensor | None = None
        self.tokens = torch.zeros_like(self.chosen)

    def __call__(self, step: Step) -> None:
        share, small = float(self.weights[step.index]), len(step.table) <= SMALL_VOCABULARY
        self.mu = share * step.mu if self.mu is None else self.mu + share * step.mu
        if not small and not bool((self.chosen == step.index).any()):
            return
        # The weights of the last call: a guided prediction is an extrapolation, and has none of its own.
        logits = [each.last.log_f.logits(each.x, each.point.at.expand(len(each.x))) for each in step.arrivals]
        weights = torch.cat(logits).double().softmax(-1)
        drawn = torch.searchsorted(weights.cumsum(-1), self.chance.to(weights.device)[..., None])[..., 0]
        drawn = drawn.clamp(max=weights.shape[-1] - 1).to(self.tokens.device)
        self.tokens = torch.where(self.chosen == step.index, drawn, self.tokens)
        if small:
            self.whole = share * weights if self.whole is None else self.whole + share * weights

    def result(self) -> Barycentre:
        """What was averaged."""
        assert self.mu is not None
        return Barycentre(self.mu, self.tokens.to(self.mu.device), self.whole)


@torch.no_grad()
def barycentres(
    predictors: Sequence[Predictor],
    settings: Settings,
    spans: Sequence[Span],
    counts: Sequence[int],
    draws: Sequence[RowDraws],
) -> list[Barycentre]:
    """What a teacher makes of spans, each in its own number of substeps; those with one predictor share network passes.

    Every substep is guided and refined as `settings` say.
    """
    driver, seen = Driver(), []
    for predictor, span, count, random in zip(predictors, spans, counts, draws, strict=True):
        times = substeps(span.begin, span.end, count)
        average = Average(shares(times, span.end, predictor.schedule), random, span.x.shape[1])
        flow = flow_of(on_grid(settings, times), widest(span.x), Wrapped(predictor))
        flow = flow if span.condition is None else carried_on(flow, span.condition)
        driver.add(Cohort([flow], [torch.arange(len(span.x))], average))
        seen.append(average)
    driver.run()
    return [average.result() for average in seen]


def carried_on(flow: Flow, choice: Tensor) -> Flow:
    """The sampler's trajectory, but that refinement begins with the prediction before it; the first is the student's.

    Refinement has many fixed points, for many texts fit one noise. A student has chosen among them, in its prediction
    more than in its state, which is mostly noise. So the teacher goes on from that choice, and from its own afterwards;
    were it to choose anew at every state, the student would be taught to change its mind.
    """
    answer, begun = None, False
    while True:
        try:
            event = flow.send(answer)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        if isinstance(event, Guided):
            choice = event.mu
        elif begun:  # the first refinement
            event = replace(event, condition=choice)
        begun = isinstance(event, Call) and event.condition is None
        answer = yield event


def on_grid(settings: Settings, times: tuple[float, ...]) -> Settings:
    """The same with these grid points, and at each of them as many calls as there are otherwise."""
    calls = 1 + settings.controls.refine if settings.self_condition == "recursive" else 1
    return replace(settings, grid=times, nfe=calls * len(times))
