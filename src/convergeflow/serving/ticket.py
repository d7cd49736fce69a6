"""A request on its way through the engine: what is asked, what was seen so far, and how it ended."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from convergeflow.errors import ConvergeFlowError
from convergeflow.results.frames import Frame, Frames
from convergeflow.serving.models import Served


class Busy(ConvergeFlowError):
    """The queue is full."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"the server is busy: try again in {seconds} s")
        self.seconds = seconds


class Closing(ConvergeFlowError):
    """The server ends before the answer is there."""

    def __init__(self) -> None:
        super().__init__("the server is closing: send the request again")


class OutOfTime(ConvergeFlowError):
    """A request took longer than the server grants."""


class Cancelled(ConvergeFlowError):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True)
class Job:
    """What is to be made: samples of consecutive seeds, as `sample` would make them."""

    served: Served
    seeds: Sequence[int]
    length: int
    arguments: Mapping[str, Any]
    """`settings` and `clamp` of a flow; the budget and controls of a rival."""
    watched: bool = False
    """Whether frames are wanted."""
    given: int = 0
    """Tokens of the prompt, with which every sample begins."""


@dataclass(frozen=True)
class Answer:
    """Samples and what they took."""

    ids: Tensor
    calls: list[int]
    agreement: Sequence[Mapping[str, float]] = ()
    """Of the token rules, for every sample of a flow."""


class Ticket:
    """A job in the queue or in the making. The engine's thread fills it, the caller's reads it."""

    def __init__(self, job: Job, deadline: float, frames: int) -> None:
        self.job, self.deadline = job, deadline
        self.created = time.monotonic()
        self.frames: deque[Frame] = deque(maxlen=frames)
        self.answer: Answer | None = None
        self.failure: BaseException | None = None
        self.cancelled = False
        self.notify: Callable[[], None] = lambda: None
        """Called from the engine's thread after every frame and at the end."""
        self.done = threading.Event()

    @property
    def over(self) -> bool:
        return self.done.is_set()

    def cancel(self) -> None:
        """Nobody waits any more; its rows leave before the next pass."""
        self.cancelled = True

    def check(self) -> None:
        """Raises if the job is not to go on."""
        if self.cancelled:
            raise Cancelled("the client went away")
        if time.monotonic() > self.deadline:
            raise OutOfTime("the request took longer than this server grants: ask for fewer samples or calls")

    def finish(self, answer: Answer) -> None:
        self.answer = answer
        self._end()

    def fail(self, failure: BaseException) -> None:
        self.failure = failure
        self._end()

    def _end(self) -> None:
        self.done.set()
        self.notify()

    def result(self, timeout: float | None = None) -> Answer:
        """Wait for the end, from a thread that may wait."""
        if not self.done.wait(timeout):
            raise OutOfTime("no answer yet")
        if self.failure is not None:
            raise self.failure
        assert self.answer is not None
        return self.answer


class Delivered(Frames):
    """Makes frames and hands them to the reader of a ticket, who may be slow: only the latest are kept."""

    def __init__(self, ticket: Ticket) -> None:
        super().__init__()
        self.ticket = ticket

    def keep(self, frame: Frame) -> None:
        self.ticket.check()
        self.ticket.frames.append(frame)
        self.ticket.notify()
