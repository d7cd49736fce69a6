"""A driver with a queue: one network pass carries every request that runs, and each gets the tokens it has alone.

Requests of any preset, budget, noise level and refinement count share a pass; they join and leave between passes. A
request that fails (impossible settings, numbers that overflow), is cancelled or runs out of time leaves alone. Systems
without trajectories (the rivals), and samplers without settings, have a lane of their own, one request after the other.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from convergeflow.sampling.cohort import Cohort
from convergeflow.sampling.decoding import Decoded
from convergeflow.sampling.driver import Driver
from convergeflow.sampling.events import Call, Prediction
from convergeflow.sampling.integration import cohort, initial_noise
from convergeflow.serving.limits import Limits
from convergeflow.serving.ticket import Answer, Busy, Cancelled, Closing, Delivered, Job, Ticket
from convergeflow.systems.finite import check_end


class Guarded:
    """A cohort whose errors are its own: it leaves the driver, and `failure` says why."""

    def __init__(self, cohort: Cohort) -> None:
        self.cohort = cohort
        self.failure: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cohort, name)

    @property
    def finished(self) -> bool:
        return self.failure is None and not self.cohort.events

    def waiting(self) -> list[int]:
        try:
            return [] if self.failure else self.cohort.waiting()
        except Exception as failure:
            self.failure = failure
            return []

    def send(self, member: int, prediction: Prediction) -> None:
        try:
            if not self.failure:
                self.cohort.send(member, prediction)
        except Exception as failure:
            self.failure = failure


class LenientDriver(Driver):
    """A driver whose pass goes on without a call that makes it fail."""

    def remove(self, cohort: Any) -> None:
        """Its rows are not part of the next pass."""
        self.cohorts = [each for each in self.cohorts if each is not cohort]

    def _answers(self, calls: Sequence[Call], details: Sequence[bool]) -> list[Prediction]:
        try:
            return super()._answers(calls, details)
        except Exception:
            # One of them is to blame: each again on its own.
            return [self._answer(call, detail) for call, detail in zip(calls, details, strict=True)]

    def _answer(self, call: Call, detail: bool) -> Prediction:
        try:
            return super()._answers([call], [detail])[0]
        except Exception as failure:
            return _Failed(failure)  # type: ignore[return-value]


class _Failed:
    """An answer that cannot be used: whoever tries is told why."""

    def __init__(self, failure: Exception) -> None:
        self._failure = failure

    def __getattr__(self, name: str) -> Any:
        raise self._failure


@dataclass
class Counts:
    """What the engine did since it began, for /metrics."""

    passes: int = 0
    row_passes: int = 0
    """Rows of all passes: divided by `passes`, how full they were."""
    busy_seconds: float = 0.0
    calls: int = 0
    """Network calls that answered requests were charged."""
    ended: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("answered", "failed", "cancelled"), 0))


class Lane(threading.Thread):
    """A thread with a queue. A subclass says how its tickets are carried on."""

    def __init__(self, name: str, limits: Limits) -> None:
        super().__init__(name=name, daemon=True)
        self.limits, self.counts = limits, Counts()
        self.waiting: deque[Ticket] = deque()
        self.running: list[Ticket] = []
        self.wakened = threading.Condition()
        self.closing = False
        self.at_once = False
        """Whether what is there is not to be finished."""

    def put(self, ticket: Ticket) -> None:
        with self.wakened:
            if self.closing:
                raise Closing
            self.clear()
            if len(self.waiting) >= self.limits.queue:
                raise Busy(self.comes_back())
            self.waiting.append(ticket)
            self.wakened.notify()

    def comes_back(self) -> int:
        """Seconds until the queue is likely to be shorter."""
        each = self.counts.busy_seconds / max(1, sum(self.counts.ended.values()))
        return max(1, min(60, math.ceil(0.25 * len(self.waiting) * each)))

    def run(self) -> None:
        while True:
            with self.wakened:
                while not (self.waiting or self.running or self.closing):
                    self.wakened.wait()
                self.clear()
                if self.closing and not (self.waiting or self.running):
                    return
                joining = self.admitted()
            for ticket in joining:
                with self.ending(ticket):
                    self.check(ticket)
                    self.begin(ticket)
                    self.running.append(ticket)
            began = time.monotonic()
            try:
                self.advance()
            except Exception as failure:  # a mistake of ours: whoever waits is told, and the thread lives on
                for ticket in list(self.running):
                    with self.ending(ticket):
                        raise failure
            self.counts.busy_seconds += time.monotonic() - began

    def check(self, ticket: Ticket) -> None:
        """Raises if a ticket is not to go on."""
        if self.at_once:
            raise Closing
        ticket.check()

    def clear(self) -> None:
        """Who went away, or is too late, makes room in the queue."""
        with self.wakened:
            for ticket in list(self.waiting):
                with self.ending(ticket):
                    self.check(ticket)

    def admitted(self) -> list[Ticket]:
        """In their order, as many as fit into a pass."""
        rows = sum(len(ticket.job.seeds) for ticket in self.running)
        joining: list[Ticket] = []
        while self.waiting:
            more = len(self.waiting[0].job.seeds)
            if rows and rows + more > self.limits.rows:
                break
            rows += more
            joining.append(self.waiting.popleft())
        return joining

    @contextmanager
    def ending(self, ticket: Ticket) -> Iterator[None]:
        """An error inside is the end of this ticket, and of no other."""
        try:
            yield
        except Exception as failure:
            with self.wakened:
                self.counts.ended["cancelled" if isinstance(failure, Cancelled) else "failed"] += 1
                self.leave(ticket)
            ticket.fail(failure)

    def leave(self, ticket: Ticket) -> None:
        for place in (self.running, self.waiting):
            if ticket in place:
                place.remove(ticket)

    def finish(self, ticket: Ticket, answer: Answer) -> None:
        self.leave(ticket)
        self.counts.ended["answered"] += 1
        self.counts.calls += sum(answer.calls)
        ticket.finish(answer)

    def begin(self, ticket: Ticket) -> None:
        """Take a ticket on."""

    def advance(self) -> None:
        """A step for everything that runs."""
        raise NotImplementedError

    def close(self, at_once: bool = False) -> None:
        """Take nothing more, and finish what is there unless it is to end at once."""
        with self.wakened:
            self.closing, self.at_once = True, self.at_once or at_once
            self.clear()
            self.wakened.notify()


class FlowLane(Lane):
    """Trajectories: one pass for all of them at a time."""

    def __init__(self, limits: Limits) -> None:
        super().__init__("flows", limits)
        self.driver = LenientDriver()
        self.cohorts: dict[Ticket, Guarded] = {}

    def begin(self, ticket: Ticket) -> None:
        self.cohorts[ticket] = guarded = Guarded(cohort_of(ticket))
        self.driver.add(guarded)  # type: ignore[arg-type]

    def leave(self, ticket: Ticket) -> None:
        super().leave(ticket)
        if ticket in self.cohorts:
            self.driver.remove(self.cohorts.pop(ticket))

    def advance(self) -> None:
        for ticket in list(self.running):
            with self.ending(ticket):
                self.check(ticket)
        rows = sum(len(ticket.job.seeds) for ticket in self.running)
        if not self.driver.step():
            rows = 0
        self.counts.passes += rows > 0
        self.counts.row_passes += rows
        for ticket, flow in list(self.cohorts.items()):
            with self.ending(ticket):
                if flow.failure is not None:
                    raise flow.failure
                if flow.finished:
                    self.finish(ticket, answer_of(ticket.job, flow.cohort))


class RivalLane(Lane):
    """Whole requests, one after the other."""

    def __init__(self, limits: Limits) -> None:
        super().__init__("rivals", limits)

    def admitted(self) -> list[Ticket]:
        return [self.waiting.popleft()] if self.waiting else []

    def advance(self) -> None:
        for ticket in list(self.running):
            with self.ending(ticket):
                job = ticket.job
                made = job.served.model.sample(
                    len(job.seeds), job.length, seeds=list(job.seeds), observe=self.observer(ticket), **job.arguments
                )
                calls = made.extras["calls"].tolist()
                self.counts.passes += max(calls)
                self.counts.row_passes += sum(calls)
                self.finish(ticket, Answer(made.ids, calls))

    def observer(self, ticket: Ticket) -> Callable[[Any], None]:
        """Ends a request that nobody waits for at its next step; without a reader no frames are kept."""
        delivered = Delivered(ticket) if ticket.job.watched else None

        def observe(step: Any) -> None:
            self.check(ticket)
            self.clear()
            if delivered is not None:
                delivered(step)

        return observe


class Engine:
    """Both lanes, and the way in."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.flows, self.rivals = FlowLane(limits), RivalLane(limits)

    @property
    def lanes(self) -> tuple[Lane, Lane]:
        return self.flows, self.rivals

    def start(self) -> None:
        for lane in self.lanes:
            lane.start()

    def submit(self, job: Job) -> Ticket:
        """Queue a job; raises `Busy` if there is no room."""
        ticket = Ticket(job, time.monotonic() + self.limits.seconds, self.limits.frames)
        (self.flows if "settings" in job.arguments else self.rivals).put(ticket)
        return ticket

    def end_at_once(self) -> None:
        """Tell everybody who waits that there will be no answer."""
        for lane in self.lanes:
            lane.close(at_once=True)

    def stop(self, timeout: float | None = None) -> None:
        """Finish what runs and what waits, for so long."""
        end = None if timeout is None else time.monotonic() + timeout
        for lane in self.lanes:
            lane.close()
        for lane in self.lanes:
            lane.join(None if end is None else max(0.0, end - time.monotonic()))


@torch.no_grad()
def cohort_of(ticket: Ticket) -> Cohort:
    """The trajectories of a job, from the noise of its seeds."""
    job = ticket.job
    flow, predictor = job.served.model.as_flow(), job.served.predictor
    assert flow is not None and predictor is not None
    settings, clamp = job.arguments["settings"], job.arguments.get("clamp")
    noise = initial_noise(list(job.seeds), job.length, flow.config.width, flow.device)
    pieces = flow.pieces(settings, job.length, clamp)
    observe = Delivered(ticket) if job.watched else None
    return cohort(predictor, settings, noise, clamp=clamp, observe=observe, pieces=pieces, window=flow.config.length)


def answer_of(job: Job, flow: Cohort) -> Answer:
    """What a finished job made."""
    end = flow.end()
    check_end(end, job.seeds)
    ids = end.decoded.by(job.arguments["settings"].decode)
    rows = [Decoded({rule: found[row] for rule, found in end.decoded.tokens.items()}) for row in range(len(ids))]
    return Answer(ids.cpu(), flow.calls.tolist(), [row.agreements() for row in rows])
