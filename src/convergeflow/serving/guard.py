"""What stands before every route: who may ask, from where, how much; what is sent with every answer; the access log."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from convergeflow.errors import ConvergeFlowError
from convergeflow.serving.answers import refused
from convergeflow.serving.ticket import Closing

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
OPEN = ("/", "/healthz", "/openapi.json")
"""What needs no token, besides the files of the page: they hold nothing of a model."""
LOG = "convergeflow.log"
"""Where a route puts what the access log should say of it."""


class TooLarge(ConvergeFlowError):
    """A body above the limit."""


async def body_of(request: Request, most: int) -> bytes:
    """The body, read no further than the limit."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise TooLarge(f"the body is larger than {most} bytes: shorten the prompt")
        parts.append(part)
    return b"".join(parts)


class Guard:
    """Token, host and headers around an application."""

    def __init__(self, app: ASGIApp, token: str | None, hosts: frozenset[str] | None) -> None:
        self.app, self.hosts = app, hosts
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        headers = Headers(scope=scope)
        if self.hosts is not None and _host(headers.get("host", "")) not in self.hosts:
            # A page elsewhere may point a name of its own at this machine; it must not get answers.
            names = " or ".join(f"http://{name}" for name in sorted(self.hosts))
            answer = refused(400, f"this server answers on loopback only: use {names}")
            await answer(scope, receive, with_headers)
        elif not self._allowed(scope["path"], headers.get("authorization", "")):
            answer = refused(
                401, "a token is needed: send it as `Authorization: Bearer TOKEN`", WWW_Authenticate="Bearer"
            )
            await answer(scope, receive, with_headers)
        else:
            await self.app(scope, receive, with_headers)

    def _allowed(self, path: str, given: str) -> bool:
        if self._expected is None or path in OPEN or (path.startswith("/page/") and path.count("/") == 2):
            return True
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._expected)


def _host(value: str) -> str:
    """The name in a Host header, without its port."""
    if value.startswith("["):
        return value.partition("]")[0] + "]"
    return value.rpartition(":")[0].lower() if value.count(":") == 1 else value.lower()


class AccessLog:
    """One JSON line for every request; a failure is a line as well, and never a page of traceback for the client."""

    def __init__(self, app: ASGIApp, write: Callable[[str], None], seen: Callable[[str, int, float], None]) -> None:
        self.app, self.write, self.seen = app, write, seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status, sent = time.monotonic(), 0, 0
        said: dict[str, Any] = {}
        scope[LOG] = said

        async def watched(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                sent += len(message.get("body", b""))
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except asyncio.CancelledError:  # the last thing that a server does to a request before it ends
            said["failure"] = "Closing: the server ended"
            if status == 0:
                await refused(503, str(Closing()))(scope, receive, watched)
        except Exception as failure:
            said["failure"] = f"{type(failure).__name__}: {' '.join(str(failure).split())}"[:300]
            if status == 0:
                await refused(500, "the request failed inside the server: its log says why")(scope, receive, watched)
        finally:
            seconds = time.monotonic() - began
            line: dict[str, Any] = {
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "client": (scope.get("client") or ["-"])[0],
                "method": scope["method"],
                "path": scope["path"][:200],
                "status": status or 499,
                "ms": round(1000 * seconds, 1),
                "bytes": sent,
                **said,
            }
            self.write(json.dumps(line))
            self.seen(str(said.get("route", "other")), status or 499, seconds)
