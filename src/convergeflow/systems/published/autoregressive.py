"""The autoregressive baseline of the MDLM and Duo repositories: begins with a begin-of-text token, predicts L - 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from convergeflow.errors import UserError
from convergeflow.randomness import RowDraws
from convergeflow.systems.autoregressive import AutoregressiveModel, CausalNetwork, Memory
from convergeflow.systems.published.family import PRECISE, DrawsTokens
from convergeflow.systems.rival import RivalConfig, Run, zero_linear

NEVER = -1000.0
"""The logit of the mask, a token that the vocabulary has for the sake of the diffusion models."""


@dataclass(frozen=True)
class PublishedArConfig(RivalConfig):
    begin: int = -1
    """The token that every text begins with; -1 is the last one of the vocabulary, as in GPT-2's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not -1 <= self.begin < self.vocabulary:
            raise UserError(f"begin must be a token of the vocabulary, not {self.begin}")


class MaskedCausalNetwork(CausalNetwork):
    """The authors' network predicts the mask too; here it is kept with the weights, and cut off."""

    def __init__(self, config: RivalConfig) -> None:
        super().__init__(config)
        self.head = zero_linear(config.width, config.vocabulary + 1)

    def whole(self, tokens: Tensor) -> Tensor:
        """Logits of all tokens and of the mask, which is last."""
        return super().forward(tokens)[0]

    def forward(self, tokens: Tensor, past: Memory | None = None) -> tuple[Tensor, Memory]:
        logits, kept = super().forward(tokens, past)
        return logits[..., :-1], kept


class PublishedAr(DrawsTokens, AutoregressiveModel):
    """Next-token prediction behind a begin-of-text token, which is free."""

    method = "published-ar"
    config_class = PublishedArConfig
    bound_kind = "exact (the first token is given)"
    controls: Mapping[str, Any] = {**AutoregressiveModel.controls, "precision": "float64"}
    choices: Mapping[str, Any] = PRECISE
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "published": {"precision": "float32"},
        "exact": {},
        "nucleus-0.95": {"nucleus": 0.95},
        "nucleus-0.9": {"nucleus": 0.9},
    }
    network: MaskedCausalNetwork

    def __init__(self, config: PublishedArConfig) -> None:
        super().__init__(config)
        self.network = MaskedCausalNetwork(config)

    @property
    def begin(self) -> int:
        """The first token of every text."""
        return int(self.config.begin) % int(self.config.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Log-probabilities [B, L, V + 1] of the next token; the mask, which is last, never comes."""
        logits = self.network.whole(tokens)
        return torch.cat([logits[..., :-1], torch.full_like(logits[..., -1:], NEVER)], dim=-1).log_softmax(-1)

    def row_losses(self, tokens: Tensor, times: Tensor, draws: RowDraws) -> Tensor:
        """Mean over the L - 1 tokens behind the first."""
        log_p = self.network(tokens[:, :-1])[0].float().log_softmax(-1)
        return -log_p.gather(-1, tokens[:, 1:, None])[..., 0].mean(-1)

    @property
    def start(self) -> int:
        """What stands before the first token that is drawn."""
        return self.begin

    def tokens_of(self, run: Run, **controls: Any) -> Tensor:
        """The begin-of-text token and L - 1 tokens, one call each."""
        first = torch.full((run.rows, 1), self.begin, device=run.device)
        if run.length == 1:
            return first
        run.length -= 1
        if run.known is not None:
            run.known = run.known[:, 1:]
        return torch.cat([first, super().tokens_of(run, **controls)], dim=1)
