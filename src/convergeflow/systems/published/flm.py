"""FLM and FMLM as published: the one-hot flow with soft-capped attention, and the flow maps distilled from it.

t = 0 is noise, t = 1 data. FLM differs from the family in three things: attention scores are capped at 50, the trunk is
told t itself, and the noisy one-hot vectors enter the table without a softmax. A flow map is told two times. Its first
stage adds a correction to the frozen FLM (`residual`, two calls a step); its second stage is one network (`map`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from convergeflow.device import onto, state_dtype_of
from convergeflow.errors import unknown_name
from convergeflow.model.backbone import Attention, NoiseLevelEmbedding
from convergeflow.randomness import RowDraws
from convergeflow.systems.categorical import tempered
from convergeflow.systems.flm import FlmModel
from convergeflow.systems.published.family import Published
from convergeflow.systems.rival import RivalConfig, Run, TokenNetwork

CAP = 50.0
STAGES = ("residual", "map")
STEPS = 1024


def soft_capped(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None) -> Tensor:
    """Attention whose scores stay within 50: 50 tanh(score/50) before the softmax."""
    assert attn_mask is None, "FLM sees the whole sequence"
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return (CAP * torch.tanh(scores / CAP)).softmax(-1) @ v


class SoftCapped(TokenNetwork):
    """The family's network with soft-capped attention."""

    def __init__(self, config: RivalConfig) -> None:
        super().__init__(config, inputs=config.vocabulary, outputs=config.vocabulary)
        for module in self.backbone.modules():
            if isinstance(module, Attention):
                module.mix = soft_capped  # type: ignore[assignment]


class TwoTimes(nn.Module):
    """The present and the next time, [B, 2], as one condition: their embeddings are added before the SiLU."""

    def __init__(self, condition_width: int) -> None:
        super().__init__()
        self.now = NoiseLevelEmbedding(condition_width)
        self.then = NoiseLevelEmbedding(condition_width)

    def forward(self, times: Tensor) -> Tensor:
        return functional.silu(self.now.embed(times[:, 0]) + self.then.embed(times[:, 1]))


class PublishedFlm(Published, FlmModel):
    """FLM of its authors."""

    method = "published-flm"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"published": {"nfe": STEPS}}

    def __init__(self, config: RivalConfig) -> None:
        super().__init__(config)
        self.network = SoftCapped(config)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Logits [B, L, V] for noisy one-hot vectors x [B, L, V] at times t [B]."""
        return self.network(x, t)


@dataclass(frozen=True)
class PublishedFmlmConfig(RivalConfig):
    stage: str = "map"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stage not in STAGES:
            raise unknown_name("stage", self.stage, STAGES)


class LossWeight(nn.Module):
    """The learned weight of the distillation's loss; nothing else reads it."""

    def __init__(self, condition_width: int) -> None:
        super().__init__()
        self.time = NoiseLevelEmbedding(condition_width)
        self.expand, self.project = nn.Linear(condition_width, 128), nn.Linear(128, 1)

    def forward(self, t: Tensor) -> Tensor:
        """w(t), [B]."""
        return self.project(functional.gelu(self.expand(self.time.embed(t))))[:, 0]


class FlowMaps(nn.Module):
    """The student, and the teacher that it corrects, if it does; a call without a next time is the teacher's."""

    def __init__(self, config: PublishedFmlmConfig) -> None:
        super().__init__()
        self.student = SoftCapped(config)
        self.student.backbone.noise_level = TwoTimes(config.condition_width)  # type: ignore[assignment]
        self.teacher = SoftCapped(config) if config.stage == "residual" else None
        self.loss_weight = LossWeight(config.condition_width)

    def forward(self, x: Tensor, t: Tensor, then: Tensor | None = None) -> Tensor:
        if then is not None:
            return self.student(x, torch.stack([t, then], dim=1))  # type: ignore[no-any-return]
        assert self.teacher is not None, "a map of the second stage stands alone"
        return self.teacher(x, t)  # type: ignore[no-any-return]


class PublishedFmlm(Published, FlmModel):
    """The flow map language model of FLM's authors."""

    method = "published-fmlm"
    config_class = PublishedFmlmConfig
    controls: Mapping[str, Any] = {}
    frontier = ({},)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "published": {"nfe": 1},
        **{f"published-{n}": {"nfe": n} for n in (2, 4, 8, 16, 32)},
    }
    network: FlowMaps

    def __init__(self, config: PublishedFmlmConfig) -> None:
        super().__init__(config)
        self.network = FlowMaps(config)

    def forward(self, x: Tensor, t: Tensor, then: Tensor) -> Tensor:
        """The student's raw output [B, L, V] for x [B, L, V], the present and the next time [B]."""
        return self.network(x, t, then)

    def row_losses(self, tokens: Tensor, times: Tensor, draws: RowDraws) -> Tensor:
        raise NotImplementedError("flow maps are distilled by their authors' code, not trained here")

    def generate_batch(self, run: Run, **_: Any) -> Tensor:
        """t_i = i/N. One call a step for a map; two, teacher and student, for a residual."""
        dtype = state_dtype_of(run.device)
        z = run.draws.normal(run.length, self.config.vocabulary, dtype=dtype)
        residual = self.network.teacher is not None
        steps = max(1, run.nfe // 2) if residual else run.nfe
        t = torch.arange(steps + 1, dtype=torch.float64) / steps
        c = self.warp(t)
        for i in range(steps):
            now, then = (onto(time.expand(len(z)), run.device) for time in (t[i], t[i + 1]))
            change, gap = float(c[i + 1] - c[i]), float(1 - c[i]) + 1e-5
            out = self(z, now, then).to(z)
            if self.network.teacher is None:
                p = tempered(out, 1.0).exp()
                z = p if i == steps - 1 else z + (p - z) / gap * change
            else:
                p = tempered(self.network(z, now).to(z), 1.0).exp()
                z = z + (p - z) / gap * change + 0.5 * change**2 * out
            run.report(i, steps, float(t[i]), z.argmax(-1))
        return z.argmax(-1)
