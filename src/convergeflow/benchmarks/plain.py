"""The yardstick: the paper's model and sampler written out plainly, from its equations and the published behaviour.

Frozen on purpose: it is never made faster, so that ratios against it keep their meaning. It has the costs of a first
transcription. The table is normalised at every use (twice per call in sampling), all length x vocabulary logits exist
at once, and in sampling they are float64, because the log-SNR is. It reads the weights of a `ConvergeFlowModel`, so
both can be asked for the same tokens and the same loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

Weights = dict[str, Tensor]


class PlainModel:
    """The network over a dictionary of weights (names as in `FlowNetwork`)."""

    def __init__(self, weights: Weights, heads: int, dropout: float = 0.0) -> None:
        self.weights, self.heads, self.dropout = weights, heads, dropout
        self.depth = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("backbone.blocks."))

    def table(self) -> Tensor:
        raw = self.weights["embedding.weight"]
        return functional.normalize(raw.float(), dim=-1) * math.sqrt(raw.shape[-1])

    def logits(self, x: Tensor, gamma: Tensor, condition: Tensor | None, training: bool = False) -> Tensor:
        """log f + (alpha/sigma^2) <x, e_j>, [B, L, V]; as precise as gamma."""
        base = functional.linear(
            self._trunk(x, gamma, condition, training), self.weights["head.weight"], self.weights["head.bias"]
        )
        kernel = torch.exp((functional.softplus(-gamma) - gamma) / 2)
        return base + kernel[:, None, None] * (x @ self.table().T)

    def mean(self, logits: Tensor) -> Tensor:
        """mu = E^T softmax(logits)."""
        return functional.softmax(logits.float(), dim=-1) @ self.table()

    def _trunk(self, x: Tensor, gamma: Tensor, condition: Tensor | None, training: bool) -> Tensor:
        if condition is None:
            condition = torch.zeros_like(x)
        h = x + functional.linear(torch.cat([x, condition], dim=-1), self.weights["condition_input.weight"])
        level = self._level(gamma)
        cos, sin = self._rotation(x.shape[1], x.shape[2] // self.heads)
        for i in range(self.depth):
            h = self._block(h, level, cos, sin, f"backbone.blocks.{i}.", training)
        shift, scale = self._linear("backbone.modulation_final", level)[:, None].chunk(2, dim=-1)
        return self._norm(h, "backbone.norm_final") * (1 + scale) + shift

    def _block(self, h: Tensor, level: Tensor, cos: Tensor, sin: Tensor, at: str, training: bool) -> Tensor:
        batch, length, width = h.shape
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self._linear(at + "modulation", level)[:, None].chunk(
            6, dim=-1
        )
        inner = self._norm(h, at + "norm_attention") * (1 + scale_a) + shift_a
        qkv = self._linear(at + "attention.qkv", inner).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.unbind(2)
        q, k = q * cos + self._turned(q) * sin, k * cos + self._turned(k) * sin
        mixed = functional.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        out = self._linear(at + "attention.out", mixed.transpose(1, 2).reshape(batch, length, width))
        h = h + gate_a * functional.dropout(out, self.dropout, training)
        inner = self._norm(h, at + "norm_mlp") * (1 + scale_m) + shift_m
        inner = functional.gelu(self._linear(at + "mlp_up", inner), approximate="tanh")
        return h + gate_m * functional.dropout(self._linear(at + "mlp_down", inner), self.dropout, training)

    def _level(self, gamma: Tensor) -> Tensor:
        rates = torch.exp(-math.log(10_000) * torch.arange(128, dtype=torch.float32) / 128)
        angles = gamma[:, None].float() * rates
        features = torch.cat([angles.cos(), angles.sin()], dim=-1)
        hidden = functional.silu(self._linear("backbone.noise_level.expand", features))
        return functional.silu(self._linear("backbone.noise_level.project", hidden))

    @staticmethod
    def _rotation(length: int, width: int) -> tuple[Tensor, Tensor]:
        rates = 1.0 / 10_000.0 ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), rates)
        angles = torch.cat([angles, angles], dim=-1)[None, :, None]
        return angles.cos(), angles.sin()

    @staticmethod
    def _turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat([-second, first], dim=-1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x.float(), x.shape[-1:]) * self.weights[name + ".weight"]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.weights[name + ".weight"], self.weights.get(name + ".bias"))


@torch.no_grad()
def sample(
    model: PlainModel, noise: Tensor, gammas: Sequence[float], refinements: Sequence[int], w_scg: Sequence[float]
) -> Tensor:
    """Tokens [B, L] from noise [B, L, d]: at each point u, then K_i times p = (1 - w) u + w mu(x, t, p), then a step.

    State and coefficients are float64. At the last point the K-th refinement is not extrapolated but decoded.
    """
    z = noise.double()
    levels = torch.tensor(gammas, dtype=torch.float64)
    alphas, sigmas = torch.sigmoid(-levels).sqrt(), torch.sigmoid(levels).sqrt()

    def predict(condition: Tensor | None, gamma: Tensor) -> tuple[Tensor, Tensor]:
        at = gamma.expand(len(z))
        logits = model.logits(z.float(), at, None if condition is None else condition.float()).double()
        return model.mean(logits), logits

    for i, gamma in enumerate(levels):
        final = i == len(levels) - 1
        unconditional, logits = predict(None, gamma)
        guided = unconditional
        for k in range(refinements[i]):
            mu, logits = predict(guided, gamma)
            if final and k == refinements[i] - 1:
                break
            guided = (1 - w_scg[i]) * unconditional.double() + w_scg[i] * mu.double()
        if final:
            return logits.argmax(dim=-1)
        epsilon = (z - alphas[i] * guided) / sigmas[i]
        ratio = sigmas[i + 1] / alphas[i + 1] - sigmas[i] / alphas[i]
        z = alphas[i + 1] / alphas[i] * z + alphas[i + 1] * ratio * epsilon
    raise ValueError("a trajectory needs at least one grid point")


def loss(model: PlainModel, tokens: Tensor, gamma: Tensor, noise: Tensor, active: Tensor) -> Tensor:
    """Mean of (1 + alpha/sigma)^2 (mu - x*)^2; the rows `active` [B] are conditioned on a first prediction."""
    gamma = gamma.float()
    alpha, sigma = torch.sigmoid(-gamma).sqrt()[:, None, None], torch.sigmoid(gamma).sqrt()[:, None, None]
    x_star = model.table()[tokens]
    x = alpha * x_star + sigma * noise
    condition = torch.zeros_like(x)
    if bool(active.any()):
        with torch.no_grad():
            condition[active] = model.mean(model.logits(x[active], gamma[active], None, training=True))
    mu = model.mean(model.logits(x, gamma, condition, training=True))
    weight = (1 + alpha / sigma).square()[:, 0, 0]
    return (weight * (mu - x_star).square().mean(dim=(1, 2))).mean()
