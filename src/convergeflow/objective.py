"""What training minimises (paper Eq. 17; LangFlow's cross-entropy; self-conditioning, Sec. 2.1).

`mse` is ConvergeFlow's only loss, (1 + alpha/sigma)^2 ||x* - mu||^2; `ce` is LangFlow's, which teaches the token table
and fits a Gumbel schedule to it. The schedule's parameters never see the gradient of the main loss, which would push
them towards easier noise; they follow a regression of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from convergeflow.errors import UserError, unknown_name
from convergeflow.flow.path import sample_path, spread
from convergeflow.flow.schedule import Coefficients, Gumbel, Schedule
from convergeflow.model.head import Weighted
from convergeflow.model.network import FlowNetwork
from convergeflow.randomness import RowDraws
from convergeflow.records import Loss

OBJECTIVES = ("mse", "ce")


@dataclass(frozen=True)
class Objective:
    """A stage of training: which loss, and how its inputs are drawn."""

    kind: str = "mse"
    self_condition: float = 0.25
    """Probability that an example is conditioned on the model's own first prediction."""
    position_noise: float = 0.0
    """Share of sequences whose positions each draw a noise level of their own (an option; the paper has none)."""

    clean_context: float = 0.0
    """Share of sequences seen as empty slots after clean words (an option; the paper has none)."""
    block_length: int | None = None
    """Blocks of up to this many tokens, each on a path of its own after clean words (an option); none: the paper's one
    path for the whole sequence."""

    def __post_init__(self) -> None:
        if self.kind not in OBJECTIVES:
            raise unknown_name("objective", self.kind, OBJECTIVES)


class LearnedGumbel(nn.Module):
    """LangFlow's schedule as parameters: loc, scale and the height h of the entropy curve h F(gamma; loc, scale).

    When the cross-entropy follows that curve, gamma = F^-1(q) with q uniform makes it fall at a constant rate in q.
    """

    def __init__(self, schedule: Gumbel, entropy: float) -> None:
        super().__init__()
        self.cutoff = schedule.cutoff
        # One-element vectors: sharded training does not take scalars.
        self.loc = nn.Parameter(torch.tensor([schedule.loc]))
        self.scale = nn.Parameter(torch.tensor([schedule.scale]))
        self.entropy = nn.Parameter(torch.tensor([float(entropy)]))

    def schedule(self) -> Gumbel:
        """The present values as an immutable schedule."""
        return Gumbel(self.loc.item(), max(self.scale.item(), 1e-2), self.cutoff)

    def fit_loss(self, gamma: Tensor, cross_entropy: Tensor) -> Tensor:
        """Mean of (CE - h F(gamma))^2, with gradient to the schedule's own parameters alone."""
        if len(gamma) == 0:
            return 0.0 * (self.loc + self.scale + self.entropy).sum()
        z = (gamma.detach().to(self.loc.dtype) - self.loc) / self.scale.clamp_min(1e-2)
        curve = self.entropy * torch.exp(-torch.exp(-z))
        return (cross_entropy.detach().to(curve.dtype) - curve).square().mean()


def noise_levels(
    schedule: Schedule, times: Tensor, draws: RowDraws, length: int, share: float
) -> Coefficients:
    """Coefficients [B], or [B, L] where a share of the sequences has independent times per position."""
    if share == 0.0:
        return schedule(times)
    independent = draws.uniform()[:, None] < share
    per_position = draws.uniform(length)
    return schedule(torch.where(independent, per_position, times.double().cpu()[:, None]))


def flow_loss(
    network: FlowNetwork,
    schedule: Schedule,
    objective: Objective,
    tokens: Tensor,
    *,
    times: Tensor,
    draws: RowDraws,
    learned: LearnedGumbel | None = None,
) -> Loss:
    """The loss of a batch of tokens [B, L] at times [B] in (0, 1).

    `learned` is the schedule to fit, when the stage fits one. Means are over positions and dimensions, then examples.
    """
    if objective.clean_context > 0.0:
        return _mixed_loss(network, schedule, objective, tokens, times, draws, learned)
    table = network.embedding.rows()
    x_star = nn.functional.embedding(tokens, table)
    predict = _predict_whole if objective.block_length is None else _predict_blocks
    at, prediction = predict(network, schedule, objective, _Batch(tokens, x_star, table, times, draws))

    squared = (x_star - prediction.mu).square().mean(-1)
    weight = spread((1 + at.signal_to_noise).square(), squared)
    mse = (weight * squared).mean()
    parts = {"mse": float(mse.detach())}
    if prediction.cross_entropy is not None:
        parts["ce"] = float(prediction.cross_entropy.detach().mean())
    if objective.kind == "mse":
        return Loss(mse, parts)
    if prediction.cross_entropy is None:
        raise UserError("the direct predictor cannot be trained with ce; set the stage's objective to mse")
    total = prediction.cross_entropy.mean()
    if learned is not None:
        fit = learned.fit_loss(*_fitted(at.gamma, prediction.cross_entropy, objective))
        parts |= {
            "schedule_fit": float(fit.detach()),
            "schedule_loc": learned.loc.item(),
            "schedule_scale": learned.scale.item(),
            "schedule_entropy": learned.entropy.item(),
        }
        total = total + fit
    return Loss(total, parts)


def _fitted(gamma: Tensor, ce: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """Noise levels and cross-entropies as the sampler meets them: that of a block, or of a sequence."""
    if objective.block_length is not None:
        return gamma.flatten(), ce.flatten()  # the positions of a block share their level
    if gamma.dim() == 2:
        # The sampler has one noise level per sequence: the schedule is fitted to sequences that have one, too.
        uniform = (gamma == gamma[:, :1]).all(-1)
        return gamma[uniform, 0], ce.mean(-1)[uniform.to(ce.device)]
    return gamma, ce.mean(-1)


class _Batch(NamedTuple):
    """Tokens [B, L] with their rows of the table, the table itself, times [B] and what is random."""

    tokens: Tensor
    x_star: Tensor
    table: Tensor
    times: Tensor
    draws: RowDraws


def _predict_whole(
    network: FlowNetwork, schedule: Schedule, objective: Objective, batch: _Batch
) -> tuple[Coefficients, Weighted]:
    """Noise levels [B] (or [B, L]) and the prediction of whole sequences on the path."""
    tokens, x_star, table, times, draws = batch
    at = noise_levels(schedule, times, draws, tokens.shape[1], objective.position_noise)
    noise = draws.normal(*x_star.shape[1:], device=x_star.device)
    x_t = sample_path(x_star, noise.to(x_star.dtype), at).x_t
    condition = None
    if objective.self_condition > 0.0:
        condition = torch.zeros_like(x_t)
        if len(active := (draws.uniform() < objective.self_condition).nonzero()[:, 0]):
            with torch.no_grad():
                rows = active.to(x_t.device)
                condition[rows] = network(x_t[rows], at[active], table=table).mu.to(condition.dtype)
    weighted = network.predictor == "weighted"
    return at, network(x_t, at, condition, table=table, targets=tokens if weighted else None)


STRATUM = (5**0.5 - 1) / 2
"""Times of a sequence's blocks differ by multiples of the golden ratio: each is uniform, together they are even."""


def _predict_blocks(
    network: FlowNetwork, schedule: Schedule, objective: Objective, batch: _Batch
) -> tuple[Coefficients, Weighted]:
    """Noise levels [B, L] and the prediction of every block after the clean words before it, in one pass.

    A sequence is cut into blocks of one length, a power of two up to the longest: a model that knows shorter blocks too
    can go on from a prompt of any length.
    """
    assert objective.block_length is not None
    tokens, x_star, table, times, draws = batch
    starts = block_starts(draws.uniform(), objective.block_length, tokens.shape[1])
    at = schedule((times.double().cpu()[:, None] + STRATUM * starts) % 1.0)
    noise = draws.normal(*x_star.shape[1:], device=x_star.device)
    x_t = sample_path(x_star, noise.to(x_star.dtype), at).x_t
    condition = torch.zeros_like(x_t)
    if len(active := (draws.uniform() < objective.self_condition).nonzero()[:, 0]):
        with torch.no_grad():
            here = active.to(x_t.device)
            first = network.paired(x_star[here], x_t[here], at[active], table=table, starts=starts[active])
            condition[here] = first.mu.to(condition.dtype)
    weighted = network.predictor == "weighted"
    return at, network.paired(
        x_star, x_t, at, condition, table=table, starts=starts, targets=tokens if weighted else None
    )


def block_starts(u: Tensor, longest: int, length: int) -> Tensor:
    """The first position of each position's block, [B, length]; uniforms u [B] choose among 1, 2, 4, .. `longest`."""
    sizes = torch.tensor([size for power in range(longest.bit_length()) if (size := 2**power) <= longest])
    size = sizes[(u * len(sizes)).long().clamp(max=len(sizes) - 1)][:, None]
    return torch.arange(length) // size * size


def even_starts(size: int, shape: Sequence[int]) -> Tensor:
    """The same for blocks of one size in every sequence, [B, L]."""
    return (torch.arange(shape[1]) // size * size).expand(*shape)


def _mixed_loss(
    network: FlowNetwork,
    schedule: Schedule,
    objective: Objective,
    tokens: Tensor,
    times: Tensor,
    draws: RowDraws,
    learned: LearnedGumbel | None,
) -> Loss:
    """Some sequences as empty slots after clean words, the others on the path."""
    beside = draws.uniform() < objective.clean_context
    total, parts = tokens.new_zeros((), dtype=torch.float32), {}
    if len(shown := beside.nonzero()[:, 0]):
        context = _clean_context_loss(network, schedule, objective, tokens[shown], draws.select(shown))
        total, parts = total + len(shown) / len(tokens) * context.total, dict(context.parts)
    if len(others := (~beside).nonzero()[:, 0]):
        on_path = replace(objective, clean_context=0.0)
        path = flow_loss(network, schedule, on_path, tokens[others], times=times[others],
                         draws=draws.select(others), learned=learned)  # fmt: skip
        total, parts = total + len(others) / len(tokens) * path.total, parts | path.parts
    elif learned is not None:  # sharded training wants a gradient for every parameter, be it zero
        total = total + learned.fit_loss(times.new_zeros(0), times.new_zeros(0))
    return Loss(total, parts)

NOISY_END, CLEAN_END = 0.12, 0.95
"""The times of `_clean_context_loss`: up to the first a word is pure noise, from the second on it is plain."""


def _clean_context_loss(
    network: FlowNetwork, schedule: Schedule, objective: Objective, tokens: Tensor, draws: RowDraws
) -> Loss:
    """The loss of every word, itself in noise, given the clean words before it; one pass for all of them.

    Copying a name from an earlier mention is learned from such pairs of plain word and empty slot within some thousand
    sequences. Under one noise level for all, either the mention is unreadable or the slot needs no help.
    """
    table = network.embedding.rows()
    length = tokens.shape[1]
    clean = CLEAN_END + (1 - CLEAN_END) * draws.uniform(length)
    at = schedule(torch.cat([clean, NOISY_END * draws.uniform(length)], dim=1))
    twice = tokens.repeat(1, 2)
    x_star = nn.functional.embedding(twice, table)
    noise = draws.normal(*x_star.shape[1:], device=x_star.device)
    x_t = sample_path(x_star, noise.to(x_star.dtype), at).x_t
    slots = torch.zeros_like(twice, dtype=torch.bool)
    slots[:, length:] = True
    prediction = network(x_t, at, table=table, targets=twice, positions=slots, paired=torch.arange(length))
    if objective.kind == "mse":
        squared = (x_star[slots] - prediction.mu).square().mean(-1)
        weight = (1 + at.signal_to_noise[:, length:]).square().flatten().to(squared)
        mse = (weight * squared).mean()
        return Loss(mse, {"context_mse": float(mse.detach())})
    if prediction.cross_entropy is None:
        raise UserError("the direct predictor cannot be trained with ce; set the stage's objective to mse")
    total = prediction.cross_entropy.mean()
    return Loss(total, {"context_ce": float(total.detach())})


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
    x_star = nn.functional.embedding(tokens, table)
    noise = draws.normal(*x_star.shape[1:], device=x_star.device)
    targets = tokens if network.predictor == "weighted" else None
    report: dict[str, float] = {}
    for gamma in gammas:
        at = schedule.at_gamma(torch.full((len(tokens),), gamma, dtype=torch.float64))
        x_t = sample_path(x_star, noise.to(x_star.dtype), at).x_t
        if block_length is None:
            first = network(x_t, at, table=table).mu
            second = network(x_t, at, first, table=table, targets=targets)
        else:
            starts = even_starts(block_length, tokens.shape)
            first = network.paired(x_star, x_t, at, table=table, starts=starts).mu
            second = network.paired(x_star, x_t, at, first, table=table, starts=starts, targets=targets)
        report[f"mse@{gamma:g}"] = float((x_star - second.mu).square().mean())
        if second.cross_entropy is not None:
            ce = float(second.cross_entropy.mean())
            alone = network.context_free_prediction(x_t, at, table, targets=tokens).cross_entropy
            assert alone is not None
            report[f"ce@{gamma:g}"] = ce
            report[f"gain@{gamma:g}"] = float(alone.mean()) - ce
    return report
