"""LangFlow's learned noise schedule, fitted beside the loss and not inside it.

The schedule's parameters do not see the gradient of the main loss, which would push them towards easier noise; they
follow a regression of their own. The published code lets the MSE move them all the same: an option here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from convergeflow.device import onto, widest
from convergeflow.flow.schedule import Coefficients, Gumbel, variance_preserving


class LearnedGumbel(nn.Module):
    """LangFlow's schedule as parameters: loc, scale and the height h of the entropy curve h F(gamma; loc, scale).

    When the cross-entropy follows that curve, gamma = F^-1(q) with q uniform makes it fall at a constant rate in q.
    """

    def __init__(self, schedule: Gumbel, entropy: float) -> None:
        super().__init__()
        self.cutoff, self.by_loss = schedule.cutoff, False
        # One-element vectors: sharded training does not take scalars.
        self.loc = nn.Parameter(torch.tensor([schedule.loc]))
        self.scale = nn.Parameter(torch.tensor([schedule.scale]))
        self.entropy = nn.Parameter(torch.tensor([float(entropy)]))

    def schedule(self) -> Gumbel:
        """The present values as an immutable schedule."""
        return Gumbel(self.loc.item(), max(self.scale.item(), 1e-2), self.cutoff)

    def learn(self, *, by_fit: bool, by_loss: bool) -> None:
        """Who moves the parameters: the fit, else the main loss through the noise level, as in the published code."""
        self.by_loss = by_loss and not by_fit
        for value in (self.loc, self.scale, self.entropy):
            value.requires_grad_(by_fit or (self.by_loss and value is not self.entropy))

    def levels(self, t: Tensor) -> Coefficients:
        """The coefficients at times t on the CPU, on the parameters' device, which need not be asked for its values."""
        values = (self.loc, self.scale) if self.by_loss else (self.loc.detach(), self.scale.detach())
        loc, scale = (widest(value) for value in values)
        standard = onto(Gumbel(0.0, 1.0, self.cutoff).gamma(t), loc.device)
        return variance_preserving(loc + scale.clamp_min(1e-2) * standard)

    def fit_loss(self, gamma: Tensor, cross_entropy: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Mean of (CE - h F(gamma))^2 over the `chosen`, with gradient to the schedule's own parameters alone."""
        z = (gamma.detach().to(self.loc) - self.loc) / self.scale.clamp_min(1e-2)
        curve = self.entropy * torch.exp(-torch.exp(-z))
        error = (cross_entropy.detach().to(curve) - curve).square()
        if chosen is None:
            return error.mean()
        # Zero, if every sequence of the batch had a noise level per position.
        return (error * chosen).sum() / chosen.sum().clamp_min(1)

    def no_fit(self) -> Tensor:
        """Zero, with a gradient of zero: sharded training wants one for every parameter in every pass."""
        return 0.0 * (self.loc + self.scale + self.entropy).sum()

    def numbers(self, fit: Tensor) -> dict[str, Tensor]:
        """The fit and the present values, for the journal."""
        values = {"fit": fit, "loc": self.loc[0], "scale": self.scale[0], "entropy": self.entropy[0]}
        return {f"schedule_{name}": value.detach() for name, value in values.items()}


def fitted_points(gamma: Tensor, ce: Tensor, *, blocks: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Noise levels and cross-entropies [n] as the sampler meets them, and which of them count if not all do.

    The sampler has one level for a block, or for a sequence: sequences with a level per position do not count.
    """
    if blocks:
        return gamma.flatten(), ce.flatten(), None  # the positions of a block share their level
    if gamma.dim() == 2:
        return gamma[:, 0], ce.mean(-1), (gamma == gamma[:, :1]).all(-1)
    return gamma, ce.mean(-1), None
