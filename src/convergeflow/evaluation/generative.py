"""Generative perplexity: from the NLL of every sample to one number with its standard error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convergeflow.errors import ConvergeFlowError
from convergeflow.evaluation.estimate import Estimate, Floats, mean, ratio


@dataclass(frozen=True)
class Scored:
    """What a scorer says of samples, in their order."""

    nll: Floats
    """Nats over the scored tokens of each sample, [n]."""
    tokens: NDArray[np.int64]
    """Scored tokens of each sample, [n]."""
    retokenised: list[list[int]] | None = None
    """The scorer's own tokens of each sample, without start token; None where it reads the ids themselves."""
    truncated: int = 0
    """Samples that were longer than the protocol or the scorer allows."""
    empty: int = 0
    """Samples without any text."""


def mean_nll(scored: Scored, aggregate: str = "corpus") -> Estimate:
    """Nats per token: over all tokens (`corpus`), or the logarithm of the mean perplexity of samples (`sample`)."""
    used = scored.tokens > 0
    if not used.any():
        raise ConvergeFlowError("no token was scored: every sample is empty or a single token long")
    if aggregate == "corpus":
        return ratio(scored.nll[used], scored.tokens[used])
    each = mean(np.exp(scored.nll[used] / scored.tokens[used]))
    return each.map(math.log, 1 / each.value)


def perplexity(scored: Scored, aggregate: str = "corpus") -> Estimate:
    """exp of the mean NLL; by the delta method its error is perplexity times the error of the mean NLL."""
    nll = mean_nll(scored, aggregate)
    value = math.exp(nll.value) if nll.value < 700 else math.inf
    return nll.map(lambda _: value, value)


def resampled(per_sample: Mapping[str, Any], picks: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """(log Gen. PPL, entropy) of resamples [b, n] of a record's samples, each [b]."""
    nll, tokens, entropy = (np.asarray(per_sample[name], np.float64)[picks] for name in ("nll", "tokens", "entropy"))
    return nll.sum(1) / tokens.sum(1), np.nanmean(entropy, axis=1)


def log_differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> Floats | None:
    """For each noise, a number whose mean is log Gen. PPL of `left` less log Gen. PPL of `right`; None without pairs.

    Both are `per_sample` parts of records made from the same seeds. Gen. PPL is a ratio of sums over samples, nats over
    tokens; these are its linear parts, and differences of nats per token where all texts have as many tokens.
    """
    parts = []
    for each in (left, right):
        nll, tokens = (np.asarray(each[name], dtype=np.float64) for name in ("nll", "tokens"))
        rate = nll.sum() / tokens.sum()
        parts.append(rate + (nll - rate * tokens) / tokens.mean())
    return parts[0] - parts[1] if len(parts[0]) == len(parts[1]) else None


def paired_ratio(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Estimate | None:
    """The geometric mean of Gen. PPL ratios, noise by noise over pairs of `per_sample` parts; None without pairs."""
    found = [log_differences(left, right) for left, right in pairs]
    present = [differences for differences in found if differences is not None]
    if not present or len(present) < len(found) or len(present[0]) < 2 or len({len(p) for p in present}) > 1:
        return None
    each = mean(np.mean(present, axis=0))
    return each.map(math.exp, math.exp(each.value))
