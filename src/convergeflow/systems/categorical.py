"""Draws from categorical laws that keep the tail, with one stream of random numbers per row.

The draw is a race of exponential clocks, argmax_j log p_j - log E_j with E_j ~ Exp(1), in float64 where the device has
it. Float32 uniforms end at 1 - 2^-24 and cut the Gumbel noise at 16.6: rare tokens lose their mass, entropy falls and
perplexity looks better than it is. A cumulative sum would erode a long tail as well, by rounding; there is none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from convergeflow.device import state_dtype_of
from convergeflow.errors import UserError
from convergeflow.randomness import RowDraws

CELLS = 1 << 21
"""Positions x tokens of a row drawn at once; what is drawn depends on the row alone, never on the batch."""


def draw(log_weights: Tensor, draws: RowDraws) -> Tensor:
    """Tokens [B, ...] with probabilities proportional to exp(log_weights) [B, ..., V]; -inf is never drawn."""
    shape = log_weights.shape
    flat = log_weights.reshape(shape[0], -1, shape[-1])
    dtype = state_dtype_of(log_weights.device)
    step = max(1, CELLS // shape[-1])
    parts = []
    for start in range(0, flat.shape[1], step):
        piece = flat[:, start : start + step]
        clocks = draws.log_exponential(piece.shape[1], shape[-1], dtype=dtype)
        parts.append((piece.to(dtype) - clocks.to(piece.device)).argmax(-1))
    return torch.cat(parts, dim=1).reshape(shape[:-1])


def tempered(logits: Tensor, temperature: float, nucleus: float = 1.0) -> Tensor:
    """log-probabilities of softmax(logits / temperature): 1 is as trained, 0 the most likely token alone.

    Of these, the smallest set of most likely tokens is kept that holds a share `nucleus` of the mass; 1 keeps all.
    """
    if temperature != 0.0 and not 1e-3 <= temperature <= 1e3:
        raise UserError(f"the temperature must be 0 (the most likely token alone) or 0.001 to 1000, not {temperature}")
    if not 0.0 < nucleus <= 1.0:
        raise UserError(f"the nucleus must hold a share in (0, 1] of the mass, not {nucleus}")
    if temperature == 0.0:
        best = torch.full_like(logits, -torch.inf)
        return best.scatter_(-1, logits.argmax(-1, keepdim=True), 0.0)
    log_p = (logits if temperature == 1.0 else logits / temperature).log_softmax(-1)
    if nucleus == 1.0:
        return log_p
    ordered, index = log_p.sort(-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()  # mass in front of each token: the first is always kept
    kept = torch.where(before < nucleus, ordered, -torch.inf)
    return torch.empty_like(kept).scatter_(-1, index, kept).log_softmax(-1)
