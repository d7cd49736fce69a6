"""Unigram entropy of samples: how varied the words of one text are.

The entropy of a sample is that of its own token counts, in nats; the number reported is the mean over samples. It is at
most the logarithm of the length, so lengths must match before two values are compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from convergeflow.evaluation.estimate import Estimate, Floats, mean


def sample_entropies(samples: Sequence[ArrayLike]) -> Floats:
    """Entropy of each sample's token counts in nats, [n]; samples may differ in length."""
    values = np.zeros(len(samples))
    for i, ids in enumerate(samples):
        _, counts = np.unique(np.asarray(ids), return_counts=True)
        if len(counts):
            share = counts / counts.sum()
            values[i] = -float(share @ np.log(share))
    return values + 0.0  # a single word gives -0.0


def unigram_entropy(samples: Sequence[ArrayLike]) -> Estimate:
    """Mean over samples of their unigram entropy, in nats."""
    return mean(sample_entropies(samples))
