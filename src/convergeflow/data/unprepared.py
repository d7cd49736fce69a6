"""Text that nobody prepared: one look at it, and the settings of `prepare` that suit it, each with its reason.

A small flow learns whole words better than pieces (docs/log/basic-small.md), and nothing about a word that it meets
only a few times. So the vocabulary is the words that come often enough; bytes write the rest.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import pre_tokenizers

from convergeflow.data.sources import find_files, read_texts
from convergeflow.data.tokenizer import Tokenizer
from convergeflow.errors import UserError

SAMPLE = 1 << 21
"""Bytes of text that are looked at."""
OFTEN = 8
"""Times that a word must come to be a token of its own."""
MOST_TOKENS, FEWEST_TOKENS = 4096, 384
"""Of a vocabulary that is chosen: a larger one makes every step of a small model slower; bytes alone take 257."""
COVERED = 0.7
"""Share of the words that must be tokens of their own; text with fewer (no spaces, no words) gets pieces instead."""
PIECES = 3
"""Tokens that a word takes if it is none itself, about."""
HELD_OUT = 256
"""Sequences that are held out if that is a fair part of the text: half to score, half to compare with."""
LEAST_SHARE, MOST_SHARE = 0.02, 0.1
LENGTH, SHORT_LENGTH, FEW = 64, 32, 400
"""Tokens in a sequence, and in one of a text that has fewer than so many of the longer ones."""


class Decision(NamedTuple):
    """Something that was decided for the user, and why."""

    what: str
    value: str
    why: str


@dataclass(frozen=True)
class Look:
    """What a look at text files tells."""

    files: int
    bytes: int
    """Of all files."""
    text_field: str
    words: Counter[str]
    """Of the sample, with the space before each, as byte-level tokenizers cut text."""
    scale: float
    """The whole text is so many times the sample."""
    text: str
    """The beginning of the sample."""


def look(paths: Sequence[Path]) -> Look:
    """Read the beginning of every file, two megabytes of all."""
    files, _ = find_files(paths)
    field = _longest_field(files)
    total = sum(file.stat().st_size for file in files)
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words: Counter[str] = Counter()
    share, parts = min(1.0, SAMPLE / max(1, total)), list[str]()
    for text, _ in read_texts(files, field, None, share=share):
        words.update(word for word, _ in split.pre_tokenize_str(text))
        if len(parts) < 100:
            parts.append(text[: 1 << 14])
    if not words:
        raise UserError(f"there is no text in {', '.join(map(str, paths[:3]))}")
    return Look(len(files), total, field, words, 1 / share, "\n".join(parts))


def _longest_field(files: Sequence[Path]) -> str:
    """`text`, unless the first rows of JSON lines have no such field: then the one with most text."""
    letters: Counter[str] = Counter()
    for file in files:
        for row in _first_rows(file):
            if "text" in row:
                return "text"
            letters.update({name: len(value) for name, value in row.items() if isinstance(value, str)})
    return letters.most_common(1)[0][0] if letters else "text"


def _first_rows(file: Path, most: int = 20) -> Iterator[Mapping[str, Any]]:
    if file.suffix.lower() not in (".jsonl", ".ndjson"):
        return
    with open(file, encoding="utf-8", errors="replace") as lines:
        for _, line in zip(range(most), lines, strict=False):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                return  # the reader refuses it, with the line
            if isinstance(row, dict):
                yield row


def can_write(tokenizer: Tokenizer, text: str) -> bool:
    """Whether a tokenizer knows how to write a text; one of given words alone does not."""
    try:
        tokenizer.encode(text)
    except UserError:
        return False
    return True


def settings(found: Look, given: Mapping[str, Any], most_bytes: float) -> tuple[dict[str, Any], list[Decision]]:
    """Arguments of `prepare` for a text, and what was chosen; what is `given` stays.

    `most_bytes` is how much text there is time for.
    """
    chosen: dict[str, Any] = dict(given)
    choices: list[Decision] = []
    if found.text_field != "text":
        chosen["text_field"] = found.text_field
        choices.append(Decision("text field", found.text_field, "no field is called text, and this one has most text"))
    if "tokenizer" not in given:
        choices.append(_tokenizer(found, chosen))
    tokens = _num_tokens(found, chosen.get("vocabulary") or MOST_TOKENS)
    used = min(1.0, most_bytes / max(1, found.bytes))
    if used < 1:
        chosen["share"] = used
        why = "there is no time to read more; the same part of every file, from its beginning"
        choices.append(Decision("text", f"the first {used:.0%} of {found.bytes / 1e6:,.0f} MB", why))
    tokens *= used
    if "length" not in given:
        short = tokens < FEW * LENGTH
        chosen["length"] = SHORT_LENGTH if short else LENGTH
        why = f"the text would fill fewer than {FEW} sequences of {LENGTH}" if short else "the length of small recipes"
        choices.append(Decision("sequences", f"{chosen['length']} tokens", why))
    share = min(MOST_SHARE, max(LEAST_SHARE, HELD_OUT * chosen["length"] / tokens))
    chosen["heldout_share"] = round(share, 3)
    number = round(share * tokens / chosen["length"])
    choices.append(Decision("held out", f"{share:.1%} of the text", f"about {number:,} sequences to measure on"))
    return chosen, choices


def _tokenizer(found: Look, chosen: dict[str, Any]) -> Decision:
    """Whole words where the text has words, else byte-level pieces; fills in `chosen`."""
    total = found.words.total()
    # The sample stands for the whole text: a word that comes once in a tenth of it comes ten times.
    enough = max(2.0, OFTEN / found.scale)
    often = [word for word, count in found.words.most_common(MOST_TOKENS) if count >= enough and len(word) > 1]
    covered = sum(count for word, count in found.words.items() if len(word) == 1) + sum(
        found.words[word] for word in often
    )
    if covered / total < COVERED:
        size = chosen.setdefault("vocabulary", _size(found.bytes // 400))
        chosen["tokenizer"] = "bpe"
        why = (
            f"only {covered / total:.0%} of what stands between spaces comes often enough to be a token: pieces instead"
        )
        return Decision("tokenizer", f"bpe, {size} tokens", why)
    size = chosen.setdefault("vocabulary", _size(257 + len(often)))
    chosen["tokenizer"] = "word-byte"
    why = f"{covered / total:.0%} of the words are tokens; rarer ones are written in pieces, so every text can be"
    return Decision("tokenizer", f"word-byte, {size} tokens", why)


def _size(wanted: int) -> int:
    """A vocabulary within bounds."""
    return max(FEWEST_TOKENS, min(MOST_TOKENS, wanted))


def _num_tokens(found: Look, vocabulary: int) -> float:
    """How many tokens the whole text has, about."""
    known = sum(count for _, count in found.words.most_common(max(1, vocabulary - 257)))
    rest = found.words.total() - known
    return (known + PIECES * rest) * found.scale
