"""FLM: a flow on one-hot vectors (arXiv 2602.16813).

t = 0 is noise, t = 1 data. x = (1 - c) noise + c one-hot, with c(t) chosen so that the argmax of x is right with a
chance that grows linearly in t. The network reads the raw vector and t, and is trained by plain cross-entropy. There
is no bound. The reference has no temperature; here one acts on the predicted probabilities, and 1 is the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from convergeflow.device import onto, state_dtype_of, widest
from convergeflow.randomness import RowDraws
from convergeflow.systems.accuracy import interpolation_at
from convergeflow.systems.categorical import tempered
from convergeflow.systems.rival import TEMPERATURES, Rival, RivalConfig, Run, TokenNetwork, token_losses


class FlmModel(Rival):
    """One-hot flow."""

    method = "flm"
    takes_known = False
    controls: Mapping[str, Any] = {"temperature": 1.0}
    frontier = TEMPERATURES

    def __init__(self, config: RivalConfig) -> None:
        super().__init__(config)
        self.network = TokenNetwork(config, inputs=config.vocabulary, outputs=config.vocabulary)

    def warp(self, t: Tensor) -> Tensor:
        """c(t) for times on the CPU."""
        return torch.as_tensor(interpolation_at(t.double().numpy(), self.config.vocabulary))

    def row_losses(self, tokens: Tensor, times: Tensor, draws: RowDraws) -> Tensor:
        t = 1.0 - times  # `times` are shares of noise
        c = onto(self.warp(t).float(), tokens.device)[:, None, None]
        noise = draws.normal(tokens.shape[1], self.config.vocabulary).to(tokens.device)
        x = (1 - c) * noise + c * functional.one_hot(tokens, self.config.vocabulary)
        return token_losses(self.network(x, t), tokens)

    def generate_batch(self, run: Run, *, temperature: float) -> Tensor:  # type: ignore[override]
        """Euler in c on t_i = i/N; the last call is decoded by its argmax."""
        dtype = state_dtype_of(run.device)
        x = run.draws.normal(run.length, self.config.vocabulary, dtype=dtype)
        t = torch.arange(run.nfe + 1, dtype=torch.float64) / run.nfe
        c = self.warp(t)
        for i in range(run.nfe):
            log_f = tempered(widest(self.network(x, onto(t[i].expand(run.rows), run.device))), temperature)
            if i < run.nfe - 1:
                velocity = (log_f.exp().to(dtype) - x) / (1 - c[i] + 1e-5)
                x = x + (c[i + 1] - c[i]) * velocity
            tokens = log_f.argmax(-1)
            run.report(i, run.nfe, float(t[i]), tokens)
        return tokens
