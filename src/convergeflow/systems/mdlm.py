"""MDLM: masked diffusion with the SUBS parameterisation (Sahoo et al. 2024, arXiv 2406.07524).

tau = 0 is data, tau = 1 all mask. Each position is masked with probability 1 - a(tau), a = 1 - (1 - eps) tau. The
network sees no time. Masked positions pay -log x_th with weight a'/(1 - a) = 1/tau; other tokens stay and cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from convergeflow.device import matching, onto, widest
from convergeflow.randomness import RowDraws
from convergeflow.systems.categorical import tempered
from convergeflow.systems.discrete import DiscreteDiffusion, kept_share, training_tau
from convergeflow.systems.rival import TEMPERATURES

REMOVALS = ("sample", "greedy")
"""How the last step chooses among the tokens."""


class MdlmModel(DiscreteDiffusion):
    """Masked diffusion."""

    method = "mdlm"
    masks = True
    bound_kind: str | None = "masked-diffusion ELBO"
    controls: Mapping[str, Any] = {"temperature": 1.0, "removal": "sample"}
    choices: Mapping[str, Any] = {"removal": REMOVALS}
    frontier = TEMPERATURES

    def logits(self, noisy: Tensor, positions: Tensor | None = None) -> Tensor:
        """Token logits; the trunk's noise level is 0 at all times."""
        return self.network(noisy, torch.zeros(len(noisy), device=noisy.device), positions)

    def masked_nll(self, tokens: Tensor, masked: Tensor) -> Tensor:
        """-log x_th at positions that are `masked` (on the CPU), 0 elsewhere, [B, L]."""
        logits = self.logits(self.hidden(tokens, masked), masked)
        return self.masked_values(masked, functional.cross_entropy(logits.float(), tokens[masked], reduction="none"))

    def row_losses(self, tokens: Tensor, times: Tensor, draws: RowDraws) -> Tensor:
        tau = training_tau(times)
        masked = draws.uniform(tokens.shape[1]) > kept_share(tau)[:, None]
        return self.masked_nll(tokens, masked).mean(-1) / onto(tau, tokens.device)

    def row_bounds(self, tokens: Tensor, times: Tensor, draws: RowDraws) -> Tensor:
        """Masking with probability tau itself: the network sees no time, so training's cut-offs are not needed."""
        masked = draws.uniform(tokens.shape[1]) < times[:, None]
        return self.masked_nll(tokens, masked).mean(-1) / onto(times, tokens.device)

    def law(self, x: Tensor, tau: Tensor, then: Tensor | None, *, temperature: float, removal: str) -> Tensor:  # type: ignore[override]
        """The last step fills every mask."""
        greedy = then is None and removal == "greedy"
        log_x = tempered(widest(self.logits(x)), 0.0 if greedy else temperature)
        return log_x if then is None else self.reverse_law(log_x, kept_share(tau), kept_share(then))

    @staticmethod
    def reverse_law(log_x: Tensor, now: Tensor, then: Tensor) -> Tensor:
        """log p(x_s | x_t = mask) over tokens and, last, the mask, [..., V + 1]; a_t = now, a_s = then."""
        chances = (1 - then) / (1 - now), (then - now) / (1 - now)
        stay, leave = (matching(chance.log(), log_x) for chance in chances)
        return torch.cat([log_x + leave, stay.expand(*log_x.shape[:-1], 1)], dim=-1)
