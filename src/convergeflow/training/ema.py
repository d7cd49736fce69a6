"""The average of the weights along training: a second copy of the model, the one that is evaluated and shipped.

After the n-th update, n = 1, 2, ..., the decay is min(decay, (1 + n)/(10 + n)), so that a short run is not held back by
its random start; the paper's own run uses a constant decay, having started from trained weights.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from convergeflow.systems.protocol import LanguageModel
from convergeflow.training.config import EmaConfig
from convergeflow.training.sharding import local


def decay_at(config: EmaConfig, update: int) -> float:
    """The decay of update number `update` (from 1)."""
    return min(config.decay, (1 + update) / (10 + update)) if config.warmup else config.decay


class WeightAverage:
    """Holds `model`, a copy whose parameters follow those of the trained one."""

    def __init__(self, model: LanguageModel, config: EmaConfig) -> None:
        self.config = config
        self.model: LanguageModel = copy.deepcopy(model).requires_grad_(False).eval()

    @torch.no_grad()
    def update(self, model: nn.Module, update: int) -> None:
        """Move towards `model`; `update` counts from 1, so no counter has to be saved."""
        share = 1.0 - decay_at(self.config, update)
        for average, current in zip(self.model.parameters(), model.parameters(), strict=True):
            if current.requires_grad:
                local(average).lerp_(local(current), share)
        for kept, given in zip(self.model.buffers(), model.buffers(), strict=True):
            kept.copy_(given)

    @torch.no_grad()
    def adopt_frozen(self, model: nn.Module) -> None:
        """Take over exactly what is not trained: an averaged table beside a frozen one would be a different model."""
        for average, current in zip(self.model.parameters(), model.parameters(), strict=True):
            if not current.requires_grad:
                local(average).copy_(local(current))
