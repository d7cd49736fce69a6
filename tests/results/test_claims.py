"""Claims: one holder at a time, the dead are relieved, and two processes share the points of a folder."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convergeflow.results import claims as claiming
from convergeflow.results.claims import Claims, Taken, shared
from convergeflow.results.store import Store


def elsewhere(path: Path, *, age: float) -> None:
    """A claim of another machine, touched so many seconds ago."""
    path.write_text(json.dumps({"machine": "other", "process": 1, "began": 0.0}))
    os.utime(path, (time.time() - age,) * 2)


def test_a_claim_has_one_holder(tmp_path: Path) -> None:
    claims = Claims(tmp_path)
    with claims.held("point"):
        with pytest.raises(Taken), Claims(tmp_path).held("point"):
            pass
        with claims.held("another"):
            pass
    with Claims(tmp_path).held("point"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_claim_goes_when_the_work_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Claims(tmp_path).held("point"):
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_a_holder_elsewhere_counts_as_dead_when_it_was_silent_for_long(tmp_path: Path) -> None:
    elsewhere(tmp_path / "point.0", age=10)
    with pytest.raises(Taken), Claims(tmp_path, patience=60).held("point"):
        pass
    with Claims(tmp_path, patience=5).held("point"):
        assert [path.name for path in tmp_path.iterdir()] == ["point.1"]


def test_a_torn_claim_goes_by_its_age(tmp_path: Path) -> None:
    (tmp_path / "point.0").write_text("{")
    with pytest.raises(Taken), Claims(tmp_path).held("point"):
        pass
    os.utime(tmp_path / "point.0", (0, 0))
    with Claims(tmp_path).held("point"):
        pass


def test_a_holder_is_touched_while_it_works(tmp_path: Path) -> None:
    with Claims(tmp_path, touch_every=0.01).held("point"):
        os.utime(tmp_path / "point.0", (0, 0))
        deadline = time.monotonic() + 30
        while (tmp_path / "point.0").stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (tmp_path / "point.0").stat().st_mtime > 0


def test_what_is_taken_is_attempted_again_after_each_that_was_free(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(claiming.time, "sleep", pauses.append)
    attempts = {"a": 3, "b": 1, "c": 1}  # taken until the last of so many attempts

    def attempt(task: str) -> str:
        attempts[task] -= 1
        if attempts[task]:
            raise Taken(task)
        return task.upper()

    assert list(shared("abc", attempt)) == [("b", "B"), ("c", "C"), ("a", "A")]
    assert pauses == [], "it waits only after a round in which nothing was free"
    attempts |= {"a": 2}
    assert list(shared("a", attempt)) == [("a", "A")] and pauses == [claiming.PAUSE]


def test_a_turn_waits_until_the_claim_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claims, order = Claims(tmp_path), []
    held = claims.held("page")
    held.__enter__()

    def let_go(seconds: float) -> None:
        order.append("waits")
        held.__exit__(None, None, None)

    monkeypatch.setattr(claiming.time, "sleep", let_go)
    with Claims(tmp_path).turn("page"):
        order.append("writes")
    assert order == ["waits", "writes"] and not list(tmp_path.iterdir())


def _hold(folder: Path) -> None:
    with Claims(folder).held("point"):
        time.sleep(600)


def test_the_claim_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    process = multiprocessing.get_context("forkserver").Process(target=_hold, args=(tmp_path,))
    process.start()
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("point.*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(Taken), Claims(tmp_path).held("point"):
        pass
    process.kill()
    process.join()
    with Claims(tmp_path).held("point"):
        pass


POINTS = 12


def _sum(arrays: dict[str, Any]) -> dict[str, Any]:
    return {"sum": int(arrays["x"].sum())}


def _work(folder: Path, name: str, die_in: int | None) -> None:
    """Go through all points until none is missing; every computation leaves a mark. Die inside of one, if told to."""
    store = Store(folder, claims=Claims(folder / "claims"))
    missing = set(range(POINTS))
    while missing:
        for number in sorted(missing):

            def compute(number: int = number) -> tuple[dict[str, Any], dict[str, Any]]:
                (folder / "marks" / f"{number}-{name}").touch()
                if number == die_in:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.02)
                return {"x": np.full(3, number)}, {"number": number}

            try:
                arrays, facts = store.arrays({"number": number}, compute)
                assert arrays["x"].tolist() == [number] * 3 and facts == {"number": number}
                store.point("kind", {"number": number}, partial(_sum, arrays), label=f"{number}")
                missing.discard(number)
            except Taken:
                continue
        time.sleep(0.01)


def test_nothing_is_lost_or_done_twice_when_a_process_dies(tmp_path: Path) -> None:
    (tmp_path / "marks").mkdir()
    context = multiprocessing.get_context("forkserver")
    workers = [
        context.Process(target=_work, args=(tmp_path, name, die_in))
        for name, die_in in (("a", None), ("b", None), ("dying", 5))
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    codes = [worker.exitcode for worker in workers]
    assert codes[:2] == [0, 0] and codes[2] in (0, -signal.SIGKILL)
    marks = [path.name for path in (tmp_path / "marks").iterdir()]
    for number in range(POINTS):
        finished = [mark for mark in marks if mark.startswith(f"{number}-") and mark != "5-dying"]
        assert len(finished) == 1, finished
    records = [json.loads(path.read_text()) for path in (tmp_path / "records/kind").iterdir()]
    assert sorted(record["values"]["sum"] for record in records) == [3 * number for number in range(POINTS)]
    assert not list((tmp_path / "claims").iterdir())
