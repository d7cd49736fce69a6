"""Ctrl-C and SIGTERM as a polite request: finish the step, save, say how to go on. A second one stops at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class StopRequest:
    """A context in which the two signals only set `signal_number`."""

    def __init__(self) -> None:
        self.signal_number = 0
        self._before: dict[int, Any] = {}

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
