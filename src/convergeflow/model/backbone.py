"""The DiT that reads a noisy state and a noise level: LangFlow's, which ConvergeFlow and its discrete rivals share.

Pre-norm blocks with rotary attention over the whole sequence and adaLN modulation by an embedding of gamma.
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

GAMMA_LIMIT = 60.0
"""gamma is infinite at the ends of unclamped schedules; sinusoids need a number, and beyond this nothing changes."""


class Norm(nn.Module):
    """Layer norm with a weight and no bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(
            x.float() if x.dtype != torch.float64 else x, self.weight.shape, self.weight
        )


class NoiseLevelEmbedding(nn.Module):
    """gamma -> [.., C]: 256 sinusoids of the raw value (cosines first), a two-layer MLP, and the SiLU for adaLN."""

    FREQUENCIES = 128

    def __init__(self, condition_width: int) -> None:
        super().__init__()
        self.expand = nn.Linear(2 * self.FREQUENCIES, condition_width)
        self.project = nn.Linear(condition_width, condition_width)

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
    cos, sin = (
        part[start:] for part in _rotation(start + x_BHLK.shape[-2], half, x_BHLK.device, x_BHLK.dtype)
    )
    first, second = x_BHLK[..., :half], x_BHLK[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def pair_mask(starts: Tensor) -> Tensor:
    """Who may look at whom when a clean copy of a sequence is followed by a noisy one, [.., 2L, 2L].

    `starts` [.., L] is the first position of the block that each position belongs to. A clean position sees the clean
    ones up to itself; a noisy one sees the noisy ones of its block and the clean ones before it. So every block of one
    pass is predicted from the clean words before it (block diffusion's training pass).
    """
    place = torch.arange(starts.shape[-1], device=starts.device)
    up_to_itself = (place[:, None] >= place).expand(*starts.shape, -1)
    before, beside = place < starts[..., None], starts[..., None] == starts[..., None, :]
    clean = torch.cat([up_to_itself, torch.zeros_like(up_to_itself)], -1)
    return torch.cat([clean, torch.cat([before, beside], -1)], -2)


Memory = list[tuple[Tensor, Tensor]]
"""Keys and values [B, H, P, K] of each block at P clean positions: they see nothing that follows, so they stay."""


class Attention(nn.Module):
    """Full attention, no biases; `causal` is for the autoregressive rival."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(
        self,
        x_BLD: Tensor,
        mask: Tensor | None = None,
        copies: int = 1,
        past: tuple[Tensor, Tensor] | None = None,
        keep: Memory | None = None,
    ) -> Tensor:
        """`copies` of a sequence, end to end, each count their positions from 0; those after a `past` go on from it."""
        B, L, D = x_BLD.shape
        q, k, v = self.qkv(x_BLD).view(B, L, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        start = 0 if past is None else past[0].shape[-2]
        q, k = (rotate(each.unflatten(2, (copies, -1)), start).flatten(2, 3) for each in (q, k))
        if past is not None:
            k, v = torch.cat([past[0], k], dim=-2), torch.cat([past[1], v], dim=-2)
        if keep is not None:
            keep.append((k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(B, L, D))


class Block(nn.Module):
    """Attention and MLP, each normalised, shifted and scaled by the noise level, and gated into the residual stream."""

    def __init__(
        self, width: int, heads: int, condition_width: int, dropout: float, gate_init: float, causal: bool
    ) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = Norm(width), Norm(width)
        self.attention = Attention(width, heads, causal)
        self.mlp_up, self.mlp_down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = nn.Linear(condition_width, 6 * width)
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
    """Blocks and the final modulated norm: hidden state in, hidden state out, [B, L, D] both."""

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
            Block(width, heads, condition_width, dropout, gate_init, causal) for _ in range(depth)
        )
        self.norm_final = Norm(width)
        self.modulation_final = nn.Linear(condition_width, 2 * width)
        nn.init.zeros_(self.modulation_final.weight)
        nn.init.zeros_(self.modulation_final.bias)
        self.recompute = False
        """Activation checkpointing: keep only block inputs and compute each block again in the backward pass."""

    def forward(
        self,
        x_BLD: Tensor,
        gamma: Tensor,
        *,
        paired: Tensor | None = None,
        past: Memory | None = None,
        keep: Memory | None = None,
    ) -> Tensor:
        """`paired`: the input is two copies of a sequence, end to end, with these block starts; see `pair_mask`.

        `past`: it follows clean positions, whose keys and values these are. `keep` (an empty list): it is such clean
        positions, each of which sees those up to itself, and theirs are put there.
        """
        mask, copies = None, 1
        if paired is not None:
            mask, copies = pair_mask(paired.to(x_BLD.device)).unsqueeze(-3), 2  # the same for all heads
        elif keep is not None:
            mask = torch.ones(x_BLD.shape[1], x_BLD.shape[1], dtype=torch.bool, device=x_BLD.device).tril()
        with torch.autocast(x_BLD.device.type, enabled=False):  # gamma spans decades; bfloat16 would blur it
            condition = self.noise_level(gamma)
        if condition.dim() == 2:
            condition = condition[:, None]  # one noise level for the whole sequence
        for number, block in enumerate(self.blocks):
            attention = (mask, copies, None if past is None else past[number], keep)
            if self.recompute and self.training:
                x_BLD = checkpoint(block, x_BLD, condition, *attention, use_reentrant=False)
            else:
                x_BLD = block(x_BLD, condition, *attention)
        shift, scale = self.modulation_final(condition).chunk(2, dim=-1)
        return torch.addcmul(shift, self.norm_final(x_BLD), 1 + scale)


class Neighbours(nn.Module):
    """The inputs of the few positions before each one, mixed linearly: a convolution that looks back."""

    def __init__(self, width: int, reach: int) -> None:
        super().__init__()
        self.reach = reach
        self.mix = nn.Linear(reach * width, width, bias=False)

    def forward(self, x_BLD: Tensor, paired: Tensor | None = None, past: Tensor | None = None) -> Tensor:
        """With `paired` (block starts) x is two copies: a noisy position has clean ones before its block's start.

        `past` [B, P, D] are the inputs before x.
        """
        if past is not None:
            return self(torch.cat([past, x_BLD], 1))[:, past.shape[1] :]
        if paired is None:
            return self.mix(torch.cat(self._back(x_BLD), dim=-1))
        clean, noisy = (self._back(half) for half in x_BLD.chunk(2, 1))
        place = torch.arange(paired.shape[-1], device=x_BLD.device)
        starts = paired.to(x_BLD.device)
        own = [
            torch.where((place - step >= starts)[..., None], within, before)
            for step, (within, before) in enumerate(zip(noisy, clean, strict=True), 1)
        ]
        return self.mix(torch.cat([torch.cat(clean, -1), torch.cat(own, -1)], 1))

    def _back(self, x_BLD: Tensor) -> list[Tensor]:
        """What stands 1, 2, .. positions before each; nearest first, so that a longer reach only appends columns."""
        padded = functional.pad(x_BLD, (0, 0, self.reach, 0))
        length = x_BLD.shape[1]
        return [padded[:, self.reach - step : self.reach - step + length] for step in range(1, self.reach + 1)]


class EvidencePooling(nn.Module):
    """Which positions hold the same word, and the sum of their evidence: y_p = sum_q a_pq v_q, a in (0, 1).

    Observations of one word add: if positions p and q hold the same word, its posterior has the kernel scores of both.
    So a_pq is a probability of its own (a sigmoid, no softmax), and a position's own state stays out of its sum.
    """

    START = -5.0
    """Of the logits: nothing is pooled at the beginning."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.offset = nn.Parameter(torch.tensor([self.START]))

    def forward(
        self,
        h_BLD: Tensor,
        values_BLD: Tensor,
        *,
        paired: Tensor | None = None,
        past: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """`paired` as in `Backbone`; `past`: h and values of clean positions before these."""
        if past is not None:
            count = past[0].shape[1]
            h_BLD, values_BLD = torch.cat([past[0], h_BLD], 1), torch.cat([past[1], values_BLD], 1)
            return self(h_BLD, values_BLD)[:, count:]
        copies = 1 if paired is None else 2
        q, k = (rotate(each(h_BLD).unflatten(1, (copies, -1))).flatten(1, 2) for each in (self.query, self.key))
        same = torch.sigmoid(q @ k.mT / h_BLD.shape[-1] ** 0.5 + self.offset)
        hidden = torch.eye(h_BLD.shape[1], dtype=torch.bool, device=h_BLD.device)
        if paired is not None:
            hidden = hidden | ~pair_mask(paired.to(h_BLD.device))
        return same.masked_fill(hidden, 0.0).to(values_BLD.dtype) @ values_BLD


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
