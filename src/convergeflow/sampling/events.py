"""What passes between trajectories and drivers: calls, predictions at grid points, and ends."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from convergeflow.flow.schedule import Coefficients
from convergeflow.model.fused import Weighted
from convergeflow.model.head import LogF
from convergeflow.sampling.decoding import Decoded, decode
from convergeflow.sampling.plan import Point
from convergeflow.sampling.wrappers import Wrapped


@dataclass(frozen=True)
class Call:
    """A network call that a trajectory waits for."""

    predictor: Wrapped
    x: Tensor
    """[rows, L, d]"""
    point: Point
    condition: Tensor | None
    closing: bool
    """Whether this may be the last call at its point."""


@dataclass(frozen=True)
class Prediction:
    """The answer to a call."""

    mu: Tensor
    """In the state's format: extrapolation amplifies rounding."""
    weights: Weighted
    log_f: LogF


@dataclass(frozen=True)
class Guided:
    """The prediction that drives a step, and the two calls that it was made of: the moment that observers see."""

    predictor: Wrapped
    x: Tensor
    point: Point
    mu: Tensor
    unconditional: Prediction
    last: Prediction


@dataclass(frozen=True)
class Read:
    """A network pass that reads the words [rows, P] before a block; the predictor behind them is sent back."""

    predictor: Wrapped
    words: Tensor
    block: int
    """The number of the block."""


@dataclass(frozen=True)
class End:
    """The end of trajectories: the last state, the prediction that tokens are read from, the tokens by every rule."""

    x: Tensor
    final: Weighted
    decoded: Decoded
    logits: Callable[[], Tensor]

    @classmethod
    def at(cls, level: Coefficients, x: Tensor, final: Weighted, log_f: LogF, predictor: Wrapped) -> End:
        """Where tokens are read off at a noise level."""
        end = predictor.schedule(torch.ones((), dtype=torch.float64))
        decoded = decode(final, x, level, end, predictor.table)
        return cls(x, final, decoded, lambda: log_f.logits(x, level.expand(len(x))))

    @classmethod
    def joined(cls, parts: Sequence[End], dim: int) -> End:
        """The ends of several trajectories as one, along rows (0) or positions (1)."""
        if len(parts) == 1:
            return parts[0]
        found = [part.decoded.tokens for part in parts]
        return cls(
            torch.cat([part.x for part in parts], dim),
            Weighted.joined([part.final for part in parts], dim),
            Decoded({rule: torch.cat([tokens[rule] for tokens in found], dim) for rule in found[0]}),
            lambda: torch.cat([part.logits() for part in parts], dim),
        )


Flow = Generator[Any, Any, End]
"""Yields `Call` (and is sent a `Prediction`), `Guided` (and is sent nothing) or, between blocks, `Read`."""
