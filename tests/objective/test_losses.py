"""Objectives: minimised by the true posterior; the schedule's fit; gradients go only where they should."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from convergeflow.errors import UserError
from convergeflow.flow.grid import training_times
from convergeflow.flow.schedule import Gumbel, Linear, gumbel_for_width
from convergeflow.model.network import FlowNetwork, Shape
from convergeflow.model.small_scale import Extras, SmallScaleNetwork
from convergeflow.objective.corruption import PerPosition, Whole, block_starts
from convergeflow.objective.learned_schedule import LearnedGumbel
from convergeflow.objective.losses import Objective, flow_loss
from convergeflow.randomness import RowDraws
from convergeflow.systems.convergeflow import ConvergeFlowConfig, ConvergeFlowModel
from convergeflow.systems.likelihood import fixed_noise_report
from convergeflow.training.config import StageConfig

PRIOR = torch.tensor([0.6, 0.3, 0.1])


def one_position_network() -> FlowNetwork:
    """V = 3, one position: with log f = log prior the weights are the exact posterior."""
    torch.manual_seed(0)
    network = FlowNetwork(Shape(vocabulary=3, width=8, depth=1, heads=1, condition_width=4, dropout=0.0))
    with torch.no_grad():
        network.head.bias.copy_(PRIOR.log())
    return network.eval()


@pytest.mark.parametrize("kind", ["mse", "ce"])
def test_the_true_posterior_minimises_the_loss(kind: str) -> None:
    network = one_position_network()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.multinomial(PRIOR, 4_000, replacement=True, generator=generator)[:, None]
    times, schedule = training_times(4_000, seed=0), Linear()

    def loss() -> float:
        objective = Objective(kind, self_condition=0.0)
        with torch.no_grad():
            return float(
                flow_loss(network, schedule, objective, tokens, times=times * 0.6, draws=RowDraws(range(4_000))).total
            )

    best = loss()
    for direction in torch.eye(3):
        for size in (-0.5, 0.5):
            with torch.no_grad():
                network.head.bias.copy_(PRIOR.log() + size * direction)
            assert loss() > best


def test_the_weight_of_the_mse_is_the_papers() -> None:
    network = one_position_network()
    tokens = torch.tensor([[0], [1]])
    times = torch.tensor([0.25, 0.75], dtype=torch.float64)
    draws = RowDraws([1, 2])
    loss = flow_loss(network, Linear(), Objective("mse", 0.0), tokens, times=times, draws=draws).total
    table, noise = network.embedding.rows(), RowDraws([1, 2]).normal(1, 8)
    x_star = table[tokens]
    x_t = times[:, None, None] * x_star + (1 - times[:, None, None]) * noise
    distance = (x_t[:, :, None, :] - times[:, None, None, None] * table).square().sum(-1)
    w = torch.softmax(PRIOR.log() - distance / (2 * (1 - times[:, None, None]) ** 2), -1)
    squared = (x_star - w @ table.double()).square().mean((1, 2))
    expected = ((1 + times / (1 - times)) ** 2 * squared).mean()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)


def test_the_schedule_fit_recovers_known_parameters() -> None:
    truth, height = Gumbel(3.1, 0.6), 4.2
    learned = LearnedGumbel(Gumbel(4.0, 0.9), 6.0)
    optimizer = torch.optim.Adam(learned.parameters(), lr=0.03)
    for step in range(700):
        gamma = learned.schedule().gamma(training_times(256, seed=step))
        optimizer.zero_grad()
        learned.fit_loss(gamma, height * truth.cdf(gamma)).backward()
        optimizer.step()
    assert learned.loc.item() == pytest.approx(3.1, abs=1e-2)
    assert learned.scale.item() == pytest.approx(0.6, abs=1e-2)
    assert learned.entropy.item() == pytest.approx(4.2, abs=1e-2)


def test_schedule_parameters_get_gradient_from_their_fit_alone() -> None:
    model = ConvergeFlowModel(ConvergeFlowConfig.of_size("test", vocabulary=11, length=6, dropout=0.0))
    learned = model.learned_schedule
    assert learned is not None
    tokens, times = torch.randint(0, 11, (8, 6)), training_times(8, seed=0)

    def gradients(kind: str, fitted: LearnedGumbel | None) -> list[torch.Tensor | None]:
        model.zero_grad()
        flow_loss(
            model.network,
            model.schedule,
            Objective(kind),
            tokens,
            times=times,
            draws=RowDraws(range(8)),
            learned=fitted,
        ).total.backward()
        return [parameter.grad for parameter in learned.parameters()]

    assert gradients("mse", None) == [None] * 3
    assert gradients("ce", None) == [None] * 3
    with_fit = gradients("ce", learned)
    loss = flow_loss(model.network, model.schedule, Objective("ce"), tokens, times=times, draws=RowDraws(range(8)))
    assert math.isfinite(float(loss.total.detach()))
    assert all(gradient is not None and float(gradient.abs().sum()) > 0 for gradient in with_fit)


@pytest.mark.parametrize("options", [{"position_noise": 1.0}, {"clean_context": 1.0}])
def test_a_batch_without_points_to_fit_gives_every_schedule_parameter_a_zero_gradient(
    options: dict[str, float],
) -> None:
    model = ConvergeFlowModel(ConvergeFlowConfig.of_size("test", vocabulary=11, length=6, dropout=0.0))
    learned = model.learned_schedule
    assert learned is not None
    loss = flow_loss(
        model.network,
        model.schedule,
        Objective("ce", **options),  # type: ignore[arg-type]
        torch.randint(0, 11, (8, 6)),
        times=training_times(8, seed=0),
        draws=RowDraws(range(8)),
        learned=learned,
    )
    loss.total.backward()
    assert math.isfinite(float(loss.total.detach()))
    assert all(each.grad is not None and float(each.grad.abs().sum()) == 0.0 for each in learned.parameters())


def test_self_conditioning_touches_the_drawn_share_and_carries_no_gradient() -> None:
    network = one_position_network()
    seen: list[torch.Tensor] = []
    network.condition_input.register_forward_hook(lambda module, args, out: seen.append(args[1]))
    tokens = torch.randint(0, 3, (1000, 1))
    flow_loss(
        network,
        Linear(),
        Objective("mse", 0.25),
        tokens,
        times=training_times(1000, seed=0) * 0.5,
        draws=RowDraws(range(1000)),
    )
    first, second = seen
    assert first is None, "the first pass has no condition"
    active = (second != 0).any(-1)[:, 0]
    assert abs(float(active.double().mean()) - 0.25) < 0.06
    assert not second.requires_grad


def test_position_noise_gives_some_sequences_a_level_per_position() -> None:
    times = training_times(2000, seed=0)
    at = PerPosition(0.7)(torch.zeros(2000, 5, 1), Linear(), times, RowDraws(range(2000))).at
    varied = (at.alpha != at.alpha[:, :1]).any(-1)
    assert abs(float(varied.double().mean()) - 0.7) < 0.04
    torch.testing.assert_close(at.alpha[~varied][:, 0], times[~varied])
    assert Whole()(torch.zeros(2000, 5, 1), Linear(), times, RowDraws(range(2000))).at.alpha.shape == (2000,)


def test_the_direct_predictor_has_no_cross_entropy() -> None:
    network = FlowNetwork(Shape(vocabulary=3, width=8, depth=1, heads=1, condition_width=4, predictor="direct"))
    with pytest.raises(UserError, match="mse"):
        flow_loss(
            network,
            Linear(),
            Objective("ce"),
            torch.zeros(2, 1, dtype=torch.long),
            times=training_times(2, seed=0),
            draws=RowDraws([0, 1]),
        )


def test_learning_the_table_with_mse_moves_it_and_freezing_does_not() -> None:
    network = one_position_network()
    tokens, times = torch.randint(0, 3, (16, 1)), training_times(16, seed=0) * 0.5
    flow_loss(network, Linear(), Objective("mse"), tokens, times=times, draws=RowDraws(range(16))).total.backward()
    assert network.embedding.weight.grad is not None
    network.zero_grad()
    network.embedding.weight.requires_grad_(False)
    flow_loss(network, Linear(), Objective("mse"), tokens, times=times, draws=RowDraws(range(16))).total.backward()
    assert network.embedding.weight.grad is None


def test_unknown_objective_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'mse'"):
        Objective("mss")


def test_log_unigram_is_a_buffer_not_a_parameter() -> None:
    network = one_position_network()
    assert "log_unigram" in dict(network.named_buffers())
    assert not any(
        isinstance(value, nn.Parameter) and name == "log_unigram" for name, value in network.named_parameters()
    )


def test_a_clean_context_teaches_copying_that_one_noise_level_does_not_show() -> None:
    # A word, two words of filler, the same word again. With the word before it plain the repeat is certain, and at
    # the start, where the words before say nothing, it costs the entropy of eight equal words.
    torch.manual_seed(0)
    network = SmallScaleNetwork(
        Shape(vocabulary=10, width=32, depth=2, heads=2, condition_width=8),
        Extras(gate_init=1.0, context_free_input=True, neighbours=2, head_init=0.02),
    )
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)

    def batch(num: int) -> torch.Tensor:
        word = torch.randint(0, 8, (num, 1), generator=generator)
        return torch.cat([word, torch.full((num, 1), 8), torch.full((num, 1), 9), word], 1)

    for step in range(150):
        draws = RowDraws(range(64 * step, 64 * step + 64))
        objective, times = Objective("ce", clean_context=1.0), training_times(64, seed=step)
        loss = flow_loss(network, gumbel_for_width(32), objective, batch(64), times=times, draws=draws)
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
    assert abs(loss.parts["context_ce"] - math.log(8) / 4) < 0.1, "only the first word is left uncertain"


def test_a_share_of_clean_contexts_leaves_the_other_sequences_as_they_were() -> None:
    network = one_position_network()
    tokens, times = torch.randint(0, 3, (4000, 1)), training_times(4000, seed=0) * 0.5

    def parts(kind: str, share: float) -> dict[str, float]:
        objective = Objective(kind, 0.0, clean_context=share)
        found = flow_loss(network, Linear(), objective, tokens, times=times, draws=RowDraws(range(4000))).parts
        return {name: float(value) for name, value in found.items()}

    for kind in ("mse", "ce"):
        mixed = parts(kind, 0.5)
        assert {f"context_{kind}", kind} <= mixed.keys()
        assert parts(kind, 1.0).keys() == {f"context_{kind}"}
        # One position has no words before it: in noise the loss is that of the prior, whatever the mix.
        assert mixed[kind] == pytest.approx(parts(kind, 0.0)[kind], rel=0.08)
    assert parts("ce", 1.0)["context_ce"] == pytest.approx(float(-PRIOR.log().mean()), rel=0.1)


def test_blocks_have_lengths_of_powers_of_two_up_to_the_longest() -> None:
    starts = block_starts((torch.arange(8) + 0.5) / 8, 8, 8)
    assert starts[::2].tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 0, 2, 2, 4, 4, 6, 6],
        [0, 0, 0, 0, 4, 4, 4, 4],
        [0] * 8,
    ]
    assert torch.equal(starts[::2], starts[1::2]), "all lengths are equally likely"
    assert block_starts(torch.tensor([0.999]), 6, 8).tolist() == [[0, 0, 0, 0, 4, 4, 4, 4]]


@pytest.mark.parametrize("kind", ["mse", "ce"])
def test_words_without_context_cost_the_same_in_blocks(kind: str) -> None:
    # A fresh trunk predicts each word from its own state: the clean words before it change nothing, and every block's
    # time is uniform, as a sequence's is.
    network = one_position_network()
    tokens = torch.multinomial(PRIOR, 16_000, True, generator=torch.Generator().manual_seed(1)).view(2000, 8)
    schedule, times = gumbel_for_width(8), training_times(2000, seed=0)

    def loss(block_length: int | None) -> float:
        objective = Objective(kind, 0.5, block_length=block_length)
        with torch.no_grad():
            found = flow_loss(network, schedule, objective, tokens, times=times, draws=RowDraws(range(2000)))
        return float(found.total)

    assert loss(4) == pytest.approx(loss(None), rel=0.03)


def test_a_schedule_is_fitted_to_the_levels_of_blocks() -> None:
    network = one_position_network()
    schedule = Gumbel(2.0, 0.7, 1e-5)
    learned = LearnedGumbel(schedule, 1.0)
    seen: list[torch.Tensor] = []
    learned.fit_loss = lambda gamma, ce, _: seen.extend((gamma, ce)) or ce.sum() * 0  # type: ignore[method-assign]
    flow_loss(
        network,
        schedule,
        Objective("ce", 0.0, block_length=2),
        torch.zeros(5, 4, dtype=torch.long),
        times=training_times(5, seed=0),
        draws=RowDraws(range(5)),
        learned=learned,
    )
    gamma, ce = seen
    assert gamma.shape == ce.shape == (20,)
    low, high = schedule.gamma_min, schedule.gamma_max
    assert low <= float(gamma.min()) and float(gamma.max()) <= high, "not those of the clean words"


def test_a_block_learns_to_copy_from_the_words_before_it() -> None:
    # Two words, two of filler, the two words again: in blocks of two, in pure noise, only the first block is uncertain.
    torch.manual_seed(0)
    network = SmallScaleNetwork(
        Shape(vocabulary=9, width=32, depth=2, heads=2, condition_width=8),
        Extras(gate_init=1.0, context_free_input=True, neighbours=2, head_init=0.02),
    )
    generator, schedule = torch.Generator().manual_seed(1), gumbel_for_width(32)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)

    def batch(num: int) -> torch.Tensor:
        words = torch.randint(0, 8, (num, 2), generator=generator)
        return torch.cat([words, torch.full((num, 2), 8), words], 1)

    for step in range(300):
        draws = RowDraws(range(64 * step, 64 * step + 64))
        objective, times = Objective("ce", 0.25, block_length=2), training_times(64, seed=step)
        loss = flow_loss(network, schedule, objective, batch(64), times=times, draws=draws)
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
    noisy = schedule.gamma_max
    found = fixed_noise_report(network.eval(), schedule, [noisy], batch(256), RowDraws(range(256)), block_length=2)
    assert abs(found[f"ce@{noisy:g}"] - math.log(8) / 3) < 0.1


def test_a_schedule_that_the_mse_moves_has_the_gradient_of_the_loss() -> None:
    """The option `learn_schedule` of an mse stage, against finite differences of the loss in loc and scale."""
    torch.manual_seed(0)
    model = ConvergeFlowModel(ConvergeFlowConfig(vocabulary=9, width=16, depth=1, heads=2, length=5, dropout=0.0))
    model.double()
    with torch.no_grad():
        for parameter in model.network.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    stage = StageConfig(name="mse", objective="mse", steps=1, lr=1.0, learn_schedule=True, self_condition=0.0)
    model.enter_stage(stage)
    assert model.learned_schedule is not None
    loc, scale, height = model.learned_schedule.loc, model.learned_schedule.scale, model.learned_schedule.entropy
    assert loc.requires_grad and scale.requires_grad and not height.requires_grad
    tokens, times = torch.randint(9, (4, 5)), training_times(4, seed=1)

    def loss() -> torch.Tensor:
        return model.loss(tokens, times=times, draws=RowDraws(range(4))).total

    loss().backward()
    for parameter in (loc, scale):
        assert parameter.grad is not None
        with torch.no_grad():
            start, step = parameter.clone(), 1e-4
            up, down = (float(loss_at(parameter, start + sign * step, loss)) for sign in (1, -1))
            parameter.copy_(start)
        assert float(parameter.grad) == pytest.approx((up - down) / (2 * step), rel=1e-4)


def loss_at(parameter: nn.Parameter, value: torch.Tensor, loss: Callable[[], torch.Tensor]) -> torch.Tensor:
    parameter.copy_(value)
    return loss()


def test_the_mse_leaves_the_schedule_alone_unless_told() -> None:
    model = ConvergeFlowModel(ConvergeFlowConfig(vocabulary=9, width=16, depth=1, heads=2, length=5, dropout=0.0))
    for told in (True, False):
        model.enter_stage(StageConfig(name="mse", objective="mse", steps=1, lr=1.0, learn_schedule=told))
        assert model.learned_schedule is not None
        assert model.learned_schedule.loc.requires_grad == model.learned_schedule.by_loss == told
