"""ELF-like: a flow on a frozen contextual encoder's outputs, with a decoder in the same network (arXiv 2605.10938).

t = 0 is noise, t = 1 data. z = t x + s (1 - t) noise, where x is the encoder's output. The network regresses x (by
velocity) for 80 % of the examples and decodes tokens from lightly corrupted x for the rest. Guidance by
self-conditioning is distilled into it and set by a scalar. There are two encoders: `t5` is T5-small as published, on T5
tokens; `embedded` is a small one, trained here by masked-token prediction in a `ce` stage and frozen in the `mse`
stage. The trunk is the package's shared one: time enters by modulation, guidance and mode as prefix tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from convergeflow.device import onto
from convergeflow.errors import ConvergeFlowError, UserError, unknown_name
from convergeflow.flow.path import spread
from convergeflow.model.backbone import Backbone, NoiseLevelEmbedding, TrunkShape
from convergeflow.model.small_scale import open_gates
from convergeflow.model.views import WHOLE
from convergeflow.objective.losses import Loss
from convergeflow.randomness import RowDraws
from convergeflow.systems.hub import asked_once
from convergeflow.systems.protocol import Stage
from convergeflow.systems.rival import Rival, RivalConfig, Run, Table, token_losses, trunk, words_before, zero_linear

ENCODERS = ("embedded", "t5")
TIME_LAW = (-1.5, 0.8)
"""Mean and deviation of logit t, in training and on the sampler's grid."""
DECODER_LAW = (0.8, 0.8)
LEAST_GAP = 0.05
"""1 - t is not taken smaller than this where the velocity divides by it."""
GUIDANCE_RANGE = (0.5, 5.0)
DECODER_SHARE = 0.2
SELF_CONDITION = 0.5
PREFIX = 4
"""Tokens in front of the text for each of guidance and mode."""


def logit_normal(uniform: Tensor, law: tuple[float, float]) -> Tensor:
    """sigmoid of a Gaussian, from uniform numbers."""
    return torch.sigmoid(law[0] + law[1] * torch.special.ndtri(uniform))


def guidance_scale(uniform: Tensor) -> Tensor:
    """w with 1 + w log-uniform over the trained range."""
    low, high = (1 + value for value in GUIDANCE_RANGE)
    return low * (high / low) ** uniform - 1


class EmbeddedEncoder(nn.Module):
    """A small bidirectional transformer; every output has mean 0 and variance 1 over its features."""

    def __init__(self, vocabulary: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.mask = vocabulary
        self.embedding = Table(vocabulary + 1, width)
        self.backbone = Backbone(TrunkShape(width=width, depth=depth, heads=heads, condition_width=16, dropout=0.0))
        open_gates(self.backbone, 1.0)
        self.head = zero_linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Contextual embeddings [B, L, width]; the trunk's noise level is a constant."""
        h = self.backbone(self.embedding(tokens), torch.zeros(len(tokens), device=tokens.device))
        return functional.layer_norm(h, h.shape[-1:])

    def losses(self, tokens: Tensor, times: Tensor, draws: RowDraws) -> Tensor:
        """Cross-entropy of all tokens [B] with up to 30 % of them hidden: identity and context both have to be kept."""
        hidden = onto(draws.uniform(tokens.shape[1]) < 0.3 * times[:, None], tokens.device)
        return token_losses(self.head(self(torch.where(hidden, self.mask, tokens))), tokens)


class T5Encoder:
    """T5's encoder from transformers, frozen and outside the module tree: neither trained nor saved with the model."""

    def __init__(self, config: ElfConfig) -> None:
        self.config = config
        self._model: Any = None

    def __call__(self, tokens: Tensor) -> Tensor:
        name, latent = self.config.encoder_name, self.config.latent
        if self._model is None:
            from transformers import T5EncoderModel

            try:
                self._model = T5EncoderModel.from_pretrained(name, **asked_once(name)).eval().requires_grad_(False)
            except OSError as failure:
                raise ConvergeFlowError(
                    f"cannot load the encoder {name!r} ({str(failure).splitlines()[0]}); give a local folder as "
                    "model.encoder_name, or train the embedded encoder with model.encoder=embedded"
                ) from None
        model = self._model.to(tokens.device)
        if int(tokens.max()) >= model.config.vocab_size:
            raise UserError(f"the corpus is not in the tokens of {name}: prepare it with that tokenizer")
        if model.config.d_model != latent:
            raise UserError(f"{name} has width {model.config.d_model}: set model.latent={model.config.d_model}")
        return model(input_ids=tokens).last_hidden_state.float() / self.config.encoder_deviation  # type: ignore[no-any-return]


class Widen(nn.Linear):
    """To the trunk's width, with the words before mixed in if the configuration asks for it."""

    def __init__(self, inputs: int, config: RivalConfig) -> None:
        super().__init__(inputs, config.width)
        self.before = words_before(config)

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        return h if self.before is None else h + self.before(h, WHOLE)


class ElfNetwork(nn.Module):
    """(z, earlier prediction, t, guidance, mode) -> (x prediction [B, L, latent], token logits [B, L, V])."""

    def __init__(self, config: ElfConfig) -> None:
        super().__init__()
        latent, width = config.latent, config.width
        self.join = nn.Linear(2 * latent, latent)
        self.narrow = nn.Linear(latent, min(128, latent), bias=False)
        self.widen = Widen(min(128, latent), config)
        self.guidance = NoiseLevelEmbedding(config.condition_width)
        self.guidance_out = nn.Linear(config.condition_width, width)
        self.prefix = nn.Parameter(0.02 * torch.randn(2 * PREFIX, width))
        self.backbone = trunk(config)
        self.predict = zero_linear(width, latent)
        self.decode_in = nn.Linear(width, latent)
        self.decode_out = nn.Linear(latent, config.vocabulary)
        for layer in (self.decode_in, self.decode_out):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(
        self, z: Tensor, condition: Tensor, t: Tensor, guidance: Tensor, decoding: Tensor
    ) -> tuple[Tensor, Tensor]:
        dtype = self.join.weight.dtype
        z, condition = z.to(dtype), condition.to(dtype)
        with torch.autocast(z.device.type, enabled=False):
            h = self.widen(self.narrow(self.join(torch.cat([z, condition], dim=-1))))
            scale = self.guidance_out(self.guidance(guidance))[:, None]
        prefix = self.prefix.expand(len(z), -1, -1)
        # Mode tokens are zeroed, not left out, when the network denoises.
        mode = prefix[:, PREFIX:] * decoding.to(dtype)[:, None, None]
        h = torch.cat([prefix[:, :PREFIX] + scale, mode, h], dim=1)
        h = self.backbone(h, t)[:, 2 * PREFIX :]
        with torch.autocast(z.device.type, enabled=False):
            h = h.to(dtype)
            inner = functional.gelu(self.decode_in(h), approximate="tanh")
            return self.predict(h), self.decode_out(inner)


@dataclass(frozen=True)
class ElfConfig(RivalConfig):
    encoder: str = "embedded"
    encoder_name: str = "google-t5/t5-small"
    encoder_deviation: float = 0.2
    """T5's outputs are divided by this."""
    encoder_depth: int = 2
    encoder_heads: int = 2
    latent: int = 64
    """Width of the encoder's outputs; 512 for T5-small."""
    noise_scale: float = 2.0
    decoder_noise_scale: float = 5.0

    def __post_init__(self) -> None:
        if self.encoder not in ENCODERS:
            raise unknown_name("encoder", self.encoder, ENCODERS)
        super().__post_init__()


class ElfModel(Rival):
    """Embedded language flow."""

    method = "elf"
    takes_known = False
    config_class = ElfConfig
    network_class: type[Any] = ElfNetwork
    controls: Mapping[str, Any] = {"guidance": 3.0, "churn": 1.5, "grid": "logit-normal"}
    choices: Mapping[str, Any] = {"grid": ("logit-normal", "uniform")}
    frontier = tuple({"guidance": value} for value in (3.0, 1.0, 1.5, 2.0, 4.0, 5.0))

    def __init__(self, config: ElfConfig) -> None:
        super().__init__(config)
        self.network = self.network_class(config)
        self.teaches_encoder = False
        self.encoder: EmbeddedEncoder | T5Encoder = T5Encoder(config)
        if config.encoder == "embedded":
            sizes = config.vocabulary, config.latent, config.encoder_depth, config.encoder_heads
            self.encoder = EmbeddedEncoder(*sizes).requires_grad_(False)
        self.register_buffer("encoder_passes", torch.zeros((), dtype=torch.long))

    encoder_passes: Tensor

    def enter_stage(self, stage: Stage) -> None:
        """`ce` trains the embedded encoder, `mse` the flow on the frozen encoder."""
        super().enter_stage(stage)
        if isinstance(self.encoder, T5Encoder):
            return
        self.teaches_encoder = stage.objective == "ce"
        if not self.teaches_encoder and int(self.encoder_passes) == 0:
            raise UserError("elf's embedded encoder is untrained: put a ce stage before the mse stage to train it")
        self.network.requires_grad_(not self.teaches_encoder)
        self.encoder.requires_grad_(self.teaches_encoder)

    @torch.no_grad()
    def encode(self, tokens: Tensor) -> Tensor:
        """The clean latents x [B, L, latent]."""
        return self.encoder(tokens)  # type: ignore[no-any-return]

    def loss(self, tokens: Tensor, *, times: Tensor, draws: RowDraws) -> Loss:
        if not (self.teaches_encoder and isinstance(self.encoder, EmbeddedEncoder)):
            return super().loss(tokens, times=times, draws=draws)
        if self.training:
            self.encoder_passes += 1
        rows = self.encoder.losses(tokens, times, draws)
        return Loss(rows.mean(), {"encoder_ce": rows.detach().mean()})

    def row_losses(self, tokens: Tensor, times: Tensor, draws: RowDraws) -> Tensor:
        """Velocity error or, for one example in five, the decoder's cross-entropy."""
        device = tokens.device
        choices = draws.uniform(3)
        conditioned = (choices[:, 1] < SELF_CONDITION) & (choices[:, 0] >= DECODER_SHARE)
        decoding, w = onto(choices[:, 0] < DECODER_SHARE, device), onto(guidance_scale(choices[:, 2]), device)
        x = self.encode(tokens)
        noise = draws.normal(*x.shape[1:]).to(x)
        t = onto(logit_normal(1.0 - times, TIME_LAW), device)
        share = t.to(x)[:, None, None]
        z = share * x + self.config.noise_scale * (1 - share) * noise
        kept = spread(logit_normal(draws.uniform(x.shape[1]), DECODER_LAW), x)
        corrupted = kept * x + self.config.decoder_noise_scale * (1 - kept) * noise
        gap = (1 - t).clamp_min(LEAST_GAP).to(x)[:, None, None]
        nothing = torch.zeros_like(x)
        condition, target = nothing, x
        if bool(conditioned.any()):
            with torch.no_grad():
                denoising = torch.zeros_like(decoding)
                first, _ = self.network(z, nothing, t, w, denoising)
                second, _ = self.network(z, first, t, w, denoising)
            on = onto(conditioned, device)[:, None, None]
            condition = torch.where(on, first, nothing)
            # In velocities this is v + (1 - 1/w)(v_cond - v_uncond); z and the gap are common to all of them.
            target = torch.where(on, x + (1 - 1 / w).to(x)[:, None, None] * (second - first), x)
        mode = decoding[:, None, None]
        predicted, logits = self.network(
            torch.where(mode, corrupted, z), condition, torch.where(decoding, 1.0, t), w, decoding
        )
        velocity = ((predicted - target) / gap).square().mean((1, 2))
        return torch.where(decoding, token_losses(logits, tokens), velocity)

    def generate_batch(self, run: Run, *, guidance: float, churn: float, grid: str) -> Tensor:  # type: ignore[override]
        """nfe - 1 steps with noise put back in proportion to `churn` (0: the ODE), and one decoding call.

        The grid is random and each sample draws its own. Putting noise back under-disperses, as in the reference.
        """
        if run.nfe < 2:
            raise UserError("elf needs at least 2 network calls: one step and the decoding")
        num_steps = run.nfe - 1
        shape = (run.length, self.config.latent)
        s = self.config.noise_scale
        z = s * run.draws.normal(*shape).to(run.device)
        times = self._grid(run, num_steps, grid)
        there = onto(times, run.device)
        w = torch.full((run.rows,), float(guidance), device=run.device)
        denoising = torch.zeros(run.rows, dtype=torch.bool, device=run.device)
        condition = torch.zeros_like(z)
        for i in range(num_steps):
            t, then = there[:, i], there[:, i + 1]
            if churn and i < num_steps - 1:
                a = (1 - churn * (then - t)).clamp(0, 1)
                z = a[:, None, None] * z + (1 - a)[:, None, None] * s * run.draws.normal(*shape).to(z)
                t = a * t
            condition, logits = self.network(z, condition, t, w, denoising)
            velocity = (condition - z) / (1 - t).clamp_min(LEAST_GAP)[:, None, None]
            z = z + (then - t)[:, None, None] * velocity
            run.report(i, run.nfe, float(times[:, i].mean()), logits.argmax(-1))
        _, logits = self.network(z, torch.zeros_like(z), torch.ones_like(w), w, ~denoising)
        tokens = logits.argmax(-1)
        run.report(num_steps, run.nfe, 1.0, tokens)
        return tokens

    def _grid(self, run: Run, num_steps: int, kind: str) -> Tensor:
        """Increasing times [B, N + 1] from 0 to 1, on the CPU."""
        if kind == "uniform":
            inner = (torch.arange(1, num_steps) / num_steps).double().expand(run.rows, -1)
        else:
            inner = logit_normal(run.draws.uniform(num_steps - 1), TIME_LAW).sort(-1).values
        return functional.pad(functional.pad(inner, (1, 0), value=0.0), (0, 1), value=1.0).float()
