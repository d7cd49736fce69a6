"""A stopped study goes on where it was, and never mixes up points."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convergeflow.errors import ConvergeFlowError
from convergeflow.results.store import Arrays, Pace, Store, digest, readable


def test_a_point_is_measured_once(tmp_path: Path) -> None:
    calls: list[int] = []

    def compute() -> dict[str, int]:
        calls.append(1)
        return {"answer": 42}

    first = Store(tmp_path).point("kind", {"nfe": 64, "name": "a"}, compute)
    again = Store(tmp_path).point("kind", {"nfe": 64, "name": "a"}, compute)
    assert first == again and len(calls) == 1
    Store(tmp_path).point("kind", {"nfe": 128, "name": "a"}, compute)
    assert len(calls) == 2, "another setting is another point"


def test_a_failed_point_leaves_nothing_and_is_measured_next_time(tmp_path: Path) -> None:
    def stop() -> dict[str, int]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Store(tmp_path).point("kind", {"n": 1}, stop)
    assert not list(tmp_path.rglob("*.json"))
    assert Store(tmp_path).point("kind", {"n": 1}, lambda: {"ok": True})["values"] == {"ok": True}


def test_a_torn_record_is_measured_again_and_a_foreign_one_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.point("kind", {"n": 1}, lambda: {"value": 1})
    (path,) = (tmp_path / "records").rglob("*.json")
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    assert store.point("kind", {"n": 1}, lambda: {"value": 2})["values"] == {"value": 2}
    path.write_text(text.replace('"n": 1', '"n": 7'))
    with pytest.raises(ConvergeFlowError, match="another point"):
        store.point("kind", {"n": 1}, lambda: {"value": 3})


def test_a_record_whose_files_are_gone_is_made_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.point("models", {"n": 1}, lambda: {"folder": "gone"})
    made = store.point("models", {"n": 1}, lambda: {"folder": "new"}, usable=lambda values: values["folder"] != "gone")
    assert made["values"] == {"folder": "new"}


def test_not_a_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        Store(tmp_path).point("kind", {"n": 1}, lambda: {"value": float("nan")})


def test_arrays_are_made_once_and_come_back_as_they_were(tmp_path: Path) -> None:
    calls: list[int] = []

    def compute() -> tuple[dict[str, Any], dict[str, Any]]:
        calls.append(1)
        return {"weight": np.arange(6).reshape(2, 3)}, {"steps": 4}

    for _ in range(2):
        arrays, facts = Store(tmp_path).arrays({"n": 1}, compute)
        assert arrays["weight"].tolist() == [[0, 1, 2], [3, 4, 5]] and facts == {"steps": 4}
    assert len(calls) == 1
    next((tmp_path / "samples").glob("*.json")).write_text('{"ste')  # torn: both are made again
    Store(tmp_path).arrays({"n": 1}, compute)
    assert len(calls) == 2


def test_a_record_with_its_own_key_answers_that_key_alone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.find("duo-facts", {"draws": (8, 9)}) is None
    kept = store.keep("duo-facts", {"draws": (8, 9)}, {"parameters": 3})
    assert kept == {"parameters": 3, "key": {"draws": [8, 9]}} == store.find("duo-facts", {"draws": (8, 9)})
    assert store.find("duo-facts", {"draws": (8,)}) is None
    assert [path.name for path in (tmp_path / "records").iterdir()] == ["duo-facts.json"]


RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.mark.parametrize(
    "report", ["reproduction", "reproduction-basic", "reproduction-basic-gentle", "reproduction-basic-15000"]
)
def test_committed_points_are_found_by_their_keys(report: str) -> None:
    """Nothing that is measured and committed may be measured again."""
    listed = sorted((RESULTS / report / "records").glob("*/*.json"))
    assert len(listed) >= 10

    def refuse() -> dict[str, Any]:
        raise AssertionError("measured again")

    for path in listed:
        record = json.loads(path.read_text())
        found = Store(RESULTS / report).point(record["kind"], record["key"], refuse, label="x")
        assert found == record, path


@pytest.mark.parametrize(
    ("comparison", "points"),
    [("stories", 60), ("sotu", 60), *((f"basic/steps-{steps}", 12) for steps in (125, 250, 500, 1000))],
)
def test_committed_comparisons_are_found_by_their_keys(comparison: str, points: int) -> None:
    folder = RESULTS / f"comparison-{comparison}"
    found = 0
    for path in sorted((folder / "records").glob("*-nfe*-*.json")):
        record = json.loads(path.read_text())
        if "per_sample" in record:  # a point; the others list the points of a system
            name = f"{record['system']}-nfe{path.stem.rsplit('-nfe', 1)[1].split('-')[0]}-{digest(record['key'])[:10]}"
            assert name == path.stem
            assert Store(folder).find(name, record["key"]) == record
            found += 1
    assert found >= points


def test_time_left_follows_the_pace() -> None:
    said: list[str] = []
    now = 100.0
    pace = Pace(4, 40.0, said.append, lambda: now)
    pace.begin(2, 20.0)
    assert pace.left() == 40.0
    now += 20.0
    pace.count("first", reused=False)  # planned: 10 s, so twice as slow
    assert pace.left() == pytest.approx(60.0)
    now += 20.0
    pace.count("second", reused=False)
    pace.finish()
    assert pace.left() == pytest.approx(40.0)
    assert said[-1] == "[2/4] second: 20.0 s, about 40 s left"
    assert (readable(600), readable(9000)) == ("10 min", "2.5 h")


def test_the_samples_of_a_point_belong_to_its_time(tmp_path: Path) -> None:
    """They are kept as arrays before the point, so that processes can share them."""
    now = 0.0

    def draw() -> tuple[Arrays, dict[str, Any]]:
        nonlocal now
        now += 30.0
        return {"ids": np.zeros(1)}, {}

    said: list[str] = []
    store = Store(tmp_path)
    store.pace = Pace(2, 60.0, said.append, lambda: now)
    store.arrays({"of": "first"}, draw)
    store.point("samples", {"nfe": 4}, lambda: {"gen_ppl": 2.0}, label="first")
    assert said == ["[1/2] first: 30.0 s, about 30 s left"]
