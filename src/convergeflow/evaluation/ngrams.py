"""n-grams of token blocks as single integers, so that counting and looking up are array operations.

Codes are exact (positional notation in base V) while V^n fits 63 bits, and 64-bit hashes with fixed random odd
multipliers beyond that; with m different n-grams a collision has probability below m^2/2^64. n-grams never cross the
edge of a block.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from convergeflow.errors import UserError

Codes = NDArray[np.uint64]


def ngram_codes(ids: NDArray[np.integer], n: int, vocabulary: int) -> Codes:
    """One code per n-gram, [blocks, length - n + 1]."""
    if ids.ndim != 2:
        raise UserError(f"token ids must be [blocks, length], not {ids.shape}")
    if ids.shape[1] < n:
        raise UserError(f"blocks of {ids.shape[1]} tokens hold no {n}-grams")
    tokens = np.ascontiguousarray(ids).astype(np.uint64)
    places = ids.shape[1] - n + 1
    codes = np.zeros((len(ids), places), dtype=np.uint64)
    multipliers = _multipliers(n, vocabulary)
    with np.errstate(over="ignore"):  # hashes live modulo 2^64
        for k in range(n):
            codes += tokens[:, k : k + places] * multipliers[k]
    return codes


def _multipliers(n: int, vocabulary: int) -> Codes:
    if n * np.log2(max(vocabulary, 2)) < 63:
        return np.array([vocabulary**k for k in range(n)], dtype=np.uint64)
    rng = np.random.default_rng([n, 0x5EED])
    return rng.integers(1 << 62, 1 << 63, size=n, dtype=np.uint64) | np.uint64(1)


def distinct_per_block(codes: Codes) -> NDArray[np.int64]:
    """How many different n-grams each block holds, [blocks]."""
    ordered = np.sort(codes, axis=1)
    return 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(1)


def present_in(wanted: Codes, blocks: NDArray[np.integer], n: int, vocabulary: int) -> NDArray[np.bool_]:
    """Which of the codes occur in the blocks; these may be a memory map of any size and are read piece by piece."""
    unique, where = np.unique(wanted, return_inverse=True)
    if not len(unique):
        return np.zeros(wanted.shape, dtype=bool)
    found = np.zeros(len(unique), dtype=bool)
    piece = max(1, (1 << 22) // blocks.shape[1]) if len(blocks) else 1
    for first in range(0, len(blocks), piece):
        codes = ngram_codes(np.asarray(blocks[first : first + piece]), n, vocabulary).ravel()
        # Only the few wanted codes are in order: sorting millions of the corpus' codes for each question is slow.
        place = np.minimum(np.searchsorted(unique, codes), len(unique) - 1)
        found[place[unique[place] == codes]] = True
    return found[where].reshape(wanted.shape)
