"""ELF as published: its own trunk with prefix tokens and interleaved rotary, the T5 encoder, the decoder mode.

t = 0 is noise, t = 1 data. There is no modulation: time, guidance and mode enter as four tokens each in front of the
text, which are not rotated. The same network denoises latents and, with the mode tokens on, decodes them to tokens.
`systems/elf.py` is ELF-like: its objective and sampler on the trunk that this package's systems share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from convergeflow.device import onto
from convergeflow.errors import UserError
from convergeflow.model.backbone import NoiseLevelEmbedding
from convergeflow.systems.elf import LEAST_GAP, PREFIX, ElfConfig, ElfModel
from convergeflow.systems.published.family import Published
from convergeflow.systems.rival import Run

CHURN = ((32, 1.5), (64, 1.0))
"""Noise put back by the SDE sampler, by the number of steps up to which it is meant; the last also for more."""


class RootMeanSquare(nn.Module):
    """Norm by the root of the mean square, with a weight."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)


def rotate_pairs(x: Tensor, unrotated: int) -> Tensor:
    """Interleaved rotary [B, H, L, K]: pairs (2k, 2k + 1); positions count from 0 behind the `unrotated` ones."""
    fixed, text = x[:, :, :unrotated], x[:, :, unrotated:]
    half = x.shape[-1] // 2
    rate = 10_000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(text.shape[2], device=x.device, dtype=torch.float32)[:, None] * rate
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    even, odd = text[..., 0::2], text[..., 1::2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
    return torch.cat([fixed, turned], dim=2)


class ElfLayer(nn.Module):
    """Attention with normalised queries and keys, and a SwiGLU of two thirds of the usual width; biases everywhere."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = RootMeanSquare(width), RootMeanSquare(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm_q, self.norm_k = RootMeanSquare(width // heads), RootMeanSquare(width // heads)
        self.mlp_up, self.mlp_down = nn.Linear(width, 2 * inner), nn.Linear(inner, width)

    def forward(self, x: Tensor, unrotated: int, mask: Tensor | None) -> Tensor:
        B, L, D = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(B, L, 3, self.heads, D // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = rotate_pairs(self.norm_q(q), unrotated), rotate_pairs(self.norm_k(k), unrotated)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).reshape(B, L, D))
        gate, value = self.mlp_up(self.norm_mlp(x)).chunk(2, dim=-1)
        return x + self.mlp_down(functional.silu(gate) * value)


@dataclass(frozen=True)
class PublishedElfConfig(ElfConfig):
    encoder: str = "t5"
    latent: int = 512
    bottleneck: int = 128
    inner: int = 2048
    """Width inside the SwiGLU."""
    prefix: int = PREFIX
    """Tokens in front of the text for each of time, guidance and mode."""


class Prefix(nn.Module):
    """The tokens in front of the text that say time, guidance and mode."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.time, self.guidance = NoiseLevelEmbedding(width), NoiseLevelEmbedding(width)
        self.time_tokens = nn.Parameter(torch.zeros(1, count, width))
        self.guidance_tokens = nn.Parameter(torch.zeros(1, count, width))
        self.mode_tokens = nn.Parameter(torch.zeros(1, count, width))

    def forward(self, t: Tensor, guidance: Tensor, decoding: Tensor) -> Tensor:
        time = self.time_tokens + self.time.embed(t)[:, None]
        scale = self.guidance_tokens + self.guidance.embed(guidance)[:, None]
        # Zeroed, not left out, when the network denoises.
        mode = self.mode_tokens * decoding.to(time)[:, None, None]
        return torch.cat([time, scale, mode], dim=1)


class PublishedElfNetwork(nn.Module):
    """(z, earlier prediction, t, guidance, mode) -> (x prediction [B, L, latent], token logits [B, L, V])."""

    def __init__(self, config: PublishedElfConfig) -> None:
        super().__init__()
        width, latent = config.width, config.latent
        self.join = nn.Linear(2 * latent, latent)
        self.narrow = nn.Linear(latent, config.bottleneck, bias=False)
        self.widen = nn.Linear(config.bottleneck, width)
        self.prefix = Prefix(width, config.prefix)
        self.blocks = nn.ModuleList(ElfLayer(width, config.heads, config.inner) for _ in range(config.depth))
        self.norm_final = RootMeanSquare(width)
        self.predict = nn.Linear(width, latent)
        self.decode_in, self.decode_out = nn.Linear(width, latent), nn.Linear(latent, config.vocabulary)

    def forward(
        self,
        z: Tensor,
        condition: Tensor | None,
        t: Tensor,
        guidance: Tensor,
        decoding: Tensor,
        valid: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`decoding` [B] scales the mode tokens (0 or 1); `valid` [B, L] marks the positions that may be looked at."""
        dtype = self.join.weight.dtype
        with torch.autocast(z.device.type, enabled=False):  # the trunk alone may run in half precision
            h = z.to(dtype)
            if condition is not None:
                h = self.join(torch.cat([h, condition.to(dtype)], dim=-1))
            h = self.widen(self.narrow(h))
            prefix = self.prefix(t, guidance, decoding)
        in_front = prefix.shape[1]
        h = torch.cat([prefix, h], dim=1)
        mask = None
        if valid is not None:
            mask = functional.pad(valid.bool(), (in_front, 0), value=True)[:, None, None]
        for layer in self.blocks:
            h = layer(h, in_front, mask)
        h = h[:, in_front:]
        with torch.autocast(z.device.type, enabled=False):
            h = h.to(dtype)
            inner = functional.gelu(self.decode_in(h), approximate="tanh")
            return self.predict(self.norm_final(h)), self.decode_out(inner)


class PublishedElf(Published, ElfModel):
    """ELF of its authors."""

    method = "published-elf"
    config_class = PublishedElfConfig
    controls: Mapping[str, Any] = {**ElfModel.controls, "churn": None, "sampler": "sde", "text_guidance": 1.0}
    choices: Mapping[str, Any] = {**ElfModel.choices, "sampler": ("sde", "ode")}
    takes_known = True
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "published": {"nfe": 33, "sampler": "sde", "churn": 1.5, "guidance": 3.0},
        "published-64": {"nfe": 65, "sampler": "sde", "churn": 1.0, "guidance": 3.0},
        "conditional": {"nfe": 65, "sampler": "ode", "guidance": 1.0, "text_guidance": 2.0},
        **{f"distilled-{n}": {"nfe": n + 1, "churn": 1.5, "guidance": 2.5} for n in (1, 2, 4, 8)},
        **{f"distilled-{n}": {"nfe": n + 1, "churn": 2.0, "guidance": 2.0} for n in (16, 32)},
    }
    network_class = PublishedElfNetwork
    network: PublishedElfNetwork  # type: ignore[assignment]

    def forward(
        self,
        z: Tensor,
        t: Tensor,
        guidance: Tensor,
        previous: Tensor | None = None,
        decoding: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The data prediction [B, L, E] and the decoder's logits [B, L, V] for latents z [B, L, E]."""
        mode = torch.zeros_like(t) if decoding is None else decoding
        return self.network(z, previous, t, guidance, mode, valid)

    def generate_batch(  # type: ignore[override]
        self, run: Run, *, guidance: float, churn: float | None, grid: str, sampler: str, text_guidance: float
    ) -> Tensor:
        """nfe - 1 calls along a random grid, and one that decodes; a guided prompt takes two calls a step."""
        given = self.given(run)
        steps = (run.nfe - 1) // (1 if given is None or text_guidance == 1.0 else 2)
        if steps < 1:
            raise UserError("elf needs more network calls: one or two for a step, and one for the decoding")
        if churn is None:
            churn = next((value for most, value in CHURN if steps <= most), CHURN[-1][1])
        z = self.config.noise_scale * run.draws.normal(run.length, self.config.latent)
        w = torch.full((run.rows,), float(guidance), device=run.device)
        churn = 0.0 if sampler == "ode" else churn
        z = self.flow(run, z, self._grid(run, steps, grid), w, churn, given, text_guidance)
        _, logits = self.network(z, torch.zeros_like(z), torch.ones_like(w), w, torch.ones_like(w))
        return run.put(logits.argmax(-1))

    def flow(
        self, run: Run, z: Tensor, times: Tensor, w: Tensor, churn: float, given: Given | None, text_guidance: float
    ) -> Tensor:
        """Latents from the noise z along `times` [B, N + 1] on the CPU; the last step puts no noise back."""
        s, count = self.config.noise_scale, times.shape[1] - 1
        z = z if given is None else given.pin(z)
        x, there = torch.zeros_like(z), onto(times, run.device)
        for i in range(count):
            t, then = there[:, i], there[:, i + 1]
            if churn and i < count - 1:
                a = (1 - churn * (then - t)).clamp(0, 1)
                z = a[:, None, None] * z + (1 - a)[:, None, None] * s * run.draws.normal(*z.shape[1:]).to(z)
                t = a * t
                z = z if given is None else given.pin(z)
            x, logits = self._predict(z, x, t, w, given, text_guidance)
            z = z + (then - t)[:, None, None] * (x - z) / (1 - t).clamp_min(LEAST_GAP)[:, None, None]
            z = z if given is None else given.pin(z)
            run.report(i, run.nfe, float(times[:, i].mean()), logits.argmax(-1))
        return z

    def _predict(
        self, z: Tensor, x: Tensor, t: Tensor, w: Tensor, given: Given | None, text_guidance: float
    ) -> tuple[Tensor, Tensor]:
        """The data prediction; with a guided prompt that without the prompt is extrapolated away from."""
        denoising = torch.zeros_like(t)
        if given is None:
            return self.network(z, x, t, w, denoising)  # type: ignore[no-any-return]
        told, logits = self.network(z, given.pin(x), t, w, denoising)
        if text_guidance == 1.0:
            return told, logits
        untold, _ = self.network(given.wipe(z), given.wipe(x), t, w, denoising)
        return untold + text_guidance * (told - untold), logits

    def given(self, run: Run) -> Given | None:
        """The latents of a prompt, which sees only itself."""
        if run.known is None or not bool(run.known.known.any()):
            return None
        known, length = run.known.known, run.known.prompt_length
        if bool(known[:, length:].any()):
            raise UserError("elf continues a prompt that is as long in all samples; it cannot fill gaps")
        latents = torch.zeros(run.rows, run.length, self.config.latent, device=run.device)
        latents[:, :length] = self.encode(run.known.tokens[:, :length])
        return Given(latents, onto(known, run.device))


@dataclass(frozen=True)
class Given:
    """Clean latents at the positions of a condition."""

    latents: Tensor
    where: Tensor

    def pin(self, z: Tensor) -> Tensor:
        """z with the condition in its place."""
        return torch.where(self.where[..., None], self.latents, z)

    def wipe(self, z: Tensor) -> Tensor:
        """z with nothing in its place."""
        return torch.where(self.where[..., None], torch.zeros_like(z), z)
