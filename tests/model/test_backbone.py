"""The trunk: identity at the start, rotary attention by definition, noise level per position, checkpointing."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from convergeflow.flow.schedule import Linear
from convergeflow.model.backbone import Backbone, NoiseLevelEmbedding, SelfConditionedInput, TrunkShape, rotate
from convergeflow.model.small_scale import open_gates
from convergeflow.model.views import AfterWords, Reading


def trained_like(**changes: object) -> Backbone:
    torch.manual_seed(0)
    options: dict[str, object] = {"width": 16, "depth": 2, "heads": 2, "condition_width": 8, "dropout": 0.0}
    trunk = Backbone(TrunkShape(**{**options, **changes}))  # type: ignore[arg-type]
    for parameter in trunk.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return trunk.double().eval()


def test_a_fresh_trunk_is_its_final_norm() -> None:
    trunk = Backbone(TrunkShape(width=16, depth=2, heads=2, condition_width=8))
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(trunk(x, torch.tensor([1.0, 4.0])), torch.nn.functional.layer_norm(x, (16,)))


def test_opened_gates_are_not_the_identity() -> None:
    trunk = Backbone(TrunkShape(width=16, depth=2, heads=2, condition_width=8)).eval()
    open_gates(trunk, 0.5)
    x = torch.randn(2, 5, 16)
    assert not torch.allclose(trunk(x, torch.tensor([1.0, 4.0])), torch.nn.functional.layer_norm(x, (16,)))


def test_rotation_is_a_complex_phase_on_half_split_pairs() -> None:
    x = torch.randn(1, 1, 7, 6, dtype=torch.float64)
    as_complex = torch.complex(x[..., :3], x[..., 3:])
    angle = torch.arange(7)[:, None] * 10_000.0 ** (-torch.arange(3) / 3)
    turned = as_complex * torch.polar(torch.ones_like(angle), angle).to(as_complex.dtype)
    torch.testing.assert_close(rotate(x), torch.cat([turned.real, turned.imag], -1), rtol=1e-6, atol=1e-6)


def test_attention_sees_relative_positions_only() -> None:
    q, k = torch.randn(1, 1, 1, 8, dtype=torch.float64), torch.randn(1, 1, 1, 8, dtype=torch.float64)

    def score(i: int, j: int) -> Tensor:
        return (rotate(q.expand(1, 1, 12, 8))[0, 0, i] * rotate(k.expand(1, 1, 12, 8))[0, 0, j]).sum()

    torch.testing.assert_close(score(3, 1), score(9, 7), rtol=1e-6, atol=1e-6)


def test_noise_level_features_are_cosines_then_sines() -> None:
    embed = NoiseLevelEmbedding(4)
    captured: list[Tensor] = []
    embed.expand.register_forward_hook(lambda module, args, out: captured.append(args[0]))
    embed(torch.tensor([2.5]))
    k = torch.arange(128)
    angle = 2.5 * torch.exp(-math.log(10_000) * k / 128)
    torch.testing.assert_close(captured[0][0], torch.cat([angle.cos(), angle.sin()]))


def test_infinite_noise_is_a_number() -> None:
    assert bool(torch.isfinite(NoiseLevelEmbedding(4)(torch.tensor([float("inf"), -float("inf")]))).all())


def test_one_level_per_position_equals_one_per_sequence_when_they_agree() -> None:
    trunk = trained_like()
    x, gamma = torch.randn(3, 5, 16, dtype=torch.float64), torch.tensor([1.0, 3.0, 6.0], dtype=torch.float64)
    torch.testing.assert_close(trunk(x, gamma), trunk(x, gamma[:, None].expand(3, 5)))


def test_attention_is_over_the_whole_sequence_unless_words_are_read() -> None:
    x, gamma = torch.randn(1, 6, 16, dtype=torch.float64), torch.tensor([2.0], dtype=torch.float64)
    changed = x.clone()
    changed[0, -1, 0] += 1.0
    full = trained_like()
    assert not torch.allclose(full(x, gamma)[0, 0], full(changed, gamma)[0, 0])
    torch.testing.assert_close(full(x, gamma, Reading())[0, :-1], full(changed, gamma, Reading())[0, :-1])


def test_recomputation_changes_no_gradient() -> None:
    trunk = trained_like().train()
    x, gamma = torch.randn(2, 5, 16, dtype=torch.float64), torch.tensor([1.0, 4.0], dtype=torch.float64)
    trunk(x, gamma).square().sum().backward()
    plain = [parameter.grad.clone() for parameter in trunk.parameters() if parameter.grad is not None]
    trunk.zero_grad()
    trunk.recompute = True
    trunk(x, gamma).square().sum().backward()
    again = [parameter.grad for parameter in trunk.parameters() if parameter.grad is not None]
    for left, right in zip(plain, again, strict=True):
        torch.testing.assert_close(left, right)


def test_no_condition_is_a_zero_condition() -> None:
    mix = SelfConditionedInput(6)
    torch.nn.init.normal_(mix.weight)
    x = torch.randn(2, 3, 6)
    torch.testing.assert_close(mix(x, None), mix(x, torch.zeros_like(x)))
    joined = torch.cat([x, x.flip(0)], -1)
    torch.testing.assert_close(mix(x, x.flip(0)), x + joined @ mix.weight.T)


def test_a_paired_pass_shows_each_noisy_position_itself_and_the_clean_words_before_it() -> None:
    torch.manual_seed(0)
    length, width = 5, 16
    backbone = Backbone(TrunkShape(width=width, depth=2, heads=2, condition_width=8)).eval().double()
    open_gates(backbone, 1.0)
    clean, noisy = torch.randn(1, length, width).double(), torch.randn(1, length, width).double()
    pair = torch.cat([clean, noisy], 1).requires_grad_()
    view = AfterWords(clean, Linear()(torch.ones(1, length)), torch.arange(length))
    out = backbone(pair, torch.zeros(1).double(), view)
    for position in range(length):
        (seen,) = torch.autograd.grad(out[0, length + position].square().sum(), pair, retain_graph=True)
        touched = (seen[0].abs().sum(-1) > 0).nonzero()[:, 0].tolist()
        assert touched == [*range(position), length + position]
        # The clean half is an ordinary causal pass: the noisy position in place of the last clean one sees the same.
        alone = torch.cat([clean[:, :position], noisy[:, position : position + 1]], 1)
        torch.testing.assert_close(
            backbone(alone, torch.zeros(1).double(), Reading())[:, -1], out[:, length + position]
        )


@torch.no_grad()
def test_a_row_has_the_same_bits_in_every_batch() -> None:
    trunk = trained_like(width=32, condition_width=32).float()
    x, gamma = torch.randn(24, 64, 32), torch.linspace(-6.0, 6.0, 24)
    whole = trunk(x, gamma)
    for size in (1, 2, 3, 5, 7, 16):
        for start in range(0, 24 - size + 1, size):
            rows = slice(start, start + size)
            assert torch.equal(trunk(x[rows], gamma[rows]), whole[rows]), size
