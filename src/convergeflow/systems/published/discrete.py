"""MDLM, Duo and SEDD as published: networks with their authors' weights, and their authors' samplers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from convergeflow.systems.duo import DuoConfig, DuoModel
from convergeflow.systems.mdlm import MdlmModel
from convergeflow.systems.published.family import DrawsTokens, MaskedNetwork
from convergeflow.systems.rival import RivalConfig
from convergeflow.systems.sedd import SeddAbsorbModel, SeddUniformConfig, SeddUniformModel

STEPS = 1024
"""Of the numbers in the papers; one more call removes what noise is left."""


@dataclass(frozen=True)
class PublishedMdlmConfig(RivalConfig):
    time_conditioning: bool = False
    """Whether the network is told sigma; the published one is told 0 at all times."""


class PublishedMdlm(DrawsTokens, MdlmModel):
    """MDLM of its authors."""

    method = "published-mdlm"
    config_class = PublishedMdlmConfig
    network: MaskedNetwork

    def __init__(self, config: PublishedMdlmConfig) -> None:
        super().__init__(config)
        self.network = MaskedNetwork(config)

    def forward(self, tokens: Tensor, sigma: Tensor | None = None) -> Tensor:
        """Logits [B, L, V + 1]; the mask is last. `sigma` [B] counts only with time conditioning."""
        if sigma is None or not self.config.time_conditioning:
            sigma = torch.zeros(len(tokens), device=tokens.device)
        return self.network.whole(tokens, sigma)


class PublishedDuo(DrawsTokens, DuoModel):
    """Duo of its authors, and the student that they distilled from it."""

    method = "published-duo"
    config_class = DuoConfig
    controls: Mapping[str, Any] = {**DuoModel.controls, "precision": "float64"}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "published": {"nfe": STEPS + 1, "removal": "sample"},
        "greedy": {"nfe": STEPS + 1, "removal": "greedy"},
        "distilled-8": {"nfe": 9, "removal": "greedy"},
    }

    def forward(self, inputs: Tensor, sigma: Tensor) -> Tensor:
        """Logits [B, L, V] for tokens [B, L]; for vectors [B, L, V], of which Duo's own table takes the softmax."""
        return self.network(inputs.softmax(-1) if inputs.is_floating_point() else inputs, sigma)


@dataclass(frozen=True)
class PublishedSeddAbsorbConfig(RivalConfig):
    scale_by_sigma: bool = True
    """Whether log(e^sigma - 1) + log V is taken from the output."""


class PublishedSeddAbsorb(DrawsTokens, SeddAbsorbModel):
    """SEDD with masks, of its authors or of the MDLM and Duo repositories."""

    method = "published-sedd-absorb"
    config_class = PublishedSeddAbsorbConfig
    controls: Mapping[str, Any] = {**SeddAbsorbModel.controls, "precision": "float64"}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "published": {"nfe": STEPS + 1, "step": "analytic"},
        "original": {"nfe": STEPS + 1, "step": "euler", "precision": "float32"},
    }
    network: MaskedNetwork

    def __init__(self, config: PublishedSeddAbsorbConfig) -> None:
        super().__init__(config)
        self.network = MaskedNetwork(config)

    def forward(self, tokens: Tensor, sigma: Tensor) -> Tensor:
        """Log scores [B, L, V + 1]; 0 at the present token."""
        out = self.network.whole(tokens, sigma)
        if self.config.scale_by_sigma:
            out = out - self._scale(sigma)[:, None, None]
        return out.scatter(-1, tokens[..., None], 0.0)

    def log_scores(self, x: Tensor, sigma: Tensor, positions: Tensor | None = None) -> Tensor:
        out = super().log_scores(x, sigma, positions)
        if self.config.scale_by_sigma:
            return out
        scale = self._scale(sigma)[:, None, None].expand(*x.shape, 1).to(out)
        return out + (scale if positions is None else scale[positions])

    def _scale(self, sigma: Tensor) -> Tensor:
        return torch.expm1(sigma).log() + math.log(self.config.vocabulary)


class PublishedSeddUniform(DrawsTokens, SeddUniformModel):
    """SEDD with uniform noise, of its authors."""

    method = "published-sedd-uniform"
    config_class = SeddUniformConfig
    controls: Mapping[str, Any] = {**SeddUniformModel.controls, "precision": "float64"}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = PublishedSeddAbsorb.presets

    def forward(self, tokens: Tensor, sigma: Tensor) -> Tensor:
        """Log scores [B, L, V]; 0 at the present token."""
        return self.log_scores(tokens, sigma)
