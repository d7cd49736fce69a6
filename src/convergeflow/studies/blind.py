"""A blind look: texts of several sources in one shuffled list that does not say whose they are, and a key beside it.

The first texts of every source are taken, none is chosen, and the order depends on the seed alone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from convergeflow.errors import UserError
from convergeflow.randomness import derive_seed


@dataclass(frozen=True)
class Text:
    """A text and where in its source it stood (a seed, or the number of a held-out block)."""

    text: str
    origin: str


@dataclass(frozen=True)
class Entry:
    """A numbered text of the list."""

    number: int
    source: str
    text: Text


def shuffled(sources: Mapping[str, Sequence[Text]], num: int, seed: int = 0) -> list[Entry]:
    """`num` texts of every source under new numbers, from 1."""
    if len(sources) < 2:
        raise UserError("a blind look needs at least two sources")
    for name, texts in sources.items():
        if len(texts) < num:
            raise UserError(f"{name} has {len(texts)} texts, not {num}: make more, or lower --num")
        if not any(text.text.strip() for text in texts[:num]):
            raise UserError(f"all texts of {name} are empty")
    entries = [(name, text) for name, texts in sources.items() for text in texts[:num]]
    random.Random(derive_seed(seed, "blind")).shuffle(entries)
    return [Entry(number, name, text) for number, (name, text) in enumerate(entries, start=1)]


def page(entries: Sequence[Entry], title: str) -> str:
    """The list without its sources, as Markdown."""
    sources = sorted({entry.source for entry in entries})
    lines = [
        f"# {title}",
        "",
        f"{len(entries)} texts of {len(sources)} sources in random order, as many of each, none selected. The sources "
        f"are {', '.join(sources)}; which text is whose stands in [key.md](key.md).",
        "",
    ]
    for entry in entries:
        # Indented, so that no character of a text is taken for Markdown.
        body = "\n".join(f"    {line}" for line in entry.text.text.splitlines() if line.strip()) or "    (empty)"
        lines += [f"**{entry.number}**", "", body, ""]
    return "\n".join(lines)


def key_page(entries: Sequence[Entry], title: str, facts: Mapping[str, Any]) -> str:
    """The same numbers with their sources, and how the texts were made."""
    lines = [f"# Key: {title}", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    for source in sorted({entry.source for entry in entries}):
        of = [entry for entry in entries if entry.source == source]
        listed = ", ".join(f"{entry.number} ({entry.text.origin})" for entry in of)
        lines += ["", f"**{source}**: {listed}"]
    return "\n".join(lines) + "\n"
