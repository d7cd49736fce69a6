"""The token table E: one row e_j per token, every row with norm sqrt(d) (paper Sec. 3.1).

The raw parameter is free; rows are normalised at every use, in float32, so that the constraint holds exactly whatever
the optimizer does. A frozen table is normalised once, in place, and used without a copy. Equal norms are what makes the
Gaussian kernel an inner product. Trained with the MSE objective alone the table collapses to one point; `health` says
so in numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


def normalise_rows(raw: Tensor) -> Tensor:
    """Rows scaled to norm sqrt(width); float32 or better."""
    raw = raw if raw.dtype == torch.float64 else raw.float()
    # In place: at 50,257 x 768 each copy is 150 MB, and the division before it keeps its operands, not its result.
    return nn.functional.normalize(raw, dim=-1).mul_(math.sqrt(raw.shape[-1]))


NORM_TOLERANCE = 1e-6
"""Relative: what rounding leaves after normalising in float32."""


class TokenTable(nn.Module):
    """E as a parameter, [vocabulary, width]."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        self._checked: tuple[tuple[int, int], bool] | None = None

    def rows(self) -> Tensor:
        """The normalised table, [vocabulary, width]: the parameter itself where it is normal and needs no gradient."""
        learns = self.weight.requires_grad and torch.is_grad_enabled()
        return self.weight.detach() if not learns and self._is_normal() else normalise_rows(self.weight)

    @torch.no_grad()
    def settle(self) -> None:
        """Normalise the parameter in place, for a table that learns no more; a second time changes no bit."""
        if not self._is_normal():
            self.weight.copy_(normalise_rows(self.weight))

    @torch.no_grad()
    def _is_normal(self) -> bool:
        """Whether the parameter is float32 and its rows have the norm already; looked at once per version of it."""
        weight = self.weight
        if weight.dtype != torch.float32 or weight.is_meta:
            return False
        state = None if weight.is_inference() else (weight.data_ptr(), weight._version)
        if state is None or self._checked is None or self._checked[0] != state:
            root = math.sqrt(weight.shape[1])
            normal = bool(((weight.norm(dim=-1) - root).abs() <= NORM_TOLERANCE * root).all())
            if state is None:
                return normal
            self._checked = (state, normal)
        return self._checked[1]

    def forward(self, tokens: Tensor) -> Tensor:
        """x* = the rows of the tokens, [..., width]."""
        # Only the rows in use are normalised: at 50,257 tokens a batch touches a small part of the table.
        return normalise_rows(nn.functional.embedding(tokens, self.weight))


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
    table = table.detach().double()
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
    power = torch.linalg.eigvalsh(table.T @ table).clamp_min(0)
    share = power / power.sum()
    entropy = float(-(share * share.clamp_min(1e-300).log()).sum())
    return TableHealth(
        norm_min=float(norms.min()),
        norm_max=float(norms.max()),
        nearest_distance=math.sqrt(max(0.0, 2.0 - 2.0 * largest)),
        largest_cosine=largest,
        effective_rank=math.exp(entropy),
    )
