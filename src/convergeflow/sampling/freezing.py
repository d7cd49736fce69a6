"""Stop computing what has converged: a position skips the head, a refinement ends, a sequence leaves the batch.

Each sequence is a trajectory of its own then; the driver still sends all of them through the network together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from convergeflow.model.fused import Weighted
from convergeflow.model.head import LogF, no_weights
from convergeflow.sampling.settings import Freeze
from convergeflow.sampling.trajectory import Stop
from convergeflow.sampling.wrappers import Change, DecidedLogF


class Freezing(Stop):
    """The state of one sequence under `Freeze`."""

    def __init__(self, freeze: Freeze, table: Tensor, length: int) -> None:
        self.freeze, self.table = freeze, table
        self.settled = torch.zeros(1, length, dtype=torch.bool, device=table.device)
        self.tokens = torch.full((1, length), -1, dtype=torch.long, device=table.device)
        self.streak = torch.zeros(1, length, dtype=torch.long, device=table.device)
        self.may_end_early = freeze.change > 0
        self.move = math.inf
        """How far the condition moved in the pass before, relative to sqrt(width)."""

    def refined(self, k: int, before: Tensor, after: Tensor) -> bool:
        if not self.may_end_early:
            return False
        earlier, self.move = self.move, float(_distance(after, before).amax())
        if k == 0:
            left = self.move  # no move before it to be judged by: what is left counts as large as the move itself
        else:
            ratio = self.move / earlier if earlier else math.nan
            left = self.move * ratio / (1.0 - ratio) if ratio < 1.0 else math.inf
        return left <= self.freeze.change

    def decided(self, weights: Weighted, mu: Tensor) -> bool:
        if weights.token is None or weights.top_weight is None:
            raise no_weights()
        limit = self.freeze.weight
        away = _distance(mu, self.table[weights.token])
        sure = (weights.top_weight >= limit) & (away <= 2.0 * (1.0 - limit))
        self.streak = torch.where(sure & (weights.token == self.tokens), self.streak + 1, sure.long())
        self.tokens = weights.token
        self.settled = self.settled | (self.streak >= self.freeze.patience)
        return bool(self.settled.all())


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """||a - b|| at each position, relative to sqrt(width)."""
    return torch.linalg.vector_norm(a - b.to(a), dim=-1) / math.sqrt(a.shape[-1])


@dataclass(frozen=True, eq=False)
class Settled(Change):
    """The settled positions of sequences skip the head: their prediction is their embedding."""

    sequences: tuple[Freezing, ...]

    def joined(self, parts: Sequence[Self]) -> Settled:
        return Settled(tuple(each for part in parts for each in part.sequences))

    def reading(self, log_f: LogF) -> LogF:
        settled, tokens = (
            torch.cat([getattr(each, name) for each in self.sequences]) for name in ("settled", "tokens")
        )
        return DecidedLogF.around(log_f, settled.cpu(), tokens, self.sequences[0].table)
