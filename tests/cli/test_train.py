from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from convergeflow.cli import console
from convergeflow.cli.main import main
from convergeflow.training import automatic, trainer
from convergeflow.training.estimate import RunCost

sys.path.insert(0, str(Path(__file__).parents[1] / "evaluation"))

import scorer_stand_ins

SHORT = [
    "stages.0.steps=2",
    "stages.1.steps=1",
    "stages.0.warmup=0",
    "batch=4",
    "device=cpu",
    "evaluate_blocks=4",
    "sample_nfe=4",
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVERGEFLOW_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def test_train_says_how_to_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["train", "test", *SHORT, "--out", str(out)]) == 0
    assert f"convergeflow generate --model {out / 'model'}" in capsys.readouterr().out
    assert main(["train", "test", *SHORT, "--out", str(out)]) == 2
    assert "--resume" in capsys.readouterr().err
    assert main(["train", "--out", str(out), "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["finished"] is True


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["storys"], "did you mean 'stories'"),
        (["test", "bach=3"], "did you mean 'batch'"),
        (["test", "stages.0.steps=-1"], "stages.0.steps"),
        (["test", "--method", "flows"], "unknown method 'flows'"),
        (["test", "--device", "abacus"], "unknown device 'abacus'"),
        (["test", "corpus.name=nowhere"], "nowhere"),
        (["test", "--resume"], "nothing to resume"),
        (["test", "--init-from", "nowhere"], "unknown model 'nowhere'"),
        (["test", "--minutes", "1", "--steps", "5"], "give one of them"),
        (["test", "--minutes", "0"], "above 0"),
        (["test", "--minutes", "1", "--resume"], "give one of them"),
        (["test", "--steps", "1"], "2 stages need at least 2 steps"),
        (["./nothing/here"], "no such file or folder"),
        (["test", "--dry-run", "--resume"], "cannot be combined"),
        (["test", "stages.0.learn_schedule=true", "model.schedule.kind=cosine", *SHORT], "learn_schedule"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_two(
    words: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words, "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and expected in error


def test_a_hint_names_what_train_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "a b c"}\n{"other": "a b c"}\n')
    (tmp_path / "a.txt").write_text("a b c")
    for name, says in (("a.jsonl", "convergeflow prepare --text-field"), ("a.txt", "smaller corpus.length")):
        assert main(["train", str(tmp_path / name), "--steps", "2", "--out", str(tmp_path / "run")]) == 2
        said = capsys.readouterr().err
        assert says in said.splitlines()[-1] and "`text_field`" not in said


def test_dry_run_prints_and_trains_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["train", "test", "batch=4", "device=cpu", "--dry-run", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "command line" in text and "parameters" in text and "time per step" in text
    assert not out.exists()
    assert main(["train", "test", "device=cpu", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["estimate"]["parameters"] > 0


# --- own text ---

TINY = ["model.width=16", "model.depth=1", "model.heads=1", "batch=4", "evaluate_blocks=4", "sample_nfe=4"]
"""The path of a real run in a second."""
WORDS = "the a cat dog house river sees finds likes small green old and in on under with bread water".split()  # noqa: SIM905


def prose(seed: int, sentences: int) -> str:
    draw = random.Random(seed)
    return "\n".join(" ".join(draw.choices(WORDS, k=9)).capitalize() + "." for _ in range(sentences))


def folder_of_files(place: Path) -> Path:
    (place / "licences").mkdir()
    for name in ("GPL-3", "MIT", "Artistic"):
        (place / "licences" / name).write_text(prose(len(name), 400))
    (place / "licences" / "logo.png").write_bytes(b"\x89PNG\0")
    return place / "licences"


def one_file(place: Path) -> Path:
    (place / "book.md").write_text(prose(1, 2000))
    return place / "book.md"


def json_lines(place: Path) -> Path:
    rows = [json.dumps({"id": number, "body": prose(number, 20)}) for number in range(80)]
    (place / "rows.jsonl").write_text("\n".join(rows))
    return place / "rows.jsonl"


@pytest.mark.parametrize("make", [folder_of_files, one_file, json_lines])
def test_text_that_nobody_prepared_becomes_a_model_that_every_command_takes(
    make: object, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From nothing to a sample, an evaluation and a sweep, one command each."""
    monkeypatch.chdir(tmp_path)
    text = make(tmp_path)  # type: ignore[operator]
    scorer = str(scorer_stand_ins.random_gpt2(tmp_path / "gpt2"))
    assert main(["train", str(text), *TINY, "--steps", "6"]) == 0
    told = capsys.readouterr()
    run = f"runs/{text.stem}"
    assert f"convergeflow generate --model {run}/model" in told.out and f"convergeflow evaluate {run}" in told.err
    assert "tokenizer:" in told.err and "held out:" in told.err and "held-out perplexity at most" in told.err
    assert ("logo.png: a binary file" in told.err) == (make is folder_of_files)
    assert main(["generate", "--model", run, "--nfe", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    few = ["--nfe", "4", "--num", "4", "--scorer", scorer, "--json"]
    assert main(["evaluate", run, *few, "--bound", "1"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["n"] == 4 and record["real"]["gen_ppl"] > 0 and record["likelihood"]["nats_per_token"] > 0
    assert record["corpus"]["name"] == text.stem
    assert main(["sweep", run, "--values", "1,2", *few, "--out", "out"]) == 0
    assert len(json.loads(capsys.readouterr().out)["curves"]) == 1
    assert main(["train", str(text), "--minutes", "1"]) == 2  # told before anything is prepared and tried
    assert "already holds a run" in capsys.readouterr().err


def test_no_time_at_all_is_said_of_the_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(one_file(tmp_path)), *TINY, "--minutes", "1e-9", "--out", str(tmp_path / "run")]) == 2
    assert "1e-09 minutes are too short" in capsys.readouterr().err


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The second that it is, for the command, the plan and the run; it passes when the test says so."""
    now = [100.0]
    for room in ("cli.train", "training.automatic", "training.interrupt"):
        watch = SimpleNamespace(monotonic=lambda: now[0])
        monkeypatch.setattr(import_module(f"convergeflow.{room}"), "time", watch)
    return now


def steps_take(monkeypatch: pytest.MonkeyPatch, seconds: float, trying: Callable[[], None] = lambda: None) -> None:
    """The trial says that a training step takes so long; `trying` happens meanwhile."""
    real = automatic.estimate

    def told(*arguments: Any) -> RunCost:
        trying()
        return replace(real(*arguments), seconds_per_step=seconds)

    monkeypatch.setattr(automatic, "estimate", told)


def test_minutes_are_kept_by_the_clock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    """12 seconds, of which planning takes 4 and the end is thought to take 3, so that the clock ends the run after 5.
    It is the clock, for the trial said that a step takes a millionth of its second and the pace is never looked at."""

    def trying() -> None:
        clock[0] = 104.0

    def second(*arguments: Any) -> Any:
        clock[0] += 1
        assert clock[0] < 200, "the clock does not end the run"
        return train_step(*arguments)

    train_step = trainer.Trainer._train_step
    monkeypatch.setattr(trainer.Trainer, "_train_step", second)
    steps_take(monkeypatch, 1e-6, trying)
    monkeypatch.setattr(trainer, "PACE_AFTER", 1 << 40)
    monkeypatch.setattr(trainer, "PACE_EVERY", 1 << 40)
    text, out = one_file(tmp_path), tmp_path / "run"
    assert main(["train", str(text), *TINY, "--minutes", "0.2", "--out", str(out), "--json"]) == 0
    told = capsys.readouterr()
    result = json.loads(told.out)
    assert not result["finished"] and "the time is up" in told.err
    assert result["step"] == 6  # the time is up before the sixth, which is the last
    assert {choice["what"] for choice in result["choices"]} >= {"tokenizer", "held out", "stage ce"}
    assert main(["generate", "--model", result["model"], "--nfe", "4"]) == 0


def test_a_recipe_in_so_many_minutes_or_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    few = ["batch=4", "device=cpu", "evaluate_blocks=4", "sample_nfe=4", "--json"]
    assert main(["train", "test", *few, "--steps", "5", "--out", str(tmp_path / "a")]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 5
    saved = json.loads((tmp_path / "a" / "run.json").read_text())
    assert [(stage["steps"], stage["warmup"]) for stage in saved["stages"]] == [(3, 0), (2, 0)]
    steps_take(monkeypatch, 0.1)
    assert main(["train", "test", *few, "--minutes", "0.3", "--dry-run"]) == 0
    told = json.loads(capsys.readouterr().out)
    ce, mse = told["config"]["stages"]
    # 18 seconds, 6 of them for beginning and end; the looks at the end of two stages take 9 steps each.
    assert ce["steps"] + mse["steps"] == int(12 / 0.11) - 18
    assert ce["steps"] / mse["steps"] == pytest.approx(1.5, rel=0.05)
    assert ce["warmup"] / ce["steps"] == pytest.approx(5 / 30, rel=0.1)


def test_a_dry_run_refuses_what_the_run_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A corpus of bytes for a recipe that says bpe of 1024: the corpus wins, a contradiction is refused both times."""
    text, corpus, out = tmp_path / "book.txt", str(tmp_path / "corpus"), str(tmp_path / "run")
    text.write_text(prose(1, 2000))
    assert main(["prepare", str(text), "--tokenizer", "byte", "--length", "32", "--out", corpus]) == 0
    capsys.readouterr()
    sizes = ["model.width=16", "model.depth=1", "model.heads=1", "batch=4", "evaluate_blocks=4", "sample_nfe=4"]
    for named in (f"corpus.name={corpus}", corpus):
        assert main(["train", "sotu", named, *sizes, "--dry-run", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["vocabulary"] == 257
    for words in (["--dry-run"], ["--out", out]):
        assert main(["train", "sotu", corpus, *sizes, "corpus.vocabulary=4096", *words]) == 2
        assert "has a vocabulary of 257, not 4096" in capsys.readouterr().err
    assert main(["train", "sotu", corpus, *sizes, "--steps", "3", "--out", out]) == 0


def test_fine_tuning_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, few = one_file(tmp_path), ["batch=2", "evaluate_blocks=2", "sample_nfe=2", "evaluate_every=0"]
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    assert main(["train", str(text), *few, "--steps", "2", "--init-from", "stories-small", "--out", first]) == 0
    assert "keep their rows, the others start fresh" in capsys.readouterr().err
    # A run is a name too, and its own tokenizer can write the text.
    assert main(["train", str(text), *few, "--steps", "2", "--init-from", first, "--out", second]) == 0
    told = capsys.readouterr().err
    assert "which can write the text" in told and "start fresh" not in told
    few += ["stages.0.learn_table=false"]
    assert main(["train", str(text), *few, "--steps", "2", "--init-from", "stories-small", "--out", second + "2"]) == 2
    assert "no stage learns the table" in capsys.readouterr().err


def test_the_bar_names_the_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "watched", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["train", "test", *SHORT, "--out", str(tmp_path / "run")]) == 0
    assert "stage mse (2 of 2)" in capsys.readouterr().err
