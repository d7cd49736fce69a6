"""A driver turns the calls of trajectories into network passes.

One pass carries the waiting rows of any number of requests. They may be at different grid points, under different
plans, temperatures and known tokens; each row gets the tokens that it would get alone. Requests may join and leave
between passes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from convergeflow.flow.schedule import Coefficients
from convergeflow.model.head import LogF
from convergeflow.sampling.cohort import Cohort
from convergeflow.sampling.events import Call, Prediction
from convergeflow.sampling.wrappers import Predictor, Rows, Wrapper, unwrapped

SHARED_SCORES_BYTES = 1 << 28
"""Kernel scores <x, e_j> are kept for the passes at a grid point up to this size."""


class Driver:
    """Carries cohorts to their ends, one network pass after the other."""

    def __init__(self, shared_bytes: int = SHARED_SCORES_BYTES) -> None:
        self.shared_bytes = shared_bytes
        self.cohorts: list[Cohort] = []
        self._scores: dict[tuple[int, ...], tuple[list[Tensor], Tensor | None]] = {}
        """Kernel scores of the latest pass by its states, which are kept beside them: an id alone may be used again."""

    def add(self, *cohorts: Cohort) -> None:
        """Take on requests; they are part of the next pass."""
        self.cohorts += cohorts

    @torch.no_grad()
    def step(self) -> bool:
        """One network pass for everything that waits; False when nothing does. Finished cohorts leave."""
        waiting: list[tuple[Cohort, int]] = []
        for cohort in self.cohorts:
            with self.blame(cohort):
                waiting += [(cohort, member) for member in cohort.waiting()]
        self.cohorts = list(dict.fromkeys(cohort for cohort, _ in waiting))
        calls: list[Call] = [cohort.events[member] for cohort, member in waiting]
        details = [
            call.closing and (cohort.watched or call.point.last)
            for call, (cohort, _) in zip(calls, waiting, strict=True)
        ]
        for (cohort, member), prediction in zip(waiting, self._answers(calls, details), strict=True):
            with self.blame(cohort):
                cohort.send(member, prediction)
        return bool(waiting)

    def blame(self, cohort: Cohort) -> AbstractContextManager[None]:
        """Around what is done for one cohort: here its error ends the run, a server lets it fail alone."""
        return nullcontext()

    def run(self) -> None:
        """Until nothing waits any more."""
        while self.step():
            pass

    def _answers(self, calls: Sequence[Call], details: Sequence[bool]) -> list[Prediction]:
        """What the calls wait for: one pass of the trunk, then one of the head for each kind of wrappers."""
        answers: dict[int, Prediction] = {}
        before, self._scores = self._scores, {}
        for group in _alike(_pass_of(call) for call in calls):
            together = [calls[number] for number in group]
            log_f = _trunk_pass(together)
            for part in _alike(_kinds(call) for call in together):
                members = [together[number] for number in part]
                reading = log_f if len(part) == len(group) else log_f[_rows(together, part)]
                reading = _wrapped(members, reading)
                wanted = any(details[group[number]] for number in part)
                predictions = self._weighed(reading, members, wanted, before)
                answers |= zip((group[number] for number in part), predictions, strict=True)
        return [answers[number] for number in range(len(calls))]

    def _weighed(
        self,
        log_f: LogF,
        calls: Sequence[Call],
        details: bool,
        before: dict[tuple[int, ...], tuple[list[Tensor], Tensor | None]],
    ) -> list[Prediction]:
        states = [call.x for call in calls]
        x, at = _cat(states), Coefficients.joined([call.point.at.expand(len(call.x)) for call in calls])
        scores = None
        size = 4 * x.shape[0] * x.shape[1] * len(calls[0].predictor.table)
        if size <= self.shared_bytes and any(call.point.refinements for call in calls):
            key = tuple(map(id, states))
            kept = before[key] if key in before else (states, log_f.scores(x))
            self._scores[key], scores = kept, kept[1]
        weights = log_f.weigh(x, at, details=details, scores=scores)
        if len(calls) == 1:
            return [Prediction(weights.mu.to(x.dtype), weights, log_f)]
        answers, start = [], 0
        for call in calls:
            rows = slice(start, start := start + len(call.x))
            answers.append(Prediction(weights.mu[rows].to(x.dtype), weights[rows], log_f[rows]))
        return answers


def _alike(keys: Iterable[Hashable]) -> list[list[int]]:
    """Numbers of equal keys, together."""
    groups: dict[Hashable, list[int]] = {}
    for number, key in enumerate(keys):
        groups.setdefault(key, []).append(number)
    return list(groups.values())


def _pass_of(call: Call) -> Hashable:
    """Calls that agree in this can share a pass of the trunk."""
    trunk, _ = unwrapped(call.predictor)
    return id(trunk.whole if isinstance(trunk, Rows) else trunk), call.x.shape[1:]


def _kinds(call: Call) -> Hashable:
    return tuple(wrapper.kind for wrapper in unwrapped(call.predictor)[1])


def _trunk_pass(calls: Sequence[Call]) -> LogF:
    """The network's answers to all calls, before any wrapper reads them."""
    levels = [call.point.at.expand(len(call.x)) for call in calls]
    shown = [_shown(call, level) for call, level in zip(calls, levels, strict=True)]
    condition = None
    if any(call.condition is not None for call in calls):  # zeros mean none
        condition = _cat([torch.zeros_like(call.x) if call.condition is None else call.condition for call in calls])
    return _trunk(calls)(_cat(shown), Coefficients.joined(levels), condition)


def _trunk(calls: Sequence[Call]) -> Predictor:
    trunks = [unwrapped(call.predictor)[0] for call in calls]
    first = trunks[0]
    if not isinstance(first, Rows):
        return first
    return first.whole.rows(torch.cat([trunk.index for trunk in trunks if isinstance(trunk, Rows)]))


def _shown(call: Call, level: Coefficients) -> Tensor:
    x = call.x
    for wrapper in reversed(unwrapped(call.predictor)[1]):  # outermost first
        x = wrapper.state(x, level)
    return x


def _wrapped(calls: Sequence[Call], log_f: LogF) -> LogF:
    """The network's answer as the wrappers of the calls, which are of the same kinds, read it."""
    layers: Iterable[tuple[Wrapper, ...]] = zip(*(unwrapped(call.predictor)[1] for call in calls), strict=True)
    for layer in layers:
        log_f = (layer[0] if len(layer) == 1 else layer[0].joined(layer, layer[0].inner)).reading(log_f)
    return log_f


def _rows(calls: Sequence[Call], chosen: Sequence[int]) -> Tensor:
    """The rows of some of the calls in a pass of all of them."""
    bounds = torch.tensor([0, *(len(call.x) for call in calls)]).cumsum(0).tolist()
    return torch.cat([torch.arange(bounds[n], bounds[n + 1], device=calls[0].x.device) for n in chosen])


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
