"""Plaid as published: its own trunk (RMS norm, no biases, residuals scaled by depth, the muP read-out).

tau = 0 is data, tau = 1 noise. Schedule, read-out and sampler are those of `systems/plaid.py`; the trunk is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from convergeflow.device import widest
from convergeflow.model.backbone import Norm, rotate
from convergeflow.systems.plaid import Level, PlaidConfig, PlaidModel, UnitTable
from convergeflow.systems.published.elf import RootMeanSquare
from convergeflow.systems.published.family import Published

BASE_WIDTH = 256
"""Of muP: the read-out sees the hidden state divided by width/256."""
FREQUENCIES = 32
STEPS = 4096


class PlaidLayer(nn.Module):
    """Pre-norm attention and MLP without biases; both branches are scaled before they are added."""

    def __init__(self, width: int, heads: int, scale: float) -> None:
        super().__init__()
        self.heads, self.scale = heads, scale
        self.norm_attention, self.norm_mlp = RootMeanSquare(width, 1e-5), RootMeanSquare(width, 1e-5)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp_up, self.mlp_down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, L, D = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(B, L, 3, self.heads, D // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(rotate(q), rotate(k), v)
        x = x + self.scale * self.out(mixed.transpose(1, 2).reshape(B, L, D))
        h = self.mlp_down(functional.gelu(self.mlp_up(self.norm_mlp(x)), approximate="tanh"))
        return x + self.scale * h


class PublishedPlaidNetwork(nn.Module):
    """State [B, L, D] and earlier prediction to what the read-out sees; the table and the read-out live here too."""

    def __init__(self, config: PlaidConfig) -> None:
        super().__init__()
        D = config.dimension
        self.embedding = UnitTable(config.vocabulary, D)
        self.enter = nn.Linear(D, config.width, bias=False)
        self.enter_condition = nn.Linear(D, config.width, bias=False)
        self.enter_gamma = nn.Linear(2 * FREQUENCIES, config.width, bias=False)
        scale = config.depth**-0.5
        self.blocks = nn.ModuleList(PlaidLayer(config.width, config.heads, scale) for _ in range(config.depth))
        self.norm_final = Norm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary)

    def forward(self, z: Tensor, at: Level, condition: Tensor) -> Tensor:
        D, dtype = z.shape[-1], self.enter.weight.dtype
        scale = (at.alpha.square() / D + at.sigma.square()).rsqrt()[:, None, None]
        rate = torch.linspace(-5.0, 5.0, FREQUENCIES, device=z.device, dtype=at.gamma.dtype).exp()
        angle = at.gamma[:, None] * rate
        features = torch.cat([angle.sin(), angle.cos()], dim=-1).to(dtype)
        with torch.autocast(z.device.type, enabled=False):  # the layers alone may run in half precision
            h = self.enter((z * scale).to(dtype)) + self.enter_condition((D**0.5 * condition).to(dtype))
            h = h + self.enter_gamma(features)[:, None]
        for layer in self.blocks:
            h = layer(h)
        with torch.autocast(z.device.type, enabled=False):
            return self.norm_final(h.to(dtype)) / (h.shape[-1] / BASE_WIDTH)


class PublishedPlaid(Published, PlaidModel):
    """Plaid of its authors."""

    method = "published-plaid"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "published": {"nfe": STEPS + 1, "temperature": 0.9, "step": "ancestral"},
        "ddim": {"nfe": STEPS + 1, "temperature": 0.9, "step": "ddim"},
    }
    network_class = PublishedPlaidNetwork
    network: PublishedPlaidNetwork  # type: ignore[assignment]

    def forward(self, z: Tensor, gamma: Tensor, previous: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits [B, L, V] and the data prediction [B, L, D] for states z [B, L, D] at gamma [B]."""
        at = Level(widest(gamma))
        h = self.network(z, at, torch.zeros_like(z) if previous is None else previous)
        table = self.network.embedding.rows().to(h)
        with torch.autocast(z.device.type, enabled=False):
            logits = self.network.head(h) + at.kernel[:, None, None].to(h) * (z.to(h) @ table.T)
            return logits, logits.softmax(-1) @ table
