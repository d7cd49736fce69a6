"""`convergeflow serve`: models behind an HTTP interface, and the page that shows them converge."""

from __future__ import annotations

import errno
import ipaddress
import os
import signal
import socket
import sys
from typing import Annotated

import typer

from convergeflow.cli.console import note
from convergeflow.errors import ConvergeFlowError, UserError

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL", help="Shipped models, checkpoint folders, runs. [default: all shipped]"),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but this machine's own (loopback) needs --token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    token: Annotated[
        str | None,
        typer.Option(help="What clients must send as a bearer token.", envvar="CONVERGEFLOW_TOKEN", show_envvar=True),
    ] = None,
    limit: Annotated[
        list[str] | None, typer.Option(help="A limit, as in queue=64; repeatable. See docs/serving.md for all.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of a network pass. [default: all cores]")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Serve models over HTTP, with a page that shows their flows converge.

    The interface is OpenAI's for completions; a request gets the tokens that `generate` gives for its seed, whatever
    else is running. Ctrl-C finishes what runs.

    Example:
      convergeflow serve
      convergeflow serve stories-small runs/mine --port 8080 --limit queue=64
      CONVERGEFLOW_TOKEN=secret convergeflow serve --host 0.0.0.0
    """
    address = f"[{host}]" if ":" in host else host
    loopback = _is_loopback(host)
    if not loopback and not token:
        raise UserError(f"`host` {host} can be reached from other machines: set `token`, or the host to 127.0.0.1")
    if token is not None and (len(token) < 8 or not token.isascii() or not token.isprintable()):
        raise UserError("`token` needs at least 8 printable ASCII characters")
    try:
        import uvicorn

        from convergeflow.serving.api import Server
        from convergeflow.serving.closing import Closer
    except ModuleNotFoundError as missing:
        raise UserError(f"{missing.name} is not installed: pip install 'convergeflow[serve]'") from None
    import torch

    from convergeflow import zoo
    from convergeflow.serving.limits import Limits
    from convergeflow.serving.models import Shelf

    limits = Limits().changed(limit or [])
    if threads is not None:
        if threads > (cores := os.cpu_count() or 1):
            raise UserError(f"`threads` {threads} is more than the {cores} cores of this machine")
        torch.set_num_threads(threads)
    sources = models or zoo.shipped_models()
    for source in sources:
        zoo.locate(source)
    listening = _listening(host, port)  # before models are loaded, which takes seconds
    shelf = Shelf(sources, device)
    server = Server(shelf, limits, token=token, say=lambda line: print(line, file=sys.stderr, flush=True))
    hosts = frozenset({"127.0.0.1", "[::1]", "localhost", address}) if loopback else None
    config = uvicorn.Config(
        server.application(hosts),
        host=host,
        port=port,
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
    )
    url = f"http://{address}:{listening.getsockname()[1]}"
    note(f"serving {', '.join(shelf.models)} at {url} (Ctrl-C finishes what runs and stops)")
    if browser:
        import webbrowser

        webbrowser.open(url)
    runner = Closer(config, server)
    for each in (signal.SIGINT, signal.SIGTERM):  # uvicorn listens to them once it has started
        signal.signal(each, runner.handle_exit)
    runner.run(sockets=[listening])
    if not runner.started:
        raise ConvergeFlowError("the server could not start: see the lines above")


def _listening(host: str, port: int) -> socket.socket:
    """A socket at an address, or what is wrong with the address."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except PermissionError:
        raise UserError(f"port {port} is for administrators: choose another with `port`, from 1024 on") from None
    except OSError as failure:
        if failure.errno == errno.EADDRINUSE:
            raise UserError(f"{host} port {port} is already in use: choose another with `port`") from None
        if failure.errno in (errno.EADDRNOTAVAIL, socket.EAI_NONAME):
            raise UserError(f"`host` {host} is no address of this machine; 0.0.0.0 stands for all of them") from None
        raise ConvergeFlowError(f"{host} port {port}: {failure}") from None


def _is_loopback(host: str) -> bool:
    if host in LOOPBACK:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
