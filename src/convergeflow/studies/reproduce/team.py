"""The processes of one launch (torchrun, accelerate) train each model together; all else they share point by point.

Training comes first, while all processes are at the same place: the first of them looks up what is missing, claims it
and tells the others. Afterwards each goes its own way through the points and never waits for another one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from convergeflow.errors import UserError
from convergeflow.results.claims import Taken
from convergeflow.results.store import Store
from convergeflow.studies.reproduce.scale import ExperimentScale

if TYPE_CHECKING:
    from convergeflow.studies.reproduce.registry import Experiment

PAUSE = 30.0
"""Seconds before one looks again at what another launch trains."""
TIMEOUT = timedelta(hours=2)
"""How long a process waits for the others of its launch; they are never far apart while they train."""

_assembled: ContextVar[bool] = ContextVar("assembled", default=False)


def size() -> int:
    """The number of processes of this launch."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def train_together(experiments: Sequence[Experiment], store: Store, scale: ExperimentScale) -> None:
    """Train what the experiments need and the store lacks; a single process does it when it gets there."""
    if size() == 1:
        return
    from accelerate import PartialState

    from convergeflow.device import choose_device
    from convergeflow.studies.reproduce.bench import Bench

    PartialState(cpu=choose_device("auto").device.type == "cpu", timeout=TIMEOUT)
    mark = _assembled.set(True)
    try:
        waiting = [experiment for experiment in experiments if experiment.own("train") or scale.model is None]
        while waiting:
            later = []
            for experiment in waiting:
                bench = Bench(store, replace(scale, **experiment.changes.get(scale.name, {})))
                try:
                    _train(experiment, bench)
                except UserError:
                    continue  # what is missing here is said when the experiment runs
                except Taken:
                    later.append(experiment)  # another launch trains it
            if len(later) == len(waiting):
                time.sleep(PAUSE)
            waiting = later
    finally:
        _assembled.reset(mark)


def _train(experiment: Experiment, bench: Any) -> None:
    if bench.scale.model is None:
        _ = bench.start, bench.model
    own = experiment.own("train")
    if own is not None:
        own(bench)


def point(
    store: Store, kind: str, key: Mapping[str, Any], compute: Callable[[], dict[str, Any]], **how: Any
) -> dict[str, Any]:
    """`Store.point` for what all processes of a launch compute together; `Taken` if they are not together now."""
    if size() == 1:
        return store.point(kind, key, compute, **how)
    if not _assembled.get():
        return store.point(kind, key, _not_now, **how)
    if int(os.environ.get("RANK", "0")) == 0:
        return _lead(store, kind, key, compute, **how)
    while True:
        word, record = _hear()
        if word == "done":
            return dict(record)
        if word == "busy":
            raise Taken(kind)
        compute()


def _not_now() -> dict[str, Any]:
    raise Taken("a model that another launch trains")


def _lead(
    store: Store, kind: str, key: Mapping[str, Any], compute: Callable[[], dict[str, Any]], **how: Any
) -> dict[str, Any]:
    def with_the_others() -> dict[str, Any]:
        _hear(("compute", None))
        return compute()

    try:
        record = store.point(kind, key, with_the_others, **how)
    except Taken:
        _hear(("busy", None))
        raise
    _hear(("done", record))
    return record


def _hear(word: tuple[str, Any] | None = None) -> tuple[str, Any]:
    """What the first process says; it gives its `word`."""
    from accelerate.utils import broadcast_object_list

    said: list[Any] = [word]
    broadcast_object_list(said)
    found: tuple[str, Any] = said[0]
    return found
