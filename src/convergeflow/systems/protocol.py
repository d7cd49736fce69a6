"""The one protocol every system of this package follows, and the records that pass between rooms.

Ours and every rival are torch modules with these methods, so that training, evaluation and comparison are loops without
a branch on a name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from convergeflow.objective.losses import Loss
from convergeflow.randomness import RowDraws
from convergeflow.sampling.driver import Observer


@dataclass(frozen=True)
class Samples:
    """Generated sequences and how they were made."""

    ids: Tensor
    """Token ids, [n, length]."""
    seeds: list[int]
    """The seed of each sample; a sample depends on its own seed alone."""
    nfe: int
    """Network calls per sample, counted while sampling, not computed from the settings."""
    settings: dict[str, Any]
    """Everything needed to make them again, as JSON values."""
    texts: list[str] | None = None
    extras: dict[str, Tensor] = field(default_factory=dict)
    """Per-sample tensors by name, such as final logits or the agreement of the token rules."""


@dataclass(frozen=True)
class Bound:
    """An upper bound on the negative log-likelihood, in nats per token."""

    nats_per_token: float
    standard_error: float
    draws: int
    kind: str
    tokens: int


@runtime_checkable
class LanguageModel(Protocol):
    """What training, generation and evaluation need of a system."""

    method: str
    config: Any
    tokenizer: Any
    device: Any

    def enter_stage(self, stage: Any) -> None:
        """Set the objective and which parameters are trained for a stage of the recipe."""

    def loss(self, tokens: Tensor, *, times: Tensor, draws: RowDraws) -> Loss:
        """The loss of `tokens` [B, L]; `times` [B] are uniforms in (0, 1), stratified over the global batch."""

    def sample(
        self, num: int, length: int, *, seeds: Sequence[int], nfe: int, observe: Observer | None = None, **controls: Any
    ) -> Samples:
        """Generate `num` sequences of `length` tokens with `nfe` network calls each."""

    def monitor(self, tokens: Tensor, *, draws: RowDraws) -> dict[str, float]:
        """Validation numbers at fixed noise, comparable across training steps."""
