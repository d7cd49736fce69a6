from __future__ import annotations

import json
from pathlib import Path

import pytest

from convergeflow.cli.main import main

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
        (["test", "--init-from", "nowhere"], "no model.safetensors"),
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


def test_dry_run_prints_and_trains_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["train", "test", "batch=4", "device=cpu", "--dry-run", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "command line" in text and "parameters" in text and "time per step" in text
    assert not out.exists()
    assert main(["train", "test", "device=cpu", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["estimate"]["parameters"] > 0
