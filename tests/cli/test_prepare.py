"""`convergeflow prepare` and `fetch` as a user types them: results on stdout, one line per mistake, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from convergeflow.cli.main import main
from convergeflow.data.corpus import Corpus


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CONVERGEFLOW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_stories_by_default(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    assert main(["prepare", "--blocks", "8", "--heldout-blocks", "2", "--length", "16"]) == 0
    shown = capsys.readouterr().out
    assert "8 sequences of 16 tokens" in shown and "corpora" in shown


def test_own_file_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words of mine\n" * 50)
    out = tmp_path / "corpus"
    command = ["prepare", str(tmp_path / "a.txt"), "--tokenizer", "byte", "--out", str(out), "--json"]
    assert main(command) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["fingerprint"] == Corpus.open(out).fingerprint
    assert shown["tokenizer"]["kind"] == "byte"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prepare", "storys"], "did you mean 'stories'"),
        (["prepare", "missing.txt"], "no such file: missing.txt"),
        (["prepare", "stories", "--length", "-3"], "length must be at least 1"),
        (["prepare", "sotu"], "convergeflow fetch sotu"),
        (["prepare", "stories", "--lenght", "3"], "--length"),
        (["fetch", "sotuu"], "did you mean 'sotu'"),
        (["fetch"], "NAME"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    shown = capsys.readouterr()
    assert message in shown.err and shown.err.count("\n") == 1 and shown.out == ""
