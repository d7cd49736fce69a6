"""The token table E: one row e_j per token, every row with norm sqrt(d) (paper Sec. 3.1).

The raw parameter is free; rows are normalised at every use, in float32, so that the constraint holds exactly whatever
the optimizer does. A frozen table is normalised once, in place, and used without a copy. Equal norms are what makes the
Gaussian kernel an inner product. Trained with the MSE objective alone the table collapses to one point;
`evaluation/health.py` says so in numbers.
"""

from __future__ import annotations

import math

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
