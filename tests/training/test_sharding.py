"""Two processes on gloo follow one process: DDP and FSDP2, with and without accumulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from toy import finish, losses, run_toy, start, toy_config

from convergeflow.training import checkpoint

TOLERANCE = 2e-5
"""Relative difference allowed between the curves: sums over rows are taken in another order, nothing else differs."""

# Processes that share a core wait for each other at every exchange: few steps, and no more evaluations than stages.
QUIET: dict[str, Any] = {"evaluate_every": 0, "sample_every": 0, "checkpoint_every": 100}


def short(*steps: int) -> list[dict[str, Any]]:
    stages = toy_config().to_dict()["stages"]
    return [{**stage, "steps": count} for stage, count in zip(stages, steps, strict=True)]


PARALLEL = pytest.mark.parametrize(
    ("parallel", "changes"),
    [
        ("ddp", {}),
        ("ddp", {"accumulate": 2}),
        ("fsdp", {}),
        ("fsdp", {"accumulate": 2, "optimizer": {"name": "muon-fp32", "clip": 1.0}}),
    ],
    ids=["ddp", "ddp-accumulate", "fsdp", "fsdp-accumulate-muon"],
)
"""Ways to share a run; one process is the reference."""


@PARALLEL
def test_two_processes_repeat_to_the_bit(tmp_path: Path, parallel: str, changes: dict[str, Any]) -> None:
    """Whatever order the processes come in: the sums between them are taken in one order."""
    config = toy_config(stages=short(4, 3), parallel=parallel, **{**QUIET, **changes})
    for name in ("once", "again"):
        assert finish(start(tmp_path / name, config, world=2)) == [0, 0]
    assert (tmp_path / "once/journal.jsonl").read_bytes() == (tmp_path / "again/journal.jsonl").read_bytes()
    once, again = (checkpoint.present(tmp_path / name)[-1] for name in ("once", "again"))
    files = sorted(path.name for path in once.iterdir())
    assert {"model.safetensors", "ema.safetensors", "optimizer.safetensors", "manifest.json"} <= set(files)
    for name in files:
        assert (once / name).read_bytes() == (again / name).read_bytes(), name


@PARALLEL
def test_two_processes_follow_one(tmp_path: Path, parallel: str, changes: dict[str, Any]) -> None:
    changes = {**QUIET, **changes}
    # The toy's schedule fit squares a batch mean, the one loss here that is not a mean over rows: leave it out.
    stages = short(8, 6)
    stages[0]["learn_schedule"] = False
    run_toy(tmp_path / "one", toy_config(stages=stages, **{**changes, "accumulate": 1}))
    config = toy_config(stages=stages, parallel=parallel, **changes)
    assert finish(start(tmp_path / "two", config, world=2)) == [0, 0]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=TOLERANCE)
    one, two = (checkpoint.present(tmp_path / name)[-1] for name in ("one", "two"))
    for name in ("model.safetensors", "ema.safetensors"):
        expected, found = load_file(one / name), load_file(two / name)
        assert expected.keys() == found.keys()
        for key in expected:
            assert torch.allclose(found[key], expected[key], rtol=1e-3, atol=1e-4), key


def test_a_sharded_run_resumes_exactly(tmp_path: Path) -> None:
    """Stopped in the second stage and resumed, FSDP2 gives the journal of an unbroken FSDP2 run."""
    config = toy_config(parallel="fsdp", stages=short(3, 4), **QUIET)
    assert finish(start(tmp_path / "unbroken", config, world=2)) == [0, 0]
    assert finish(start(tmp_path / "broken", config, world=2, stop_at=5)) == [0, 0]
    assert checkpoint.present(tmp_path / "broken")[-1].name == "step-00000005"
    assert finish(start(tmp_path / "broken", config, world=2, resume=True)) == [0, 0]
    assert (tmp_path / "broken/journal.jsonl").read_bytes() == (tmp_path / "unbroken/journal.jsonl").read_bytes()
    for name in ("model.safetensors", "ema.safetensors", "optimizer.safetensors"):
        left, right = (checkpoint.present(tmp_path / run)[-1] / name for run in ("broken", "unbroken"))
        assert left.read_bytes() == right.read_bytes(), name
