"""What people are told while a model trains: two numbers they can read, and a loss without the schedule's fit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from toy import run_toy, toy_config

from convergeflow.randomness import RowDraws
from convergeflow.systems.convergeflow import ConvergeFlowConfig, ConvergeFlowModel
from convergeflow.training import watch
from convergeflow.training.config import resolve
from convergeflow.training.interrupt import ending_at
from convergeflow.training.journal import shown_loss
from convergeflow.training.run import Reporter, train


def test_the_context_free_number_is_the_bound_of_the_exact_context_free_predictor() -> None:
    """A fresh network predicts by kernel and head bias alone; with log frequencies it is that predictor."""
    shares = torch.tensor([0.5, 0.3, 0.15, 0.05])
    torch.manual_seed(0)
    config = ConvergeFlowConfig(vocabulary=4, width=8, depth=1, heads=1, condition_width=8, length=8, dropout=0.0)
    model = ConvergeFlowModel(config).eval()
    with torch.no_grad():
        model.network.head.bias.copy_(shares.log())
    tokens = torch.multinomial(shares, 400 * 8, replacement=True).reshape(400, 8)
    corpus: Any = SimpleNamespace(unigram=shares.double().numpy(), train=np.zeros(10**7))
    found = model.bound(tokens, draws=RowDraws(range(400)), repeats=64)
    exact = watch.context_free(corpus, tokens)
    assert exact == pytest.approx(-float(shares.log()[tokens].mean()), abs=1e-5)
    assert found.nats_per_token == pytest.approx(exact, abs=3 * found.standard_error)
    assert found.standard_error < 0.03


def test_an_unseen_word_has_a_frequency() -> None:
    corpus: Any = SimpleNamespace(unigram=np.array([1.0, 0.0]), train=np.zeros(3))
    assert watch.context_free(corpus, torch.tensor([[1]])) == pytest.approx(math.log(4 / 0.5))


def test_an_evaluation_is_one_line_of_two_numbers() -> None:
    numbers = {"ce@2.2": 1.0, "mse@2.2": 0.1, "gain@2.2": 0.5, "bound": math.log(50.0), "context_free": math.log(200.0)}
    line = watch.in_words(numbers)
    assert line == "held-out perplexity at most 50 (200 without context: a gain of +1.39 nats per token)"
    assert watch.in_words({**numbers, "bound_error": 0.2}).endswith("a gain of +1.39 \u00b1 0.20 nats per token)")
    assert "loss@0.1 2" in watch.in_words({"loss@0.1": 2.0})  # a method without a bound shows what it has


def test_the_loss_that_is_shown_leaves_the_fit_of_the_schedule_out() -> None:
    assert shown_loss({"loss": 9.0, "ce": 3.0, "schedule_fit": 6.0}) == 3.0
    assert shown_loss({"loss": 0.2, "ce": 3.0, "mse": 0.1}) == 0.2


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVERGEFLOW_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def test_a_run_names_its_stages_and_shows_what_it_journals(tmp_path: Path) -> None:
    short = ["batch=4", "evaluate_blocks=4", "sample_nfe=4", "device=cpu", "evaluate_every=0"]
    config = resolve("test", ["stages.0.steps=3", "stages.0.warmup=0", "stages.1.steps=2", *short])
    shown: list[dict[str, Any]] = []
    notes: list[str] = []
    reporter = Reporter(advance=lambda *amount, **fields: shown.append(fields), note=notes.append)
    train(config, tmp_path / "run", reporter=reporter)
    assert [fields["stage"] for fields in shown if "stage" in fields] == ["ce (1 of 2)", "mse (2 of 2)"]
    records = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").open()]
    steps = [record for record in records if "loss" in record]
    losses = [fields["loss"] for fields in shown if "loss" in fields]
    assert losses == [round(shown_loss(record), 4) for record in steps] and len(losses) == 5
    assert all(record["loss"] != pytest.approx(record["ce"], rel=1e-3) for record in steps[:3])  # the fit is in there
    looks = [note for note in notes if "held-out" in note]
    assert len(looks) == 2 and looks[0].startswith("step 3/5 (ce)  held-out perplexity at most ")
    assert all("@" not in look for look in looks)
    evaluations = [record["evaluate"] for record in records if "evaluate" in record]
    assert {"bound", "bound_error", "context_free"} < set(evaluations[0]) and sum(
        "@" in name for name in evaluations[0]
    ) == 15


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time is what the test says it is, and a nanosecond more at every look."""
    from convergeflow.training import interrupt, trainer

    now = [0.0]

    def look() -> float:
        now[0] += 1e-9
        return now[0]

    monkeypatch.setattr(interrupt.time, "monotonic", look)
    monkeypatch.setattr(trainer.time, "perf_counter", look)
    return now


def test_the_clock_ends_a_run_with_a_model_and_it_can_go_on(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes a second, and time runs out in the sixth."""
    from convergeflow.training import trainer

    monkeypatch.setattr(trainer, "PACE_AFTER", 100)

    def pass_time(amount: float = 1, **fields: Any) -> None:
        clock[0] += amount

    with ending_at(5.5):
        outcome = run_toy(tmp_path, toy_config(), advance=pass_time)
    assert (outcome.step, outcome.finished, outcome.usable, outcome.signal_number) == (7, False, True, 0)
    records = [json.loads(line) for line in (tmp_path / "journal.jsonl").open()]
    assert records[-2]["step"] == 7 and "evaluate" in records[-2] and "samples" in records[-1]
    again = run_toy(tmp_path, toy_config(), resume=True)
    assert again.finished and again.step == 24


@pytest.mark.parametrize(("second", "expected"), [(2.0, [11, 4]), (0.5, [24, 36])])
def test_a_run_that_is_slower_or_faster_than_planned_still_has_all_its_stages(
    tmp_path: Path, clock: list[float], second: float, expected: list[int]
) -> None:
    """14 and 10 steps were planned for 30 seconds; after 10 of them it is clear what a step takes."""

    def pass_time(amount: float = 1, **fields: Any) -> None:
        clock[0] += second * amount

    with ending_at(30.1):
        outcome = run_toy(tmp_path, toy_config(), advance=pass_time)
    assert outcome.finished
    steps = [stage["steps"] for stage in json.loads((tmp_path / "run.json").read_text())["stages"]]
    assert steps == expected and clock[0] == pytest.approx(30, abs=2)
    records = [json.loads(line) for line in (tmp_path / "journal.jsonl").open()]
    assert any(record.get("refitted") == {"ce": expected[0], "mse": expected[1]} for record in records)
    assert [record["stage"] for record in records if "loss" in record].count("mse") == expected[1]
