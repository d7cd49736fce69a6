"""MDLM: masked diffusion with the SUBS parameterisation (Sahoo et al. 2024, arXiv 2406.07524).

tau = 0 is data, tau = 1 all mask. Each position is masked with probability 1 - a(tau), a = 1 - (1 - eps) tau.
The network sees no time. Masked positions pay -log x_th with weight a'/(1 - a) = 1/tau; an unmasked token is
carried over and free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from convergeflow.errors import unknown_name
from convergeflow.randomness import RowDraws
from convergeflow.systems.categorical import draw, tempered
from convergeflow.systems.rival import TEMPERATURES, Rival, RivalConfig, Run, TokenNetwork

FLOOR = 1e-3
"""The share of signal left at tau = 1, and the smallest time of training."""
LAST_TIME = 1e-5
"""Where the sampler's grid ends, before what is left is removed at once."""
REMOVALS = ("sample", "greedy")


def kept_share(tau: Tensor) -> Tensor:
    """a(tau), the log-linear schedule: sigma = -log a."""
    return 1.0 - (1.0 - FLOOR) * tau


def training_tau(times: Tensor) -> Tensor:
    """Uniform times without the first thousandth, where the weight 1/tau explodes."""
    return FLOOR + (1.0 - FLOOR) * times


def hide(tokens: Tensor, masked: Tensor, mask: int) -> tuple[Tensor, Tensor]:
    """`tokens` [B, L] with masks where `masked` (decided on the CPU) says so, and where those are among all B x L."""
    hidden = masked.flatten().nonzero()[:, 0]
    return torch.where(masked.to(tokens.device), mask, tokens), hidden.to(tokens.device)


def put_back(values: Tensor, hidden: Tensor, shape: torch.Size) -> Tensor:
    """One number per hidden position at its place, zeros elsewhere, [B, L]."""
    return values.new_zeros(shape.numel()).index_put((hidden,), values).view(shape)


class MdlmModel(Rival):
    """Masked diffusion."""

    method = "mdlm"
    bound_kind = "masked-diffusion ELBO"
    controls: Mapping[str, Any] = {"temperature": 1.0, "removal": "sample"}
    frontier = TEMPERATURES

    def __init__(self, config: RivalConfig) -> None:
        super().__init__(config)
        # The head has no mask output: SUBS gives the mask probability zero.
        self.network = TokenNetwork(config, inputs=config.vocabulary + 1, outputs=config.vocabulary)

    @property
    def mask(self) -> int:
        return self.config.vocabulary

    def logits(self, noisy: Tensor, positions: Tensor | None = None) -> Tensor:
        """Token logits; the trunk's noise level is 0 at all times."""
        return self.network(noisy, torch.zeros(len(noisy), device=noisy.device), positions)

    def masked_nll(self, tokens: Tensor, masked: Tensor) -> Tensor:
        """-log x_th at positions that are `masked` (on the CPU), 0 elsewhere, [B, L]."""
        noisy, hidden = hide(tokens, masked, self.mask)
        nll = functional.cross_entropy(self.logits(noisy, hidden).float(), tokens.flatten()[hidden], reduction="none")
        return put_back(nll, hidden, tokens.shape)

    def row_losses(self, tokens: Tensor, times: Tensor, draws: RowDraws) -> Tensor:
        tau = training_tau(times)
        masked = draws.uniform(tokens.shape[1]) > kept_share(tau)[:, None]
        return self.masked_nll(tokens, masked).mean(-1) / tau.to(tokens.device)

    def row_bounds(self, tokens: Tensor, times: Tensor, draws: RowDraws) -> Tensor:
        """Masking with probability tau itself: the network sees no time, so training's cut-offs are not needed."""
        masked = draws.uniform(tokens.shape[1]) < times[:, None]
        return self.masked_nll(tokens, masked).mean(-1) / times.to(tokens.device)

    def generate_batch(self, run: Run, *, temperature: float, removal: str) -> Tensor:  # type: ignore[override]
        """nfe - 1 ancestral steps from all masks, then one call that fills what is still masked."""
        if removal not in REMOVALS:
            raise unknown_name("removal", removal, REMOVALS)
        x = run.known.put(torch.full((run.rows, run.length), self.mask, device=run.device))
        num_steps = run.nfe - 1
        grid = torch.linspace(1.0, LAST_TIME, num_steps + 1, dtype=torch.float64)
        for i in range(num_steps):
            now, then = kept_share(grid[i]), kept_share(grid[i + 1])
            law = self.reverse_law(tempered(self.logits(x).double(), temperature), now, then)
            x = torch.where(x == self.mask, draw(law, run.draws), x)
            run.report(i, run.nfe, float(1 - grid[i]), x)
        log_x = tempered(self.logits(x).double(), temperature if removal == "sample" else 0.0)
        x = torch.where(x == self.mask, draw(log_x, run.draws), x)
        run.report(num_steps, run.nfe, 1.0, x)
        return x

    @staticmethod
    def reverse_law(log_x: Tensor, now: Any, then: Any) -> Tensor:
        """log p(x_s | x_t = mask) over tokens and, last, the mask; [..., V + 1]."""
        stay = torch.as_tensor((1 - then) / (1 - now), dtype=log_x.dtype).log().to(log_x.device)
        leave = torch.as_tensor((then - now) / (1 - now), dtype=log_x.dtype).log().to(log_x.device)
        return torch.cat([log_x + leave, stay.expand(*log_x.shape[:-1], 1)], dim=-1)
