"""Which n-grams occur in a training text that is too large to be searched for every question.

A Bloom filter is built once and kept beside the corpus: an n-gram sets four bits of one 64-bit word. It never misses an
n-gram that is there, and takes a share f of the others for one. How large f is follows from the filter itself, so that
`training_overlap` takes it out: with m n-grams the standard error of what is left is sqrt(f (1 - f) / m). Texts of up
to `SMALL` tokens are searched exactly and have no filter.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from filelock import FileLock
from numpy.typing import NDArray

from convergeflow.data.corpus import Corpus
from convergeflow.data.stream import mix
from convergeflow.evaluation.ngrams import Codes, ngram_codes
from convergeflow.files import cache_folder, replacing, write_json

SMALL = 1 << 25
"""Tokens that are searched one by one."""
BITS = 12
"""Bits of the filter for each n-gram; f is then about 1.2 %."""

LEAST_MEMORY = 1 << 28
"""Bytes of the filter that are made at once even where memory is short."""

_FORMAT = 1
_SHIFTS = (40, 46, 52, 58)  # each takes six bits of the hash: a place in the word
_PIECE = 1 << 22  # tokens at once

Report = Callable[[int], None]
"""Called with the number of n-grams that are done."""


class NgramIndex:
    """The n-grams of a corpus's training sequences; n-grams never cross the edge of a sequence."""

    def __init__(self, corpus: Corpus, n: int) -> None:
        self.corpus, self.n = corpus, n

    @property
    def shape(self) -> tuple[int, int]:
        """Of the training text, [sequences, length]."""
        return len(self.corpus.train), self.corpus.length

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def num_ngrams(self) -> int:
        return len(self) * max(0, self.corpus.length - self.n + 1)

    @property
    def num_words(self) -> int:
        # Odd, so that the rest of a division depends on all bits of a hash.
        return max(1, BITS * self.num_ngrams // 64) | 1

    @cached_property
    def _folder(self) -> Path:
        """Beside the corpus, or in the cache where the corpus may only be read."""
        if os.access(self.corpus.folder, os.W_OK):
            return self.corpus.folder
        return cache_folder() / "overlap" / self.corpus.fingerprint

    @property
    def _facts(self) -> dict[str, Any]:
        """What a filter must say of itself to be this one's."""
        return {"format": _FORMAT, "n": self.n, "corpus": self.corpus.fingerprint, "words": self.num_words}

    @property
    def is_built(self) -> bool:
        try:
            noted = json.loads((self._folder / f"ngrams-{self.n}.json").read_text(encoding="utf-8"))
            size = (self._folder / f"ngrams-{self.n}.bloom").stat().st_size
        except (OSError, ValueError):
            return False
        return size == 8 * self.num_words and all(noted.get(key) == value for key, value in self._facts.items())

    def build(self, report: Report = lambda done: None) -> None:
        """Read the whole text and write the filter, unless it is there."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with FileLock(str(self._folder / f".ngrams-{self.n}.lock")):
            if self.is_built:
                return
            with replacing(self._folder / f"ngrams-{self.n}.bloom") as draft:
                words = np.memmap(draft, dtype="<u8", mode="w+", shape=(self.num_words,))
                share = self._fill(words, report)
                words.flush()
                del words
            write_json(self._folder / f"ngrams-{self.n}.json", {**self._facts, "false_positives": share})

    def _fill(self, words: NDArray[Any], report: Report) -> float:
        """Set the bits of every n-gram; the share of all other n-grams that would be found."""
        # Bits are set all over a part of the filter: a part must fit into memory, and the text is read once for each.
        parts = math.ceil(words.nbytes / max(psutil.virtual_memory().available // 2, LEAST_MEMORY))
        rows, train = max(1, _PIECE // self.corpus.length), self.corpus.train
        expected = 0.0
        for part in range(parts):
            first, last = part * len(words) // parts, (part + 1) * len(words) // parts
            own = np.zeros(last - first, dtype=np.uint64)
            for row in range(0, len(train), rows):
                codes = ngram_codes(np.asarray(train[row : row + rows]), self.n, self.corpus.vocabulary)
                places, masks = self._bits(codes.ravel())
                if parts > 1:
                    here = (places >= first) & (places < last)
                    places, masks = places[here] - first, masks[here]
                _set(own, places, masks)
                done = (part * len(train) + min(row + rows, len(train))) / (parts * len(train))
                report(round(done * self.num_ngrams))
            words[first:last] = own
            for start in range(0, len(own), _PIECE):
                expected += float(((np.bitwise_count(own[start : start + _PIECE]) / 64.0) ** len(_SHIFTS)).sum())
        return expected / len(words)

    def _bits(self, codes: Codes) -> tuple[NDArray[np.int64], Codes]:
        """The word of each n-gram, and its bits there."""
        hashes = mix(codes)
        masks = np.zeros_like(hashes)
        for shift in _SHIFTS:
            masks |= np.uint64(1) << ((hashes >> np.uint64(shift)) & np.uint64(63))
        return (hashes % np.uint64(self.num_words)).astype(np.int64), masks

    @cached_property
    def _words(self) -> NDArray[Any]:
        self.build()
        return np.memmap(self._folder / f"ngrams-{self.n}.bloom", dtype="<u8", mode="r")

    @cached_property
    def false_positives(self) -> float:
        """The share f of n-grams that are not in the text and are found."""
        self.build()
        noted = json.loads((self._folder / f"ngrams-{self.n}.json").read_text(encoding="utf-8"))
        return float(noted["false_positives"])

    def contains(self, codes: Codes) -> NDArray[np.bool_]:
        """Which n-grams are in the text, or seem to be."""
        unique, where = np.unique(codes, return_inverse=True)
        places, masks = self._bits(unique)
        order = np.argsort(places)  # a file on disk is read from one end to the other
        found = np.zeros(len(unique), dtype=bool)
        found[order] = (self._words[places[order]] & masks[order]) == masks[order]
        return found[where].reshape(codes.shape)


def _set(words: NDArray[Any], places: NDArray[np.int64], masks: Codes) -> None:
    """words[places] |= masks, where places may be equal: of those one wins, and the others try again."""
    while len(places):
        words[places] |= masks
        lost = (words[places] & masks) != masks
        places, masks = places[lost], masks[lost]


def training_text(corpus: Corpus, n: int) -> NDArray[Any] | NgramIndex:
    """The training sequences of a corpus, or an index of their n-grams where there are too many to search."""
    return corpus.train if corpus.train.size <= SMALL else NgramIndex(corpus, n)
