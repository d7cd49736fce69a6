"""Tokens from the end of a trajectory, without a trained decoder (paper Eqs. 27, 28).

| rule | token at a position |
|---|---|
| `weight` | largest final weight w_j |
| `prediction` | embedding nearest to the final mu: the published code's "distance" |
| `distance` | embedding nearest to the state after a closing update with the last mu to the end of the schedule |

The state at the last grid point is never read as it is: with a clamped schedule it is still mostly noise. For equal
norms the nearest e_j to x/alpha is the nearest alpha e_j to x.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from convergeflow.errors import unknown_name
from convergeflow.flow.path import spread
from convergeflow.flow.schedule import Coefficients
from convergeflow.flow.solver import step_data
from convergeflow.model.fused import Weighted, nearest
from convergeflow.model.head import no_weights
from convergeflow.sampling.settings import RULES


@dataclass(frozen=True)
class Decoded:
    """Tokens under every rule that applies, [B, L] each."""

    tokens: dict[str, Tensor]

    def by(self, rule: str) -> Tensor:
        """The tokens of one rule."""
        if rule not in RULES:
            raise unknown_name("token rule", rule, RULES)
        if rule not in self.tokens:
            raise no_weights()
        return self.tokens[rule]

    def changed(self, change: Callable[[Tensor], Tensor]) -> Decoded:
        """The same change of the tokens of every rule."""
        return Decoded({rule: change(tokens) for rule, tokens in self.tokens.items()})

    def agreements(self) -> dict[str, float]:
        """The share of positions on which each pair of rules agrees."""
        names = [rule for rule in RULES if rule in self.tokens]
        pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
        return {f"{a}={b}": float((self.tokens[a] == self.tokens[b]).cpu().double().mean()) for a, b in pairs}


def decode(final: Weighted, x: Tensor, now: Coefficients, end: Coefficients, table: Tensor) -> Decoded:
    """All rules at once, from the last prediction and the last state; no network call."""
    closed = step_data(x, final.mu.to(x.dtype), now, end)
    scale = spread(end.alpha, closed)[..., 0]
    tokens = {
        "prediction": nearest(final.mu, table).token,
        "distance": nearest(closed, table, scale=scale.expand(closed.shape[:-1])).token,
    }
    if final.token is not None:
        tokens = {"weight": final.token, **tokens}
    return Decoded({rule: value.to(torch.long) for rule, value in tokens.items()})
