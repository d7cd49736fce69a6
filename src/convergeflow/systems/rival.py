"""What every rival shares: a sampler loop that counts calls, and bounds from the losses of rows.

A rival gives `row_losses` (one number per sequence at one time) and `generate_batch`; the rest of the `LanguageModel`
protocol follows. Inside their own files rivals run in the direction of their papers, most of them from data (tau = 0)
to noise (tau = 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from convergeflow.device import widest
from convergeflow.errors import UserError, unknown_name
from convergeflow.model.backbone import Backbone
from convergeflow.model.small_scale import Neighbours, open_gates
from convergeflow.model.views import WHOLE
from convergeflow.objective.losses import Loss
from convergeflow.randomness import RowDraws, derive_seed
from convergeflow.sampling.cohort import Observer
from convergeflow.sampling.integration import batches
from convergeflow.sampling.wrappers import Clamp
from convergeflow.systems.config import SystemConfig
from convergeflow.systems.protocol import Bound, LanguageModel, Samples, Stage

MONITOR_TIMES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Where validation looks, in the paper's direction: 0 is noise, 1 is data."""

TEMPERATURES = tuple({"temperature": value} for value in (1.0, 0.95, 0.9, 0.85, 0.8, 0.7))
"""The frontier of a method whose one control between quality and diversity is a temperature."""


@dataclass(frozen=True)
class RivalConfig(SystemConfig):
    """The shape of the trunk; fields that a subclass adds are its method's own options."""

    gate_init: float = 0.0
    """Start value of the residual gates; an opened gate lets attention learn sooner."""
    words_before: int = 0
    """Mix the inputs of this many preceding positions into each position's (the flows' `neighbours`)."""
    head_start: float = 0.0
    """Start the head at this multiple of the token table, in rows of mean square 1 (the flows' `head_init`)."""


@dataclass(frozen=True)
class TokenStep:
    """What an observer of a rival's sampler sees after each step."""

    index: int
    num_steps: int
    t: float
    """0 is noise, 1 is data."""
    tokens: Tensor
    """The present tokens [B, L]; a mask is shown by an id outside the vocabulary."""
    calls: int


class AlongTable(nn.Module):
    """A network whose head may start along the rows of its token table."""

    embedding: Table
    head: nn.Linear

    @torch.no_grad()
    def start_head(self, start: float) -> None:
        """`start` times the rows, in rows of mean square 1; 0 leaves the head as it is."""
        if start:
            rows = self.embedding.weight[: len(self.head.weight)]
            self.head.weight.copy_(start * rows / rows.square().mean().sqrt())


class TokenNetwork(AlongTable):
    """Table, trunk and a zero-initialised head: tokens, or vectors over the vocabulary, to logits [B, L, outputs]."""

    def __init__(self, config: RivalConfig, *, inputs: int, outputs: int) -> None:
        super().__init__()
        self.embedding = Table(inputs, config.width)
        self.before = words_before(config)
        self.backbone = trunk(config)
        self.head = zero_linear(config.width, outputs)
        self.start_head(config.head_start)

    def forward(self, inputs: Tensor, level: Tensor, positions: Tensor | None = None) -> Tensor:
        """`level` [B] is what the trunk is told; with `positions` (a mask on the CPU) the head runs on those, flat."""
        h = self.embedding(inputs)
        h = self.backbone(h if self.before is None else h + self.before(h, WHOLE), level)
        h = h if positions is None else h[positions]
        with torch.autocast(h.device.type, enabled=False):
            return self.head(h.to(self.head.weight.dtype))


class Table(nn.Module):
    """A learned row per token; a vector over the vocabulary gives the weighted sum of rows."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, width))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.is_floating_point():
            with torch.autocast(inputs.device.type, enabled=False):
                return inputs.to(self.weight.dtype) @ self.weight
        return functional.embedding(inputs, self.weight)


def trunk(config: RivalConfig) -> Backbone:
    """The trunk that all systems share."""
    backbone = Backbone(config)
    open_gates(backbone, config.gate_init)
    return backbone


def words_before(config: RivalConfig) -> Neighbours | None:
    """The layer that shows each position the inputs before it, if the configuration asks for it."""
    return Neighbours(config.width, config.words_before) if config.words_before else None


def zero_linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    """A linear map that starts at zero, so that a fresh model is a known function."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.zeros_(layer.weight)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def token_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross-entropy of `tokens` [B, L] under logits [B, L, V]: the mean of each row, [B]."""
    nll = functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten(), reduction="none")
    return nll.view(tokens.shape).mean(-1)


class Rival(LanguageModel):
    """A system with tokens or latents of its own; subclasses give `row_losses` and `generate_batch`."""

    config_class: ClassVar[type[RivalConfig]] = RivalConfig
    choices: Mapping[str, Sequence[str]] = MappingProxyType({})
    """The names that a control may have, for controls that are names."""
    laws = 12  # they are float64, and steps make several of them
    takes_known: bool = True
    """Whether some tokens of a sample can be given."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        # Buffers, so that a resumed run knows how far it was: some methods change along training.
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))
        self.register_buffer("horizon", torch.zeros((), dtype=torch.long))
        self.counted: tuple[int, int] | None = None
        """Both as the host counts them in a stage: it need not ask the device."""

    passes: Tensor
    horizon: Tensor

    def enter_stage(self, stage: Stage) -> None:
        """Train everything: a rival has one objective. The first stage's steps are its `horizon`."""
        super().enter_stage(stage)
        if int(self.horizon) == 0:
            self.horizon.fill_(int(stage.steps))
        self.counted = (int(self.passes), int(self.horizon))

    @property
    def progress(self) -> float:
        """Training passes so far, relative to the steps of the first stage; 1 if there was no stage."""
        passes, horizon = self.counted if self.training and self.counted else (int(self.passes), int(self.horizon))
        return passes / horizon if horizon else 1.0

    def count_pass(self) -> None:
        """A training pass begins."""
        self.passes += 1
        if self.counted:
            self.counted = (self.counted[0] + 1, self.counted[1])

    def loss(self, tokens: Tensor, *, times: Tensor, draws: RowDraws) -> Loss:
        """The mean of the rows' losses, nats per token where the method has a likelihood."""
        if self.training:
            self.count_pass()
        rows = self.row_losses(tokens, times, draws)
        return Loss(rows.mean(), {})

    def row_losses(self, tokens: Tensor, times: Tensor, draws: RowDraws) -> Tensor:
        """One loss per sequence [B] at noise shares `times` [B] in (0, 1), float64 on the CPU; differentiable."""
        raise NotImplementedError

    @torch.no_grad()
    def monitor(self, tokens: Tensor, *, draws: RowDraws) -> dict[str, float]:
        """The loss at fixed times with fixed noise."""
        with self.evaluating():
            report = {}
            for t in MONITOR_TIMES:
                times = torch.full((len(tokens),), 1.0 - t, dtype=torch.float64)
                report[f"loss@{t:g}"] = float(self.row_losses(tokens, times, draws).mean())
            return report

    @torch.no_grad()
    def bound_of_ids(  # type: ignore[override]
        self, tokens: Tensor, *, draws: RowDraws, repeats: int = 8, progress: Callable[[int], None] = lambda done: None
    ) -> Bound:
        """An upper bound on -log p(tokens) in nats per token: `repeats` stratified times per row."""
        assert self.bound_kind is not None
        repeats = 1 if self.bound_kind == "exact" else repeats  # nothing is drawn then
        found = []
        with self.evaluating():
            for part in batches(len(tokens), self.batch_size(tokens.shape[1])):
                stream = draws.select(range(len(tokens))[part])
                here = tokens[part].to(self.device)
                times = [(k + stream.uniform()) / repeats for k in range(repeats)]
                parts = [self.row_bounds(here, time, stream) for time in times]
                found.append(widest(torch.stack(parts)).mean(0).cpu())
                progress(len(here))
        return Bound.of(torch.cat(found), repeats, self.bound_kind, tokens.numel())

    def row_bounds(self, tokens: Tensor, times: Tensor, draws: RowDraws) -> Tensor:
        """Per row, a number whose mean over uniform times bounds the negative log-likelihood per token."""
        return self.row_losses(tokens, times, draws)

    @torch.no_grad()
    def sample(  # type: ignore[override]
        self,
        num: int,
        length: int,
        *,
        seeds: Sequence[int],
        nfe: int = 64,
        observe: Observer | None = None,
        clamp: Clamp | None = None,
        batch: int | None = None,
        **controls: Any,
    ) -> Samples:
        """Generate; the network calls are counted by a hook on the network."""
        self._check_request(num, length, seeds, nfe)
        for name in controls:
            if name not in self.controls:
                raise unknown_name(f"sampling control of {self.method}", name, self.controls)
            if name in self.choices and controls[name] not in self.choices[name]:
                raise unknown_name(name, str(controls[name]), self.choices[name])
            kind, switch = type(self.controls[name]), isinstance(controls[name], bool)
            if (kind is float and (switch or not isinstance(controls[name], int | float))) or (
                kind is bool and not switch
            ):
                wanted = "true or false" if kind is bool else "a number"
                raise UserError(f"{name} of {self.method} must be {wanted}, not {controls[name]!r}")
        chosen = {**self.controls, **controls}
        size = batch or self.batch_size(length)
        known = None if clamp is None else clamp.resolved(num, length, self.config.vocabulary, self.device)
        if known is not None and bool(known.known.any()) and not self.takes_known:
            raise UserError(f"{self.method} has no infilling; generate without a prompt or gaps")
        parts, calls = [], []
        with self.evaluating():
            for part in batches(num, size):
                draws = RowDraws([derive_seed(seed, "sample") for seed in seeds[part]], self.device)
                run = Run(length, draws, nfe, None if known is None else known[part], observe, self.device)
                with self.network.register_forward_pre_hook(run.count):
                    parts.append(self.generate_batch(run, **chosen).cpu())
                calls += [run.calls] * run.rows
        settings = {"method": self.method, "nfe": nfe, **chosen, "length": length, "batch": size}
        return self._samples(torch.cat(parts), seeds, torch.tensor(calls), settings)

    def generate_batch(self, run: Run, **controls: Any) -> Tensor:
        """Token ids [B, L] of one batch."""
        raise NotImplementedError


@dataclass
class Run:
    """One batch of samples in the making."""

    length: int
    draws: RowDraws
    nfe: int
    known: Clamp | None
    observe: Observer | None
    device: torch.device
    calls: int = 0
    """Network calls so far."""

    @property
    def rows(self) -> int:
        return len(self.draws)

    def count(self, *_: Any) -> None:
        """Hear of a network call."""
        self.calls += 1

    def put(self, tokens: Tensor) -> Tensor:
        """`tokens` [B, L] with the known ones in place."""
        return tokens if self.known is None else self.known.put(tokens)

    def report(self, index: int, num_steps: int, t: float, tokens: Tensor) -> None:
        """Tell the observer, if there is one."""
        if self.observe is not None:
            self.observe(TokenStep(index, num_steps, t, tokens, self.calls))
