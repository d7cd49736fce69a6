"""What every rival shares: configuration, strict files, a counted and row-wise sampler loop, bounds from row losses.

A rival gives `row_losses` (one number per sequence at one time) and `generate_batch`; the rest of the
`LanguageModel` protocol follows. Rivals run from data (tau = 0) to noise (tau = 1) inside their own files, as
their papers do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from convergeflow.errors import UserError, unknown_name
from convergeflow.model.backbone import Backbone
from convergeflow.objective.losses import Loss
from convergeflow.pretrained import load_strictly, quietly
from convergeflow.randomness import RowDraws, derive_seed
from convergeflow.sampling.cohort import Observer
from convergeflow.sampling.integration import batches, default_batch
from convergeflow.sampling.wrappers import Clamp
from convergeflow.systems.protocol import Bound, Samples

MONITOR_TIMES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Where validation looks, in the paper's direction: 0 is noise, 1 is data."""


class RivalConfig(PreTrainedConfig):
    """The shape of the trunk, under ConvergeFlow's names; fields that a subclass adds are its method's own options."""

    vocabulary: int = 50257
    width: int = 768
    depth: int = 12
    heads: int = 12
    condition_width: int = 128
    length: int = 1024
    dropout: float = 0.1
    gate_init: float = 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        for name in ("vocabulary", "width", "depth", "heads", "length"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.width % (2 * self.heads):
            raise UserError(f"width {self.width} must be a multiple of 2 x heads (2 x {self.heads})")
        super().__post_init__(**kwargs)

    @classmethod
    def options(cls) -> dict[str, Any]:
        """The options that only this method has, with their defaults."""
        shared = {field.name for field in dataclasses.fields(RivalConfig)}
        return {field.name: field.default for field in dataclasses.fields(cls) if field.name not in shared}

    @classmethod
    def from_run(cls, model: Any, *, vocabulary: int, length: int) -> Self:
        """The configuration for a run (`config.ModelConfig`); an option that the method does not have is refused."""
        for name in model.options:
            if name not in cls.options():
                raise unknown_name(f"option of {model.method}", name, cls.options())
        shape = {
            name: getattr(model, name)
            for name in ("width", "depth", "heads", "condition_width", "dropout", "gate_init")
        }
        return cls(vocabulary=vocabulary, length=length, **shape, **model.options)


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


class TokenNetwork(nn.Module):
    """Table, trunk and a zero-initialised head: tokens, or vectors over the vocabulary, to logits [B, L, outputs]."""

    def __init__(self, config: RivalConfig, *, inputs: int, outputs: int) -> None:
        super().__init__()
        self.embedding = Table(inputs, config.width)
        self.backbone = Backbone(
            width=config.width,
            depth=config.depth,
            heads=config.heads,
            condition_width=config.condition_width,
            dropout=config.dropout,
            gate_init=config.gate_init,
        )
        self.head = zero_linear(config.width, outputs)

    def forward(self, inputs: Tensor, level: Tensor, positions: Tensor | None = None) -> Tensor:
        """`level` [B] is the scalar that the trunk is told; with `positions` (a mask) the head runs on those, flat."""
        h = self.backbone(self.embedding(inputs), level)
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


def zero_linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    """A linear map that starts at zero, so that a fresh model is a known function."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.zeros_(layer.weight)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


class Rival(PreTrainedModel):
    """A language model under the package's protocol. Subclasses set `network`, whose calls are what NFE counts."""

    method: ClassVar[str]
    bound_kind: ClassVar[str | None] = None
    """What `bound` computes; None: the method has no bound."""
    KNOBS: ClassVar[dict[str, Any]] = {}
    """Sampling controls of the method with their defaults."""
    FRONTIER: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    """Controls along which quality and diversity are traded; the first is the method's own default."""
    supports_gradient_checkpointing = False
    base_model_prefix = "network"
    network: nn.Module

    def __init__(self, config: RivalConfig) -> None:
        super().__init__(config)
        self.tokenizer: Any = None
        # Buffers, so that a resumed run knows how far it was: some methods change along training.
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))
        self.register_buffer("horizon", torch.zeros((), dtype=torch.long))

    passes: Tensor
    horizon: Tensor

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: the modules initialise themselves, and loading refuses a file that leaves anything to initialise."""

    # -- training ------------------------------------------------------------------------------------------------------

    def enter_stage(self, stage: Any) -> None:
        """Train everything: a rival has one objective. The first stage's steps are its `horizon`."""
        self.requires_grad_(True)
        if int(self.horizon) == 0:
            self.horizon.fill_(int(stage.steps))

    @property
    def progress(self) -> float:
        """Training passes so far, relative to the steps of the first stage."""
        return int(self.passes) / max(1, int(self.horizon))

    def loss(self, tokens: Tensor, *, times: Tensor, draws: RowDraws) -> Loss:
        """The mean of the rows' losses, nats per token where the method has a likelihood."""
        if self.training:
            self.passes += 1
        rows = self.row_losses(tokens, times.to(tokens.device), draws)
        return Loss(rows.mean(), {})

    def row_losses(self, tokens: Tensor, times: Tensor, draws: RowDraws) -> Tensor:
        """One loss per sequence [B] at noise shares `times` [B] in (0, 1), differentiable."""
        raise NotImplementedError

    @torch.no_grad()
    def monitor(self, tokens: Tensor, *, draws: RowDraws) -> dict[str, float]:
        """The loss at fixed times with fixed noise."""
        with self.evaluating():
            report = {}
            for t in MONITOR_TIMES:
                times = torch.full((len(tokens),), 1.0 - t, dtype=torch.float64)
                report[f"loss@{t:g}"] = float(self.row_losses(tokens, times.to(tokens.device), draws).mean())
            return report

    @torch.no_grad()
    def bound(self, tokens: Tensor, *, draws: RowDraws, repeats: int = 8) -> Bound:
        """An upper bound on -log p(tokens) in nats per token: `repeats` stratified times per row."""
        if self.bound_kind is None:
            raise UserError(f"{self.method} has no likelihood bound")
        found = []
        with self.evaluating():
            for part in batches(len(tokens), default_batch(tokens.shape[1], self.config.vocabulary)):
                stream = draws.select(range(len(tokens))[part])
                times = [(k + stream.uniform()) / repeats for k in range(repeats)]
                parts = [self.row_bounds(tokens[part], time.to(tokens.device), stream) for time in times]
                found.append(torch.stack(parts).double().mean(0))
        rows = torch.cat(found)
        error = float(rows.std() / len(rows) ** 0.5) if len(rows) > 1 else float("nan")
        return Bound(float(rows.mean()), error, repeats, self.bound_kind, tokens.numel())

    def row_bounds(self, tokens: Tensor, times: Tensor, draws: RowDraws) -> Tensor:
        """Per row, a number whose mean over uniform times bounds the negative log-likelihood per token."""
        return self.row_losses(tokens, times, draws)

    def evaluating(self) -> _Evaluating:
        """Dropout off for the time of a `with` block."""
        return _Evaluating(self)

    # -- sampling ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def sample(
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
        """Generate; `controls` are those of KNOBS. The network calls are counted by a hook on the network."""
        if len(seeds) != num:
            raise UserError(f"{num} samples need {num} seeds, not {len(seeds)}")
        if num < 1 or length < 1 or nfe < 1:
            raise UserError("the number of samples, their length and nfe must be at least 1")
        for name in controls:
            if name not in self.KNOBS:
                raise unknown_name(f"sampling control of {self.method}", name, self.KNOBS)
        knobs = {**self.KNOBS, **controls}
        size = batch or default_batch(length, self.config.vocabulary)
        parts, calls = [], []
        with self.evaluating():
            for part in batches(num, size):
                draws = RowDraws([derive_seed(seed, "sample") for seed in seeds[part]])
                piece = Known.of(clamp, part, length, len(draws), self.device)
                with _Calls(self.network) as counter:
                    run = Run(length, draws, nfe, piece, observe, counter, self.device)
                    parts.append(self.generate_batch(run, **knobs).cpu())
                calls += [counter.total] * len(draws)
        ids = torch.cat(parts)
        texts = None if self.tokenizer is None else [self.tokenizer.decode(row.tolist()) for row in ids]
        settings = {"method": self.method, "nfe": nfe, **knobs, "length": length, "batch": size}
        counted = torch.tensor(calls)
        return Samples(ids, list(seeds), int(counted.max()), settings, texts, {"calls": counted})

    def generate_batch(self, run: Run, **knobs: Any) -> Tensor:
        """Token ids [B, L] of one batch."""
        raise NotImplementedError

    def generate(self, num: int = 1, *, length: int | None = None, seed: int = 0, **options: Any) -> Samples:  # type: ignore[override]
        """`num` samples with seeds seed, seed + 1, ...; options as in `sample`."""
        return self.sample(num, length or self.config.length, seeds=range(seed, seed + num), **options)

    # -- files ---------------------------------------------------------------------------------------------------------

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """config.json, model.safetensors, and the tokenizer where there is one."""
        with quietly():
            super().save_pretrained(save_directory, **kwargs)
        if self.tokenizer is not None:
            self.tokenizer.save(save_directory)

    @classmethod
    def from_pretrained(cls, folder: Any, *args: Any, **kwargs: Any) -> Self:  # type: ignore[override]
        """Load a checkpoint folder in float32; a missing or unexpected weight is an error, not a warning."""
        return load_strictly(cls, folder, *args, **kwargs)

    def num_parameters_without_table(self) -> int:
        """All parameters but the input table."""
        table = getattr(self.network, "embedding", None)
        return sum(p.numel() for p in self.parameters()) - (0 if table is None else table.weight.numel())


def register(config: type[RivalConfig], model: type[Rival]) -> None:
    """Make a rival known to transformers' Auto classes."""
    model.config_class = config
    AutoConfig.register(config.model_type, config)
    AutoModel.register(config, model)


@dataclass(frozen=True)
class Known:
    """Tokens that a sample must have, [B, L] with a mask; none: the mask is empty."""

    tokens: Tensor
    mask: Tensor

    @classmethod
    def of(cls, clamp: Clamp | None, part: slice, length: int, rows: int, device: torch.device) -> Known:
        if clamp is None:
            return cls(
                torch.zeros(rows, length, dtype=torch.long, device=device),
                torch.zeros(rows, length, dtype=torch.bool, device=device),
            )
        if clamp.tokens.shape != clamp.known.shape or clamp.tokens.shape[-1] != length:
            raise UserError(f"the known tokens must have length {length}, not {tuple(clamp.tokens.shape)}")
        pair = (clamp.tokens, clamp.known)
        tokens, mask = (value[part] if value.dim() == 2 else value.expand(rows, length) for value in pair)
        return cls(tokens.to(device), mask.to(device))

    def __bool__(self) -> bool:
        return bool(self.mask.any())

    def put(self, tokens: Tensor) -> Tensor:
        """`tokens` with the known ones in place."""
        return torch.where(self.mask, self.tokens, tokens)


@dataclass(frozen=True)
class Run:
    """One batch of samples in the making."""

    length: int
    draws: RowDraws
    nfe: int
    known: Known
    observe: Observer | None
    counter: _Calls
    device: torch.device

    @property
    def rows(self) -> int:
        return len(self.draws)

    def report(self, index: int, num_steps: int, t: float, tokens: Tensor) -> None:
        """Tell the observer, if there is one."""
        if self.observe is not None:
            self.observe(TokenStep(index, num_steps, t, tokens, self.counter.total))

    def refuse_known(self, method: str) -> None:
        """For methods that cannot be told tokens."""
        if self.known:
            raise UserError(f"{method} has no infilling; generate without a prompt or gaps")


class _Calls:
    """Counts the calls of a module inside a `with` block."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.total = module, 0

    def _count(self, *_: Any) -> None:
        self.total += 1

    def __enter__(self) -> _Calls:
        self.handle = self.module.register_forward_pre_hook(self._count)
        return self

    def __exit__(self, *_: Any) -> None:
        self.handle.remove()


class _Evaluating:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> None:
        self.was_training = self.model.training
        self.model.eval()

    def __exit__(self, *_: Any) -> None:
        self.model.train(self.was_training)
