"""Trajectories of one request keep step, so that its observer sees all its rows at a grid point at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from convergeflow.flow.convergence import normalised_distance
from convergeflow.flow.path import spread
from convergeflow.flow.schedule import Coefficients
from convergeflow.model.fused import Nearest, Weighted, nearest
from convergeflow.sampling.events import Arrival, Call, End, Flow, Prediction, Read
from convergeflow.sampling.wrappers import NetworkPredictor, Predictor, Rows, unwrapped


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
    calls: int
    """Network calls so far."""
    table: Tensor
    before: Tensor | None = None
    """Tokens in front of the block that this state is, [rows, P]; None if the state is the whole sequence."""
    block: int = 0
    """The number of that block."""
    arrivals: Sequence[Arrival] = ()
    """What the state was made of, for observers that want to know more."""

    def distances(self) -> Nearest:
        """Normalised distances ||x - alpha e_j||/(sigma sqrt d) to the nearest and second-nearest embedding."""
        scale = spread(self.at.alpha, self.x_t)[..., 0].expand(self.x_t.shape[:-1])
        found = nearest(self.x_t, self.table, scale=scale, second=True)
        assert found.second_distance is not None
        both = (
            normalised_distance(each, self.at, self.x_t.shape[-1]) for each in (found.distance, found.second_distance)
        )
        return Nearest(found.token, *both)


Observer = Callable[[Any], None]
"""Called at every grid point with a `Step`; a rival's sampler calls it with what it has."""


class Cohort:
    """The trajectories of one request, and what each of them waits for."""

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
        self.blocks = 0
        """How many blocks were begun."""
        for member in range(len(flows)):
            self._resume(member, None)

    def waiting(self) -> list[int]:
        """The members that wait for a network call, after everything that needs none; empty at the end."""
        while self.events:
            calls = [member for member, event in self.events.items() if isinstance(event, Call)]
            if calls:
                return calls
            if any(isinstance(event, Read) for event in self.events.values()):
                self._read()
            else:
                self._arrive()
        return []

    def send(self, member: int, prediction: Prediction) -> None:
        """Answer a member's call."""
        self.calls[self.rows[member].cpu()] += 1
        self._resume(member, prediction)

    def end(self) -> End:
        """All rows in their order."""
        return End.joined([self.ends[member] for member in range(len(self.flows))], 0)

    def _resume(self, member: int, answer: Any) -> None:
        try:
            self.events[member] = self.flows[member].send(answer)
        except StopIteration as stop:
            self.ends[member] = stop.value
            self.events.pop(member, None)

    def _arrive(self) -> None:
        if self.observe is not None:
            self.observe(self._step([*self.events.items()]))
        for member in list(self.events):
            self._resume(member, None)

    def _step(self, arrivals: list[tuple[int, Arrival]]) -> Step:
        first = arrivals[0][1]
        words = [_words(arrival.predictor) for _, arrival in arrivals]
        x = torch.cat([arrival.x for _, arrival in arrivals])
        return Step(
            index=first.point.index,
            num_steps=first.point.num_steps,
            t=first.point.t,
            at=first.point.at.expand(len(x)),
            x_t=x,
            mu=torch.cat([arrival.guided.mu for _, arrival in arrivals]),
            last=Weighted.joined([arrival.guided.last.weights for _, arrival in arrivals]),
            rows=torch.cat([self.rows[member] for member, _ in arrivals]),
            calls=int(self.calls.max()),
            table=first.predictor.table,
            before=None if words[0] is None else torch.cat([each for each in words if each is not None]),
            block=max(0, self.blocks - 1),
            arrivals=[arrival for _, arrival in arrivals],
        )

    def _read(self) -> None:
        """Let all members read the words before their next block, in one network pass."""
        self.blocks += 1
        reads: dict[int, Read] = {member: event for member, event in self.events.items() if isinstance(event, Read)}
        words = torch.cat([read.words for read in reads.values()])
        whole = next(iter(reads.values())).predictor.after(words)
        start = 0
        for member, read in reads.items():
            index = torch.arange(start, start := start + len(read.words), device=words.device)
            # A pass over nothing is none.
            self.calls[self.rows[member].cpu()] += int(words.shape[1] > 0)
            self._resume(member, whole if len(index) == len(words) else Rows(whole, index))


def _words(predictor: Predictor) -> Tensor | None:
    trunk, _ = unwrapped(predictor)
    return trunk.words if isinstance(trunk, NetworkPredictor | Rows) else None
