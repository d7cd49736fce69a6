"""A driver turns the calls of trajectories into network passes.

One pass carries the waiting rows of any number of requests. They may be at different grid points, under different
plans, temperatures and known tokens; each row gets the tokens that it would get alone. Requests may join and leave
between passes.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from convergeflow.flow.schedule import Coefficients
from convergeflow.model.fused import scores_room
from convergeflow.model.head import LogF
from convergeflow.sampling.cohort import Cohort
from convergeflow.sampling.events import Call, Prediction

Scores = dict[tuple[int, ...], tuple[list[Tensor], Tensor | None]]
"""Kernel scores of a pass by the ids of its states, which are kept beside them: an id alone may be used again."""


class Driver:
    """Carries cohorts to their ends, one network pass after the other."""

    def __init__(self, shared_bytes: int | None = None) -> None:
        self.shared_bytes = shared_bytes
        self.cohorts: list[Cohort] = []
        self._scores: Scores = {}

    def add(self, *cohorts: Cohort) -> None:
        """Take on requests; they are part of the next pass."""
        self.cohorts += cohorts

    @torch.no_grad()
    def step(self) -> bool:
        """One network pass for everything that waits; False when nothing does. Finished cohorts leave."""
        waiting = [(cohort, member) for cohort in self.cohorts for member in cohort.waiting()]
        self.cohorts = list(dict.fromkeys(cohort for cohort, _ in waiting))
        calls: list[Call] = [cohort.events[member] for cohort, member in waiting]
        details = [
            call.closing and (cohort.watched or call.point.then is None)
            for call, (cohort, _) in zip(calls, waiting, strict=True)
        ]
        for (cohort, member), prediction in zip(waiting, self._answers(calls, details), strict=True):
            cohort.send(member, prediction)
        return bool(waiting)

    def run(self) -> None:
        """Until nothing waits any more."""
        while self.step():
            pass

    def _answers(self, calls: Sequence[Call], details: Sequence[bool]) -> list[Prediction]:
        """What the calls wait for: one pass of the trunk, then one of the head for each kind of changes."""
        answers: dict[int, Prediction] = {}
        before, self._scores = self._scores, {}
        # Calls share a pass of the trunk if they have the same one and states of one shape.
        for group in _alike((id(call.predictor.trunk), call.x.shape[1:]) for call in calls):
            together = [calls[number] for number in group]
            log_f, spans = _trunk_pass(together), _spans(together)
            for part in _alike(tuple(change.kind for change in call.predictor.changes) for call in together):
                members = [together[number] for number in part]
                rows = [row for number in part for row in range(spans[number].start, spans[number].stop)]
                reading = _changed(members, log_f if len(part) == len(group) else log_f[rows])
                wanted = any(details[group[number]] for number in part)
                predictions = self._weighed(reading, members, wanted, before)
                answers |= zip((group[number] for number in part), predictions, strict=True)
        return [answers[number] for number in range(len(calls))]

    def _weighed(self, log_f: LogF, calls: Sequence[Call], details: bool, before: Scores) -> list[Prediction]:
        states = [call.x for call in calls]
        x, at = _cat(states), _levels(calls)
        scores = None
        size = 4 * x.shape[0] * x.shape[1] * len(calls[0].predictor.table)
        room = scores_room(x.device) if self.shared_bytes is None else self.shared_bytes
        key = tuple(map(id, states))
        if key in before or (size <= room and any(call.point.refinements for call in calls)):
            kept = before[key] if key in before else (states, log_f.scores(x))
            self._scores[key], scores = kept, kept[1]
        weights = log_f.weigh(x, at, details=details, scores=scores)
        return [Prediction(weights.mu[rows].to(x.dtype), weights[rows], log_f[rows]) for rows in _spans(calls)]


def _alike(keys: Iterable[Hashable]) -> list[list[int]]:
    """Numbers of equal keys, together."""
    groups: dict[Hashable, list[int]] = {}
    for number, key in enumerate(keys):
        groups.setdefault(key, []).append(number)
    return list(groups.values())


def _trunk_pass(calls: Sequence[Call]) -> LogF:
    """The network's answers to all calls, before any change reads them."""
    shown = [call.predictor.shown(call.x, call.point.at.expand(len(call.x))) for call in calls]
    condition = None
    if any(call.condition is not None for call in calls):  # zeros mean none
        condition = _cat([torch.zeros_like(call.x) if call.condition is None else call.condition for call in calls])
    trunk = calls[0].predictor.trunk
    if index := [call.predictor.index for call in calls if call.predictor.index is not None]:
        trunk = trunk.rows(_cat(index))
    log_f: LogF = trunk(_cat(shown), _levels(calls), condition)
    return log_f


def _changed(calls: Sequence[Call], log_f: LogF) -> LogF:
    """The network's answer as the changes of the calls, which are of the same kinds, read it."""
    for alike in zip(*(call.predictor.changes for call in calls), strict=True):
        log_f = (alike[0] if len(alike) == 1 else alike[0].joined(alike)).reading(log_f)
    return log_f


def _spans(calls: Sequence[Call]) -> list[slice]:
    """The rows of each call in a pass of all of them."""
    ends = itertools.accumulate(len(call.x) for call in calls)
    return [slice(end - len(call.x), end) for end, call in zip(ends, calls, strict=True)]


def _levels(calls: Sequence[Call]) -> Coefficients:
    """The noise level of every row."""
    return Coefficients.joined([call.point.at.expand(len(call.x)) for call in calls])


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
