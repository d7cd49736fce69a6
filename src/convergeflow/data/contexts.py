"""Which tokens can stand in each other's place: vectors of tokens by counting what stands around them.

For every token: how much more often than by chance each frequent token stands one or two places before or after it
(positive pointwise mutual information), reduced to a few dimensions by a singular value decomposition. Tokens with the
same neighbours get the same direction. It takes seconds, and a network of minutes has no time to learn it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.linalg import svds

OFFSETS = {-2: 0.5, -1: 1.0, 1: 1.0, 2: 0.5}
"""Where a neighbour stands, and how much it counts."""
CONTEXTS = 1000
"""Frequent tokens that are looked for as neighbours."""
SMOOTHING = 0.75
"""Exponent of the neighbours' frequencies: rare neighbours would say too much."""
SHARE = 0.6
"""Of the squared length of a row of `mixed`, what the vector of a frequent token makes up."""


def context_vectors(tokens: NDArray[np.integer], vocabulary: int, width: int) -> NDArray[np.float64]:
    """Unit rows [vocabulary, width] from a text [n]; zeros for a token of which nothing is known."""
    text = np.asarray(tokens, dtype=np.int64).reshape(-1)
    counts = np.bincount(text, minlength=vocabulary).astype(np.float64)
    around = sparse.hstack([weight * _surprise(text, counts, offset) for offset, weight in OFFSETS.items()]).tocsr()
    rank = min(width, min(around.shape) - 1)
    # Frequent tokens decide what the directions are, but not alone.
    weighted = sparse.diags(counts**0.25) @ around
    _, strengths, directions = svds(weighted, k=rank, v0=np.ones(min(around.shape)))
    strong = strengths > 1e-9 * strengths.max()
    strengths, directions = strengths[strong], directions[strong]
    largest = np.abs(directions).argmax(1)
    directions *= np.sign(directions[np.arange(len(directions)), largest])[:, None]  # a sign is a matter of chance
    vectors = around @ directions.T / np.sqrt(strengths)
    seen = np.asarray(around.sum(1)).ravel() > 0
    vectors[seen] -= np.average(vectors[seen], axis=0, weights=np.sqrt(counts[seen]))
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors = np.divide(vectors, lengths, out=np.zeros_like(vectors), where=(lengths > 0) & seen[:, None])
    return np.pad(vectors, ((0, 0), (0, width - vectors.shape[1])))


def _surprise(tokens: NDArray[np.int64], counts: NDArray[np.float64], offset: int) -> sparse.csr_matrix:
    """Positive pointwise mutual information of tokens and the frequent ones `offset` places on, [V, CONTEXTS]."""
    frequent = np.argsort(-counts, kind="stable")[:CONTEXTS]
    column = np.full(len(counts), -1)
    column[frequent] = np.arange(len(frequent))
    words, beside = (tokens[:-offset], tokens[offset:]) if offset > 0 else (tokens[-offset:], tokens[:offset])
    known = column[beside] >= 0
    pairs = np.ones(int(known.sum())), (words[known], column[beside[known]])
    found = sparse.coo_matrix(pairs, shape=(len(counts), len(frequent))).tocsr().tocoo()
    together, word, other = found.data, counts[found.row], counts[frequent][found.col]
    expected = other**SMOOTHING / (counts[frequent] ** SMOOTHING).sum()
    surprise = np.maximum(np.log(together / word / expected), 0.0)
    # What was seen once or twice is believed less (Pantel and Lin 2002).
    surprise *= together / (together + 1) * np.minimum(word, other) / (np.minimum(word, other) + 1)
    return sparse.csr_matrix((surprise, (found.row, found.col)), shape=found.shape)


def mixed(rows: NDArray[np.floating], tokens: NDArray[np.integer]) -> NDArray[np.float64]:
    """Rows [V, width] turned towards the vectors of their tokens; each keeps its length.

    What is left of the row itself keeps tokens apart that stand in the same places. The rarer a token, the more of it.
    """
    rows = np.asarray(rows, dtype=np.float64)
    counts = np.bincount(np.asarray(tokens).reshape(-1), minlength=len(rows))[:, None]
    vectors = context_vectors(tokens, *rows.shape)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    share = SHARE * counts / (counts + 1)
    turned = np.sqrt(share) * vectors + np.sqrt(1 - share) * rows / lengths
    return turned / np.linalg.norm(turned, axis=1, keepdims=True) * lengths
