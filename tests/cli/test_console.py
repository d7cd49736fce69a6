"""What commands print: tables and JSON on stdout, notes on stderr, bars only where somebody watches."""

from __future__ import annotations

import json

import pytest

from convergeflow.cli import console


def test_a_table_aligns_numbers_right_and_words_left(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_table(["name", "value"], [["a", 3], {"name": "long", "value": 12.34567}, ["x", None]])
    assert capsys.readouterr().out == "name  value\na         3\nlong  12.35\nx         -\n"


def test_a_table_is_never_cut_at_the_width_of_the_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    console.print_table(["text"], [["x" * 300]])
    assert "x" * 300 in capsys.readouterr().out


def test_a_result_is_a_table_with_sentences_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    result = {"rows": [1]}, ["name"], [["a"]], ["a is [better]"]
    console.print_result(*result, as_json=False)
    assert capsys.readouterr().out == "name\na\na is [better]\n"
    console.print_result(*result, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"rows": [1]}


def test_json_keeps_letters(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_json({"text": "naïve γ", "n": 1})
    out = capsys.readouterr().out
    assert json.loads(out) == {"text": "naïve γ", "n": 1}
    assert "naïve γ" in out


def test_notes_go_to_stderr_and_can_be_silenced(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CONVERGEFLOW_QUIET", raising=False)
    console.note("reading")
    monkeypatch.setenv("CONVERGEFLOW_QUIET", "1")
    console.note("hidden")
    console.warn("shown")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "reading\nwarning: shown\n")


def test_a_bar_is_drawn_only_for_somebody_who_watches(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "watched", lambda: False)
    with console.progress("sampling", 3) as bar:
        bar.advance(loss=1.5)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(console, "watched", lambda: True)
    with console.progress("sampling", 3) as bar:
        for _ in range(3):
            bar.advance(loss=1.5)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "sampling" in captured.err
    assert "3/3" in captured.err
