"""Ctrl-C and SIGTERM as a polite request: finish the step, save, say how to go on. A second one stops at once.

The clock can ask too: inside `ending_at` every run stops at that moment.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

_END: ContextVar[float] = ContextVar("end", default=float("inf"))


@contextmanager
def ending_at(moment: float) -> Iterator[None]:
    """Runs inside this context stop at a moment of `time.monotonic`."""
    before = _END.set(moment)
    try:
        yield
    finally:
        _END.reset(before)


def seconds_left() -> float:
    """Until the moment of `ending_at`; infinite outside of it."""
    return _END.get() - time.monotonic()


class StopRequest:
    """A context in which the two signals only set `signal_number`."""

    def __init__(self) -> None:
        self.signal_number = 0
        self._before: dict[int, Any] = {}

    @property
    def out_of_time(self) -> bool:
        """Whether the moment of `ending_at` has come."""
        return seconds_left() <= 0

    @property
    def asked(self) -> bool:
        return bool(self.signal_number) or self.out_of_time

    def __enter__(self) -> StopRequest:
        # Python delivers signals to the main thread alone and refuses handlers elsewhere.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *reason: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number:
            raise KeyboardInterrupt
        self.signal_number = number
