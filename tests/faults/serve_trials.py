"""Trials of `serve`: killed while it answers, and its model replaced, in part or whole, while it runs.

Every server here ends itself when it is about to change a file: it has no write points. A request must always get the
tokens that `generate` gives for its seed, of the model as it was or as it will be, never of a mixture.
"""

from __future__ import annotations

import functools
import http.client
import json
import os
import random
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from campaign import Campaign
from children import Ended, child, fence, run, wait
from small_run import RECIPE

SEEDS = (11, 12)
Tokens = list[list[int]]
ROUTES: dict[str, tuple[str, str, Any]] = {
    "the page": ("GET", "/", None),
    "a file of the page": ("GET", "/page/replay.html", None),
    "words": ("GET", "/page/words/m", None),
    "models": ("GET", "/v1/models", None),
    "a model": ("GET", "/v1/models/m", None),
    "the interface": ("GET", "/openapi.json", None),
    "health": ("GET", "/healthz", None),
    "metrics": ("GET", "/metrics", None),
    "a plan": ("POST", "/plan", {"model": "m"}),
    "a stream": ("POST", "/v1/completions", {"model": "m", "stream": True, "convergeflow": {"nfe": 4, "frames": True}}),
    "a prompt": ("POST", "/v1/completions", {"model": "m", "prompt": "once", "convergeflow": {"nfe": 4}}),
    "nonsense": ("POST", "/v1/completions", {"model": "../m", "n": -1}),
}


def look_often() -> None:
    from convergeflow.serving import api

    api.LOOK_AGAIN = 0.05  # seconds between looks at the model's folder


class Served:
    """A server in a child that may change no file."""

    def __init__(self, model: Path, port: int = 0) -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            self.port = probe.getsockname()[1]
        self.log = model.parent / f"serve-{time.monotonic_ns()}.log"
        words = ["serve", model, "--port", self.port, "--threads", 1]
        self.number = child(words, self.log, first=lambda: (look_often(), fence())[0])
        self.ended: Ended | None = None

    def answers(self, seconds: float = 60.0) -> bool:
        """Whether it comes up; False if it ends instead."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if os.waitid(os.P_PID, self.number, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return False
            with suppress(OSError):
                return self.ask("GET", "/healthz")[0] == 200
            time.sleep(0.01)
        return False

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def tokens(self) -> Tokens:
        body = {"model": "m", "seed": SEEDS[0], "n": len(SEEDS), "convergeflow": {"nfe": 4}}
        status, content = self.ask("POST", "/v1/completions", body)
        assert status == 200, content[:300]
        return [choice["convergeflow"]["tokens"] for choice in json.loads(content)["choices"]]

    def begin(self, dice: random.Random) -> socket.socket:
        """A long request whose answer nobody waits for."""
        body = json.dumps({"model": "m", "stream": dice.random() < 0.5, "n": 4, "convergeflow": {"nfe": 2000}}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[: dice.choice((9, 999, 999))])
        return connection

    def end(self, how: int = signal.SIGTERM) -> Ended:
        if self.ended is None:
            with suppress(ProcessLookupError):
                os.kill(self.number, how)
            self.ended = wait(self.number, self.log)
        return self.ended


@contextmanager
def served(model: Path, port: int = 0) -> Iterator[Served]:
    server = Served(model, port)
    try:
        yield server
    finally:
        server.end(signal.SIGKILL)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())} if folder.is_dir() else {}


class ServeTrials:
    """Two models of the same sizes, and what `generate` gives for both."""

    def __init__(self, campaign: Campaign) -> None:
        self.campaign = campaign

    @functools.cached_property
    def models(self) -> tuple[Path, Path]:
        made = []
        for number in (1, 2):
            root = self.campaign.fresh()
            ended = run(["train", *RECIPE, f"seed={number}", "--out", root / "run"], root)
            assert ended.code == 0, ended.said
            made.append(root / "run/model")
        return made[0], made[1]

    @functools.cached_property
    def expected(self) -> tuple[Tokens, Tokens]:
        found = []
        for model in self.models:
            out = self.campaign.fresh() / "s.jsonl"
            words = ["generate", "--model", model, "--num", len(SEEDS), "--seed", SEEDS[0], "--nfe", 4, "--out", out]
            ended = run(words, out.parent)
            assert ended.code == 0, ended.said
            found.append([json.loads(line)["ids"] for line in out.read_text().splitlines()])
        assert found[0] != found[1]
        return found[0], found[1]

    def fresh(self) -> Path:
        return Path(shutil.copytree(self.models[0], self.campaign.fresh() / "m"))

    def route(self, name: str) -> str | None:
        """A request, after which the server ends as it should and no file was changed."""
        folder = self.fresh()
        before = content(folder)
        with served(folder) as server:
            if not server.answers():
                return f"did not start: {server.end().last}"
            status, _ = server.ask(*ROUTES[name])
            if status >= 500:
                return f"was answered {status}"
            return self.closed(server, before, folder)

    def closed(self, server: Served, before: dict[str, bytes], folder: Path) -> str | None:
        ended = server.end()
        if ended.code != 0 or not ended.one_line:
            return f"ended with {ended.code}: {ended.last}"
        return None if content(folder) == before else "the model's folder has changed"

    def killed(self, dice: random.Random) -> str | None:
        """Killed with requests on their way; started again at its address it answers as before."""
        folder = self.fresh()
        before = content(folder)
        with served(folder) as server:
            if not server.answers():
                return f"did not start: {server.end().last}"
            waiting = [server.begin(dice) for _ in range(dice.randrange(4))]
            time.sleep(dice.uniform(0, 0.3))
            if dice.random() < 0.5 and server.tokens() != self.expected[0]:
                return "other tokens before the kill"
            ended = server.end(signal.SIGKILL)
            for connection in waiting:
                connection.close()
            if ended.code != -signal.SIGKILL:
                return f"ended by itself with {ended.code}: {ended.last}"
        return self.comes_back(folder, server.port, before)

    def killed_starting(self, dice: random.Random) -> str | None:
        """Killed at a moment of its start."""
        folder = self.fresh()
        before = content(folder)
        with served(folder) as server:
            time.sleep(dice.uniform(0, 0.5))
        return self.comes_back(folder, server.port, before)

    def comes_back(self, folder: Path, port: int, before: dict[str, bytes]) -> str | None:
        """Started again at its address it answers as before, and its folder is what it was."""
        with served(folder, port) as server:
            if not server.answers():
                return f"did not start again: {server.end().last}"
            if server.tokens() != self.expected[0]:
                return "other tokens after the kill"
            return self.closed(server, before, folder)

    def torn(self, dice: random.Random) -> str | None:
        """Another model is copied over the one that is served, file by file, and the copy stops in the middle."""
        folder = self.fresh()
        old, new = content(self.models[0]), content(self.models[1])
        order = dice.sample(sorted(new), len(new))
        upto = dice.randrange(len(order))
        restart, whole = dice.random() < 0.5, False
        with served(folder) as server:
            if not server.answers() or server.tokens() != self.expected[0]:
                return f"did not start: {server.end().last}"
            for number, name in enumerate(order[: upto + 1]):
                tear(folder / name, old[name], new[name], dice.choice(KINDS) if number == upto else "whole")
                time.sleep(dice.choice((0, 0.05, 0.15)))
                whole |= content(folder) == new  # some files may be the same in both
                if server.tokens() not in (self.expected if whole else self.expected[:1]):
                    return f"answered from a torn folder ({', '.join(order[: number + 1])})"
            torn = content(folder) not in (old, new)
            if restart and torn:
                server.end(signal.SIGKILL)
                if complaint := self.refuses(folder, server.port):
                    return complaint
            for name in order[upto:]:
                (folder / name).write_bytes(new[name])
            if not (restart and torn):
                return self.arrives(server, folder, new)
        with served(folder, server.port) as server:
            return self.arrives(server, folder, new) if server.answers() else f"did not start: {server.end().last}"

    def refuses(self, folder: Path, port: int) -> str | None:
        """A server must not start on a torn folder."""
        with served(folder, port) as server:
            if server.answers():
                return "started on a torn folder"
            ended = server.end()
            if ended.code not in (1, 2) or not ended.one_line or not ended.last.startswith("error: "):
                return f"did not refuse a torn folder but ended with {ended.code}: {ended.last}"
        return None

    def arrives(self, server: Served, folder: Path, new: dict[str, bytes]) -> str | None:
        """The new model is answered from within a while, and never a third one."""
        deadline = time.monotonic() + 30
        while (found := server.tokens()) != self.expected[1]:
            if found != self.expected[0]:
                return "answered from a mixture"
            if time.monotonic() > deadline:
                return "the new model was not loaded"
            time.sleep(0.02)
        return self.closed(server, new, folder)

    def replaced(self, dice: random.Random) -> str | None:
        """The folder is replaced in one step, as `train` and `import` do, or taken away and put back."""
        folder = self.fresh()
        new = content(self.models[1])
        with served(folder) as server:
            if not server.answers():
                return f"did not start: {server.end().last}"
            draft = Path(shutil.copytree(self.models[1], folder.with_name("draft")))
            folder.rename(folder.with_name("old"))
            for _ in range(dice.randrange(4)):
                time.sleep(0.04)
                if server.tokens() != self.expected[0]:
                    return "other tokens while the folder was away"
            draft.rename(folder)
            return self.arrives(server, folder, new)


KINDS = ("cut", "spliced", "gone", "whole")


def tear(path: Path, old: bytes, new: bytes, kind: str) -> None:
    """Put a part of a new file in the place of an old one."""
    half = len(new) // 2
    if kind == "gone" and path.name != "manifest.json":  # without it nobody could tell
        path.unlink()
    elif kind == "cut":
        path.write_bytes(new[:half])
    elif kind == "spliced":
        path.write_bytes(new[:half] + old[half:])
    else:
        path.write_bytes(new)


def serve_trials(campaign: Campaign, count: int) -> None:
    """So many of each."""
    made, once = ServeTrials(campaign), campaign.trials.once
    for name in ROUTES if count > 10 else list(ROUTES)[-3:]:
        once("serve: a request under watch (it changes no file)", name, lambda _, name=name: made.route(name))
    kinds: dict[str, Callable[[random.Random], str | None]] = {
        "kill while it answers": made.killed,
        "kill while it starts": made.killed_starting,
        "its model torn": made.torn,
        "its model replaced": made.replaced,
    }
    for kind, trial in kinds.items():
        for number in range(count // 2 if trial in (made.killed_starting, made.replaced) else count):
            once(f"serve: {kind}", number, trial)
