"""What a flow model (ConvergeFlow, LangFlow) knows about given text: a likelihood bound, and numbers at fixed noise.

The variational diffusion bound of a path in gamma = log(sigma^2/alpha^2), for one sequence with embeddings x*:

    CE(z at gamma_min)  +  E_gamma[ 1/2 exp(-gamma)/p(gamma) ||x* - mu(z, gamma)||^2 ]  +  1/2 exp(-gamma_max) ||x*||^2

reading the text off the end of the path, following the path, and the prior. It holds for any predictor that looks at z
alone, so for self-conditioning by a first pass at the same z too, and is tight for the exact posterior. gamma is drawn
from the schedule's own density mixed with a uniform one: the weights stay bounded where the schedule hardly looks. A
model of blocks has such a bound for each block given the words before it, and their sum is one for the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from convergeflow.device import widest
from convergeflow.errors import UserError
from convergeflow.flow.path import sample_path
from convergeflow.flow.schedule import Coefficients, Gumbel, Schedule, gumbel_for_width
from convergeflow.model.fused import Weighted
from convergeflow.model.network import FlowNetwork
from convergeflow.model.views import WHOLE, AfterWords, View
from convergeflow.randomness import RowDraws
from convergeflow.sampling.integration import batches, default_batch
from convergeflow.systems.protocol import Bound

UNIFORM_SHARE = 0.2
CELLS = 4096


@dataclass(frozen=True)
class Proposal:
    """A piecewise constant density of gamma: drawing and density are exact, so the bound has no bias from it."""

    edges: Tensor
    """Cell borders, [cells + 1]."""
    masses: Tensor
    """Probability of each cell, [cells]."""

    @classmethod
    def between(cls, low: float, high: float, gumbel: Gumbel) -> Proposal:
        """A Gumbel density cut to [low, high], mixed with a uniform one."""
        edges = torch.linspace(low, high, CELLS + 1, dtype=torch.float64)
        inside = gumbel.cdf(edges).diff()
        total = float(inside.sum())
        shape = inside / total if total > 0 else torch.full_like(inside, 1 / CELLS)
        masses = (1 - UNIFORM_SHARE) * shape + UNIFORM_SHARE / CELLS
        return cls(edges, masses / masses.sum())

    def draw(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """(gamma, density at gamma) for uniforms u."""
        above = self.masses.cumsum(0)
        cell = torch.searchsorted(above, u.double().contiguous()).clamp(max=len(self.masses) - 1)
        width = self.edges[1:] - self.edges[:-1]
        within = ((u - (above[cell] - self.masses[cell])) / self.masses[cell]).clamp(0.0, 1.0)
        return self.edges[cell] + within * width[cell], self.masses[cell] / width[cell]


@torch.no_grad()
def flow_bound(
    network: FlowNetwork,
    schedule: Schedule,
    tokens: Tensor,
    *,
    draws: RowDraws,
    repeats: int = 32,
    block_length: int | None = None,
    self_condition: bool = True,
    span: tuple[float, float] | None = None,
    batch: int | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Bound:
    """The bound in nats per token, averaged over the sequences `tokens` [n, L]; the network should be in eval mode.

    `repeats` noise levels per sequence, one in each of as many strata. The standard error is over sequences and so
    contains both the spread of texts and the noise of the draws. `span` is (gamma_min, gamma_max); by default the
    schedule's own, or LangFlow's at this width if the schedule has no ends. The cost is (repeats + 1) x 2 network calls
    per sequence, half of that without self-conditioning.
    """
    if tokens.dim() != 2 or len(tokens) < 1:
        raise UserError(f"the bound needs tokens of shape [sequences, length], not {tuple(tokens.shape)}")
    if repeats < 1:
        raise UserError(f"the bound needs at least 1 draw, not {repeats}")
    table = network.embedding.rows()
    gumbel = schedule if isinstance(schedule, Gumbel) else gumbel_for_width(table.shape[1])
    low, high = span or (gumbel.gamma_min, gumbel.gamma_max)
    proposal = Proposal.between(low, high, gumbel)
    totals: list[Tensor] = []
    for part in batches(len(tokens), batch or default_batch(tokens.shape[1], len(table), table.device)):
        stream = draws.select(range(len(tokens))[part])
        here = tokens[part].to(table.device)
        terms = _Terms(network, schedule.at_gamma, table, here, self_condition, block_length)
        total = terms.reading(low, stream) + terms.prior(high)
        for index in range(repeats):
            gamma, density = proposal.draw((index + stream.uniform()) / repeats)
            total = total + terms.path(gamma, density, stream) / repeats
        totals.append(total)
        progress(len(here))
    kind = f"variational diffusion bound, {'self-conditioned' if self_condition else 'unconditioned'}"
    return Bound.of(torch.cat(totals) / tokens.shape[1], repeats, kind, tokens.numel())


@dataclass(frozen=True)
class _Terms:
    """The three terms of the bound for one batch, in nats per sequence, [B]."""

    network: FlowNetwork
    at_gamma: Callable[[Tensor], Coefficients]
    table: Tensor
    tokens: Tensor
    self_condition: bool
    block_length: int | None
    """Blocks follow clean words: the terms add up block by block, each a bound given the words before it."""

    @property
    def x_star(self) -> Tensor:
        return nn.functional.embedding(self.tokens, self.table)

    def reading(self, gamma: float, stream: RowDraws) -> Tensor:
        """Cross-entropy of the tokens given the end of the path."""
        at = self.at_gamma(torch.full((len(self.tokens),), gamma, dtype=torch.float64))
        x_t = self._noisy(at, stream)
        if self.network.predictor == "direct":
            # It has no weights; the posterior without context is a reader too, and any reader gives a bound.
            ce = self.network.without_context(x_t, at, self.table, targets=self.tokens).cross_entropy
        else:
            ce = self.predict(x_t, at, self.tokens).cross_entropy
        assert ce is not None
        return widest(ce).sum(-1).cpu()

    def path(self, gamma: Tensor, density: Tensor, stream: RowDraws) -> Tensor:
        """The integrand at the drawn noise levels over their density."""
        at = self.at_gamma(gamma)
        mu = self.predict(self._noisy(at, stream), at, None).mu
        error = widest(self.x_star - mu).square().sum((-1, -2)).cpu()
        return 0.5 * (-gamma).exp() / density * error

    def prior(self, gamma: float) -> Tensor:
        """KL of the noisiest state, in units of sigma, to a standard Gaussian."""
        return 0.5 * math.exp(-gamma) * widest(self.x_star).square().sum((-1, -2)).cpu()

    def _noisy(self, at: Coefficients, stream: RowDraws) -> Tensor:
        x_star = self.x_star
        return sample_path(x_star, stream.normal(*x_star.shape[1:]).to(x_star), at)

    def predict(self, x_t: Tensor, at: Coefficients, targets: Tensor | None) -> Weighted:
        view, condition = _view_of_blocks(self.x_star, self.block_length), None
        if self.self_condition:
            condition = self.network(x_t, at, None, view, self.table).weigh(x_t, at).mu
        return self.network(x_t, at, condition, view, self.table).weigh(x_t, at, targets=targets)


def _view_of_blocks(x_star: Tensor, block_length: int | None) -> View:
    """The view in which blocks of one length are predicted after clean words; the whole sequence without blocks."""
    if block_length is None:
        return WHOLE
    rows, length = x_star.shape[:2]
    return AfterWords.plain(x_star, (torch.arange(length) // block_length * block_length).expand(rows, length))


@torch.no_grad()
def fixed_noise_report(
    network: FlowNetwork,
    schedule: Schedule,
    gammas: list[float],
    tokens: Tensor,
    draws: RowDraws,
    block_length: int | None = None,
) -> dict[str, float]:
    """Cross-entropy, squared error and gain over the context-free predictor at fixed noise levels.

    Self-conditioned once; with a `block_length` in blocks of that many tokens after clean ones. The mean cross-entropy
    under a learned schedule is about h/2 whatever the model knows; these numbers are not.
    """
    table = network.embedding.rows()
    terms = _Terms(network, schedule.at_gamma, table, tokens, True, block_length)
    x_star = terms.x_star
    noise = draws.normal(*x_star.shape[1:]).to(x_star)
    report: dict[str, float] = {}
    for gamma in gammas:
        at = schedule.at_gamma(torch.full((len(tokens),), gamma, dtype=torch.float64))
        x_t = sample_path(x_star, noise, at)
        found = terms.predict(x_t, at, tokens)
        report[f"mse@{gamma:g}"] = float((x_star - found.mu).square().mean())
        alone = network.without_context(x_t, at, table, targets=tokens)
        if found.cross_entropy is not None and alone.cross_entropy is not None:
            report[f"ce@{gamma:g}"] = ce = float(found.cross_entropy.mean())
            report[f"gain@{gamma:g}"] = float(alone.cross_entropy.mean()) - ce
    return report
