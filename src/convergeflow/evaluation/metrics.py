"""All metrics of a set of samples that need no scorer, each beside its value for real text of the same length.

They show what a low perplexity can hide: samples that repeat themselves, each other, or the training text, or whose
words and phrases occur more or less often than they should. None of the numbers is good or bad alone. What a metric is
called here is what records, reports and frontiers call it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from convergeflow.evaluation.estimate import Estimate, Floats, mean, pairwise_mean
from convergeflow.evaluation.exact import ExactScores, exact_scores
from convergeflow.evaluation.ngrams import distinct_per_block, ngram_codes, present_in
from convergeflow.evaluation.overlap import NgramIndex
from convergeflow.evaluation.reference import OVERLAP, Reference

Blocks = NDArray[np.integer]

PAIRWISE_LIMIT = 1024
"""Pairs grow with the square: at most this many samples are compared with each other."""


def sample_entropies(samples: Sequence[ArrayLike] | Blocks) -> Floats:
    """Entropy of each sample's own token counts in nats, [n]; samples may differ in length.

    It is at most the logarithm of the length, so lengths must match before two values are compared.
    """
    values = np.zeros(len(samples))
    for i, ids in enumerate(samples):
        _, counts = np.unique(np.asarray(ids), return_counts=True)
        if len(counts):
            share = counts / counts.sum()
            values[i] = -float(share @ np.log(share))
    return values + 0.0  # a single word gives -0.0


def unigram_entropy(ids: Blocks, n: int = 1, vocabulary: int = 0) -> Estimate:
    """Mean over samples of the entropy of their words; neither `n` nor the vocabulary matters."""
    return mean(sample_entropies(ids))


def repetition(ids: Blocks, n: int, vocabulary: int) -> Estimate:
    """Share of a sample's n-grams that it has said before: 1 - different/all."""
    codes = ngram_codes(ids, n, vocabulary)
    return mean(1.0 - distinct_per_block(codes) / codes.shape[1])


def pairwise_overlap(ids: Blocks, n: int, vocabulary: int) -> Estimate:
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


def training_overlap(ids: Blocks, training: Blocks | NgramIndex, n: int, vocabulary: int) -> Estimate:
    """Share of a sample's n-grams that occur in the training blocks; what an index finds by chance is taken out."""
    codes = ngram_codes(ids, n, vocabulary)
    if not isinstance(training, NgramIndex):
        return mean(present_in(codes, training, n, vocabulary).mean(1))
    chance = training.false_positives
    found = mean((training.contains(codes).mean(1) - chance) / (1.0 - chance))
    return replace(found, value=max(found.value, 0.0))


def jensen_shannon(ids: Blocks, reference: Blocks, n: int, vocabulary: int) -> Estimate:
    """Distance between the n-gram shares of samples and of reference text, from 0 (equal) to 0.833 (disjoint).

    It is the square root of the Jensen-Shannon divergence in nats, and sqrt(ln 2) = 0.833. Two finite samples of one
    law are never at distance 0: only what exceeds the distance of as much real text is the model's. Standard error over
    samples with the reference held fixed: the divergence D has the influence function 1/2 log(P/M) at P, so se(D) is
    the standard error of the samples' mean of it, and se(sqrt D) = se(D)/(2 sqrt D).
    """
    own, other = ngram_codes(ids, n, vocabulary), ngram_codes(reference, n, vocabulary)
    codes, place = np.unique(np.concatenate([own.ravel(), other.ravel()]), return_inverse=True)
    own_place, other_place = place[: own.size], place[own.size :]
    p = np.bincount(own_place, minlength=len(codes)) / own.size
    q = np.bincount(other_place, minlength=len(codes)) / other.size
    middle = 0.5 * (p + q)
    with np.errstate(divide="ignore"):
        gain_p = 0.5 * np.where(p > 0, np.log(p / middle, where=p > 0, out=np.zeros_like(p)), 0.0)
        gain_q = 0.5 * np.where(q > 0, np.log(q / middle, where=q > 0, out=np.zeros_like(q)), 0.0)
    influence = mean(gain_p[own_place].reshape(own.shape).mean(1))
    divergence = max(influence.value + float(q @ gain_q), 0.0)
    distance = math.sqrt(divergence)
    se = influence.se / (2 * distance) if distance > 0 else 0.0
    return Estimate(distance, se, len(ids))


@dataclass(frozen=True)
class Metric:
    """What is measured (with unit), on which n-grams, how, and against which text of the reference, if any."""

    about: str
    n: int
    compute: Callable[..., Estimate]
    """A function of blocks, the other text if there is one, n and the size of the vocabulary."""
    against: str | None = None

    def of(self, ids: Blocks, reference: Reference) -> Estimate | None:
        """Its value; None if the other text is missing, or a text is shorter than an n-gram."""
        texts = [ids] if self.against is None else [ids, getattr(reference, self.against)]
        if any(text is None or text.shape[1] < self.n for text in texts):
            return None
        return self.compute(*texts, self.n, reference.vocabulary)


METRICS = {
    "entropy": Metric("unigram entropy of a sample (nats)", 1, unigram_entropy),
    "repetition_4": Metric("4-grams of a sample that it said before (share)", 4, repetition),
    "pairwise_overlap_4": Metric("4-grams that two samples share (Jaccard)", 4, pairwise_overlap),
    "training_overlap_8": Metric(
        "8-grams of a sample that occur in the training text (share)", OVERLAP, training_overlap, "training"
    ),
    "js_1": Metric("distance of word shares to held-out text (0 to 0.833)", 1, jensen_shannon, "statistics"),
    "js_2": Metric("distance of 2-gram shares to held-out text (0 to 0.833)", 2, jensen_shannon, "statistics"),
    "js_4": Metric("distance of 4-gram shares to held-out text (0 to 0.833)", 4, jensen_shannon, "statistics"),
}

EXACT_ABOUT = {
    "valid": "samples that the law of the stories can write (share)",
    "valid_stories": "valid stories (share)",
    "valid_sentences": "valid sentences (share)",
    "facts_kept": "later mentions that agree with the first (share)",
    "stories_with_facts_kept": "stories whose mentions all agree (share)",
    "clean_nll": "exact NLL of the valid samples (nats per token)",
    "smoothed_nll": "NLL of all samples under the smoothed law (nats per token)",
    "clean_excess": "exact NLL of valid samples above the data's entropy (nats per token)",
    "smoothed_excess": "smoothed NLL above the data's entropy (nats per token)",
    "slot_kl": "KL of the choices to their exact probabilities (nats per choice)",
}


def about(name: str) -> str:
    """One line on a metric."""
    return METRICS[name].about if name in METRICS else EXACT_ABOUT.get(name, name)


def measure(ids: Blocks, reference: Reference) -> dict[str, dict[str, Any]]:
    """Every metric that applies: name -> value, se, n, and real, real_se, real_n for held-out text."""
    found = {name: metric.of(ids, reference) for name, metric in METRICS.items()}
    return {name: beside(here, _real(name, reference)) for name, here in found.items() if here is not None}


@lru_cache(maxsize=256)
def _real(name: str, reference: Reference) -> Estimate | None:
    """A metric of the real text: the same for every point of a frontier, so it is computed once."""
    return None if reference.real is None else METRICS[name].of(reference.real, reference)


@lru_cache(maxsize=16)
def _real_exact(reference: Reference) -> ExactScores | None:
    return None if reference.real is None else exact_scores(reference.real, reference.law)


def measure_exact(ids: Blocks, reference: Reference) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The exact scores of stories in the same form, and what does not fit a table (slots, entropy)."""
    here, real = exact_scores(ids, reference.law), _real_exact(reference)
    table = {
        name: beside(estimate, None if real is None else real.metrics[name]) for name, estimate in here.metrics.items()
    }
    return table, {"entropy_per_token": here.entropy, "slots": here.slots}


def beside(here: Estimate, real: Estimate | None) -> dict[str, Any]:
    """A metric with its value for real text."""
    row = here.describe()
    if real is not None:
        row |= {f"real{'' if key == 'value' else '_' + key}": value for key, value in real.describe().items()}
    return row
