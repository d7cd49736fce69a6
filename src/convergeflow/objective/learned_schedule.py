"""LangFlow's learned noise schedule, fitted beside the loss and not inside it.

The schedule's parameters never see the gradient of the main loss, which would push them towards easier noise; they
follow a regression of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from convergeflow.flow.schedule import Gumbel


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
        if len(gamma) == 0:  # every sequence of the batch had a noise level per position
            return self.no_fit()
        z = (gamma.detach().to(self.loc.dtype) - self.loc) / self.scale.clamp_min(1e-2)
        curve = self.entropy * torch.exp(-torch.exp(-z))
        return (cross_entropy.detach().to(curve.dtype) - curve).square().mean()

    def no_fit(self) -> Tensor:
        """Zero, with a gradient of zero: sharded training wants one for every parameter in every pass."""
        return 0.0 * (self.loc + self.scale + self.entropy).sum()

    def numbers(self, fit: Tensor) -> dict[str, float]:
        """The fit and the present values, for the journal."""
        values = {"fit": fit.detach(), "loc": self.loc, "scale": self.scale, "entropy": self.entropy}
        return {f"schedule_{name}": value.item() for name, value in values.items()}


def fitted_points(gamma: Tensor, ce: Tensor, *, blocks: bool) -> tuple[Tensor, Tensor]:
    """Noise levels and cross-entropies [n] as the sampler meets them: one level for a block, or for a sequence."""
    if blocks:
        return gamma.flatten(), ce.flatten()  # the positions of a block share their level
    if gamma.dim() == 2:
        # The sampler has one noise level per sequence: the schedule is fitted to sequences that have one, too.
        uniform = (gamma == gamma[:, :1]).all(-1)
        return gamma[uniform, 0], ce.mean(-1)[uniform.to(ce.device)]
    return gamma, ce.mean(-1)
