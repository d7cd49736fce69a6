"""The short form of the campaign, and its journal; `make faults` is the long one."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from trials import Trials

HERE = Path(__file__).parent
PARTS = {"kills": ["train", "generate", "prepare", "flips", "processes"], "serve": ["serve"], "fuzz": ["fuzz"]}


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_everything_survives(part: str) -> None:
    # In a process of its own, which forks: nothing was computed in it before.
    source = str(HERE.parents[1] / "src")
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "CONVERGEFLOW_CACHE"):
        environment.pop(name, None)
    command = [sys.executable, str(HERE / "campaign.py"), "--size", "1", "--only", *PARTS[part]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)


def test_a_stopped_campaign_goes_on(tmp_path: Path) -> None:
    made: list[tuple[int, int]] = []

    def trial(number: int) -> object:
        return lambda dice: made.append((number, dice.randrange(100)))

    first = Trials(3, "1", tmp_path / "j.jsonl", code="x")
    for number in range(4):
        first.once("kind", number, trial(number))  # type: ignore[arg-type]
    with (tmp_path / "j.jsonl").open("a") as file:
        file.write('{"kind": "kind", "na')  # killed while it wrote
    (tmp_path / "j.jsonl").read_text()
    second = Trials(3, "1", tmp_path / "j.jsonl", code="x")
    for number in range(6):
        second.once("kind", number, trial(number))  # type: ignore[arg-type]
    assert [number for number, _ in made] == [0, 1, 2, 3, 4, 5]
    assert made[5][1] == random.Random("3 kind 5").randrange(100)
    third = Trials(3, "1", tmp_path / "j.jsonl", code="x")
    assert [line["name"] for line in third.lines] == ["0", "1", "2", "3", "4", "5"]
    assert "| kind | 6 | 0 |" in third.table()
    with pytest.raises(SystemExit, match="name another"):
        Trials(4, "1", tmp_path / "j.jsonl", code="x")


def test_shards_make_every_trial_once(tmp_path: Path) -> None:
    made: list[int] = []
    for shard in range(3):
        trials = Trials(0, "1", tmp_path / "j.jsonl", (shard, 3), code="x")
        for number in range(20):
            trials.once("kind", number, lambda dice, number=number: made.append(number))  # type: ignore[misc]
    assert sorted(made) == list(range(20))


def test_what_went_wrong_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trials = Trials(0, "1", tmp_path / "j.jsonl", code="x")
    trials.once("kind", "a", lambda dice: "was lost")
    trials.once("kind", "b", lambda dice: None)
    assert "| kind | 2 | 1 |" in trials.table() and len(trials.wrong) == 1
    assert "was lost" in capsys.readouterr().err
    assert json.loads((tmp_path / "j.jsonl").read_text().splitlines()[1])["wrong"] == "was lost"
