"""Trajectories of one request keep step, so that its observer sees all its rows at a grid point at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from convergeflow.flow.path import normalised_distance, spread
from convergeflow.flow.schedule import Coefficients
from convergeflow.model.fused import Nearest, Weighted, nearest
from convergeflow.sampling.events import Call, End, Flow, Guided, Prediction, Read
from convergeflow.sampling.wrappers import Wrapped


@dataclass(frozen=True)
class Step:
    """What an observer sees after the prediction at a grid point."""

    index: int
    num_steps: int
    t: float
    at: Coefficients
    x_t: Tensor
    mu: Tensor
    """The guided prediction that drives the step."""
    last: Weighted
    """The last network output at this point, with token and top weight."""
    rows: Tensor
    """Which samples of the batch these are; finished ones are left out."""
    calls: int  # network calls so far
    table: Tensor
    before: Tensor | None = None
    """Tokens in front of the block that this state is, [rows, P]; None if the state is the whole sequence."""
    block: int = 0  # the number of that block
    arrivals: Sequence[Guided] = ()  # for observers that want to know more

    def distances(self) -> Nearest:
        """Normalised distances ||x - alpha e_j||/(sigma sqrt d) to the nearest and second-nearest embedding."""
        scale = spread(self.at.alpha, self.x_t)[..., 0].expand(self.x_t.shape[:-1])
        found = nearest(self.x_t, self.table, scale=scale, second=True)
        assert found.second_distance is not None
        width, both = self.x_t.shape[-1], (found.distance, found.second_distance)
        return Nearest(found.token, *(normalised_distance(each, self.at, width) for each in both))


Observer = Callable[[Any], None]
"""Called at every grid point with a `Step`; a rival's sampler calls it with what it has."""


class Cohort:
    """The trajectories of one request, and what each of them waits for; `rows` are numbers on the CPU."""

    def __init__(
        self, flows: Sequence[Flow], rows: Sequence[Tensor], observe: Observer | None = None, *, watched: bool = False
    ) -> None:
        self.flows, self.rows, self.observe = flows, rows, observe
        self.watched = watched or observe is not None
        """Whether somebody wants to know token and top weight at every grid point."""
        self.calls = torch.zeros(sum(len(each) for each in rows), dtype=torch.long)
        """Network calls of each row, counted."""
        self.ends: dict[int, End] = {}
        self.events: dict[int, Any] = {}
        self.block = 0
        """The number of the block that is made."""
        self.before: Tensor | None = None
        """The words in front of it, if there are any."""
        for member in range(len(flows)):
            self._resume(member, None)

    def waiting(self) -> list[int]:
        """The members that wait for a network call, after everything that needs none; empty at the end."""
        while self.events:
            if calls := self._at(Call):
                return list(calls)
            if arrivals := self._at(Guided):
                self._arrive(arrivals)
            else:
                self._read(self._at(Read))
        return []

    def send(self, member: int, prediction: Prediction) -> None:
        """Answer a member's call."""
        self.calls[self.rows[member]] += 1
        self._resume(member, prediction)

    def end(self) -> End:
        """All rows in their order."""
        return End.joined([self.ends[member] for member in range(len(self.flows))], 0)

    def _at(self, kind: type[Any]) -> dict[int, Any]:
        """The members at an event of one kind."""
        return {member: event for member, event in self.events.items() if isinstance(event, kind)}

    def _resume(self, member: int, answer: Any) -> None:
        try:
            self.events[member] = self.flows[member].send(answer)
        except StopIteration as stop:
            self.ends[member] = stop.value
            self.events.pop(member, None)

    def _arrive(self, arrivals: dict[int, Guided]) -> None:
        if self.observe is not None:
            self.observe(self._step(arrivals))
        for member in arrivals:
            self._resume(member, None)

    def _step(self, arrivals: dict[int, Guided]) -> Step:
        first, *_ = there = list(arrivals.values())
        rows = torch.cat([self.rows[member] for member in arrivals])
        return Step(
            index=first.point.index,
            num_steps=first.point.num_steps,
            t=first.point.t,
            at=first.point.at.expand(len(rows)),
            x_t=torch.cat([arrival.x for arrival in there]),
            mu=torch.cat([arrival.mu for arrival in there]),
            last=Weighted.joined([arrival.last.weights for arrival in there]),
            rows=rows,
            calls=int(self.calls.max()),
            table=first.predictor.table,
            before=None if self.before is None else self.before[rows],
            block=self.block,
            arrivals=there,
        )

    def _read(self, reads: dict[int, Read]) -> None:
        """Let all members read the words before their next block, in one network pass."""
        first = next(iter(reads.values()))
        self.block, self.before = first.block, torch.cat([read.words for read in reads.values()])
        behind = first.predictor.trunk.after(self.before)
        self.calls += 1
        for member in reads:
            self._resume(member, Wrapped(behind, index=self.rows[member] if len(reads) > 1 else None))
