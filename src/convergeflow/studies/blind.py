"""A blind look: texts of several sources in one shuffled list that does not say whose they are, and a key beside it.

The first texts of every source are taken, none is chosen, and the order depends on the seed alone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convergeflow.errors import UserError
from convergeflow.evaluation.reference import corpus_reference
from convergeflow.randomness import derive_seed
from convergeflow.results.sample_file import read_samples
from convergeflow.training.build import open_corpus
from convergeflow.training.config import resolve


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


def generated(path: str | Path) -> tuple[list[Text], str]:
    """The texts of a sample file, and how they were made."""
    samples = read_samples(path)
    if any(not isinstance(sample.get("text"), str) for sample in samples):
        raise UserError(f"{path} has ids without text: its model had no tokenizer")
    texts = [Text(sample["text"], f"seed {sample.get('seed')}") for sample in samples]
    return texts, f"{samples[0].get('model')}, NFE {samples[0].get('nfe')}"


def real(recipe: str, num: int) -> tuple[list[Text], str]:
    """Held-out texts of the corpus of a recipe, and what they are."""
    config = resolve(recipe, [])
    reference = corpus_reference(open_corpus(config), num, config.corpus.length)
    if reference.tokenizer is None or reference.real is None:
        raise UserError(f"the corpus of {recipe} has no tokenizer to write its text with")
    rows = [reference.tokenizer.decode([int(token) for token in row]) for row in reference.real]
    texts = [Text(text, f"block {index}") for index, text in enumerate(rows)]
    return texts, f"held-out blocks of {Path(recipe).stem}"


def shuffled(sources: Mapping[str, Sequence[Text]], num: int, seed: int = 0) -> list[Entry]:
    """`num` texts of every source under new numbers, from 1."""
    if len(sources) < 2:
        raise UserError("a blind look needs at least two sources")
    for name, texts in sources.items():
        if len(texts) < num:
            raise UserError(f"{name} has {len(texts)} texts, not {num}: make more, or lower `num`")
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
