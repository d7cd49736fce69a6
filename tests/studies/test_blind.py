"""A blind look shows everything once and gives nothing away."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from convergeflow.cli.main import main
from convergeflow.errors import UserError
from convergeflow.studies.blind import Text, key_page, page, shuffled

SOURCES = {
    name: [Text(f"{letter * 3} {i} *", f"seed {i}") for i in range(6)] for name, letter in (("ours", "x"), ("ar", "y"))
}


def test_every_text_is_there_once_and_the_order_is_the_seeds() -> None:
    entries = shuffled(SOURCES, 4, seed=1)
    assert sorted(entry.text for entry in entries) == sorted(f"{c * 3} {i} *" for c in "xy" for i in range(4))
    assert entries == shuffled(SOURCES, 4, seed=1) != shuffled(SOURCES, 4, seed=2)
    assert [entry.source for entry in entries] != ["ours"] * 4 + ["ar"] * 4
    shown, key = page(entries, "Look"), key_page(entries, "Look", {"command": "c"})
    for number, entry in enumerate(entries, start=1):
        assert f"**{number}**\n\n    {entry.text}\n" in shown
        line = next(line for line in key.splitlines() if line.startswith(f"**{entry.source}**"))
        assert f" {number} ({entry.origin})" in line
    assert "seed" not in shown


def test_too_little_is_refused() -> None:
    with pytest.raises(UserError, match="ar has 6 texts, not 7"):
        shuffled({"ar": SOURCES["ar"], "ours": SOURCES["ours"] * 2}, 7)
    with pytest.raises(UserError, match="two sources"):
        shuffled({"ar": SOURCES["ar"]}, 2)
    with pytest.raises(UserError, match="empty"):
        shuffled({**SOURCES, "mute": [Text(" ", "")] * 6}, 2)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        lines = [{"seed": i, "ids": [1, 2], "text": f"{name}{i}", "nfe": 8, "model": "m"} for i in range(3)]
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert main(["blind", "a.jsonl", "other=b.jsonl", "--num", "3", "--out", "look"]) == 0
    assert all(f"    {name}{i}" in Path("look/blind.md").read_text() for name in "ab" for i in range(3))
    assert "**other**" in Path("look/key.md").read_text() and "m, NFE 8" in Path("look/key.md").read_text()
    Path("lr=0.1").mkdir()
    Path("b.jsonl").rename("lr=0.1/b.jsonl")
    assert main(["blind", "a.jsonl", "lr=0.1/b.jsonl", "--num", "3", "--out", "look"]) == 0
    assert main(["blind", "a.jsonl", "other=lr=0.1/b.jsonl", "--num", "3", "--out", "look"]) == 0
    Path("lr=0.1/b.jsonl").rename("b.jsonl")
    capsys.readouterr()
    for words, message in (
        (["a.jsonl", "a.jsonl"], "is taken"),
        (["a.jsonl", "=b.jsonl"], "has no label"),
        (["a.jsonl", "nothing.jsonl"], "does not exist"),
        (["a.jsonl", "b.jsonl", "--num", "4"], "has 3 texts, not 4"),
        (["a.jsonl", "--real", "storys"], "stories"),
    ):
        assert main(["blind", *words]) == 2
        error = capsys.readouterr().err
        assert message in error and len(error.strip().splitlines()) == 1
