"""Several processes in one folder: points in parts, one of them killed, training in a launch; the paper's runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from convergeflow.results.claims import Claims
from convergeflow.results.store import Store
from convergeflow.sampling.settings import Settings
from convergeflow.studies.reproduce import cost
from convergeflow.studies.reproduce.bench import Bench
from convergeflow.studies.reproduce.models import _parts, run_config
from convergeflow.studies.reproduce.registry import experiments
from convergeflow.studies.reproduce.scale import ExperimentScale, scale_by_name
from convergeflow.training.config import resolve

SIZES = """
like: test
length: 16
num_samples: 24
part: 4
sequences: 64
batch: 8
start_steps: 4
"""


def test_a_point_in_parts_is_the_point(micro: ExperimentScale, tmp_path: Path) -> None:
    from dataclasses import replace

    whole = Bench(Store(tmp_path), replace(micro, num_samples=10, part=16))
    ids, facts = whole.samples(whole.model, Settings(nfe=4), 10)
    parts = Bench(Store(tmp_path, claims=Claims(tmp_path / "claims")), replace(micro, num_samples=10, part=4))
    for _ in range(2):  # made, then read
        again, same = parts.samples(whole.model, Settings(nfe=4), 10)
        assert same == facts and all(np.array_equal(again[rule], ids[rule]) for rule in ids)
    assert len(list((tmp_path / "samples").glob("*.npz"))) == 1 + 3


def command(out: Path, sizes: Path, *launch: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        *launch,
        "convergeflow",
        "reproduce",
        "grids",
        "--scale",
        str(sizes),
        "--out",
        str(out),
    ]


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "CONVERGEFLOW_CACHE": str(folder / "cache")}


def records(out: Path) -> dict[str, object]:
    """What was measured, without how long it took."""
    found = {}
    for path in (out / "records/samples").glob("*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        found[path.name] = record["values"]
    return found


def test_two_processes_of_which_one_is_killed_measure_what_one_measures(tmp_path: Path) -> None:
    sizes = tmp_path / "sizes.yaml"
    sizes.write_text(SIZES)
    env = environment(tmp_path)
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    done = subprocess.run(command(alone, sizes), env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    first = subprocess.Popen(command(shared, sizes), env=env, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while len(list(shared.glob("samples/*.npz"))) < 2 and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    second = subprocess.Popen(command(shared, sizes), env=env, stderr=subprocess.PIPE, text=True)
    time.sleep(0.5)
    first.send_signal(signal.SIGKILL)
    first.wait()
    said = second.communicate()[1]
    assert second.returncode == 0, said[-2000:]
    assert records(shared) == records(alone)
    arrays = {path.name for path in alone.glob("samples/*.npz")}
    # A kill may leave a hidden draft.
    assert {path.name for path in shared.glob("samples/[!.]*.npz")} == arrays
    assert not [path for path in (shared / "claims").iterdir() if path.name.startswith("record")]


def test_a_launch_of_two_trains_together_and_shares_the_points(tmp_path: Path) -> None:
    sizes, out = tmp_path / "sizes.yaml", tmp_path / "out"
    sizes.write_text(SIZES)
    launch = ["torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29637", "-m"]
    done = subprocess.run(command(out, sizes, *launch), env=environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    states = [json.loads(path.read_text()) for path in out.glob("models/*/checkpoints/*/trainer.json")]
    assert states and all(state["world"] == 2 for state in states)
    assert (out / "grids.md").is_file() and records(out)


def test_the_papers_runs_are_its_recipe() -> None:
    scale, recipe = scale_by_name("paper"), resolve("owt")
    stages = _parts(scale.checkpoints, "mse", scale.continued_steps, lr=1e-5, ramp=False)
    for world, accumulate, rows in ((1, 40, 12), (8, 5, 12), (16, 3, 10)):
        config = run_config(scale, stages, world)
        assert (config.batch, config.accumulate) == (480, accumulate)
        assert config.batch // (world * config.accumulate) == rows
    same = ("optimizer", "ema", "precision", "compile", "parallel", "seed")
    assert all(getattr(config, name) == getattr(recipe, name) for name in same)
    assert {stage.warmup for stage in config.stages} == {0} and config.stages[0].lr == recipe.stages[0].lr
    # A kill costs 1,000 steps at most, and the eight ends stay.
    assert (config.checkpoint_every, config.keep_every) == (1000, 25000)


def test_costs_of_the_papers_scale_are_the_arithmetic() -> None:
    scale = scale_by_name("paper")
    for name, experiment in experiments().items():
        expected = cost.work(experiment, scale).seconds
        if expected:  # the theory has no network
            assert experiment.cost["paper"].seconds == pytest.approx(expected, rel=0.05), name
    # By hand: 200,000 steps of 480 x 1,024 tokens at 10 us.
    assert cost.work(experiments()["convergence"], scale).training == pytest.approx(200_000 * 480 * 1024 * 1e-5)
    assert "on 8 processes" in cost.total(list(experiments().values()), scale).in_words(8)


def test_costs_of_natural_text_are_those_of_a_core() -> None:
    scale = scale_by_name("basic")
    work = cost.work(experiments()["objectives"], scale)
    # By hand: the start, both objectives, half of each again, the learned table, 32 x 64 tokens a step at 0.4 ms.
    assert work.training == pytest.approx((1200 + 2 * 600 + 2 * 300 + 400) * 32 * 64 * 4e-4)
    # 1 + 2 x 4 + 2 x 2 points of 128 texts, and 32 calls for each.
    assert work.scoring == pytest.approx(13 * 128 * 64 / 1024 * 5.1)
    assert work.sampling == pytest.approx(13 * 128 * 32 * 64 / 1024 * 90e-3)
    assert "hours of one core" in cost.total([experiments()["objectives"]], scale).in_words(1)
