"""What a low perplexity can hide: samples that repeat themselves, each other, or the training text.

None of these numbers is good or bad alone; each is read beside its value for held-out text of the same length.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from convergeflow.evaluation.estimate import Estimate, mean, pairwise_mean
from convergeflow.evaluation.ngrams import distinct_per_block, ngram_codes, present_in

PAIRWISE_LIMIT = 1024
"""Pairs grow with the square: at most this many samples are compared with each other."""


def repetition(ids: NDArray[np.integer], n: int, vocabulary: int) -> Estimate:
    """Share of a sample's n-grams that it has said before: 1 - different/all."""
    codes = ngram_codes(ids, n, vocabulary)
    return mean(1.0 - distinct_per_block(codes) / codes.shape[1])


def pairwise_overlap(ids: NDArray[np.integer], n: int, vocabulary: int) -> Estimate:
    """How alike two samples are: shared n-grams over n-grams of either (Jaccard), mean over all pairs.

    0 = no n-gram in common, 1 = equal sets. It does not depend on how many samples there are.
    """
    codes = ngram_codes(ids[:PAIRWISE_LIMIT], n, vocabulary)
    unique, column = np.unique(codes, return_inverse=True)
    row = np.repeat(np.arange(len(codes)), codes.shape[1])
    counts = sparse.csr_matrix(
        (np.ones(column.size), (row, column.ravel())), shape=(len(codes), len(unique))
    )  # duplicates are summed, and only presence matters
    counts.data[:] = 1.0
    shared = (counts @ counts.T).toarray()
    sizes = np.diagonal(shared)
    return pairwise_mean(shared / (sizes[:, None] + sizes[None, :] - shared))


def training_overlap(ids: NDArray[np.integer], training: NDArray[np.integer], n: int, vocabulary: int) -> Estimate:
    """Share of a sample's n-grams that occur in the training blocks."""
    found = present_in(ngram_codes(ids, n, vocabulary), training, n, vocabulary)
    return mean(found.mean(1))
