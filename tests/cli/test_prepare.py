"""`convergeflow prepare` and `fetch` as a user types them: results on stdout, one line per mistake, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from huggingface_hub import HfApi, errors

from convergeflow.cli.main import main
from convergeflow.data.corpus import Corpus


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CONVERGEFLOW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_stories_by_default(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    assert main(["prepare", "--blocks", "8", "--heldout-blocks", "2", "--length", "16"]) == 0
    shown = capsys.readouterr()
    assert "8 sequences of 16 tokens" in shown.out and "corpora" in shown.out
    assert "--heldout-blocks" in shown.err and "--heldout-share" not in shown.err


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


def test_what_cannot_be_prepared_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script"
    script.mkdir()
    (script / "openwebtext.py").write_text("raise SystemExit('this must never run')")
    np.arange(250, 270, dtype="<u2").tofile(tmp_path / "beyond.bin")
    (tmp_path / "torn.bin").write_bytes(b"odd")

    def no_such_revision(*_: Any, **__: Any) -> Any:
        raise errors.RevisionNotFoundError("404", response=SimpleNamespace(headers={}, request=None))  # type: ignore[arg-type]

    monkeypatch.setattr(HfApi, "dataset_info", no_such_revision)
    for source, message in (
        (f"hf:{script}", "is a loading script (openwebtext.py)"),
        ("hf:Skylion007/openwebtext@2019", "has no revision '2019'"),
        (str(tmp_path / "beyond.bin"), "holds the id 257 (at token 7), beyond the 257 of the byte tokenizer"),
        (str(tmp_path / "torn.bin"), "it is empty or truncated"),
    ):
        assert main(["prepare", source, "--tokenizer", "byte", "--length", "4"]) == 2
        shown = capsys.readouterr()
        assert message in shown.err and shown.err.count("\n") == 1 and shown.out == ""


def test_what_is_passed_over_is_listed_and_too_little_to_measure_on_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "papers"
    folder.mkdir()
    (folder / "LICENSE").write_text("some words of mine\n" * 200)
    (folder / "scan.png").write_bytes(b"\x89PNG\0")
    assert main(["prepare", str(folder), "--tokenizer", "byte"]) == 0
    shown = capsys.readouterr()
    assert "read 1 files, passed over 1:\n  scan.png: a binary file\n" in shown.err
    assert "warning: only 2 sequences are held out" in shown.err and "--heldout-share" in shown.err
    (folder / "LICENSE").write_text("some words of mine\n" * 6000)
    assert main(["prepare", str(folder), "--tokenizer", "byte"]) == 0
    assert "warning" not in capsys.readouterr().err
