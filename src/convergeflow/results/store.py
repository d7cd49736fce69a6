"""A folder of measured points: one JSON record per point, so that a stopped study goes on where it was.

    records/<kind>/<name>-<hash>.json    what was asked (`key`), what came out (`values`), how long it took
    records/<name>.json                  a record that carries its own key
    samples/<hash>.npz and .json         arrays behind a record, and facts about them
    models/<name>/                       models trained for the study
    figures/                             PNG and SVG

A record is found again by its key alone. The key holds everything that decides the numbers (settings, number of
samples, hash of the weights), so a changed setting is a new point, and two studies that need the same point share it.

With `claims` several processes work in one folder: each point is made by one of them, and `Taken` is raised for a point
that another one is making. A store that is not `measuring` makes nothing: `Missing` is raised for what is not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convergeflow import files
from convergeflow.errors import ConvergeFlowError, UserError
from convergeflow.results.claims import Claims, Taken

Note = Callable[[str], None]
Arrays = dict[str, NDArray[Any]]
DAMAGED = (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error)
"""How numpy complains of a file of arrays that is not whole."""


class Missing(Taken):
    """It is not in the folder, and nothing may be measured now."""


def _silent(message: str) -> None:
    pass


class Pace:
    """Counts points, and estimates the time left from the planned costs and how long the points took so far."""

    def __init__(
        self,
        points: int = 0,
        seconds: float = 0.0,
        note: Note = _silent,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.planned_points, self.planned_seconds, self.note = points, seconds, note
        self.points = 0
        self.spent = 0.0
        self._clock, self._since = clock, clock()
        self.finished = 0.0
        """Planned seconds of the parts that are done."""
        self.begin(points, seconds)

    def begin(self, points: int, seconds: float) -> None:
        """A part of so many points and planned seconds starts."""
        self.part, self.part_done = (points, seconds), 0

    def finish(self) -> None:
        """The part is done, however many points it had."""
        self.finished += self.part[1]
        self.begin(0, 0.0)

    def count(self, label: str, *, reused: bool) -> None:
        """Report one more point, and how much time is left if that was planned.

        Its time is all that passed since the last one: what a point is made from, its samples say, belongs to it.
        """
        now = self._clock()
        seconds, self._since = now - self._since, now
        self.points += 1
        self.part_done += 1
        self.spent += 0.0 if reused else seconds
        took = "kept from before" if reused else f"{seconds:.1f} s"
        if not self.planned_points:
            self.note(f"{label}: {took}")
            return
        # Points shared with an earlier part or added by a refinement make the plan a guess, not a count.
        total = max(self.planned_points, self.points)
        self.note(f"[{self.points}/{total}] {label}: {took}, about {readable(self.left())} left")

    def left(self) -> float:
        """Seconds left: what the plan says is left, times how much slower than planned it has gone so far."""
        points, seconds = self.part
        done = self.finished + seconds * (min(1.0, self.part_done / points) if points else 0.0)
        slower = self.spent / done if done > 0 and self.spent > 0 else 1.0
        return max(0.0, self.planned_seconds - done) * slower


def readable(seconds: float) -> str:
    """A duration as people say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Store:
    """The points, arrays, models and figures of one study."""

    def __init__(
        self, folder: str | Path, *, note: Note = _silent, claims: Claims | None = None, measuring: bool = True
    ) -> None:
        self.folder = Path(folder)
        self.note = note
        self.claims = claims
        self.measuring = measuring
        self.lacking = 0
        """Points that were asked for and are not here."""
        self.pace = Pace(note=note)
        self._counted: set[str] = set()

    @property
    def figures(self) -> Path:
        """Where the figures go."""
        return self.folder / "figures"

    def model_folder(self, name: str) -> Path:
        """Where a model of this study lies."""
        return self.folder / "models" / name

    def point(
        self,
        kind: str,
        key: Mapping[str, Any],
        compute: Callable[[], dict[str, Any]],
        *,
        label: str = "",
        usable: Callable[[dict[str, Any]], bool] = lambda values: True,
    ) -> dict[str, Any]:
        """The record of a point: read if it is there and its values are `usable`, else computed and kept."""
        key = as_json(key)

        def make() -> dict[str, Any]:
            started = time.perf_counter()
            values = compute()
            seconds = round(time.perf_counter() - started, 3)
            return {"kind": kind, "label": said, "key": key, "values": values, "seconds": seconds}

        said = label or _slug(key).replace("-", " ")
        name = _name(kind, key)
        kept = _read(self.path(name))
        if kept is not None and kept.get("key") != key:
            raise ConvergeFlowError(f"{self.path(name)} holds a record of another point: remove it")
        return self.once(name, key, make, lambda record: said, usable=lambda record: usable(record["values"]))

    def has(self, kind: str, key: Mapping[str, Any]) -> bool:
        """Whether the record of a point is there."""
        return self.find(_name(kind, as_json(key)), key) is not None

    def once(
        self,
        name: str,
        key: Mapping[str, Any],
        make: Callable[[], Mapping[str, Any]],
        say: Callable[[dict[str, Any]], str],
        *,
        usable: Callable[[dict[str, Any]], bool] = lambda record: True,
    ) -> dict[str, Any]:
        """The record of a name and key: read if it is there and `usable`, else made and kept; `say` describes it."""
        found = self.find(name, key)
        reused = found is not None and (usable(found) or not self.measuring)
        if found is None or not reused:
            self._may_make(name)
            with self.alone(f"record-{digest({'name': name, 'key': key})[:16]}"):
                found = self.find(name, key)  # another process may have made it just now
                if found is None or not usable(found):
                    found = self.keep(name, key, make())
        if self.claims is None or name not in self._counted:  # who waits for others comes by more than once
            self.pace.count(say(found), reused=reused)
        self._counted.add(name)
        return found

    def path(self, name: str) -> Path:
        """The file of a record."""
        return self.folder / "records" / f"{name}.json"

    def find(self, name: str, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """The record of this name if it has this key; a torn file counts as missing."""
        record = _read(self.path(name))
        return record if record is not None and record.get("key") == as_json(key) else None

    def read(self, file: str) -> dict[str, Any] | None:
        """A record by its file in this folder; None if there is no whole one."""
        return _read(self.folder / file)

    def keep(self, name: str, key: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
        """Write a record with its key; returned as a reader will find it."""
        whole: dict[str, Any] = as_json({**record, "key": key})
        files.write_json(self.path(name), whole)
        return whole

    def arrays(
        self, key: Mapping[str, Any], compute: Callable[[], tuple[Arrays, dict[str, Any]]]
    ) -> tuple[Arrays, dict[str, Any]]:
        """Arrays and facts about them, kept under a key: read if both are there, else computed."""
        path = self.folder / "samples" / f"{digest(key)[:12]}.npz"
        if (kept := _read_arrays(path)) is not None:
            return kept
        self._may_make(path.stem)
        with self.alone(f"arrays-{path.stem}"):
            if (kept := _read_arrays(path)) is not None:  # another process may have made them just now
                return kept
            arrays, facts = compute()
            with files.replacing(path) as draft:
                np.savez_compressed(draft, allow_pickle=False, **arrays)
            files.write_json(path.with_suffix(".json"), facts)
        return arrays, facts

    def _may_make(self, name: str) -> None:
        if not self.measuring:
            raise Missing(name)

    def alone(self, name: str) -> AbstractContextManager[None]:
        """While this process alone works on something of this name."""
        return nullcontext() if self.claims is None else self.claims.held(name)

    def turn(self, name: str) -> AbstractContextManager[None]:
        """The same, after waiting for it: for what is quick, such as drawing and writing pages."""
        return nullcontext() if self.claims is None else self.claims.turn(name)


def _read_arrays(path: Path) -> tuple[Arrays, dict[str, Any]] | None:
    """Arrays and the facts about them; None unless both are there and whole."""
    facts = _read(path.with_suffix(".json"))
    if facts is None or not path.is_file():
        return None
    with contextlib.suppress(*DAMAGED), np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}, facts
    return None


def as_json(value: Any) -> Any:
    """The value as JSON gives it back: tuples are lists, keys are texts. NaN is refused."""
    return json.loads(json.dumps(value, allow_nan=False))


def digest(key: Mapping[str, Any]) -> str:
    """SHA-256 of a key; file names use the beginning of it."""
    return hashlib.sha256(json.dumps(as_json(key), sort_keys=True).encode()).hexdigest()


def _name(kind: str, key: Mapping[str, Any]) -> str:
    """Where the record of a point lies."""
    return f"{kind}/{_slug(key)}-{digest(key)[:12]}"


def _slug(key: Mapping[str, Any]) -> str:
    """A readable part of a file name: the short values of a key."""
    words = [str(value) for value in key.values() if isinstance(value, (str, int, float)) and len(str(value)) <= 24]
    return re.sub(r"[^a-z0-9.]+", "-", "-".join(words[:4]).lower()).strip("-")[:60] or "point"


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file; None if there is no whole one."""
    try:
        record = files.read_json(path)
    except UserError:
        return None
    return record if isinstance(record, dict) else None
