"""AR: a causal transformer of the same width and depth, without noise level or modulation.

Every token is predicted from those before it. A learned start row takes the place of a begin-of-text token, so all L
tokens of a sequence are scored and generated (L network calls). Sampling keeps keys and values of earlier positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from convergeflow.device import widest
from convergeflow.errors import UserError
from convergeflow.model.backbone import Norm, rotate
from convergeflow.model.views import WHOLE
from convergeflow.randomness import RowDraws
from convergeflow.systems.categorical import draw, tempered
from convergeflow.systems.rival import (
    TEMPERATURES,
    AlongTable,
    Rival,
    RivalConfig,
    Run,
    Table,
    token_losses,
    words_before,
    zero_linear,
)

Memory = list[tuple[Tensor, Tensor]]
"""Keys and values [B, H, P, K] of each layer at the P words so far; before them, if the inputs of the words before are
mixed in, those of the last words [B, reach, D], twice."""


class CausalBlock(nn.Module):
    """Pre-norm attention and MLP with plain residuals."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_attention, self.norm_mlp = Norm(width), Norm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp_up, self.mlp_down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        B, L, D = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(B, L, 3, self.heads, D // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        start = 0 if past is None else past[0].shape[-2]
        q, k = rotate(q, start), rotate(k, start)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=-2), torch.cat([past[1], v], dim=-2)
        # With earlier positions the queries are the last ones; a single query may see every key.
        seen = None
        if past is not None and L > 1:
            seen = torch.ones(L, start + L, dtype=torch.bool, device=x.device).tril(start)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=past is None)
        h = self.out(mixed.transpose(1, 2).reshape(B, L, D))
        x = x + functional.dropout(h, self.dropout, self.training)
        h = self.mlp_down(functional.gelu(self.mlp_up(self.norm_mlp(x)), approximate="tanh"))
        return x + functional.dropout(h, self.dropout, self.training), (k, v)


class CausalNetwork(AlongTable):
    """Input tokens [B, L] to next-token logits [B, L, V]."""

    def __init__(self, config: RivalConfig) -> None:
        super().__init__()
        self.embedding = Table(config.vocabulary + 1, config.width)
        self.before = words_before(config)
        self.blocks = nn.ModuleList(
            CausalBlock(config.width, config.heads, config.dropout) for _ in range(config.depth)
        )
        self.norm_final = Norm(config.width)
        self.head = zero_linear(config.width, config.vocabulary)
        self.start_head(config.head_start)

    def forward(self, tokens: Tensor, past: Memory | None = None) -> tuple[Tensor, Memory]:
        x, cache = self._inputs(tokens, past)
        for block in self.blocks:
            x, kept = block(x, None if past is None else past[len(cache)])
            cache.append(kept)
        x = self.norm_final(x)
        with torch.autocast(x.device.type, enabled=False):
            return self.head(x.to(self.head.weight.dtype)), cache

    def _inputs(self, tokens: Tensor, past: Memory | None) -> tuple[Tensor, Memory]:
        """What the first block reads, and the beginning of the memory."""
        x = self.embedding(tokens)
        if self.before is None:
            return x, []
        words = x if past is None else torch.cat([past[0][0], x], dim=1)
        last = words[:, -self.before.reach :]
        return x + self.before(words, WHOLE)[:, -x.shape[1] :], [(last, last)]


class AutoregressiveModel(Rival):
    """Next-token prediction."""

    method = "ar"
    bound_kind = "exact"
    controls: Mapping[str, Any] = {"temperature": 1.0, "nucleus": 1.0, "cache": True}
    frontier = TEMPERATURES

    def __init__(self, config: RivalConfig) -> None:
        super().__init__(config)
        self.network = CausalNetwork(config)

    @property
    def start(self) -> int:
        """The row of the input table that stands before the first token; the head cannot produce it."""
        return self.config.vocabulary

    def shifted(self, tokens: Tensor) -> Tensor:
        """The start row and all tokens but the last."""
        return torch.cat([torch.full_like(tokens[:, :1], self.start), tokens[:, :-1]], dim=1)

    def row_losses(self, tokens: Tensor, times: Tensor, draws: RowDraws) -> Tensor:
        logits, _ = self.network(self.shifted(tokens))
        return token_losses(logits, tokens)

    @torch.no_grad()
    def monitor(self, tokens: Tensor, *, draws: RowDraws) -> dict[str, float]:
        """The exact negative log-likelihood."""
        with self.evaluating():
            return {"nll": float(self.row_losses(tokens, torch.zeros(len(tokens)), draws).mean())}

    def generate_batch(self, run: Run, *, temperature: float, nucleus: float, cache: bool) -> Tensor:  # type: ignore[override]
        """Left to right, one call per token whatever the budget says; known tokens must be a prefix."""
        if run.known is not None and bool((run.known.known.int().diff(dim=1) > 0).any()):
            raise UserError("the autoregressive model continues a prompt; it cannot fill gaps")
        x = torch.full((run.rows, 1), self.start, device=run.device)
        past: Memory | None = None
        for i in range(run.length):
            logits, kept = self.network(x[:, -1:] if cache and i else x, past if cache else None)
            past = kept
            token = draw(tempered(widest(logits[:, -1]), temperature, nucleus), run.draws)
            if run.known is not None:
                token = run.known[:, i].put(token)
            x = torch.cat([x, token[:, None]], dim=1)
            run.report(i, run.length, (i + 1) / run.length, x[:, 1:])
        return x[:, 1:]
