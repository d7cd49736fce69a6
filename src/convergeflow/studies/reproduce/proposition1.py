"""Proposition 1: the posterior of a token is its posterior from the noisy context alone times an exact Gaussian kernel.

Every sequence of a small vocabulary is enumerated, so both sides are exact sums. The third route is the package's own
head, fed with the context posterior. A control with a wrong kernel shows that the comparison can fail.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
from torch import Tensor

from convergeflow.flow.schedule import Coefficients, Linear
from convergeflow.sampling.settings import Settings
from convergeflow.studies.reproduce import toys
from convergeflow.studies.reproduce.bench import Bench
from convergeflow.studies.reproduce.result import Record

VOCABULARY, LENGTH, WIDTH, STATES = 5, 3, 4, 64


def _enumerate(at: Coefficients, x: Tensor, table: Tensor, log_law: Tensor) -> tuple[Tensor, Tensor]:
    """(posterior of position 0 given everything, given the other positions alone), [states, V] each, by brute force."""
    sequences = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
    clean = table[sequences]  # [V^L, L, d]
    square = (x[:, None] - at.alpha * clean[None]).square().sum(-1)  # [states, V^L, L]
    log_likelihood = -square / (2 * at.sigma.square())
    everything = log_law + log_likelihood.sum(-1)
    context = log_law + log_likelihood[..., 1:].sum(-1)

    def marginal(log_weights: Tensor) -> Tensor:
        by_token = [log_weights[:, sequences[:, 0] == token].logsumexp(-1) for token in range(VOCABULARY)]
        return torch.stack(by_token, -1).log_softmax(-1).exp()

    return marginal(everything), marginal(context)


def _deviations(log_snr: float) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    table = toys.random_table(VOCABULARY, WIDTH, seed=1)
    # A law with strong dependence between positions: independent positions would make the statement empty.
    log_law = (2.0 * torch.randn(VOCABULARY**LENGTH, generator=generator, dtype=torch.float64)).log_softmax(-1)
    at = Linear().at_gamma(torch.tensor(-log_snr, dtype=torch.float64))
    drawn = torch.multinomial(log_law.exp(), STATES, replacement=True, generator=generator)
    sequences = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))[drawn]
    noise = torch.randn(STATES, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    x = at.alpha * table[sequences] + at.sigma * noise
    exact, context = _enumerate(at, x, table, log_law)
    square = (x[:, :1] - at.alpha * table[None]).square().sum(-1)
    factored = (context.log() - square / (2 * at.sigma.square())).softmax(-1)
    wrong = (context.log() - square / at.sigma.square()).softmax(-1)
    predictor = toys.ToyPredictor(table, Linear(), lambda x_t, here: context.log()[:, None])
    here, level = x[:, :1], at.expand(STATES)
    mu = predictor(here, level, None).weigh(here, level).mu[:, 0]
    return {
        "log_snr": log_snr,
        "factorisation": float((factored - exact).abs().max()),
        "head": float((mu - exact @ table).abs().max()),
        "wrong_kernel": float((wrong - exact).abs().max()),
        "context_alone": float((context - exact).abs().max()),
    }


def posterior(bench: Bench, settings: Settings, point: dict[str, Any], label: str) -> Record:
    """The kind of point that the description names: all deviations at one noise level."""
    size = {"vocabulary": VOCABULARY, "length": LENGTH, "width": WIDTH, "states": STATES}
    compute = partial(_deviations, point["log_snr"])
    return bench.store.point("proposition1", {"log_snr": point["log_snr"], **size}, compute, label=label)
