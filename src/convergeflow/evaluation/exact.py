"""Exact scores on `stories`: the law that wrote the data says how likely a generated text is.

Clean NLL exists for valid samples only; the smoothed law (a wrong word with probability eps) scores every text, and
what eps costs is shown on real data. The entropy of a block is known exactly, so "excess" has no estimate on its other
side. Reverse KL would need the sampler's own entropy, which a flow does not give.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convergeflow.data.stories import StoriesLaw, stories_law
from convergeflow.evaluation.estimate import Estimate, Floats, finite, grouped_jackknife, groups_of, mean, ratio

EPS = 1e-3
"""Probability of a wrong word in the law that scores every text."""


@dataclass(frozen=True)
class ExactScores:
    """Scores of a set of blocks of one length; NLL and entropy in nats per token."""

    metrics: dict[str, Estimate]
    slots: dict[str, float | None]
    """KL(samples || law) of each choice in nats; None where it never came up."""
    entropy: float
    """Entropy of a block under the law, nats per token, exact."""


def exact_scores(ids: NDArray[np.integer], law: StoriesLaw | None = None) -> ExactScores:
    """Everything the law can say about blocks [n, length]."""
    law = law or stories_law()
    ids = np.asarray(ids)
    num, length = ids.shape
    clean, smoothed = law.clean_nll(ids), law.smoothed_nll(ids, EPS)
    valid = np.isfinite(clean)
    entropy = law.block_entropy(length) / length
    clean_mean, smoothed_mean = mean(clean[valid] / length), mean(smoothed / length)
    groups = groups_of(num, at_most=10)
    facts = [law.facts_kept(ids[part]) for part in groups]
    counts = [law.slot_counts(ids[part]) for part in groups]
    marginals = law.slot_marginals()
    metrics = {
        "valid": mean(valid),
        "valid_stories": ratio(*law.valid_stories(ids)),
        "valid_sentences": ratio(*law.valid_sentences(ids)),
        "facts_kept": _over_groups(facts, "kept", "total", num),
        "stories_with_facts_kept": _over_groups(facts, "stories_kept", "stories", num),
        "clean_nll": clean_mean,
        "smoothed_nll": smoothed_mean,
        "clean_excess": clean_mean.map(lambda value: value - entropy, 1.0),
        "smoothed_excess": smoothed_mean.map(lambda value: value - entropy, 1.0),
        "slot_kl": grouped_jackknife(counts, lambda parts: _mean_divergence(parts, marginals), num),
    }
    slots = {
        name: finite(divergence(np.sum([part[name] for part in counts], axis=0), marginal))
        for name, marginal in marginals.items()
    }
    return ExactScores(metrics, slots, entropy)


def _over_groups(parts: Sequence[dict[str, Any]], kept: str, total: str, num: int) -> Estimate:
    """A share whose counts come per group of samples: the groups play the part of samples in its error."""
    return replace(ratio([part[kept] for part in parts], [part[total] for part in parts]), n=num)


def divergence(count: NDArray[np.int64], law: Floats) -> float:
    """KL(counts || law) in nats; nan where nothing was counted."""
    if count.sum() == 0:
        return math.nan
    share = count / count.sum()
    used = share > 0
    return float(share[used] @ np.log(share[used] / law[used]))


def _mean_divergence(parts: Sequence[dict[str, NDArray[np.int64]]], marginals: dict[str, Floats]) -> float:
    """KL over all slots, each weighted by how often it came up: nats per choice."""
    total = weight = 0.0
    for name, law in marginals.items():
        count = np.sum([part[name] for part in parts], axis=0)
        if count.sum():
            total += float(count.sum()) * divergence(count, law)
            weight += float(count.sum())
    return total / weight if weight else math.nan
