"""`convergeflow sweep` on a tiny model: files, restart, mistakes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from convergeflow.cli.main import main

sys.path.insert(0, str(Path(__file__).parents[1] / "evaluation"))

from tiny_model import saved_word_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_word_model(tmp_path_factory.mktemp("sweep") / "words")


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVERGEFLOW_CACHE", str(tmp_path / "cache"))


def test_a_sweep_writes_its_files_and_goes_on_where_it_was(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sweep"
    arguments = ["sweep", str(model), "--control", "ug", "--values", "0,0.2", "--by", "nfe=3,4", "--num", "3"]
    assert main([*arguments, "--out", str(out), "--json"]) == 0
    captured = capsys.readouterr()
    frontier = json.loads(captured.out)
    assert [curve["label"] for curve in frontier["curves"]] == ["nfe 3", "nfe 4"]
    assert [point["nfe"] for point in frontier["curves"][0]["points"]] == [3, 3]
    for name in ("frontier.png", "frontier.svg", "frontier.csv", "frontier.json", "report.html"):
        assert (out / name).stat().st_size > 0
    assert "[4/4]" in captured.err and "left" in captured.err
    records = sorted((out / "records").glob("*.json"))
    assert len(records) == 4
    times = {path: path.stat().st_mtime_ns for path in records}
    records[1].write_text(records[1].read_text()[:100])  # as a kill would leave it, were it not renamed into place
    assert main([*arguments, "--out", str(out), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["curves"] == frontier["curves"]
    kept = [path for path in records if path.stat().st_mtime_ns == times[path]]
    assert len(kept) == 3
    # another setting is another point
    assert (
        main(["sweep", str(model), "--control", "ug", "--values", "0", "--nfe", "3", "--num", "4", "--out", str(out)])
        == 0
    )
    assert len(list((out / "records").glob("*.json"))) == 5


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--control", "scgg"], "did you mean 'scg'"),
        (["--control", "refine", "--values", "1,1.5"], "whole numbers"),
        (["--values", "1,1"], "must differ"),
        (["--values", ","], "no values"),
        (["--by", "nfe"], "control=values"),
        (["--by", "scg=1,2"], "another control than --control scg"),
        (["--protocol", "all"], "one protocol"),
        (["--values", "-1"], "--scg"),
    ],
)
def test_mistakes_are_one_line(
    model: Path, tmp_path: Path, arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", str(model), "--out", str(tmp_path / "s"), "--num", "2", *arguments]) == 2
    assert expected in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "s").exists()
