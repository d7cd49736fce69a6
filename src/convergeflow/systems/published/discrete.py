"""MDLM, Duo and SEDD as published: networks with their authors' weights, and their authors' samplers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from convergeflow.device import onto, widest
from convergeflow.errors import UserError
from convergeflow.systems.categorical import draw, tempered
from convergeflow.systems.discrete import LAST_TIME, kept_share
from convergeflow.systems.duo import DuoConfig, DuoModel
from convergeflow.systems.mdlm import MdlmModel
from convergeflow.systems.published.family import PRECISE, DrawsTokens, MaskedNetwork
from convergeflow.systems.rival import RivalConfig, Run
from convergeflow.systems.sedd import SeddAbsorbModel, SeddUniformConfig, SeddUniformModel

STEPS = 1024
"""Of the numbers in the papers; one more call removes what noise is left."""
CACHED = {"predictor": "cached", "removal": "greedy"}
"""The sampler of MDLM's own repository."""


@dataclass(frozen=True)
class PublishedMdlmConfig(RivalConfig):
    time_conditioning: bool = False
    """Whether the network is told sigma; the published one is told 0 at all times."""


class PublishedMdlm(DrawsTokens, MdlmModel):
    """MDLM of its authors."""

    method = "published-mdlm"
    config_class = PublishedMdlmConfig
    controls: Mapping[str, Any] = {
        "temperature": 1.0,
        "nucleus": 1.0,
        "predictor": "ancestral",
        "removal": "sample",
        "stride": 0,
        "precision": "float64",
    }
    choices: Mapping[str, Any] = {**MdlmModel.choices, **PRECISE, "predictor": ("ancestral", "cached")}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "published": {"nfe": STEPS + 1},
        "original": {"nfe": 1001, **CACHED, "precision": "float32"},
        "cached": {"nfe": 1001, **CACHED},
        "semi-autoregressive": {"nfe": 1001, **CACHED, "stride": 512},
    }
    network: MaskedNetwork

    def __init__(self, config: PublishedMdlmConfig) -> None:
        super().__init__(config)
        self.network = MaskedNetwork(config)
        if config.time_conditioning:
            self.bound_kind = None  # the bound here is that of a network without time

    def forward(self, tokens: Tensor, sigma: Tensor | None = None) -> Tensor:
        """Logits [B, L, V + 1]; the mask is last. `sigma` [B] counts only with time conditioning."""
        return self.network.whole(tokens, self._level(tokens, sigma))

    def _level(self, tokens: Tensor, sigma: Tensor | None) -> Tensor:
        timeless = sigma is None or not self.config.time_conditioning
        return torch.zeros(len(tokens), device=tokens.device) if sigma is None or timeless else sigma

    def tokens_of(self, run: Run, *, stride: int, **controls: Any) -> Tensor:  # type: ignore[override]
        """With a `stride` the text grows: the model's length first, then `stride` tokens at a time behind the rest."""
        if not stride:
            return self.denoise(run, run.put(self._masks(run, run.length)), **controls)
        window = self.config.length
        more = run.length - window
        if not 0 < stride < window or more < 0 or more % stride or run.known is not None:
            raise UserError(
                f"semi-autoregressive texts have {window} tokens and so many strides (here {stride}, below {window}) "
                f"more, not {run.length}, and take no prompt"
            )
        x = self.denoise(run, self._masks(run, window), **controls)
        while x.shape[1] < run.length:
            behind = torch.cat([x[:, stride - window :], self._masks(run, stride)], dim=1)
            x = torch.cat([x, self.denoise(run, behind, **controls)[:, -stride:]], dim=1)
        return x

    def denoise(
        self, run: Run, x: Tensor, *, temperature: float, nucleus: float, predictor: str, removal: str
    ) -> Tensor:
        """Fill the masks of x [B, L] in nfe - 1 steps and one call for what is left.

        `cached` takes tau itself as the chance of a mask, and does not call the network again before a token changed.
        """
        grid = torch.linspace(1.0, LAST_TIME, run.nfe, dtype=torch.float64)
        kept = 1.0 - grid if predictor == "cached" else kept_share(grid)
        log_x = None
        for i in range(run.nfe):
            last = i == run.nfe - 1
            if log_x is None or last:
                greedy = last and removal == "greedy"
                sigma = onto(-kept_share(grid[i]).log().expand(len(x)), x.device)
                logits = widest(self.network(x, self._level(x, sigma)))
                log_x = tempered(logits, 0.0 if greedy else temperature, nucleus)
            law = log_x if last else self.reverse_law(log_x, kept[i], kept[i + 1])
            then = torch.where(x == self.mask, draw(law, run.draws), x)
            if predictor != "cached" or self.config.time_conditioning or not torch.equal(x, then):
                log_x = None
            x = then
            run.report(i, run.nfe, 1.0 if last else float(1 - grid[i]), x)
        return x

    def _masks(self, run: Run, length: int) -> Tensor:
        return torch.full((run.rows, length), self.mask, device=run.device)


class PublishedDuo(DrawsTokens, DuoModel):
    """Duo of its authors, and the student that they distilled from it."""

    method = "published-duo"
    config_class = DuoConfig
    controls: Mapping[str, Any] = {**DuoModel.controls, "precision": "float64"}
    choices: Mapping[str, Any] = {**DuoModel.choices, **PRECISE}
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
    choices: Mapping[str, Any] = {**SeddAbsorbModel.choices, **PRECISE}
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
    choices: Mapping[str, Any] = {**SeddUniformModel.choices, **PRECISE}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = PublishedSeddAbsorb.presets

    def forward(self, tokens: Tensor, sigma: Tensor) -> Tensor:
        """Log scores [B, L, V]; 0 at the present token."""
        return self.log_scores(tokens, sigma)
