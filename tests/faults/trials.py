"""The journal of a campaign: one JSON line for every trial, so that a campaign of hours is never lost.

A campaign that is stopped goes on where it was. Several processes may share the trials of one (`shard`), each with a
part of them; all write into one journal. A journal belongs to a seed, a size and a state of the code.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def code_hash() -> str:
    """The state of what is tried and of what tries it."""
    digest = hashlib.sha256()
    for folder in ("src/convergeflow", "tests/faults"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


class Trials:
    """What was tried, and what went wrong."""

    def __init__(
        self, seed: int, size: str, journal: Path | None = None, shard: tuple[int, int] = (0, 1), code: str = ""
    ) -> None:
        self.seed, self.journal, self.shard = seed, journal, shard
        self.about = {"seed": seed, "size": size, "code": code or code_hash()}
        self.lines: list[dict[str, Any]] = []
        self.done: set[tuple[str, str]] = set()
        if journal is not None:
            journal.parent.mkdir(parents=True, exist_ok=True)
            if not journal.exists():
                self._write(self.about)
            self.read()

    def read(self) -> None:
        """What this process and others have written."""
        assert self.journal is not None
        text = self.journal.read_text()
        if not text.endswith("\n"):  # killed while it wrote: that trial is made again
            text = text[: text.rfind("\n") + 1]
            os.truncate(self.journal, len(text.encode()))
        first, *rest = [json.loads(line) for line in text.splitlines()]
        if first != self.about:
            raise SystemExit(f"{self.journal} is the journal of {first}, not of {self.about}: name another")
        self.lines, self.done = rest, {(line["kind"], line["name"]) for line in rest}

    def once(self, kind: str, name: object, trial: Callable[[random.Random], str | None]) -> None:
        """Make a trial that was not made yet, with dice of its own; it returns what went wrong."""
        known = f"{kind} {name}"
        if (kind, str(name)) in self.done or zlib.crc32(known.encode()) % self.shard[1] != self.shard[0]:
            return
        began = time.monotonic()
        try:
            complaint = trial(random.Random(f"{self.seed} {known}"))
        except Exception as failure:  # nobody knows what it would have shown
            complaint = f"the trial failed: {failure!r}"[:500]
        line = {"kind": kind, "name": str(name), "seconds": round(time.monotonic() - began, 3), "wrong": complaint}
        self.lines.append(line)
        self.done.add((kind, str(name)))
        self._write(line)
        if complaint:
            print(f"WRONG {kind}, {name}: {complaint}", file=sys.stderr, flush=True)

    def _write(self, line: dict[str, Any]) -> None:
        if self.journal is not None:
            with self.journal.open("a") as file:
                file.write(json.dumps(line) + "\n")

    @property
    def wrong(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["wrong"]]

    def table(self) -> str:
        kinds = dict.fromkeys(line["kind"] for line in self.lines)
        rows = []
        for kind in kinds:
            made = [line for line in self.lines if line["kind"] == kind]
            wrong = sum(line["wrong"] is not None for line in made)
            rows.append(f"| {kind} | {len(made)} | {wrong} | {sum(line['seconds'] for line in made):.0f} |")
        whole = f"| together | {len(self.lines)} | {len(self.wrong)} | {sum(n['seconds'] for n in self.lines):.0f} |"
        return "\n".join(["| what was tried | trials | not survived | seconds |", "|---|--:|--:|--:|", *rows, whole])
