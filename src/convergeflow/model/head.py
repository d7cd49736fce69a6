"""What the head means: log f of the network, weights under the Gaussian kernel, data prediction (paper Sec. 3.1).

    w = softmax(log f + (alpha/sigma^2) <x_t, e_j>),    mu = E^T w                                        (Eqs. 21, 22)

A network answers with a `LogF`: what it said about a state, before any kernel. The kernel of that state, or of any
other, makes weights of it without another network call. The unconstrained regressor of the paper's control experiment
answers with a `DirectPrediction`, which has no weights. `fused.py` computes the weights in tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor, nn

from convergeflow.errors import UserError
from convergeflow.flow.path import spread
from convergeflow.flow.schedule import Coefficients
from convergeflow.model.fused import Weighted, arithmetic, kernel_scores, no_autocast, weigh

SMALLEST_KERNEL = 1e-4
"""Evidence is divided by the kernel, which vanishes in pure noise."""


class LogF(Protocol):
    """What a predictor says about a state x_t [B, L, d], once and for all kernels."""

    @property
    def has_weights(self) -> bool:
        """Whether there is a log f at all: without one the prediction is the same under every kernel."""

    def weigh(
        self,
        x: Tensor,
        at: Coefficients,
        *,
        details: bool = False,
        targets: Tensor | None = None,
        scores: Tensor | None = None,
    ) -> Weighted:
        """mu at a state and, with `details`, token and top weight; with `targets` the cross-entropy.

        `scores` are what `scores(x)` gave, if it was asked before.
        """

    def logits(self, x: Tensor, at: Coefficients) -> Tensor:
        """What the weights are the softmax of, [B, L, V]: materialised, for small jobs and comparisons."""

    def scores(self, x: Tensor) -> Tensor | None:
        """Kernel scores <x, e_j> that all predictions at one state share; None if there is nothing to share."""

    def tempered(self, temperature: float, base_temperature: float) -> LogF:
        """The same with weights softmax((log f / base_temperature + kernel) / temperature)."""

    def __getitem__(self, index: Any) -> LogF:
        """The same for some rows, or for the positions of a mask [B, L], which are then flat."""


@dataclass(frozen=True)
class KernelLogF:
    """log f(j) = <h, W_j> + b_j [+ <evidence, e_j>]; its weights follow the exact Gaussian kernel."""

    h: Tensor
    weight: Tensor
    bias: Tensor | None
    table: Tensor
    evidence: Tensor | None = None
    """Of other positions that hold the same word (`small_scale.EvidencePooling`)."""
    temperature: float = 1.0
    base_temperature: float = 1.0
    has_weights = True

    def weigh(
        self,
        x: Tensor,
        at: Coefficients,
        *,
        details: bool = False,
        targets: Tensor | None = None,
        scores: Tensor | None = None,
    ) -> Weighted:
        operands = self._operands(x, at)
        return weigh(*operands, targets=targets, token=details, top_weight=details, scores=scores)

    def logits(self, x: Tensor, at: Coefficients) -> Tensor:
        return logits(*self._operands(x, at))

    def scores(self, x: Tensor) -> Tensor | None:
        return None if self.evidence is not None else kernel_scores(x.to(self.table.dtype), self.table)

    def tempered(self, temperature: float, base_temperature: float) -> KernelLogF:
        return replace(self, temperature=temperature, base_temperature=base_temperature)

    def __getitem__(self, index: Any) -> KernelLogF:
        return replace(self, h=self.h[index], evidence=None if self.evidence is None else self.evidence[index])

    def _operands(self, x_t: Tensor, at: Coefficients) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor]:
        """h, W, b, x, kernel and table; a temperature goes into those in which the logits are linear."""
        x = x_t.to(self.table.dtype)
        kernel = spread(at.kernel, x)
        if self.evidence is not None:
            x = x + self.evidence / (self.base_temperature * kernel.clamp_min(SMALLEST_KERNEL))
        h, bias, base = self.h, self.bias, self.temperature * self.base_temperature
        if base != 1.0:
            h, bias = h / base, None if bias is None else bias / base
        kernel = kernel[..., 0] if self.temperature == 1.0 else kernel[..., 0] / self.temperature
        return h, self.weight, bias, x, kernel.expand(x.shape[:-1]), self.table


@dataclass(frozen=True)
class DirectPrediction:
    """mu regressed without weights (the control of the paper's Section 4.1): the kernel changes nothing."""

    mu: Tensor
    has_weights = False

    def weigh(self, x: Tensor, at: Coefficients, **asked: Any) -> Weighted:
        return Weighted(self.mu, log_normaliser=self.mu.new_zeros(self.mu.shape[:-1]))

    def logits(self, x: Tensor, at: Coefficients) -> Tensor:
        raise no_weights()

    def scores(self, x: Tensor) -> Tensor | None:
        return None

    def tempered(self, temperature: float, base_temperature: float) -> DirectPrediction:
        raise UserError("the direct predictor has no weights for `temperature` or `base_temperature` to act on")

    def __getitem__(self, index: Any) -> DirectPrediction:
        return DirectPrediction(self.mu[index])


class WeightedHead(nn.Linear):
    """The paper's head. It starts at zero: a fresh model predicts by the Gaussian kernel alone."""

    rule = "weight"
    """The token rule of its samples where the user names none."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__(width, vocabulary)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def read(self, h: Tensor, table: Tensor, evidence: Tensor | None = None) -> LogF:
        """The answer that the trunk's output holds."""
        return KernelLogF(h, self.weight, self.bias, table, evidence)


class DirectHead(WeightedHead):
    """The head of the control experiment: as wide as the table, and without weights."""

    rule = "prediction"

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__(width, width)

    def read(self, h: Tensor, table: Tensor, evidence: Tensor | None = None) -> LogF:
        return DirectPrediction(self(h.to(table.dtype)))


HEADS = {"weighted": WeightedHead, "direct": DirectHead}


def no_weights() -> UserError:
    """What is said where weights are wanted of a predictor that has none."""
    return UserError(
        "the direct predictor has no token weights: set `decode` to prediction or distance, and use no temperature, no "
        "freezing and not the kernel solver"
    )


def logits(h: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor, kernel: Tensor, table: Tensor) -> Tensor:
    """The formula itself, [..., V], by plain differentiable operations: what `fused.weigh` is held equal to."""
    dtype = arithmetic(table)
    table = table.to(dtype)
    with no_autocast(table):
        base = h.to(dtype) @ weight.to(dtype).T
        if bias is not None:
            base = base + bias.to(dtype)
        return base + kernel.to(dtype).unsqueeze(-1) * kernel_scores(x, table)


def context_free(log_prior: Tensor, x: Tensor, table: Tensor) -> KernelLogF:
    """log f = a prior over tokens: the best answer that looks at its own position alone."""
    nothing = x.new_zeros(*x.shape[:-1], 1)
    return KernelLogF(nothing, x.new_zeros(len(table), 1), log_prior.to(x.dtype), table)
