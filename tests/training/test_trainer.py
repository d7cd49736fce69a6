from __future__ import annotations

import errno
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from toy import ToyCorpus, finish, kill, losses, run_toy, start, toy_config

from convergeflow.errors import ConvergeFlowError, UserError
from convergeflow.training import checkpoint
from convergeflow.training import trainer as trainer_module

FILES = ("model.safetensors", "ema.safetensors", "optimizer.safetensors", "trainer.json", "config.json", "run.json")


def assert_same_end(broken: Path, unbroken: Path) -> None:
    """The last checkpoint and the journal are equal byte for byte."""
    last, expected = checkpoint.present(broken)[-1], checkpoint.present(unbroken)[-1]
    assert last.name == expected.name
    for name in FILES:
        assert (last / name).read_bytes() == (expected / name).read_bytes(), name
    assert (broken / "journal.jsonl").read_bytes() == (unbroken / "journal.jsonl").read_bytes()


@pytest.mark.parametrize("optimizer", ["adamw", "muon-fp32"])
def test_kill_at_random_moments_and_resume_bit_for_bit(tmp_path: Path, optimizer: str) -> None:
    config = toy_config(optimizer={"name": optimizer, "clip": 1.0})
    run_toy(tmp_path / "unbroken", config, dropout=0.1)
    moments = random.Random(optimizer)
    out, kills = tmp_path / "broken", 0
    while True:
        processes = start(out, config, resume=kills > 0, pause=0.02, dropout=0.1)
        # Each life gets some steps further, or dies while starting, logging, evaluating or saving.
        journal = out / "journal.jsonl"
        wanted = (journal.stat().st_size if journal.exists() else 0) + moments.randrange(0, 900)
        deadline = time.monotonic() + 30
        while processes[0].is_alive() and time.monotonic() < deadline:
            if journal.exists() and journal.stat().st_size > wanted:
                break
            time.sleep(0.001)
        time.sleep(moments.random() * 0.03)
        if kills == 5 or not processes[0].is_alive():
            assert finish(processes) == [0]
            break
        kill(processes)
        kills += 1
    assert kills >= 3
    assert_same_end(out, tmp_path / "unbroken")


@pytest.mark.parametrize("rename", [1, 2, 3])
def test_kill_in_the_middle_of_saving(tmp_path: Path, rename: int) -> None:
    """Die right before the folder of the n-th checkpoint gets its name."""
    config = toy_config()
    run_toy(tmp_path / "unbroken", config)
    out = tmp_path / "broken"
    processes = start(out, config, die_at_rename=rename)
    assert finish(processes) == [-signal.SIGKILL]
    assert len(checkpoint.present(out)) == rename - 1
    run_toy(out, config, resume=True)
    assert_same_end(out, tmp_path / "unbroken")


@pytest.mark.parametrize("damage", ["truncate", "flip"])
def test_damaged_checkpoint_is_refused_by_name_and_the_run_still_ends_the_same(tmp_path: Path, damage: str) -> None:
    config = toy_config()
    run_toy(tmp_path / "unbroken", config)
    out = tmp_path / "broken"
    run_toy(out, config, prepare=lambda trainer: stop_after(trainer, 12))
    path = checkpoint.present(out)[-1] / "model.safetensors"
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-7] ^= 0x10
    path.write_bytes(data[:-1] if damage == "truncate" else data)
    warnings: list[str] = []
    run_toy(out, config, resume=True, warn=warnings.append)
    assert len(warnings) == 1 and "step-00000012" in warnings[0] and "model.safetensors" in warnings[0]
    assert_same_end(out, tmp_path / "unbroken")


def stop_after(trainer: Any, step: int) -> None:
    """Send this process Ctrl-C during the given step."""
    original = trainer._train_step

    def watched(current: int, tokens: Any, stop: bool) -> Any:
        if current + 1 == step:
            os.kill(os.getpid(), signal.SIGINT)
            stop = True
        return original(current, tokens, stop)

    trainer._train_step = watched


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_request_saves_and_the_run_goes_on_exactly(tmp_path: Path, number: int) -> None:
    config = toy_config(checkpoint_every=100)
    run_toy(tmp_path / "unbroken", config)
    sent: list[int] = []

    def press(*amount: Any, **fields: Any) -> None:
        sent.append(1)
        if len(sent) == 7:
            os.kill(os.getpid(), number)

    outcome = run_toy(tmp_path / "broken", config, advance=press)
    assert not outcome.finished and outcome.signal_number == number
    assert outcome.checkpoint.is_dir() and checkpoint.step_of(outcome.checkpoint) == outcome.step < 24
    run_toy(tmp_path / "broken", config, resume=True)
    assert_same_end(tmp_path / "broken", tmp_path / "unbroken")


def test_accumulation_does_not_change_the_curve(tmp_path: Path) -> None:
    run_toy(tmp_path / "one", toy_config())
    run_toy(tmp_path / "four", toy_config(accumulate=4))
    # In its first stage the toy's schedule fit is the square of a mean, which slices do change; nothing depends on it.
    mse = losses(tmp_path / "one")[14:]
    assert losses(tmp_path / "four")[14:] == pytest.approx(mse, rel=1e-5)


def test_accumulation_is_exact_for_a_mean(tmp_path: Path) -> None:
    stages = [{"name": "mse", "objective": "mse", "steps": 12, "lr": 1e-2, "learn_table": True}]
    run_toy(tmp_path / "one", toy_config(stages=stages))
    run_toy(tmp_path / "four", toy_config(stages=stages, accumulate=4))
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_stages_freeze_and_switch(tmp_path: Path) -> None:
    run_toy(tmp_path, toy_config(keep=100))
    boundary, end = checkpoint.present(tmp_path)[3], checkpoint.present(tmp_path)[-1]
    assert boundary.name == "step-00000014" and end.name == "step-00000024"
    first, last = (load_file(folder / "model.safetensors") for folder in (boundary, end))
    average = load_file(end / "ema.safetensors")
    for name in ("embedding.weight", "schedule.loc"):
        assert torch.equal(first[name], last[name]), name
        assert torch.equal(average[name], last[name]), name
    assert not torch.equal(first["blocks.0.0.weight"], last["blocks.0.0.weight"])
    assert not torch.equal(average["blocks.0.0.weight"], last["blocks.0.0.weight"])
    records = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    names = [record["stage"] for record in records if "loss" in record]
    assert names == ["ce"] * 14 + ["mse"] * 10
    assert [record["step"] for record in records if "evaluate" in record] == [5, 10, 14, 15, 20, 24]
    assert [record["step"] for record in records if "samples" in record] == [7, 14, 21, 24]


@pytest.mark.parametrize("option", ["keep_moments", "from_average"])
def test_stage_options_survive_a_resume_at_the_boundary(tmp_path: Path, option: str) -> None:
    stages = toy_config().to_dict()["stages"]
    plain = run_toy(tmp_path / "plain", toy_config())
    stages[1][option] = True
    config = toy_config(stages=stages)
    run_toy(tmp_path / "unbroken", config)
    assert losses(tmp_path / "unbroken")[:14] == losses(tmp_path / "plain")[:14]
    assert losses(tmp_path / "unbroken")[15:] != losses(tmp_path / "plain")[15:]
    assert plain.finished
    run_toy(tmp_path / "broken", config, prepare=lambda trainer: stop_after(trainer, 14))
    run_toy(tmp_path / "broken", config, resume=True)
    assert_same_end(tmp_path / "broken", tmp_path / "unbroken")


def test_non_finite_loss_stops_before_the_update_and_names_step_and_batch(tmp_path: Path) -> None:
    trainers: list[Any] = []

    def poison(trainer: Any) -> None:
        trainers.append(trainer)
        original = trainer._train_step

        def watched(current: int, tokens: Any, stop: bool) -> Any:
            trainer.model.poison = current == 5
            return original(current, tokens, stop)

        trainer._train_step = watched

    with pytest.raises(ConvergeFlowError) as caught:
        run_toy(tmp_path, toy_config(), prepare=poison)
    message = str(caught.value)
    assert "loss is nan at step 6" in message and "training sequences" in message and "\n" not in message
    assert all(torch.isfinite(parameter).all() for parameter in trainers[0].model.parameters())
    assert checkpoint.newest_whole(tmp_path, pytest.fail) is not None


def test_full_disk_while_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = trainer_module.write_tensors, []

    def fill(path: Path, tensors: Any) -> None:
        calls.append(path)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        original(path, tensors)

    monkeypatch.setattr(trainer_module, "write_tensors", fill)
    with pytest.raises(ConvergeFlowError, match="disk is full"):
        run_toy(tmp_path, toy_config())
    monkeypatch.undo()
    (left,) = checkpoint.present(tmp_path)
    checkpoint.verify(left)
    assert run_toy(tmp_path, toy_config(), resume=True).finished


def test_checkpoint_of_another_model_or_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_toy(tmp_path, toy_config(), prepare=lambda trainer: stop_after(trainer, 3))
    monkeypatch.setattr(ToyCorpus, "fingerprint", "toy-2")
    with pytest.raises(UserError, match="toy-1"):
        run_toy(tmp_path, toy_config(), resume=True)
    monkeypatch.undo()
    with pytest.raises(ConvergeFlowError, match="another model"):
        run_toy(
            tmp_path,
            toy_config(),
            resume=True,
            prepare=lambda trainer: trainer.model.register_buffer("new", torch.ones(1)),
        )


def test_batch_that_cannot_be_shared(tmp_path: Path) -> None:
    with pytest.raises(ConvergeFlowError, match="accumulate"):
        run_toy(tmp_path, toy_config(accumulate=3, batch=8))


def test_export_holds_the_averaged_weights(tmp_path: Path) -> None:
    trainers: list[Any] = []
    run_toy(tmp_path, toy_config(), prepare=trainers.append)
    trainers[0].export(tmp_path / "model", "# card\n")
    exported = load_file(tmp_path / "model" / "model.safetensors")
    expected = load_file(checkpoint.present(tmp_path)[-1] / "ema.safetensors")
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    checkpoint.verify(tmp_path / "model")


def test_the_loop_learns(tmp_path: Path) -> None:
    stages = [{"name": "ce", "objective": "ce", "steps": 120, "lr": 2e-2, "learn_table": True}]
    config = toy_config(stages=stages, evaluate_every=120, sample_every=0, checkpoint_every=1000)
    curve = run_toy(tmp_path, config) and losses(tmp_path)
    assert sum(curve[-10:]) < 0.7 * sum(curve[:10])


def test_random_windows_are_a_function_of_seed_step_and_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = np.lib.stride_tricks.sliding_window_view(ToyCorpus().train.ravel(), ToyCorpus.length)
    monkeypatch.setattr(ToyCorpus, "windows", windows, raising=False)
    config = toy_config(corpus={"name": "toy", "length": ToyCorpus.length, "windows": "random"})
    run_toy(tmp_path / "whole", config)
    fixed = toy_config()
    run_toy(tmp_path / "fixed", fixed)
    assert losses(tmp_path / "whole") != losses(tmp_path / "fixed")
    # Stopped in the middle and cut into other slices: the same rows.
    assert not run_toy(tmp_path / "parts", config, stop_at=9).finished
    run_toy(tmp_path / "parts", config, resume=True)
    assert_same_end(tmp_path / "parts", tmp_path / "whole")
    run_toy(tmp_path / "sliced", config.model_copy(update={"accumulate": 2}))
    # The schedule's fit is no mean over rows, so the cross-entropy is compared.
    entropies = [
        [record["ce"] for record in map(json.loads, (tmp_path / name / "journal.jsonl").open()) if "loss" in record]
        for name in ("sliced", "whole")
    ]
    assert entropies[0] == pytest.approx(entropies[1], rel=1e-4)
