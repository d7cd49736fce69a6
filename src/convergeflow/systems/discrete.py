"""What MDLM, SEDD and Duo share: tokens turn into noise one by one, and a sampler turns them back step by step.

tau = 0 is data, tau = 1 noise. Noise is a mask or a uniform token. A method gives `law`, the chances of every token
one step earlier.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from convergeflow.device import onto
from convergeflow.randomness import RowDraws
from convergeflow.systems.categorical import draw
from convergeflow.systems.rival import Rival, RivalConfig, Run, TokenNetwork

FLOOR = 1e-3
"""The share of signal left at tau = 1, and the smallest time of training."""
LAST_TIME = 1e-5
"""Where the sampler's grid ends, before what is left is removed at once."""


def kept_share(tau: Tensor) -> Tensor:
    """a(tau), the log-linear schedule: sigma = -log a."""
    return 1.0 - (1.0 - FLOOR) * tau


def training_tau(times: Tensor) -> Tensor:
    """Uniform times without the first thousandth, where the weight 1/tau explodes."""
    return FLOOR + (1.0 - FLOOR) * times


class DiscreteDiffusion(Rival):
    """Diffusion of tokens; subclasses give `row_losses` and `law`."""

    masks: bool
    """Whether noise is a mask (a token's last change) or a uniform token."""

    def __init__(self, config: RivalConfig) -> None:
        super().__init__(config)
        # The head has no mask output: a mask is never predicted.
        self.network = TokenNetwork(config, inputs=config.vocabulary + self.masks, outputs=config.vocabulary)

    @property
    def mask(self) -> int:
        return self.config.vocabulary

    def hidden(self, tokens: Tensor, masked: Tensor) -> Tensor:
        """`tokens` with masks where `masked` says so, which is known on the CPU."""
        return torch.where(onto(masked, tokens.device), self.mask, tokens)

    def masked_values(self, masked: Tensor, values: Tensor) -> Tensor:
        """Values of the masked positions, flat, at their places [B, L]; 0 elsewhere."""
        # A mask on the CPU is turned into indices there, and the device need not be asked how many.
        return values.new_zeros(masked.shape).index_put((masked,), values)

    def replaced(self, tokens: Tensor, moved: Tensor, draws: RowDraws) -> Tensor:
        """`tokens` with a uniform one, possibly the same, wherever `moved`, which is known on the CPU."""
        K = self.config.vocabulary
        other = (draws.uniform(tokens.shape[1]) * K).long().clamp_max(K - 1)
        return torch.where(onto(moved, tokens.device), onto(other, tokens.device), tokens)

    def uniform_divergence(self, kept: float) -> float:
        """Divergence from the uniform law, in nats, of a token that survives with probability `kept`."""
        K = self.config.vocabulary
        own, other = kept + (1 - kept) / K, (1 - kept) / K
        return own * math.log(own * K) + (K - 1) * other * math.log(other * K)

    def law(self, x: Tensor, tau: Tensor, then: Tensor | None, **controls: Any) -> Tensor:
        """Log weights of every token (and, last, of the mask) at time `then`, given x [B, L] at tau: one network call.

        `then` is None at the last step, after which no noise is left.
        """
        raise NotImplementedError

    def generate_batch(self, run: Run, **controls: Any) -> Tensor:
        """nfe - 1 steps on an even grid, then one that removes the rest of the noise."""
        grid = torch.linspace(1.0, LAST_TIME, run.nfe, dtype=torch.float64)
        if self.masks:
            x = torch.full((run.rows, run.length), self.mask, device=run.device)
        else:
            shape = (run.rows, run.length, self.config.vocabulary)
            x = draw(torch.zeros((), device=run.device).expand(shape), run.draws)
        x = run.put(x)
        for i in range(run.nfe):
            then = grid[i + 1] if i + 1 < run.nfe else None
            drawn = draw(self.law(x, grid[i], then, **controls), run.draws)
            x = run.put(torch.where(x == self.mask, drawn, x) if self.masks else drawn)
            run.report(i, run.nfe, 1.0 if then is None else float(1 - grid[i]), x)
        return x
