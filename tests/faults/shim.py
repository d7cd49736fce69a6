"""A file system that can be told to fail: every change of a file is counted, and at a chosen one the process dies.

Python's own functions are wrapped in a forked child, so that a kill is a real one (SIGKILL: nothing is tidied up) and a
full disk is what the operating system would say. Only files below a folder count.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

OPERATIONS = ("fsync", "replace", "rename", "unlink", "remove", "mkdir", "rmdir", "truncate", "ftruncate")


class Shim:
    """Counts the changes below `root`; at number `at` it kills, or from there on says that the disk is full."""

    def __init__(self, root: Path, at: int = 0, how: str = "count") -> None:
        self.root, self.at, self.how = str(root.resolve()), at, how
        self.count = 0
        self.kinds: dict[str, int] = {}

    def install(self) -> None:
        for name in OPERATIONS:
            setattr(os, name, self._around(name, getattr(os, name)))
        os.open = self._opening(os.open)
        builtins.open = io.open = self._files(io.open)

    def happens(self, kind: str, torn: Callable[[], None] | None = None) -> None:
        """One change is about to happen; `torn` does half of it."""
        self.count += 1
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        if self.how == "kill" and self.count == self.at:
            if torn is not None:
                torn()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "full" and self.count >= self.at and kind in ("write", "fsync", "open", "mkdir"):
            raise OSError(errno.ENOSPC, "No space left on device")

    def concerns(self, place: Any) -> bool:
        if isinstance(place, int):
            try:
                place = os.readlink(f"/proc/self/fd/{place}")
            except OSError:
                return False
        return os.path.abspath(os.fspath(place)).startswith(self.root)

    def _around(self, name: str, original: Any) -> Any:
        def call(place: Any, *rest: Any, **options: Any) -> Any:
            if self.concerns(place):
                self.happens("rename" if name == "replace" else name)
            return original(place, *rest, **options)

        return call

    def _opening(self, original: Any) -> Any:
        def call(place: Any, flags: int, *rest: Any, **options: Any) -> Any:
            if flags & (os.O_CREAT | os.O_TRUNC) and self.concerns(place):
                self.happens("open")
            return original(place, flags, *rest, **options)

        return call

    def _files(self, original: Any) -> Any:
        def call(place: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
            if not set(mode) & set("wax+") or not self.concerns(place):
                return original(place, mode, *rest, **options)
            if not isinstance(place, int):
                self.happens("open")
            return Written(original(place, mode, *rest, **options), self)

        return call


class Written:
    """An open file whose writes can be torn in half."""

    def __init__(self, file: Any, shim: Shim) -> None:
        self._file, self._shim = file, shim

    def write(self, data: Any) -> Any:
        def half() -> None:
            self._file.write(data[: len(data) // 2])
            self._file.flush()

        self._shim.happens("write", half)
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Written:
        return self

    def __exit__(self, *reason: object) -> None:
        self._file.__exit__(*reason)

    def __iter__(self) -> Any:
        return iter(self._file)
