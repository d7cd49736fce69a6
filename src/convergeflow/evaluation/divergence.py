"""Distance of n-gram statistics to held-out text: Jensen-Shannon, between 0 (equal) and sqrt(ln 2) = 0.833 (disjoint).

Two finite samples of one law are never at distance 0, so the distance of as much real text is given beside it: only
what exceeds that is the model's.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from convergeflow.evaluation.estimate import Estimate, mean
from convergeflow.evaluation.ngrams import ngram_codes


def jensen_shannon(ids: NDArray[np.integer], reference: NDArray[np.integer], n: int, vocabulary: int) -> Estimate:
    """sqrt of the Jensen-Shannon divergence (nats) between the n-gram shares of samples and of reference text.

    Standard error over samples with the reference held fixed: the divergence D has the influence function
    1/2 log(P/M) at P, so se(D) is that of the samples' mean of it, and se(sqrt D) = se(D)/(2 sqrt D).
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
