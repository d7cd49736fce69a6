from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ten_sentences import TOKENS, fresh, stage
from torch import Tensor, nn

from convergeflow.errors import ConvergeFlowError, UserError
from convergeflow.randomness import RowDraws
from convergeflow.systems import elf
from convergeflow.systems.elf import (
    DECODER_SHARE,
    LEAST_GAP,
    SELF_CONDITION,
    TIME_LAW,
    ElfConfig,
    ElfModel,
    guidance_scale,
    logit_normal,
)
from convergeflow.training.build import build_model
from convergeflow.training.config import resolve
from convergeflow.training.estimate import estimate


def test_a_fresh_network_pays_the_weighted_square_of_the_latents() -> None:
    """x_pred = 0, so the velocity loss is mean(x^2)/max(1 - t, 0.05)^2 = that weight, latents having variance 1."""
    model = fresh("elf").eval()
    times = torch.linspace(0.001, 0.999, len(TOKENS), dtype=torch.float64)
    losses = model.row_losses(TOKENS, times, RowDraws(range(len(TOKENS))))
    choices = RowDraws(range(len(TOKENS))).uniform(3)
    denoising = choices[:, 0] >= DECODER_SHARE
    gap = (1 - logit_normal(1 - times, TIME_LAW)).clamp_min(LEAST_GAP)
    assert torch.allclose(losses[denoising].double(), gap[denoising] ** -2, rtol=1e-3)
    assert bool(denoising.any()) and not bool(denoising.all()) and 0.3 < SELF_CONDITION < 0.7


def test_guidance_is_one_plus_log_uniform() -> None:
    w = guidance_scale(torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64))
    assert w.tolist() == pytest.approx([0.5, (1.5 * 6.0) ** 0.5 - 1, 5.0])


class Recorded(nn.Module):
    """A network with known answers that remembers what it was asked."""

    def __init__(self, latent: int, vocabulary: int) -> None:
        super().__init__()
        self.asked: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self.answers: list[Tensor] = []
        self.vocabulary = vocabulary

    def forward(self, z: Tensor, condition: Tensor, t: Tensor, w: Tensor, decoding: Tensor) -> tuple[Tensor, Tensor]:
        self.asked.append((z, condition, t, decoding))
        answer = torch.tanh(z + 0.1 * condition)
        self.answers.append(answer)
        return answer, z[..., :1].expand(*z.shape[:2], self.vocabulary)


def recorded(**knobs: Any) -> tuple[Recorded, Tensor]:
    model = fresh("elf")
    network = Recorded(model.config.latent, model.config.vocabulary)
    model.network = network
    ids = model.sample(3, 4, seeds=range(3), nfe=11, **knobs).ids
    return network, ids


def test_the_last_step_lands_on_the_prediction_and_decoding_starts_there() -> None:
    network, _ = recorded(churn=0.0, grid="uniform")
    z, condition, t, decoding = network.asked[-1]
    assert torch.allclose(z, network.answers[-2], atol=1e-5)  # the last gap is 0.1, above the clamp
    assert bool(decoding.all()) and bool((t == 1).all()) and float(condition.abs().max()) == 0.0
    assert not any(bool(entry[3].any()) for entry in network.asked[:-1])
    assert torch.equal(network.asked[3][1], network.answers[2])  # self-conditioning on the step before


def test_without_churn_the_flow_is_the_ode() -> None:
    network, _ = recorded(churn=0.0)
    for i in range(9):
        (z, _, t, _), (after, _, then, _) = network.asked[i], network.asked[i + 1]
        velocity = (network.answers[i] - z) / (1 - t).clamp_min(LEAST_GAP)[:, None, None]
        assert torch.allclose(after, z + (then - t)[:, None, None] * velocity, atol=1e-5)
    noisy, _ = recorded(churn=1.5)
    assert not torch.allclose(noisy.asked[1][0], network.asked[1][0])


def test_every_sample_draws_its_own_grid() -> None:
    network, _ = recorded(churn=0.0)
    times = torch.stack([entry[2] for entry in network.asked], dim=1)
    assert bool((times.diff(dim=1) >= 0).all()) and float(times[:, 0].max()) == 0.0
    assert not torch.allclose(times[0], times[1])


@pytest.mark.parametrize("w", [1.0, 4.0])
def test_guidance_moves_the_target_of_conditioned_rows(w: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By (1 - 1/w)(x_cond - x_uncond): nothing at w = 1, three quarters of the difference at 4."""
    monkeypatch.setattr(elf, "guidance_scale", lambda u: torch.full_like(u, w))
    model = fresh("elf").eval()
    nn.init.normal_(model.network.predict.weight, std=0.3)
    answers: list[Tensor] = []
    model.network.register_forward_hook(lambda module, asked, answer: answers.append(answer[0].detach()))
    rows = len(TOKENS)
    losses = model.row_losses(TOKENS, torch.full((rows,), 0.5).double(), RowDraws(range(rows))).detach()
    unconditional, conditional, predicted = answers
    choices = RowDraws(range(rows)).uniform(3)
    denoising = choices[:, 0] >= DECODER_SHARE
    guided = (choices[:, 1] < SELF_CONDITION) & denoising
    assert 0 < int(guided.sum()) < int(denoising.sum())
    moved = (1 - 1 / w) * guided[:, None, None] * (conditional - unconditional)
    gap = (1 - logit_normal(torch.tensor(0.5).double(), TIME_LAW)).clamp_min(LEAST_GAP)
    error = ((predicted - model.encode(TOKENS) - moved) / gap).square().mean((1, 2))
    assert torch.allclose(losses[denoising].double(), error[denoising].double(), rtol=1e-5)
    assert bool((moved[guided].abs().amax((1, 2)) > 1e-3).all()) == (w != 1.0)


def test_the_encoder_is_trained_first_and_frozen_afterwards() -> None:
    model = fresh("elf")
    with pytest.raises(UserError, match="untrained"):
        model.enter_stage(stage("mse", 5))
    model.enter_stage(stage("ce", 5))
    model.train()
    loss = model.loss(TOKENS, times=torch.rand(len(TOKENS)), draws=RowDraws(range(len(TOKENS))))
    loss.total.backward()
    assert "encoder_ce" in loss.parts
    assert all((p.grad is not None) == name.startswith("encoder.") for name, p in model.named_parameters())
    model.enter_stage(stage("mse", 5))
    model.zero_grad()
    model.loss(TOKENS, times=torch.rand(len(TOKENS)), draws=RowDraws(range(len(TOKENS)))).total.backward()
    assert all((p.grad is not None) == name.startswith("network.") for name, p in model.named_parameters())


def test_the_cost_of_both_stages_is_estimated_before_training() -> None:
    """`compare` does so for all systems; the second stage wants an encoder that has made a step."""
    config = resolve("test", ["model.method=elf"])
    cost = estimate(config, build_model(config, 50), 50)
    assert cost.total_seconds is not None and cost.total_seconds > 0


def test_encodings_depend_on_the_context() -> None:
    model = fresh("elf").eval()
    first, second = model.encode(torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5]]))
    assert not torch.allclose(first[0], second[0], atol=1e-4)
    assert torch.allclose(first.var(-1, unbiased=False), torch.ones(4), atol=1e-3)


def test_a_t5_encoder_is_loaded_from_disk(tmp_path: Path) -> None:
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    t5 = T5EncoderModel(T5Config(vocab_size=40, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=2))
    t5.save_pretrained(tmp_path / "t5")
    config = ElfConfig(
        vocabulary=31, width=16, depth=1, heads=1, latent=16, encoder="t5", encoder_name=str(tmp_path / "t5")
    )
    model = ElfModel(config)
    model.enter_stage(stage("mse", 5))
    direct = t5.eval()(input_ids=TOKENS[:3]).last_hidden_state / 0.2
    assert torch.allclose(model.encode(TOKENS[:3]), direct, atol=1e-5)
    loss = model.loss(TOKENS, times=torch.rand(len(TOKENS)), draws=RowDraws(range(len(TOKENS)))).total
    assert bool(torch.isfinite(loss))
    assert not any("t5" in name for name in model.state_dict())
    config = replace(config, encoder_name=str(tmp_path / "no"))
    with pytest.raises(ConvergeFlowError, match="encoder=embedded"):
        ElfModel(config).encode(TOKENS)
