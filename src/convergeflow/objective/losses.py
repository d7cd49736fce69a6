"""What training minimises (paper Eq. 17; LangFlow's cross-entropy; self-conditioning, Sec. 2.1).

`mse` is ConvergeFlow's only loss, (1 + alpha/sigma)^2 ||x* - mu||^2. `ce` is LangFlow's, which teaches the token table.
A corruption draws x_t and what the network may look at; a learned schedule is fitted beside the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from convergeflow.device import onto
from convergeflow.errors import UserError, unknown_name
from convergeflow.flow.path import spread
from convergeflow.model.fused import Weighted
from convergeflow.model.network import FlowNetwork
from convergeflow.objective.corruption import AfterClean, Corruption, EmptySlots, Levels, Noisy, PerPosition, Whole
from convergeflow.objective.learned_schedule import LearnedGumbel, fitted_points
from convergeflow.randomness import RowDraws


@dataclass(frozen=True)
class Loss:
    """A training loss: `total` is a differentiable scalar; `parts` are detached ones for the journal, which
    nobody reads before it is written."""

    total: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)


def mse(x_star: Tensor, noisy: Noisy, prediction: Weighted) -> Tensor:
    """(1 + alpha/sigma)^2 ||x* - mu||^2, the mean over dimensions, positions and sequences (Eq. 17)."""
    squared = (x_star - prediction.mu).square().mean(-1)
    weight = spread((1 + noisy.at.signal_to_noise).square(), squared)
    return (weight * squared).mean()


def ce(x_star: Tensor, noisy: Noisy, prediction: Weighted) -> Tensor:
    """-log w at the true token, nats, the mean over positions and sequences."""
    if prediction.cross_entropy is None:
        raise UserError("the direct predictor cannot be trained with ce; set the stage's objective to mse")
    return prediction.cross_entropy.mean()


LOSSES = {"mse": mse, "ce": ce}


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
    """Blocks of up to this many tokens after clean words (an option); None is the paper's whole sequence."""

    def __post_init__(self) -> None:
        if self.kind not in LOSSES:
            raise unknown_name("objective", self.kind, LOSSES)

    @property
    def corruption(self) -> Corruption:
        """How sequences come to the path."""
        if self.block_length is not None:
            return AfterClean(self.block_length)
        return PerPosition(self.position_noise) if self.position_noise > 0.0 else Whole()

    def split(self, num: int, draws: RowDraws) -> Iterator[tuple[str, Tensor, Corruption]]:
        """The parts of a batch, with their rows and corruptions: empty slots (`context`) if there are any, the path."""
        if self.clean_context == 0.0:
            yield "path", torch.arange(num), self.corruption
            return
        beside = draws.uniform() < self.clean_context
        for name, chosen, corruption in (("context", beside, EmptySlots()), ("path", ~beside, self.corruption)):
            if len(rows := chosen.nonzero()[:, 0]):
                yield name, rows, corruption


def flow_loss(
    network: FlowNetwork,
    schedule: Levels,
    objective: Objective,
    tokens: Tensor,
    *,
    times: Tensor,
    draws: RowDraws,
    learned: LearnedGumbel | None = None,
) -> Loss:
    """The loss of tokens [B, L] at times [B] in (0, 1), which are on the CPU; `learned` is the schedule to fit."""
    table = network.embedding.rows()
    total = tokens.new_zeros((), dtype=torch.float32) if learned is None else learned.no_fit()
    parts: dict[str, Tensor] = {}
    for name, rows, corruption in objective.split(len(tokens), draws):
        here, streams = tokens[onto(rows, tokens.device)], draws.select(rows)
        x_star = nn.functional.embedding(here, table)
        noisy = corruption(x_star, schedule, times[rows], streams)
        prediction = predict(network, noisy, here, streams, objective.self_condition if name == "path" else 0.0, table)
        value = LOSSES[objective.kind](x_star, noisy, prediction)
        if name == "context":
            parts[f"context_{objective.kind}"] = value.detach()
        else:
            parts["mse"] = mse(x_star, noisy, prediction).detach()
            if prediction.cross_entropy is not None:
                parts["ce"] = ce(x_star, noisy, prediction).detach()
                if learned is not None:
                    blocks = objective.block_length is not None
                    fit = learned.fit_loss(*fitted_points(noisy.at.gamma, prediction.cross_entropy, blocks=blocks))
                    parts |= learned.numbers(fit)
                    value = value + fit
        total = total + len(rows) / len(tokens) * value
    return Loss(total, parts)


def predict(
    network: FlowNetwork, noisy: Noisy, targets: Tensor, draws: RowDraws, share: float, table: Tensor
) -> Weighted:
    """The prediction at points of the path; a share of the rows is conditioned on a first prediction (Sec. 2.1)."""
    x_t, at, view = noisy.x_t, noisy.at, noisy.view
    condition = None
    if share > 0.0:
        condition = torch.zeros_like(x_t)
        if len(active := (draws.uniform() < share).nonzero()[:, 0]):
            with torch.no_grad():
                here = onto(active, x_t.device)
                first = network(x_t[here], at[active], None, view.rows(active), table).weigh(x_t[here], at[active])
                condition[here] = first.mu.to(condition.dtype)
    weights: Weighted = network(x_t, at, condition, view, table).weigh(x_t, at, targets=targets)
    return weights
