"""Chapters of a stand-in for the wheel's module: places counted with doubled backslashes, marks, what is held out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from convergeflow.data import bibles
from convergeflow.data.bibles import is_held_out, read_chapters
from convergeflow.data.prepare import prepare
from convergeflow.errors import ConvergeFlowError, UserError

VERSES = {
    1_001_001: "At the first there was light.",
    1_001_002: " And it was[] good;",
    1_002_001: " Then *** they went\nto rest.",
    19_069_001: "A song.\\69:1\\Be glad, [all] men.",
    19_069_002: "\\69:2\\Give praise.\\\\69:3\\Amen.",
}


def module(verses: dict[int, str]) -> str:
    """A module as the packages write it: places count characters of the text with each backslash written twice."""
    starts, ends, place = {}, {}, 0
    for number, verse in verses.items():
        starts[number] = place
        place += len(verse) + verse.count("\\")
        ends[number] = place
    return (
        "raise RuntimeError('never imported')\nfrom pythonbible.books import Book\n"
        f"bible = Bible(Version.BIBLE_IN_BASIC_ENGLISH, {''.join(verses.values())!r}, {starts}, {ends}, "
        "{Book.GENESIS: {1: 2}}, {Book.GENESIS: 'Genesis'}, False)\n"
    )


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a module where a fetched one would be."""
    monkeypatch.setattr(bibles, "fetched", lambda name: tmp_path)

    def put(text: str) -> Path:
        (tmp_path / bibles.MODULE).write_text(text, encoding="utf-8")
        return tmp_path / bibles.MODULE

    return put


def test_chapters_are_cut_at_the_verses_and_marks_are_gone(shelf: Callable[[str], Path]) -> None:
    assert read_chapters(shelf(module(VERSES))) == {
        (1, 1): "At the first there was light. And it was good;",
        (1, 2): "Then they went to rest.",
        (19, 69): "A song. Be glad, all men. Give praise. Amen.",
    }


def test_one_chapter_in_twenty_is_held_out() -> None:
    held = [(book, chapter) for book in range(1, 67) for chapter in range(1, 41) if is_held_out(book, chapter)]
    assert len(held) == 66 * 2  # two of any forty chapters
    assert (1, 13) in held and (2, 6) in held and (1, 6) not in held


@pytest.mark.parametrize("name", ["basic", "kjv", "asv"])
def test_a_corpus_by_name(name: str, shelf: Callable[[str], Path], cache: Path) -> None:
    verses = {1_000_000 + 1_000 * chapter + 1: f" Day {chapter} was good and long. " * 9 for chapter in range(1, 41)}
    shelf(module(verses))
    corpus = prepare(name, tokenizer="word-byte", vocabulary=300, length=16)
    assert corpus.name == name and corpus.tokenizer.kind == "word-byte"
    text = corpus.tokenizer.decode(corpus.heldout.ravel())
    assert {chapter for chapter in range(1, 41) if f"Day {chapter} " in text} == {13, 33}
    text = corpus.tokenizer.decode(corpus.train.ravel())
    assert {chapter for chapter in range(1, 41) if f"Day {chapter} " in text} == set(range(1, 41)) - {13, 33}
    assert corpus.manifest["source"]["documents"] == 40
    assert len(prepare(name, tokenizer="word-byte", vocabulary=300, length=16, documents=20).train) < len(corpus.train)


def test_what_is_not_such_a_module_is_refused(shelf: Callable[[str], Path], cache: Path) -> None:
    cut = module(VERSES).replace("Amen", "Am")
    for text in ("def", "x = 1", "", cut, "bible = Bible(Version.X, open('f').read(), {}, {})"):
        with pytest.raises(ConvergeFlowError, match="is not the module it should be"):
            read_chapters(shelf(text))


def test_a_corpus_that_was_not_fetched(cache: Path) -> None:
    with pytest.raises(UserError, match="convergeflow fetch basic"):
        prepare("basic")
