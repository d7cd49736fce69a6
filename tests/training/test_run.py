"""The real model on the real corpus, a few steps long."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from convergeflow import files
from convergeflow.errors import UserError
from convergeflow.model.embedding import normalise_rows
from convergeflow.training import checkpoint
from convergeflow.training.build import build_model
from convergeflow.training.config import resolve
from convergeflow.training.estimate import estimate, memory
from convergeflow.training.run import Reporter, saved_config, train

SHORT = [
    "stages.0.steps=6",
    "stages.1.steps=4",
    "batch=8",
    "checkpoint_every=4",
    "evaluate_every=0",
    "keep=9",
    "device=cpu",
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVERGEFLOW_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def test_a_run_leaves_a_model_that_loads(tmp_path: Path) -> None:
    from convergeflow.systems.convergeflow import ConvergeFlowModel

    outcome = train(resolve("test", SHORT), tmp_path / "run")
    assert outcome.finished and outcome.step == 10
    folder = tmp_path / "run" / "model"
    checkpoint.verify(folder)
    model = ConvergeFlowModel.from_pretrained(folder)
    average = load_file(outcome.checkpoint / "ema.safetensors")
    assert all(torch.equal(value, average[name]) for name, value in model.state_dict().items())
    # Stage two trains neither table nor schedule.
    boundary = load_file(tmp_path / "run/checkpoints/step-00000006/model.safetensors")
    last = load_file(outcome.checkpoint / "model.safetensors")
    # A frozen table is kept normalised, which is how it was used before.
    boundary["network.embedding.weight"] = normalise_rows(boundary["network.embedding.weight"])
    for name in last:
        frozen = "embedding.weight" in name or "learned_schedule" in name or "log_unigram" in name
        assert torch.equal(boundary[name], last[name]) == frozen, name
    assert "| mse | mse | 4 |" in (folder / "card.md").read_text()
    kinds = [next(iter(set(json.loads(line)) - {"step"})) for line in (tmp_path / "run/journal.jsonl").open()]
    assert len(kinds) == 1 + 10 + 2 * 2


def test_stopped_and_resumed_equals_unbroken(tmp_path: Path) -> None:
    config = resolve("test", [*SHORT, "model.dropout=0.1", "stages.0.position_noise=0.5"])
    train(config, tmp_path / "a")
    count: list[int] = []

    def fail(*amount: object, **fields: object) -> None:
        count.append(1)
        if len(count) == 9:  # one call says where the run starts
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "b", reporter=Reporter(advance=fail))
    train(saved_config(tmp_path / "b"), tmp_path / "b", resume=True)
    assert (tmp_path / "a/journal.jsonl").read_bytes() == (tmp_path / "b/journal.jsonl").read_bytes()
    assert (tmp_path / "a/model/model.safetensors").read_bytes() == (
        tmp_path / "b/model/model.safetensors"
    ).read_bytes()


def test_what_may_change_on_resume(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    checkpoint.write_json(run / "run.json", resolve("test").to_dict())
    assert saved_config(run, ["keep=9", "stages.1.steps=99"]).stages[1].steps == 99
    for change, word in [
        ("batch=8", "batch"),
        ("stages.0.steps=9", "stages.0.steps"),
        ("stages.1.lr=1", "stages.1.lr"),
    ]:
        with pytest.raises(UserError, match=f"{word} cannot change"):
            saved_config(run, [change])
    with pytest.raises(UserError, match="nothing to resume"):
        saved_config(tmp_path)


def test_a_preset_named_on_resume_must_be_the_runs_own(tmp_path: Path) -> None:
    checkpoint.write_json(tmp_path / "run.json", resolve("test", ["batch=8"]).to_dict())
    same = resolve("test", ["batch=8", "stages.1.steps=99"])
    assert saved_config(tmp_path, wanted=same) == same
    with pytest.raises(UserError, match=r"batch cannot change on resume.*name no recipe"):
        saved_config(tmp_path, wanted=resolve("test"))
    with pytest.raises(UserError, match="cannot change on resume"):
        saved_config(tmp_path, wanted=resolve("sotu"))


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UserError, match="already holds a run"):
        train(resolve("test", SHORT), tmp_path)
    with pytest.raises(UserError, match="give one of them"):
        train(resolve("test", SHORT), tmp_path, resume=True, init_from=tmp_path)


def test_a_setting_without_effect_is_named(tmp_path: Path) -> None:
    warnings: list[str] = []
    with pytest.raises(UserError, match="no model"):
        train(
            resolve("test", [*SHORT, "parallel=fsdp"]),
            tmp_path / "run",
            init_from=tmp_path / "nowhere",  # ends it right after the corpus is open
            reporter=Reporter(warn=warnings.append),
        )
    assert warnings == ["parallel=fsdp has no effect: there is only one process"]


def test_estimate_counts_what_is_there() -> None:
    config = resolve("test", ["optimizer.name=adamw"])
    model = build_model(config, 30)
    cost = estimate(config, model, 30)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert cost.parameters == cost.trained_parameters == parameters
    # Weights, average, gradients and two moments at 4 bytes, and one step counter per tensor.
    assert cost.state_bytes == 4 * 5 * parameters + 4 * len(list(model.parameters()))
    assert cost.steps == 50 and cost.tokens_per_step == 16 * 32
    assert cost.total_seconds == pytest.approx(50 * cost.seconds_per_step) and cost.seconds_per_step > 0


def test_memory_is_counted_for_both_ways_to_share_the_work() -> None:
    config = resolve("test", ["optimizer.name=adamw", "batch=16", "accumulate=2"])
    model = build_model(config, 30)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    one, eight = memory(config, model)  # 16 processes cannot share 8 sequences a slice
    assert (one.world, one.rows, eight.world, eight.rows) == (1, 8, 8, 1)
    # The first stage trains everything: weights, average, gradients and two moments at 4 bytes.
    assert one.ddp == one.fsdp == 20 * parameters
    assert eight.ddp == 24 * parameters  # gradients once more, in buckets
    assert eight.fsdp == 20 * parameters // 8 + 8 * parameters  # shards; gathered weights and waiting gradients
    assert 4 * eight.activations < one.activations <= 8 * eight.activations and eight.activations > 0


def test_a_run_of_another_number_of_processes_goes_on_with_one_line(tmp_path: Path) -> None:
    outcome = train(resolve("test", SHORT), tmp_path)
    state = files.read_json(outcome.checkpoint / "trainer.json")
    files.write_json(outcome.checkpoint / "trainer.json", {**state, "world": 8})
    checkpoint.seal(outcome.checkpoint)
    warnings: list[str] = []
    longer = saved_config(tmp_path, ["stages.1.steps=5"])
    assert train(longer, tmp_path, resume=True, reporter=Reporter(warn=warnings.append)).step == 11
    said = "resuming on 1 processes a run of 8: sums will differ in the last bits; for the same ones go on with 8"
    assert warnings == [said]
