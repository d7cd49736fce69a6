"""How commands talk: results on stdout, everything else on stderr.

A progress bar appears only where somebody can watch it: stderr must be a terminal and CONVERGEFLOW_QUIET unset. Results
are plain text or JSON, so that a pipe gets the same bytes as a screen.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from convergeflow.markup import in_json, printable

BYTES = "(bytes)"
"""How the description of a bar ends that counts bytes."""
LOG_EVERY = 60.0
"""Seconds between two lines on long work, where nobody watches a bar."""


def quiet() -> bool:
    """Whether the user asked for silence on stderr (errors are still printed)."""
    return os.environ.get("CONVERGEFLOW_QUIET", "") not in ("", "0")


def watched() -> bool:
    """Whether somebody can see a progress bar."""
    return sys.stderr.isatty() and not quiet()


def note(message: str) -> None:
    """One line about what is going on, on stderr."""
    if not quiet():
        print(printable(message), file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """One line about something the user should know, on stderr."""
    print(f"warning: {printable(message)}", file=sys.stderr, flush=True)


def command_line() -> str:
    """The command as it was given, for records."""
    return hint(*sys.argv[1:])


def hint(*words: object) -> str:
    """A command for people to copy: every word is quoted where a shell would read it as something else."""
    return shlex.join(["convergeflow", *map(str, words)])


def print_json(value: Any) -> None:
    """A result for machines, on stdout."""
    print(in_json(json.dumps(value, indent=2, ensure_ascii=False)))


class Bar:
    """A progress bar, or nothing where nobody watches."""

    def __init__(self, update: Callable[..., None] | None = None) -> None:
        self._update = update
        self._fields: dict[str, Any] = {}

    def advance(self, amount: float = 1, **fields: Any) -> None:
        """Move on by `amount`; `fields` are shown behind the bar, for example loss=2.31."""
        self._fields |= fields
        detail = "  ".join(f"{name} {_cell(value)}" for name, value in self._fields.items())
        if self._update is not None:
            self._update(advance=amount, detail=detail)

    def describe(self, text: str | None = None, total: float | None = None) -> None:
        """Write something else before the bar, or give it another end."""
        changes = {"description": text, "total": total}
        if self._update is not None:
            self._update(**{name: value for name, value in changes.items() if value is not None})

    def reach(self, done: float) -> None:
        """Move to `done`."""
        if self._update is not None:
            self._update(completed=done)


@contextmanager
def progress(description: str, total: float | None = None) -> Iterator[Bar]:
    """A progress bar on stderr with the time left; silent where nobody watches."""
    if not watched():
        yield Bar()
        return
    # rich is slow to import, and most commands never draw a bar.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn() if description.endswith(BYTES) else MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[detail]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        yield Bar(partial(bars.update, bars.add_task(description, total=total, detail="")))


@contextmanager
def stages() -> Iterator[Callable[[str, int, int | None], None]]:
    """A function of (stage, done, total) that shows a bar for each stage of some work, or a line in a log at times."""
    if not watched():
        yield _log_lines()
        return
    with ExitStack() as on_screen:
        bars: dict[str, Bar] = {}

        def report(stage: str, done: int, total: int | None) -> None:
            if stage not in bars:
                on_screen.close()  # a screen holds one live bar at a time
                bars[stage] = on_screen.enter_context(progress(stage, total))
            bars[stage].reach(done)

        yield report


def _log_lines() -> Callable[[str, int, int | None], None]:
    """For a log file: what is done, how fast, and how long it will take, at most once a minute."""
    began: dict[str, tuple[float, int]] = {}
    last = time.monotonic()

    def report(stage: str, done: int, total: int | None) -> None:
        nonlocal last
        now = time.monotonic()
        start, first = began.setdefault(stage, (now, done))
        if now - last < LOG_EVERY or total is None or done <= first:
            return
        last = now
        left = (total - done) * (now - start) / (done - first)
        amount, unit = (1e6, " MB") if stage.endswith(BYTES) else (1, "")
        rate = (done - first) / (now - start) / amount
        share = f"{done / amount:,.0f} of {total / amount:,.0f}{unit}"
        note(f"{stage.removesuffix(BYTES).strip()}: {share}, {rate:.3g}{unit}/s, {left / 60:.0f} min left")

    return report


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any] | Mapping[str, Any]]) -> None:
    """A table on stdout: numbers to the right, words to the left, never cut at the width of the screen."""
    values = [[row.get(name) for name in columns] if isinstance(row, Mapping) else list(row) for row in rows]
    cells = [list(columns)] + [[_cell(value) for value in row] for row in values]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    numeric = [
        bool(values) and all(isinstance(row[i], (int, float)) or row[i] is None for row in values)
        for i in range(len(columns))
    ]
    for line in cells:
        padded = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        ]
        print(printable("  ".join(padded).rstrip()))


def print_result(
    told: Any,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any] | Mapping[str, Any]],
    sentences: Sequence[str] = (),
    *,
    as_json: bool,
) -> None:
    """How a command ends: `told` for machines, or a table for people and what follows from it in sentences."""
    if as_json:
        print_json(told)
        return
    print_table(columns, rows)
    for sentence in sentences:
        print(printable(sentence))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
