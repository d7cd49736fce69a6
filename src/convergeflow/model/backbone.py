"""The DiT that reads a noisy state and a noise level: LangFlow's, which ConvergeFlow and its discrete rivals share.

Pre-norm layers with rotary attention over the whole sequence and adaLN modulation by an embedding of gamma.
Zero-initialised modulation makes a fresh trunk the identity up to its final norm.

Shapes: B batch, L length, D width, H heads, C condition width. gamma is [B], or [B, L] for a noise level per position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from convergeflow.device import attend, matching
from convergeflow.errors import UserError
from convergeflow.model.views import WHOLE, View

GAMMA_LIMIT = 60.0
"""gamma is infinite at the ends of unclamped schedules; sinusoids need a number, and beyond this nothing changes."""


@dataclass(frozen=True)
class TrunkShape:
    """The size of a trunk with its vocabulary; the defaults are the paper's."""

    vocabulary: int = 50257
    width: int = 768
    depth: int = 12
    heads: int = 12
    condition_width: int = 128
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads) != 0:
            raise UserError(f"width {self.width} must be a multiple of 2 x heads (2 x {self.heads}) for the rotations")


class Norm(nn.Module):
    """Layer norm with a weight and no bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x.float() if x.dtype != torch.float64 else x, self.weight.shape, self.weight)


class FewRows(nn.Linear):
    """A layer of one row per sample, whose bits do not depend on their number: libraries treat a few rows apart."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        missing = 0 if torch.is_grad_enabled() else max(0, 16 - len(rows))
        return super().forward(functional.pad(rows, (0, 0, 0, missing)))[: len(rows)].unflatten(0, x.shape[:-1])


class NoiseLevelEmbedding(nn.Module):
    """gamma -> [.., C]: 256 sinusoids of the raw value (cosines first), a two-layer MLP, and the SiLU for adaLN."""

    FREQUENCIES = 128

    def __init__(self, condition_width: int) -> None:
        super().__init__()
        self.expand = FewRows(2 * self.FREQUENCIES, condition_width)
        self.project = FewRows(condition_width, condition_width)

    def embed(self, gamma: Tensor) -> Tensor:
        """Without the last SiLU."""
        dtype = self.expand.weight.dtype
        gamma = matching(gamma, self.expand.weight).clamp(-GAMMA_LIMIT, GAMMA_LIMIT)
        index = torch.arange(self.FREQUENCIES, device=gamma.device, dtype=dtype)
        angle = gamma[..., None] * torch.exp(index * (-math.log(10_000.0) / self.FREQUENCIES))
        features = torch.cat([angle.cos(), angle.sin()], dim=-1)
        return self.project(functional.silu(self.expand(features)))

    def forward(self, gamma: Tensor) -> Tensor:
        return functional.silu(self.embed(gamma))


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # kept for calls outside of it
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
    """Full attention, no biases; `mix` can be replaced by another way to weigh the values."""

    mix = staticmethod(attend)

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_BLD: Tensor, mask: Tensor | None = None, view: View = WHOLE, layer: int = 0) -> Tensor:
        """`mask` is the view's; positions behind a past go on from it, and copies each count from 0."""
        B, L, D = x_BLD.shape
        q, k, v = self.qkv(x_BLD).view(B, L, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        past = view.noted(f"layer {layer}")
        start = 0 if past is None else past[0].shape[-2]
        q, k = (rotate(each.unflatten(2, (view.copies, -1)), start).flatten(2, 3) for each in (q, k))
        if past is not None:
            k, v = torch.cat([past[0], k], dim=-2), torch.cat([past[1], v], dim=-2)
        view.note(f"layer {layer}", k, v)
        mixed = self.mix(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).reshape(B, L, D))


class Layer(nn.Module):
    """Attention and MLP, each normalised, shifted and scaled by the noise level, and gated into the residual stream."""

    def __init__(self, shape: TrunkShape) -> None:
        super().__init__()
        width = shape.width
        self.norm_attention, self.norm_mlp = Norm(width), Norm(width)
        self.attention = Attention(width, shape.heads)
        self.mlp_up, self.mlp_down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = FewRows(shape.condition_width, 6 * width)
        self.dropout = shape.dropout
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

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

    def __init__(self, shape: TrunkShape) -> None:
        super().__init__()
        self.noise_level = NoiseLevelEmbedding(shape.condition_width)
        self.blocks = nn.ModuleList(Layer(shape) for _ in range(shape.depth))
        self.norm_final = Norm(shape.width)
        self.modulation_final = FewRows(shape.condition_width, 2 * shape.width)
        nn.init.zeros_(self.modulation_final.weight)
        nn.init.zeros_(self.modulation_final.bias)
        self.recompute = False
        """Activation checkpointing: keep only the inputs of layers, compute the rest again in the backward pass."""

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
