"""A stopped reproduction goes on where it was, and never mixes up points."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from convergeflow.errors import ConvergeFlowError
from convergeflow.studies.reproduce.workspace import Progress, Workspace, readable


def test_a_point_is_measured_once(tmp_path: Path) -> None:
    calls: list[int] = []

    def compute() -> dict[str, int]:
        calls.append(1)
        return {"answer": 42}

    first = Workspace(tmp_path).point("kind", {"nfe": 64, "name": "a"}, compute)
    again = Workspace(tmp_path).point("kind", {"nfe": 64, "name": "a"}, compute)
    assert first == again and len(calls) == 1
    Workspace(tmp_path).point("kind", {"nfe": 128, "name": "a"}, compute)
    assert len(calls) == 2, "another setting is another point"


def test_a_failed_point_leaves_nothing_and_is_measured_next_time(tmp_path: Path) -> None:
    def stop() -> dict[str, int]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Workspace(tmp_path).point("kind", {"n": 1}, stop)
    assert not list(tmp_path.rglob("*.json"))
    assert Workspace(tmp_path).point("kind", {"n": 1}, lambda: {"ok": True})["values"] == {"ok": True}


def test_a_torn_record_is_measured_again_and_a_foreign_one_refused(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    workspace.point("kind", {"n": 1}, lambda: {"value": 1})
    (path,) = (tmp_path / "records").rglob("*.json")
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    assert workspace.point("kind", {"n": 1}, lambda: {"value": 2})["values"] == {"value": 2}
    path.write_text(text.replace('"n": 1', '"n": 7'))
    with pytest.raises(ConvergeFlowError, match="another point"):
        workspace.point("kind", {"n": 1}, lambda: {"value": 3})


def test_a_record_whose_files_are_gone_is_made_again(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    workspace.point("models", {"n": 1}, lambda: {"folder": "gone"})
    made = workspace.point(
        "models", {"n": 1}, lambda: {"folder": "new"}, usable=lambda values: values["folder"] != "gone"
    )
    assert made["values"] == {"folder": "new"}


def test_not_a_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        Workspace(tmp_path).point("kind", {"n": 1}, lambda: {"value": float("nan")})


def test_samples_come_back_as_they_were(tmp_path: Path) -> None:
    store = Workspace(tmp_path).sample_store({"n": 1})
    assert store.read() is None
    store.write({"weight": np.arange(6).reshape(2, 3)}, {"steps": 4})
    arrays, facts = Workspace(tmp_path).sample_store({"n": 1}).read() or ({}, {})
    assert arrays["weight"].tolist() == [[0, 1, 2], [3, 4, 5]] and facts == {"steps": 4}


def test_time_left_follows_the_pace() -> None:
    said: list[str] = []
    progress = Progress(planned_points=4, planned_seconds=40.0, note=said.append)
    progress.begin(2, 20.0)
    assert progress.left() == 40.0
    progress.count("first", 20.0, reused=False)  # planned: 10 s, so twice as slow
    assert progress.left() == pytest.approx(60.0)
    progress.count("second", 20.0, reused=False)
    progress.finish()
    assert progress.left() == pytest.approx(40.0)
    assert said[-1] == "[2/4] second: 20.0 s, about 40 s left"
    assert (readable(600), readable(9000)) == ("10 min", "2.5 h")
