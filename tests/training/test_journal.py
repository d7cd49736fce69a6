from __future__ import annotations

from pathlib import Path

import pytest

from convergeflow.errors import UserError
from convergeflow.training.journal import Journal, read


def test_cut_back_then_continued_equals_unbroken(tmp_path: Path) -> None:
    whole = Journal(tmp_path / "a")
    broken = Journal(tmp_path / "b")
    for step in range(3):
        whole.write({"step": step, "text": "é"})
        broken.write({"step": step, "text": "é"})
    kept = broken.sync()
    broken.write({"step": 3})
    broken._file.write(b'{"step": 4, "lo')  # a crash in the middle of a line
    broken.close()
    resumed = Journal(tmp_path / "b", keep_bytes=kept)
    for journal in (whole, resumed):
        journal.write({"step": 3, "loss": 0.1})
        journal.close()
    assert (tmp_path / "a/journal.jsonl").read_bytes() == (tmp_path / "b/journal.jsonl").read_bytes()
    assert read(tmp_path / "b/journal.jsonl")[-1] == {"step": 3, "loss": 0.1}


def test_a_torn_last_line_is_left_out_when_reading(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"step": 1}\n{"ste')
    assert read(path) == [{"step": 1}]


def test_a_shortened_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_bytes(b"{}\n")
    with pytest.raises(UserError, match="shorter"):
        Journal(tmp_path, keep_bytes=100)


def test_clocks_stay_out_of_the_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.time({"step": 1, "seconds": 0.5})
    journal.close()
    assert (tmp_path / "journal.jsonl").read_bytes() == b""
    assert (tmp_path / "timing.jsonl").read_text() == '{"step": 1, "seconds": 0.5}\n'


def test_tensorboard_on_request(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    journal = Journal(tmp_path, tensorboard=True)
    journal.write({"step": 1, "loss": 2.0, "evaluate": {"ce": 1.0}})
    journal.close()
    assert list((tmp_path / "tensorboard").glob("events*"))
