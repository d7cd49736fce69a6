"""Who works on what: processes of one or several machines share the points of a folder.

A claim is a file that only one process can create. It names its holder, who touches it again and again. A claim of a
holder that is gone is taken over: on the same machine as soon as its process has ended, elsewhere when it was not
touched for a while. Nobody needs to know of the others, and any of them may die or join at any time.

The files of one name are numbered: who takes over the claim NAME.3 must create NAME.4, which again only one process
can. What is claimed must be looked up once more afterwards: another one may have finished it just before.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil

Task = TypeVar("Task")
Outcome = TypeVar("Outcome")

PATIENCE = 180.0
"""Seconds without a sign of life after which a holder on another machine is taken for dead."""
TOUCH_EVERY = 15.0
PAUSE = 2.0
"""Seconds before one looks again at what others work on."""


class Taken(Exception):
    """Another process works on it: come back later."""


class Claims:
    """The claims in a folder, as one process sees them."""

    def __init__(self, folder: Path, *, patience: float = PATIENCE, touch_every: float = TOUCH_EVERY) -> None:
        self.folder, self.patience, self.touch_every = folder, patience, touch_every
        self._me = {"machine": _machine(), "process": os.getpid(), "began": _began(os.getpid())}

    @contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Hold the claim to a name; `Taken` if a living process holds it."""
        mine = self._take(name)
        done = threading.Event()
        thread = threading.Thread(target=self._touch, args=(mine, done), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            mine.unlink(missing_ok=True)

    @contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """Hold the claim to a name as soon as nobody else does."""
        with ExitStack() as stack:
            while True:
                try:
                    stack.enter_context(self.held(name))
                    break
                except Taken:
                    time.sleep(PAUSE / 4)
            yield

    def _take(self, name: str) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        before = self._files(name)
        if any(self._alive(path) for path in before.values()):
            raise Taken(name)
        number = max(before, default=-1) + 1
        mine = self.folder / f"{name}.{number}"
        try:
            handle = os.open(mine, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            raise Taken(name) from None
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(self._me, file)
        # Another one may have begun on an older view of the folder: if anybody else is there, both step back.
        others = {path for key, path in self._files(name).items() if key != number}
        if any(self._alive(path) for path in others):
            mine.unlink(missing_ok=True)
            raise Taken(name)
        for path in others:
            path.unlink(missing_ok=True)
        return mine

    def _files(self, name: str) -> dict[int, Path]:
        found = {}
        for path in self.folder.glob(f"{name}.*"):
            with suppress(ValueError):
                found[int(path.name.removeprefix(f"{name}."))] = path
        return found

    def _alive(self, path: Path) -> bool:
        try:
            touched = path.stat().st_mtime
            holder: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if holder["machine"] == self._me["machine"]:
                return bool(_began(holder["process"]) == holder["began"])
        except FileNotFoundError:
            return False
        except (ValueError, KeyError, TypeError):
            pass  # not written to its end: it goes by its age
        return self._now() - touched < self.patience

    def _now(self) -> float:
        """The time by the clock that stamps the files, which need not be this machine's."""
        probe = self.folder / f".clock-{platform.node()}-{os.getpid()}"
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink(missing_ok=True)
        return now

    def _touch(self, mine: Path, done: threading.Event) -> None:
        while not done.wait(self.touch_every):
            with suppress(OSError):  # somebody took it over, or the disk is away for a moment
                os.utime(mine)


def shared(tasks: Iterable[Task], attempt: Callable[[Task], Outcome]) -> Iterator[tuple[Task, Outcome]]:
    """Every task with its outcome, as they come: `Taken` ones are looked at again after each that was free."""
    waiting = list(tasks)
    while waiting:
        for place, task in enumerate(waiting):
            try:
                outcome = attempt(task)
            except Taken:
                continue
            yield waiting.pop(place), outcome
            break
        else:
            time.sleep(PAUSE)


def _machine() -> str:
    """What tells this machine, since it was started, from others; a container has process numbers of its own."""
    try:
        numbers = os.readlink("/proc/self/ns/pid")
    except OSError:
        numbers = ""
    return f"{platform.node()} {psutil.boot_time():.0f} {numbers}".strip()


def _began(process: int) -> float | None:
    """When a process of this machine began; None if it has ended."""
    try:
        found = psutil.Process(process)
        return None if found.status() == psutil.STATUS_ZOMBIE else round(found.create_time(), 1)
    except psutil.NoSuchProcess:
        return None
