"""How a server ends: it finishes what runs for as long as its grace lasts, and whoever is left then is told so."""

from __future__ import annotations

import asyncio
import signal
import socket
from types import FrameType

import uvicorn

from convergeflow.serving.api import Server

LAST_WORDS = 1.0
"""Seconds for answers that say that there will be none."""


class Closer(uvicorn.Server):
    """The HTTP server, with an end of our own: uvicorn's cuts streams, and answers what is not JSON."""

    def __init__(self, config: uvicorn.Config, server: Server) -> None:
        super().__init__(config)
        self.server, self.hurry = server, False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal finishes what runs; a Ctrl-C after it ends that too. Supervisors may repeat SIGTERM."""
        self.hurry = self.hurry or (self.should_exit and sig == signal.SIGINT)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, then wait for answers, no longer than is granted."""
        ending = asyncio.create_task(self._end())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self.server.limits.grace
        while loop.time() < end and not self.hurry:
            await asyncio.sleep(0.1)
        self.server.engine.end_at_once()
        await asyncio.sleep(LAST_WORDS)
        for task in list(self.server_state.tasks):  # bodies that never came, and readers that stand still
            task.cancel()
