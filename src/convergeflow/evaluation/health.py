"""What can be wrong with a token table, in numbers: norms, the smallest margin, and how many directions it uses."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from convergeflow.device import widest


@dataclass(frozen=True)
class TableHealth:
    """What can be wrong with a table, in numbers."""

    norm_min: float
    norm_max: float
    nearest_distance: float
    """Smallest distance between two rows, in units of sqrt(width): sqrt(2) for orthogonal rows, 0 after collapse."""
    largest_cosine: float
    effective_rank: float
    """exp of the entropy of the normalised squared singular values of the uncentred table; 1 after collapse."""

    @property
    def collapsed(self) -> bool:
        return self.effective_rank < 1.5


@torch.no_grad()
def health(table: Tensor, tile: int = 2048) -> TableHealth:
    """Norms, smallest margin and effective rank of a normalised table."""
    table = widest(table.detach())
    vocabulary = len(table)
    norms = table.norm(dim=-1)
    directions = table / norms[:, None]
    largest = -1.0
    for start in range(0, vocabulary, tile):
        cosines = directions[start : start + tile] @ directions.T
        rows = torch.arange(len(cosines))
        cosines[rows, rows + start] = -1.0
        if vocabulary > 1:
            largest = max(largest, float(cosines.max()))
    power = torch.linalg.eigvalsh((table.T @ table).cpu().double()).clamp_min(0)
    share = power / power.sum()
    entropy = float(-(share * share.clamp_min(1e-300).log()).sum())
    return TableHealth(
        norm_min=float(norms.min()),
        norm_max=float(norms.max()),
        nearest_distance=math.sqrt(max(0.0, 2.0 - 2.0 * largest)),
        largest_cosine=largest,
        effective_rank=math.exp(entropy),
    )
