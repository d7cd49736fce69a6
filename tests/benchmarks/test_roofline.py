"""The arithmetic behind the predictions for GPUs: against this project's measured seconds, and against hand counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from convergeflow.benchmarks import everything, head, measure, roofline, sample, train
from convergeflow.benchmarks.models import SIZES, Size
from convergeflow.benchmarks.roofline import CHIPS, Part, Workload

RECORDS = Path(__file__).resolve().parents[2] / "benchmarks" / "records"
TINY = Size(32, 2, 2, 61, 12, sample_batch=3, train_batch=4, self_condition=0.5)
MEMORY = 12e9
"""Bytes/s of a core's memory, roughly: it matters for the optimizer only."""


def record(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("what", ["head", "sample", "train"])
def test_the_arithmetic_gives_the_measured_seconds_of_the_cpu(what: str) -> None:
    """From the GEMM rate of the same minutes; nothing is fitted."""
    contests = {name: record(f"{name}-paper") for name in ("head", "sample", "train")}
    rate = contests[what]["gemm_gflops"] * 1e9
    chip = roofline.Chip("the record's CPU", rate, rate, rate, MEMORY)
    found = everything.compare(contests, everything.cpu_setting(SIZES["paper"]), chip)[what]
    assert found["share_of_roofline"] == pytest.approx(1.0, abs=0.15)


def test_a_part_takes_the_longer_of_arithmetic_and_memory() -> None:
    chip = roofline.Chip("by hand", bf16=100.0, tf32=30.0, float32=5.0, memory=10.0, written=0.5, streaming=0.5)
    assert Part("products", 200.0, "bf16", "library").seconds(chip) == 2.0
    assert Part("ours", 200.0, "bf16", "written").seconds(chip) == 4.0
    assert Part("split", 200.0, "tf32x3", "library").seconds(chip) == 20.0
    assert Part("reading", 200.0, "bf16", "library", bytes=50.0).seconds(chip) == 10.0


def test_the_parts_are_the_hand_count_of_the_paper_size() -> None:
    """One product with the vocabulary is 77 MFLOP per token, the trunk 210 with attention."""
    setting = Workload(SIZES["paper"])
    assert setting.product == pytest.approx(77.2e6, rel=1e-3)
    assert setting.trunk == pytest.approx(210e6, rel=0.01)
    assert sum(part.flops for part in roofline.sampling(setting)) == pytest.approx(
        210e6 + 77.2e6 * (2 + 7 / 64), rel=0.01
    )
    learning = sum(part.flops for part in roofline.training(setting))
    assert learning == pytest.approx(3.25 * 210e6 + 77.2e6 * (3 * 1.25 + 3), rel=0.01)


def test_the_goals_on_an_a100() -> None:
    found = roofline.predict(CHIPS["A100"], Workload(SIZES["paper"]))
    assert found["sampling_ms_per_sequence_and_call"] <= 2.6
    assert found["training_us_per_token"] <= 10.0
    assert found["published_sampling_ms_per_sequence_and_call"] > 1.9 * found["sampling_ms_per_sequence_and_call"]
    assert found["published_training_us_per_token"] > found["training_us_per_token"]


def test_the_record_is_what_the_command_prints() -> None:
    stored = record("roofline-paper")
    assert stored == {"what": "roofline", "name": "paper", **json.loads(json.dumps(roofline.run()))}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = {"head": head.memory, "sample": sample.memory, "train": train.memory}
    monkeypatch.setattr(measure, "in_fresh_process", lambda job, **arguments: jobs[job](**arguments))
    monkeypatch.setattr(measure, "GEMM_SIDE", 32)
    monkeypatch.setattr(everything, "GEMM_SIDE", 32)
    monkeypatch.setitem(SIZES, "small", TINY)
    monkeypatch.setitem(head.SHAPES, "small", head.HeadSize(40, 16, 70))


@pytest.mark.usefixtures("small")
def test_everything_in_one_record() -> None:
    found = everything.run("cpu", "small", repeats=1)
    assert found["compared"].keys() == {"head", "sample", "train"} == found["contests"].keys()
    assert len(found["verdict"]) == 3 and all("roofline" in line for line in found["verdict"])
    assert found["precision"]["state"] == "float64"
    json.dumps(found)


@pytest.mark.usefixtures("small")
def test_the_contests_of_an_accelerator_run_wherever_torch_does() -> None:
    """The same code on a CPU: what the published formats round, and nothing else, is between the two sides."""
    device = torch.device("cpu")
    contests = everything.on_device(TINY, head.SHAPES["small"], device, repeats=1)
    assert contests["head"]["value_error"] < 1e-5 < contests["head"]["plain_value_error"] < 3e-2
    losses = contests["train"]["loss"]
    assert losses["ours"] == pytest.approx(losses["plain"], rel=1e-2)
    assert contests["sample"]["token_agreement"]["shared"] > 0.5
    chip = everything._device_chip(device)
    assert chip.memory > 0 and chip.bf16 > 0
    lines = everything.verdict(everything.compare(contests, Workload(TINY, batch=3, train_batch=4), chip))
    assert all("us per token" in line for line in lines)
    assert everything._fitted(SIZES["paper"], device).sample_batch >= 1
