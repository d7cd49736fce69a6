"""The server's routes: OpenAI's completions and models, the page and what it asks for, health and metrics.

Nothing that a request says becomes a path of the file system: models and files of the page are looked up in lists.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from importlib import resources
from typing import Any

from pydantic import ValidationError
from sse_starlette.sse import AppStatus, EventSourceResponse
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from convergeflow.errors import ConvergeFlowError, UserError
from convergeflow.results.frames import words_of
from convergeflow.serving import openapi
from convergeflow.serving.answers import Reply, error, model_of, refused, sentence, status_of
from convergeflow.serving.engine import Engine
from convergeflow.serving.guard import LOG, AccessLog, Guard, TooLarge, body_of
from convergeflow.serving.limits import Limits
from convergeflow.serving.metrics import CONTENT_TYPE, Metrics
from convergeflow.serving.models import Shelf
from convergeflow.serving.replay import template
from convergeflow.serving.requests import Completion, job_of
from convergeflow.serving.ticket import Busy, Cancelled, Job, Ticket
from convergeflow.systems.generation import calls_of

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".json": "application/json"}
LOOK_AGAIN = 2.0
"""Seconds between looks at the models' folders."""


class Server:
    """The engine, the models and the routes that lead to them."""

    def __init__(self, shelf: Shelf, limits: Limits, *, token: str | None = None, say: Callable[[str], None]) -> None:
        self.shelf, self.limits, self.token, self.say = shelf, limits, token, say
        self.engine = Engine(limits)
        self.metrics = Metrics(self.engine)
        folder = resources.files("convergeflow.serving") / "page"
        self.files = {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.is_file()}
        self.files["replay.html"] = template().encode()

    def application(self, hosts: frozenset[str] | None = None) -> Starlette:
        """The ASGI application; `hosts` are the names it answers to."""
        # A stream is finished when the server stops, like every other answer: sse-starlette would cut it.
        AppStatus.disable_automatic_graceful_drain()
        routes = [
            Route("/", self.page, methods=["GET"]),
            Route("/plan", self.plan, methods=["POST"]),
            Route("/page/words/{model}", self.words, methods=["GET"]),
            Route("/page/{file}", self.page, methods=["GET"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model}", self.model, methods=["GET"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
            Route("/healthz", self.health, methods=["GET"]),
            Route("/metrics", self.measured, methods=["GET"]),
        ]
        return Starlette(
            routes=routes,
            lifespan=self.lifespan,
            middleware=[
                Middleware(AccessLog, write=self.say, seen=self.metrics.seen),
                Middleware(Guard, token=self.token, hosts=hosts),
            ],
            exception_handlers={
                HTTPException: _http,
                TooLarge: lambda request, failure: refused(413, str(failure)),
                ConvergeFlowError: _failed,
                ValidationError: _invalid,
                ClientDisconnect: lambda request, failure: Response(status_code=408),
            },
        )

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """The engine runs while the server does; afterwards it finishes what it has."""
        self.engine.start()
        looking = asyncio.create_task(self._look())
        try:
            yield
        finally:
            looking.cancel()
            await run_in_threadpool(self.engine.stop, self.limits.grace)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_AGAIN)
            await run_in_threadpool(self.shelf.refresh, lambda message: self.say(json.dumps({"model": message})))

    # -- routes --------------------------------------------------------------------------------------------------------

    async def page(self, request: Request) -> Response:
        request.scope[LOG]["route"] = "page"
        name = request.path_params.get("file", "index.html")
        if name not in self.files:
            return refused(404, "there is no such file: see /openapi.json for what there is")
        kind = TYPES["." + name.rpartition(".")[2]]
        return Response(self.files[name], media_type=kind, headers={"cache-control": "no-cache"})

    async def words(self, request: Request) -> Response:
        """The vocabulary of a model, for a page that shows tokens."""
        request.scope[LOG]["route"] = "page"
        served = self.shelf.models.get(request.path_params["model"])
        if served is None:
            return refused(404, f"no such model: this server has {', '.join(self.shelf.models)}")
        return JSONResponse(words_of(served.tokenizer, range(served.model.config.vocabulary)))

    async def models(self, request: Request) -> Response:
        request.scope[LOG]["route"] = "models"
        return JSONResponse({"object": "list", "data": [model_of(each) for each in self.shelf.models.values()]})

    async def model(self, request: Request) -> Response:
        request.scope[LOG]["route"] = "models"
        served = self.shelf.models.get(request.path_params["model"])
        if served is None:
            return refused(404, f"no such model: this server has {', '.join(self.shelf.models)}", "model")
        return JSONResponse(model_of(served))

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(openapi.describe(self.limits, self.token is not None, list(self.shelf.models)))

    async def health(self, request: Request) -> Response:
        request.scope[LOG]["route"] = "health"
        alive = all(lane.is_alive() and not lane.closing for lane in self.engine.lanes)
        if not alive:
            return refused(503, "the server is closing")
        return JSONResponse({"status": "ok", "models": list(self.shelf.models)})

    async def measured(self, request: Request) -> Response:
        request.scope[LOG]["route"] = "metrics"
        return Response(self.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def plan(self, request: Request) -> Response:
        """What a request would cost."""
        request.scope[LOG]["route"] = "page"
        _, job = await self._asked(request)
        settings, flow = job.arguments.get("settings"), job.served.model.as_flow()
        counts = self.engine.flows.counts
        each = counts.busy_seconds / counts.row_passes if counts.row_passes else None
        if settings is None or flow is None:
            calls = calls_of(job.served.model, job.arguments["nfe"], job.length)
            return JSONResponse({"calls": calls, "steps": calls, "seconds": None, "settings": None})
        plans = [
            piece.settings.plan(flow.schedule)
            for piece in flow.pieces(settings, job.length, job.arguments.get("clamp"))
        ]
        return JSONResponse(
            {
                "calls": settings.nfe,
                "steps": sum(map(len, plans)),
                "seconds": None if each is None else round(each * settings.nfe * len(job.seeds), 3),
                "settings": settings.describe(),
            }
        )

    async def completions(self, request: Request) -> Response:
        said = request.scope[LOG]
        said["route"] = "completions"
        asked, job = await self._asked(request)
        said |= {"model": job.served.name, "n": len(job.seeds), "seed": job.seeds[0]}
        ticket = self.engine.submit(job)
        news = _News(ticket)
        reply = Reply(asked, job)
        if asked.stream:
            stream = self._stream(reply, ticket, news, said)
            return EventSourceResponse(stream, sep="\n", ping=15, send_timeout=self.limits.stall)
        gone = asyncio.create_task(_disconnected(request))
        try:
            while not ticket.over:
                told = asyncio.create_task(news.wait())
                await asyncio.wait({told, gone}, return_when=asyncio.FIRST_COMPLETED)
                told.cancel()
                if gone.done():
                    raise Cancelled("the client went away")
        finally:
            gone.cancel()
            ticket.cancel()
            _log(said, ticket)
        answer = ticket.result(0)
        return JSONResponse(reply.whole(answer, time.monotonic() - ticket.created))

    async def _stream(self, reply: Reply, ticket: Ticket, news: _News, said: dict[str, Any]) -> AsyncIterator[Any]:
        """States as they come, then the answers; the end is always said."""
        try:
            while True:
                over = ticket.over
                while ticket.frames:
                    for chunk in reply.states_of(ticket.frames.popleft()):
                        yield {"data": _dumped(chunk)}
                if over:
                    break
                await news.wait()
            if ticket.failure is not None or ticket.answer is None:
                status, message = status_of(ticket.failure or Cancelled("cancelled"))
                yield {"data": _dumped(error(status, message))}
            else:
                seconds = time.monotonic() - ticket.created
                for number in range(len(ticket.answer.ids)):
                    yield {"data": _dumped(reply.chunk(reply.choice(number, ticket.answer, seconds)))}
                if reply.asked.stream_options is not None and reply.asked.stream_options.include_usage:
                    yield {"data": _dumped(reply.chunk(usage=reply.usage(ticket.answer)))}
            yield {"data": "[DONE]"}
        finally:
            ticket.cancel()
            _log(said, ticket)

    async def _asked(self, request: Request) -> tuple[Completion, Job]:
        """The checked body of a request."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HTTPException(415, "the body must be JSON: send `Content-Type: application/json`")
        try:
            async with asyncio.timeout(self.limits.stall):
                body = await body_of(request, self.limits.body)
        except TimeoutError:
            raise HTTPException(408, "the body did not arrive in time: send the request again") from None
        asked = Completion.model_validate_json(body)
        served = self.shelf[asked.model]
        return asked, await run_in_threadpool(job_of, asked, served, self.limits)


class _News:
    """Wakes a coroutine from the engine's thread."""

    def __init__(self, ticket: Ticket) -> None:
        self._event, self._loop = asyncio.Event(), asyncio.get_running_loop()
        ticket.notify = self._notify
        if ticket.over:
            self._event.set()

    def _notify(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it everybody who waits
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self) -> None:
        await self._event.wait()
        self._event.clear()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _log(said: dict[str, Any], ticket: Ticket) -> None:
    if ticket.answer is not None:
        said["calls"] = sum(ticket.answer.calls)
    elif ticket.failure is not None:
        said["failure"] = f"{type(ticket.failure).__name__}: {' '.join(str(ticket.failure).split())}"[:300]
    else:
        said["failure"] = "cancelled"


async def _http(request: Request, failure: Exception) -> Response:
    assert isinstance(failure, HTTPException)
    message = failure.detail
    if failure.status_code == 404:
        message = "there is no such place: see /openapi.json for what there is"
    elif failure.status_code == 405:
        allowed = sorted((failure.headers or {}).get("Allow", "").split(", "))
        message = f"the method here is {' or '.join(allowed)}, not {request.method}"
    answer = refused(failure.status_code, message)
    for name, value in (failure.headers or {}).items():
        answer.headers[name] = value
    return answer


async def _failed(request: Request, failure: Exception) -> Response:
    status, message = status_of(failure)
    request.scope[LOG].setdefault("failure", f"{type(failure).__name__}: {message}"[:300])
    if isinstance(failure, Busy):
        return refused(status, message, Retry_After=str(failure.seconds))
    if isinstance(failure, Cancelled):
        return Response(status_code=499)
    if isinstance(failure, UserError) and message.startswith("unknown model"):
        return refused(404, message, "model")
    named = re.search(r"`(\w+)`", message)
    return refused(status, message, named[1] if named and status == 400 else None)


async def _invalid(request: Request, failure: Exception) -> Response:
    assert isinstance(failure, ValidationError)
    message, param = sentence(failure)
    return refused(400, message, param)
