"""The DiT that reads a noisy state and a noise level: LangFlow's, which ConvergeFlow and its discrete rivals share.

Pre-norm layers with rotary attention over the whole sequence and adaLN modulation by an embedding of gamma.
Zero-initialised modulation makes a fresh trunk the identity up to its final norm.

Shapes: B batch, L length, D width, H heads, C condition width. gamma is [B], or [B, L] for a noise level per position.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from convergeflow.model.views import WHOLE, View

GAMMA_LIMIT = 60.0
"""gamma is infinite at the ends of unclamped schedules; sinusoids need a number, and beyond this nothing changes."""


class Norm(nn.Module):
    """Layer norm with a weight and no bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x.float() if x.dtype != torch.float64 else x, self.weight.shape, self.weight)


class FewRows(nn.Linear):
    """A linear layer of one row per sample, whose bits do not depend on how many samples there are.

    Libraries choose other kernels for a few rows; the whole network has no other product of so few.
    """

    FEWEST = 16

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        if len(rows) >= self.FEWEST or torch.is_grad_enabled():
            return super().forward(x)
        padded = torch.cat([rows, rows.new_zeros(self.FEWEST - len(rows), rows.shape[-1])])
        return super().forward(padded)[: len(rows)].unflatten(0, x.shape[:-1])


class NoiseLevelEmbedding(nn.Module):
    """gamma -> [.., C]: 256 sinusoids of the raw value (cosines first), a two-layer MLP, and the SiLU for adaLN."""

    FREQUENCIES = 128

    def __init__(self, condition_width: int) -> None:
        super().__init__()
        self.expand = FewRows(2 * self.FREQUENCIES, condition_width)
        self.project = FewRows(condition_width, condition_width)

    def forward(self, gamma: Tensor) -> Tensor:
        dtype = self.expand.weight.dtype
        gamma = gamma.to(device=self.expand.weight.device, dtype=dtype).clamp(-GAMMA_LIMIT, GAMMA_LIMIT)
        index = torch.arange(self.FREQUENCIES, device=gamma.device, dtype=dtype)
        angle = gamma[..., None] * torch.exp(index * (-math.log(10_000.0) / self.FREQUENCIES))
        features = torch.cat([angle.cos(), angle.sin()], dim=-1)
        return functional.silu(self.project(functional.silu(self.expand(features))))


@lru_cache(maxsize=16)
def _rotation(length: int, half: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    # Computed, not stored: transformers fills non-persistent buffers with garbage when it loads a model.
    rate = 1.0 / 10_000.0 ** (torch.arange(half, device=device, dtype=torch.float32) / half)
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * rate
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x_BHLK: Tensor, start: int = 0) -> Tensor:
    """Rotary embedding of positions start, start + 1, ..., half-split: pairs are (k, k + K/2)."""
    half = x_BHLK.shape[-1] // 2
    cos, sin = (part[start:] for part in _rotation(start + x_BHLK.shape[-2], half, x_BHLK.device, x_BHLK.dtype))
    first, second = x_BHLK[..., :half], x_BHLK[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    """Full attention, no biases; `causal` is for the autoregressive rival."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_BLD: Tensor, mask: Tensor | None = None, view: View = WHOLE, layer: int = 0) -> Tensor:
        """`mask` is the view's; positions behind a past go on from it, and copies each count from 0."""
        B, L, D = x_BLD.shape
        q, k, v = self.qkv(x_BLD).view(B, L, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        past = view.past(layer)
        start = 0 if past is None else past[0].shape[-2]
        q, k = (rotate(each.unflatten(2, (view.copies, -1)), start).flatten(2, 3) for each in (q, k))
        if past is not None:
            k, v = torch.cat([past[0], k], dim=-2), torch.cat([past[1], v], dim=-2)
        view.keep(k, v)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(B, L, D))


class Layer(nn.Module):
    """Attention and MLP, each normalised, shifted and scaled by the noise level, and gated into the residual stream."""

    def __init__(
        self, width: int, heads: int, condition_width: int, dropout: float, gate_init: float, causal: bool
    ) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = Norm(width), Norm(width)
        self.attention = Attention(width, heads, causal)
        self.mlp_up, self.mlp_down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = FewRows(condition_width, 6 * width)
        self.dropout = dropout
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)
        with torch.no_grad():  # order: shift, scale, gate of attention, then of the MLP
            self.modulation.bias.view(6, width)[[2, 5]] = gate_init

    def forward(self, x_BLD: Tensor, condition: Tensor, *attention: Any) -> Tensor:
        """`attention`: what `Attention` takes besides."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(condition).chunk(6, dim=-1)
        h = torch.addcmul(shift_a, self.norm_attention(x_BLD), 1 + scale_a)
        h = functional.dropout(self.attention(h, *attention), self.dropout, self.training)
        x_BLD = torch.addcmul(x_BLD, gate_a.to(x_BLD.dtype), h.to(x_BLD.dtype))
        h = torch.addcmul(shift_m, self.norm_mlp(x_BLD), 1 + scale_m)
        h = self.mlp_down(functional.gelu(self.mlp_up(h), approximate="tanh"))
        h = functional.dropout(h, self.dropout, self.training)
        return torch.addcmul(x_BLD, gate_m.to(x_BLD.dtype), h.to(x_BLD.dtype))


class Backbone(nn.Module):
    """The layers and the final modulated norm: hidden state in, hidden state out, [B, L, D] both."""

    def __init__(
        self,
        *,
        width: int,
        depth: int,
        heads: int,
        condition_width: int = 128,
        dropout: float = 0.1,
        gate_init: float = 0.0,
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.noise_level = NoiseLevelEmbedding(condition_width)
        self.blocks = nn.ModuleList(
            Layer(width, heads, condition_width, dropout, gate_init, causal) for _ in range(depth)
        )
        self.norm_final = Norm(width)
        self.modulation_final = FewRows(condition_width, 2 * width)
        nn.init.zeros_(self.modulation_final.weight)
        nn.init.zeros_(self.modulation_final.bias)
        self.recompute = False
        """Activation checkpointing: keep only the inputs of layers, compute the rest again in the backward pass."""

    def layers(self) -> list[Layer]:
        """The layers, first to last."""
        return [layer for layer in self.blocks if isinstance(layer, Layer)]

    def forward(self, x_BLD: Tensor, gamma: Tensor, view: View = WHOLE) -> Tensor:
        mask = view.mask(x_BLD.shape[1], x_BLD.device)
        if mask is not None:
            mask = mask.unsqueeze(-3)  # the same for all heads
        with torch.autocast(x_BLD.device.type, enabled=False):  # gamma spans decades; bfloat16 would blur it
            condition = self.noise_level(gamma)
        if condition.dim() == 2:
            condition = condition[:, None]  # one noise level for the whole sequence
        for number, layer in enumerate(self.blocks):
            if self.recompute and self.training:
                x_BLD = checkpoint(layer, x_BLD, condition, mask, view, number, use_reentrant=False)
            else:
                x_BLD = layer(x_BLD, condition, mask, view, number)
        shift, scale = self.modulation_final(condition).chunk(2, dim=-1)
        return torch.addcmul(shift, self.norm_final(x_BLD), 1 + scale)


class SelfConditionedInput(nn.Module):
    """x + W [x ; c]: the state with an earlier prediction mixed in; W starts at zero, and no prediction means c = 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, 2 * width))

    def forward(self, x: Tensor, condition: Tensor | None) -> Tensor:
        width = x.shape[-1]
        mixed = x + functional.linear(x, self.weight[:, :width])
        if condition is not None:
            mixed = mixed + functional.linear(condition.to(x.dtype), self.weight[:, width:])
        return mixed
