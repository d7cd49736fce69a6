"""The share of generated words that occur in the corpus, from samples that `evaluate --keep` or `generate --out` wrote.

A word is a run of letters, with hyphens and apostrophes inside. The first and the last word of a sample are left out: a
window may cut them. Held-out text is counted in the same way, against the training chapters alone and against all.

    python docs/results/basic-small/words.py samples.jsonl
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np

from convergeflow.data import bibles
from convergeflow.data.fetch import fetched
from convergeflow.training.build import open_corpus
from convergeflow.training.config import resolve

WORD = re.compile(r"[A-Za-z]+(?:[-'][A-Za-z]+)*")


def known_share(texts: list[str], known: set[str]) -> tuple[float, float, list[str]]:
    """Mean over texts, its standard error, and the words that are not known."""
    inner = [WORD.findall(text)[1:-1] for text in texts]
    shares = [np.mean([word in known for word in words]) for words in inner if words]
    unknown = [word for words in inner for word in words if word not in known]
    return float(np.mean(shares)), float(np.std(shares, ddof=1) / len(shares) ** 0.5), unknown


def main(path: str) -> None:
    chapters = bibles.read_chapters(fetched("basic") / bibles.MODULE)
    train = {w for place, text in chapters.items() if not bibles.is_held_out(*place) for w in WORD.findall(text)}
    every = {word for text in chapters.values() for word in WORD.findall(text)}
    lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    samples = [line["text"] for line in lines if "text" in line]
    corpus = open_corpus(resolve("basic"))
    real = [corpus.tokenizer.decode(row) for row in corpus.heldout[: len(samples)]]
    for name, texts in (("samples", samples), ("held-out text", real)):
        for what, known in (("training chapters", train), ("all chapters", every)):
            share, error, unknown = known_share(texts, known)
            print(f"{name}: {share:.2%} ± {error:.2%} of the words are in the {what}; not: {', '.join(unknown[:12])}")


if __name__ == "__main__":
    main(sys.argv[1])
