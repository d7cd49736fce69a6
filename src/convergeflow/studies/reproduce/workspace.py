"""The folder of a reproduction: one JSON record per measured point, so that a stopped run goes on where it was.

    records/<kind>/<name>-<hash>.json    what was asked (`key`), what came out (`values`), how long it took
    samples/<hash>.npz                   the samples behind a record
    models/<name>/                       models trained for an experiment
    figures/                             PNG and SVG

A record is found again by its key alone. The key holds everything that decides the numbers (settings, number of
samples, hash of the weights), so a changed setting is a new point, and two experiments that need the same point share
it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from convergeflow.errors import ConvergeFlowError

Note = Callable[[str], None]


def _silent(message: str) -> None:
    pass


class Progress:
    """Counts points and estimates the time left from the planned costs and the pace so far."""

    def __init__(self, planned_points: int, planned_seconds: float, note: Note = _silent) -> None:
        self.planned_points, self.planned_seconds, self.note = planned_points, planned_seconds, note
        self.points = 0
        self.spent = 0.0
        self.finished_seconds = 0.0
        """Planned seconds of the experiments that are done."""
        self.current_seconds = 0.0
        self.current_points = 0
        self.current_done = 0

    def begin(self, points: int, seconds: float) -> None:
        """An experiment of so many points and planned seconds starts."""
        self.current_points, self.current_seconds, self.current_done = points, seconds, 0

    def finish(self) -> None:
        self.finished_seconds += self.current_seconds
        self.current_seconds, self.current_points, self.current_done = 0.0, 0, 0

    def count(self, label: str, seconds: float, *, reused: bool) -> None:
        self.points += 1
        self.current_done += 1
        self.spent += 0.0 if reused else seconds
        took = "kept from before" if reused else f"{seconds:.1f} s"
        # Points shared with an earlier experiment or added by a refinement make the plan a guess, not a count.
        total = max(self.planned_points, self.points)
        self.note(f"[{self.points}/{total}] {label}: {took}, about {readable(self.left())} left")

    def left(self) -> float:
        """Seconds left: what the plan says is left, times how much slower than planned it has gone so far."""
        share = min(1.0, self.current_done / self.current_points) if self.current_points else 0.0
        done = self.finished_seconds + share * self.current_seconds
        remaining = max(0.0, self.planned_seconds - done)
        pace = self.spent / done if done > 0 and self.spent > 0 else 1.0
        return remaining * pace


def readable(seconds: float) -> str:
    """A duration as people say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


class Workspace:
    """Records, models and figures of one reproduction."""

    def __init__(self, folder: str | Path, *, note: Note = _silent) -> None:
        self.folder = Path(folder)
        self.note = note
        self.progress = Progress(0, 0.0, note)

    @property
    def figures(self) -> Path:
        return self.folder / "figures"

    def model_folder(self, name: str) -> Path:
        return self.folder / "models" / name

    def point(
        self,
        kind: str,
        key: dict[str, Any],
        compute: Callable[[], dict[str, Any]],
        *,
        label: str = "",
        usable: Callable[[dict[str, Any]], bool] = lambda values: True,
    ) -> dict[str, Any]:
        """The record of a point: read if it is there and `usable`, computed and kept otherwise."""
        key = json.loads(json.dumps(key))
        path = self._path(kind, key)
        label = label or _slug(key).replace("-", " ")
        kept = read_record(path, key)
        if kept is not None and usable(kept["values"]):
            self.progress.count(label, kept["seconds"], reused=True)
            return kept
        started = time.perf_counter()
        values = compute()
        record: dict[str, Any] = {
            "kind": kind,
            "label": label,
            "key": key,
            "values": values,
            "seconds": round(time.perf_counter() - started, 3),
        }
        write_json(path, record)
        self.progress.count(label, record["seconds"], reused=False)
        return json.loads(json.dumps(record))  # type: ignore[no-any-return]

    def sample_store(self, key: dict[str, Any]) -> SampleStore:
        """Where the samples of a point lie."""
        return SampleStore(self.folder / "samples" / f"{_digest(key)}.npz")

    def _path(self, kind: str, key: dict[str, Any]) -> Path:
        return self.folder / "records" / kind / f"{_slug(key)}-{_digest(key)}.json"


def _digest(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]


def _slug(key: dict[str, Any]) -> str:
    """A readable part of a file name: the short values of a key."""
    words = [str(value) for value in key.values() if isinstance(value, (str, int, float)) and len(str(value)) <= 24]
    return re.sub(r"[^a-z0-9.]+", "-", "-".join(words[:4]).lower()).strip("-")[:60] or "point"


def write_json(path: Path, value: Any) -> None:
    """Written beside its place and moved there: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(beside, path)


def read_record(path: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """The record in a file if it answers this key; a torn file counts as missing."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        return None
    if not isinstance(record, dict) or record.get("key") != key:
        raise ConvergeFlowError(f"{path} holds a record of another point; remove it or give another --out folder")
    return record


class SampleStore:
    """Arrays of one sampling run in an npz file, with facts about it in a JSON file beside."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        if not (self.path.is_file() and self.path.with_suffix(".json").is_file()):
            return None
        with np.load(self.path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        return arrays, json.loads(self.path.with_suffix(".json").read_text(encoding="utf-8"))

    def write(self, arrays: dict[str, Any], facts: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(f".{os.getpid()}-{self.path.name}")
        np.savez_compressed(beside, **arrays)
        os.replace(beside, self.path)
        write_json(self.path.with_suffix(".json"), facts)
