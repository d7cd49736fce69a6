"""Simple English by chapter: a Bible from a package of `pythonbible`, read as data.

The packages hold a Python module of one call, `Bible(version, text, starts, ends, ...)`. It is parsed, never imported:
the call's second argument is the whole text, the third and fourth say where each verse starts and ends, by numbers
`book * 1_000_000 + chapter * 1_000 + verse`. A document is a chapter. The same chapters are held out in every
translation, so that a model may go from one to the next.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from convergeflow.data.fetch import fetched
from convergeflow.data.sources import Document, Progress
from convergeflow.errors import ConvergeFlowError
from convergeflow.files import file_hash

MODULE = "plain_text_readers_bible.py"

_MARKS = re.compile(r"\\+\d+:\d+\\+|[\\*+\[\]]+")
"""What is no part of the text: verse numbers of other editions (as in \\69:30\\), gaps, brackets around added words."""


def is_held_out(book: int, chapter: int) -> bool:
    """One chapter in twenty; where the first falls depends on the book."""
    return (7 * book + chapter) % 20 == 0


class Chapters:
    """The chapters of one translation."""

    def __init__(self, name: str, file: Path, *, limit: int | None = None) -> None:
        self.name = name
        self._file = file
        self._limit = limit
        self._texts: dict[tuple[int, int], str] = {}

    def key(self) -> dict[str, Any]:
        return {"chapters": file_hash(self._file), "limit": self._limit}

    def survey(self, progress: Progress) -> None:
        progress("reading", 0, None)
        self._texts = dict(list(read_chapters(self._file).items())[: self._limit])

    def documents(self) -> Iterator[Document]:
        for place, text in self._texts.items():
            yield Document(text, "heldout" if is_held_out(*place) else "train")

    def describe(self) -> dict[str, Any]:
        facts = {"name": self._file.name, "bytes": self._file.stat().st_size, "sha256": file_hash(self._file)}
        return {"kind": "chapters", "files": [facts], "documents": len(self._texts)}

    def split_rule(self) -> str:
        return "chapters with (7 * book + chapter) % 20 == 0"


def read_chapters(file: Path) -> dict[tuple[int, int], str]:
    """(book, chapter) -> text, in the book's order, without marks and with single spaces."""
    try:
        calls = [node.value for node in ast.parse(file.read_bytes()).body if isinstance(node, ast.Assign)]
        _, text, starts, ends = map(_literal, calls[0].args[:4])  # type: ignore[attr-defined]
        # The places were counted in the text as its file writes it, where a backslash is two.
        text = text.replace("\\", "\\\\")
        if max(ends.values()) != len(text):
            raise ValueError(f"the last verse ends at {max(ends.values())} of {len(text)} characters")
        chapters: dict[tuple[int, int], list[str]] = {}
        for verse, start in starts.items():
            chapters.setdefault((verse // 1_000_000, verse // 1_000 % 1_000), []).append(text[start : ends[verse]])
    except (SyntaxError, ValueError, TypeError, LookupError, AttributeError) as failure:
        raise ConvergeFlowError(f"{file} is not the module it should be: {failure}; fetch it again") from failure
    return {place: " ".join(_MARKS.sub(" ", "".join(verses)).split()) for place, verses in chapters.items()}


def _literal(node: ast.expr) -> Any:
    """The value of a literal; the version is a name and nobody asks for it."""
    return None if isinstance(node, ast.Attribute) else ast.literal_eval(node)


def _chapters(name: str, *, limit: int | None = None) -> Chapters:
    return Chapters(name, fetched(name) / MODULE, limit=limit)


basic = partial(_chapters, "basic")
kjv = partial(_chapters, "kjv")
asv = partial(_chapters, "asv")
