"""Generative perplexity: from the NLL of every sample to one number with its standard error."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    """exp of the mean NLL; its error is the delta method's, perplexity times that of the mean NLL."""
    nll = mean_nll(scored, aggregate)
    value = math.exp(nll.value) if nll.value < 700 else math.inf
    return nll.map(lambda _: value, value)
