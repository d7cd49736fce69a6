"""Predictors, and what changes their answers: wrap a predictor before the loop, and the loop needs no option for it.

`Tempered` sharpens the weights, `Known` holds tokens fixed, `freezing.Settled` spares the head what has converged,
`NetworkPredictor.after` puts a block behind clean words. Each change acts row by row on the state that goes in and on
the `LogF` that comes out, so a driver can still send rows with different changes through one network pass.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from convergeflow.device import onto, trunk_autocast
from convergeflow.errors import UserError
from convergeflow.flow.path import sample_path
from convergeflow.flow.schedule import Coefficients, Schedule
from convergeflow.model.fused import Weighted
from convergeflow.model.head import LogF
from convergeflow.model.network import FlowNetwork
from convergeflow.model.views import WHOLE, View


class Predictor(Protocol):
    """What sampling needs of a model: one answer at a state, its normalised table, and its schedule."""

    @property
    def table(self) -> Tensor: ...

    @property
    def schedule(self) -> Schedule: ...

    def __call__(self, x: Tensor, at: Coefficients, condition: Tensor | None) -> LogF:
        """log f at a state [B, L, d]: one network call."""


@dataclass(frozen=True, eq=False)
class NetworkPredictor:
    """A network ready to be sampled: the table is normalised once."""

    network: FlowNetwork
    schedule: Schedule
    table: Tensor
    view: View = WHOLE

    def __call__(self, x: Tensor, at: Coefficients, condition: Tensor | None) -> LogF:
        with trunk_autocast(x.device):
            return self.network(x, at, condition, self.view, self.table)  # type: ignore[no-any-return]

    def after(self, words: Tensor) -> NetworkPredictor:
        """The predictor of a block behind the tokens [B, P]: one network call, whatever follows."""
        with trunk_autocast(self.table.device):
            return replace(self, view=self.network.remember(self.table[words], self.table))

    def rows(self, index: Tensor) -> NetworkPredictor:
        """The same for some sequences of the batch."""
        return replace(self, view=self.view.rows(index))


class Change:
    """What a wrapper does; this one does nothing."""

    @property
    def kind(self) -> Hashable:
        """Changes of one kind can be joined."""
        return type(self).__name__

    def joined(self, parts: Sequence[Self]) -> Change:
        """Changes of one kind, this one the first of them, for the rows of all of them."""
        return self

    def state(self, x: Tensor, at: Coefficients) -> Tensor:
        """The state that the network is shown."""
        return x

    def reading(self, log_f: LogF) -> LogF:
        """What is made of the network's answer."""
        return log_f


@dataclass(frozen=True, eq=False)
class Wrapped:
    """A predictor as a trajectory holds it: with changes around it, innermost first, and for some of its rows."""

    trunk: Any
    """The `Predictor` that makes the network pass; it can give some of its `rows` if there is an index."""
    changes: tuple[Change, ...] = ()
    index: Tensor | None = None
    """Which rows of the trunk these are, if it was made for more of them."""

    @property
    def table(self) -> Tensor:
        return self.trunk.table  # type: ignore[no-any-return]

    @property
    def schedule(self) -> Schedule:
        return self.trunk.schedule  # type: ignore[no-any-return]

    def around(self, change: Change) -> Wrapped:
        """This predictor with one more change."""
        return replace(self, changes=(*self.changes, change))

    def shown(self, x: Tensor, at: Coefficients) -> Tensor:
        """The state as the network sees it, through the outermost change first."""
        for change in reversed(self.changes):
            x = change.state(x, at)
        return x


@dataclass(frozen=True, eq=False)
class Tempered(Change):
    """Weights softmax((log f / base_temperature + kernel) / temperature)."""

    temperature: float
    base_temperature: float = 1.0

    @property
    def kind(self) -> Hashable:
        return "Tempered", self.temperature, self.base_temperature

    def reading(self, log_f: LogF) -> LogF:
        return log_f.tempered(self.temperature, self.base_temperature)


@dataclass(frozen=True)
class Clamp:
    """Known tokens along the path: a heuristic, not exact conditioning.

    At every grid point the network sees the known positions where the forward process would have them, alpha e + sigma
    z with the sample's own noise, and their prediction is their embedding. The unknown positions see the right noise
    level, but the flow was not trained to be steered: consistency with the known text is encouraged, not guaranteed.
    """

    tokens: Tensor
    """[L] or [B, L]; values where not known are ignored."""
    known: Tensor
    """Boolean, same shape; on the CPU, so that the host need not ask a device which positions are left."""

    def resolved(self, batch: int, length: int, vocabulary: int, device: torch.device) -> Clamp:
        """Checked, [batch, length], the tokens on a device."""
        if self.tokens.shape != self.known.shape or self.tokens.shape[-1] != length:
            raise UserError(f"the known tokens must have length {length}, not {tuple(self.tokens.shape)}")
        tokens = torch.where(self.known, self.tokens, torch.zeros_like(self.tokens))
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
            raise UserError(f"a known token lies outside the vocabulary of {vocabulary}")
        return Clamp(tokens.expand(batch, length).to(device), self.known.expand(batch, length).cpu())

    def __getitem__(self, index: Any) -> Clamp:
        """Some rows or, where all samples share the tokens, some positions."""
        return Clamp(self.tokens[index], self.known[index])

    def put(self, tokens: Tensor) -> Tensor:
        """`tokens` [B, L] with the known ones in place."""
        return torch.where(onto(self.known, tokens.device), self.tokens, tokens)

    @property
    def prompt_length(self) -> int:
        """How many first tokens are known in every sample."""
        known = self.known.reshape(-1, self.known.shape[-1]).all(0)
        return int(known.long().cumprod(0).sum())


@dataclass(frozen=True, eq=False)
class Known(Change):
    """Some tokens of the sequences are known."""

    clamp: Clamp
    noise: Tensor
    """The starting noise of the rows, [B, L, d]."""
    table: Tensor

    def joined(self, parts: Sequence[Self]) -> Known:
        tokens, known = (torch.cat([getattr(part.clamp, name) for part in parts]) for name in ("tokens", "known"))
        return Known(Clamp(tokens, known), torch.cat([part.noise for part in parts]), self.table)

    def state(self, x: Tensor, at: Coefficients) -> Tensor:
        placed = sample_path(self.table[self.clamp.tokens].to(x.dtype), self.noise.to(x.dtype), at)
        return torch.where(onto(self.clamp.known[..., None], x.device), placed, x)

    def reading(self, log_f: LogF) -> LogF:
        return DecidedLogF.around(log_f, self.clamp.known, self.clamp.tokens, self.table)


@dataclass(frozen=True)
class DecidedLogF:
    """A `LogF` some of whose positions are decided: they skip the head, and their prediction is their embedding."""

    inner: LogF
    decided: Tensor
    """Boolean, [B, L], on the CPU."""
    tokens: Tensor
    """[B, L]; values where nothing is decided are ignored."""
    table: Tensor

    @classmethod
    def around(cls, log_f: LogF, decided: Tensor, tokens: Tensor, table: Tensor) -> LogF:
        """`log_f` with these positions decided, besides those that already are."""
        if isinstance(log_f, DecidedLogF):
            tokens = torch.where(onto(decided, tokens.device), tokens, log_f.tokens)
            return cls(log_f.inner, decided | log_f.decided, tokens, table)
        return cls(log_f, decided, tokens, table) if bool(decided.any()) else log_f

    @property
    def has_weights(self) -> bool:
        return self.inner.has_weights

    def weigh(self, x: Tensor, at: Coefficients, *, scores: Tensor | None = None, **asked: Any) -> Weighted:
        live = ~self.decided
        levels = at.wide(x.shape[1])[live]
        part = self.inner[live].weigh(x[live], levels, scores=None if scores is None else scores[live], **asked)
        mu = self.table[torch.where(onto(live, x.device), 0, self.tokens)].to(part.mu.dtype)
        mu[live] = part.mu
        token = top_weight = None
        if part.token is not None and part.top_weight is not None:
            token, top_weight = self.tokens.clone(), torch.ones_like(self.tokens, dtype=part.top_weight.dtype)
            token[live], top_weight[live] = part.token, part.top_weight
        return Weighted(mu, log_normaliser=mu.new_zeros(self.tokens.shape), token=token, top_weight=top_weight)

    def logits(self, x: Tensor, at: Coefficients) -> Tensor:
        return self.inner.logits(x, at)

    def scores(self, x: Tensor) -> Tensor | None:
        return self.inner.scores(x)

    def tempered(self, temperature: float, base_temperature: float) -> LogF:
        return replace(self, inner=self.inner.tempered(temperature, base_temperature))

    def __getitem__(self, index: Any) -> LogF:
        return DecidedLogF(self.inner[index], self.decided[index], self.tokens[index], self.table)
