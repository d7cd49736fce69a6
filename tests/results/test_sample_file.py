"""Files of samples: nothing lost, nothing repeated, whatever is torn off and however the work is split."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from convergeflow.errors import UserError
from convergeflow.results import sample_file
from convergeflow.systems.protocol import Samples

SEEDS = range(10, 23)


def make(seeds: Sequence[int]) -> Samples:
    """A sample is a function of its seed; the shape of the batch is on record."""
    ids = torch.tensor([[seed, seed * 2, len(seeds)] for seed in seeds])
    return Samples(ids, list(seeds), 4, {"nfe": 4}, [f"text {seed}" for seed in seeds])


def whole(tmp_path: Path) -> bytes:
    path = tmp_path / "whole.jsonl"
    assert sample_file.collect(path, SEEDS, 4, make, "m") == 13
    return path.read_bytes()


@pytest.mark.parametrize("cut", [0, 1, 57, 200, 333, 700, 900])
def test_a_torn_file_is_completed_to_the_same_bytes(tmp_path: Path, cut: int) -> None:
    expected = whole(tmp_path)
    path = tmp_path / "torn.jsonl"
    path.write_bytes(expected[:cut])
    sample_file.collect(path, SEEDS, 4, make, "m")
    assert path.read_bytes() == expected


def test_a_finished_file_is_left_alone(tmp_path: Path) -> None:
    whole(tmp_path)
    assert sample_file.collect(tmp_path / "whole.jsonl", SEEDS, 4, make, "m") == 0


@pytest.mark.parametrize("world", [2, 3, 5])
def test_processes_together_write_the_same_file(tmp_path: Path, world: int) -> None:
    expected, path = whole(tmp_path), tmp_path / "many.jsonl"
    for rank in range(world):
        sample_file.collect(path, SEEDS, 4, make, "m", rank=rank, world=world)
    sample_file.merge(path, SEEDS)
    assert path.read_bytes() == expected
    assert [file.name for file in tmp_path.glob("many*")] == ["many.jsonl"]


def test_merging_too_early_is_refused(tmp_path: Path) -> None:
    sample_file.collect(tmp_path / "many.jsonl", SEEDS, 4, make, "m", rank=0, world=2)
    with pytest.raises(UserError, match="missing"):
        sample_file.merge(tmp_path / "many.jsonl", SEEDS)


def test_files_of_other_runs_are_not_touched(tmp_path: Path) -> None:
    whole(tmp_path)
    path = tmp_path / "whole.jsonl"
    with pytest.raises(UserError, match="another model"):
        sample_file.collect(path, SEEDS, 4, make, "other")
    with pytest.raises(UserError, match="other seeds"):
        sample_file.collect(path, range(5), 4, make, "m")

    def differently(seeds: Sequence[int]) -> Samples:
        made = make(seeds)
        return Samples(made.ids, made.seeds, made.nfe, {"nfe": 8}, made.texts)

    with pytest.raises(UserError, match="other settings"):
        sample_file.collect(path, range(10, 30), 4, differently, "m")


def test_reading_refuses_what_is_no_sample(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    with pytest.raises(UserError, match="does not exist"):
        sample_file.read_samples(path)
    path.write_text("")
    with pytest.raises(UserError, match="no samples"):
        sample_file.read_samples(path)
    path.write_text(json.dumps({"ids": [1]}) + "\n" + json.dumps({"tokens": [1]}) + "\n")
    with pytest.raises(UserError, match="line 2"):
        sample_file.read_samples(path)
