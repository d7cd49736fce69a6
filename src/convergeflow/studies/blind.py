"""A blind look: texts of several sources in one shuffled list that does not say whose they are, and a key beside it.

The first texts of every source are taken, none is chosen, and the order depends on the seed alone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from convergeflow.errors import UserError
from convergeflow.evaluation.reference import corpus_reference
from convergeflow.markup import in_page, printable
from convergeflow.randomness import derive_seed
from convergeflow.results.sample_file import read_samples
from convergeflow.training.build import open_corpus
from convergeflow.training.config import resolve


@dataclass(frozen=True)
class Text:
    """A text, where in its source it stood (a seed, or the number of a held-out sequence), and the source."""

    text: str
    origin: str
    source: str = ""


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
    texts = [Text(text, f"sequence {index}") for index, text in enumerate(rows)]
    return texts, f"held-out sequences of {Path(recipe).stem}"


def shuffled(sources: Mapping[str, Sequence[Text]], num: int, seed: int = 0) -> list[Text]:
    """`num` texts of every source in a new order."""
    if len(sources) < 2:
        raise UserError("a blind look needs at least two sources")
    for name, texts in sources.items():
        if len(texts) < num:
            raise UserError(f"{name} has {len(texts)} texts, not {num}: make more, or lower `num`")
        if not any(text.text.strip() for text in texts[:num]):
            raise UserError(f"all texts of {name} are empty")
    mixed = [replace(text, source=name) for name, texts in sources.items() for text in texts[:num]]
    random.Random(derive_seed(seed, "blind")).shuffle(mixed)
    return mixed


def page(texts: Sequence[Text], title: str) -> str:
    """The numbered list without its sources, as Markdown."""
    sources = sorted({text.source for text in texts})
    lines = [
        f"# {in_page(title)}",
        "",
        f"{len(texts)} texts of {len(sources)} sources in random order, as many of each, none selected. The sources "
        f"are {', '.join(map(in_page, sources))}; which text is whose stands in [key.md](key.md).",
        "",
    ]
    for number, text in enumerate(texts, start=1):
        # Indented, so that no character of a text is taken for Markdown.
        body = "\n".join(f"    {line}" for line in printable(text.text).split("\n") if line.strip()) or "    (empty)"
        lines += [f"**{number}**", "", body, ""]
    return "\n".join(lines)


def key_page(texts: Sequence[Text], title: str, facts: Mapping[str, Any]) -> str:
    """The same numbers with their sources, and how the texts were made."""
    lines = [f"# Key: {in_page(title)}", ""]
    lines += [f"- {in_page(name)}: {in_page(str(value))}" for name, value in facts.items()]
    for source in sorted({text.source for text in texts}):
        listed = [f"{number} ({in_page(t.origin)})" for number, t in enumerate(texts, start=1) if t.source == source]
        lines += ["", f"**{in_page(source)}**: {', '.join(listed)}"]
    return "\n".join(lines) + "\n"
