"""Reads the tokens of the next step while the device computes this one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from convergeflow.device import onto, pinned


class Ahead:
    """`read(step)` gives a step's tokens on the CPU; calling this gives them on the device, read one step ahead.

    For an accelerator they wait in pinned memory, so that their copy does not hold up the host.
    """

    def __init__(self, read: Callable[[int], Tensor], device: torch.device, end: int) -> None:
        self._read, self._device, self._end = read, device, end
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._waiting: tuple[int, Future[Tensor]] | None = None

    def __call__(self, step: int) -> Tensor:
        """The tokens of a step."""
        known, waiting = self._waiting or (None, None)
        tokens = waiting.result() if waiting is not None and known == step else self._fetch(step)
        self._waiting = (step + 1, self._pool.submit(self._fetch, step + 1)) if step + 1 < self._end else None
        return onto(tokens, self._device)

    def close(self) -> None:
        """Let the reader go; what it is reading is not needed."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, step: int) -> Tensor:
        return pinned(self._read(step), self._device)
