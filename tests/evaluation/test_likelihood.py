"""The bound on models whose likelihood is known in closed form."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tiny_model import word_shares

from convergeflow.data.stories import stories_law
from convergeflow.data.tokenizer import byte_tokenizer
from convergeflow.errors import UserError
from convergeflow.evaluation.likelihood import bits_per_byte, bytes_per_token
from convergeflow.flow.schedule import Gumbel
from convergeflow.randomness import RowDraws, derive_seed
from convergeflow.systems.convergeflow import ConvergeFlowConfig, ConvergeFlowModel
from convergeflow.systems.likelihood import Proposal
from convergeflow.systems.protocol import Bound


def independent_words(shares: torch.Tensor, *, width: int = 2, **changes: object) -> ConvergeFlowModel:
    """A fresh network predicts by kernel and head bias alone: with bias log pi, the exact posterior of iid words."""
    torch.manual_seed(0)
    model = ConvergeFlowModel(
        ConvergeFlowConfig(
            vocabulary=len(shares), width=width, depth=1, heads=1, condition_width=8, length=8, dropout=0.0, **changes
        )
    )
    with torch.no_grad():
        model.network.head.bias.copy_(shares.log())
    return model.eval()


def bound(model: ConvergeFlowModel, tokens: torch.Tensor, *, draws: int, seed: int = 0, **how: Any) -> Bound:
    stream = RowDraws([derive_seed(seed, "bound", row) for row in range(len(tokens))])
    return model.bound(tokens, draws=stream, repeats=draws, **how)


@pytest.mark.parametrize("schedule", [None, {"kind": "linear"}])
def test_bound_of_an_exact_posterior_is_the_entropy(schedule: dict[str, str] | None) -> None:
    shares = torch.tensor([0.7, 0.3])
    model = independent_words(shares, schedule=schedule)
    with torch.no_grad():  # two words opposite each other on the circle
        model.network.embedding.weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    tokens = torch.multinomial(shares, 400 * 8, replacement=True).reshape(400, 8)
    found = bound(model, tokens, draws=64, batch=200)
    exact = -(shares.log()[tokens]).mean().item()
    assert found.standard_error < 0.02 and found.tokens == 3200 and found.draws == 64
    assert found.nats_per_token == pytest.approx(exact, abs=0.006)


def test_the_bounds_of_blocks_add_up_to_the_entropy_of_independent_words() -> None:
    shares = torch.tensor([0.7, 0.3])
    model = independent_words(shares, block_length=3)
    tokens = torch.multinomial(shares, 400 * 8, replacement=True).reshape(400, 8)
    found = bound(model, tokens, draws=64, batch=200)
    assert found.nats_per_token == pytest.approx(-(shares.log()[tokens]).mean().item(), abs=0.01)


def test_a_wrong_prior_costs_its_divergence() -> None:
    shares, believed = torch.tensor([0.7, 0.3]), torch.tensor([0.4, 0.6])
    tokens = torch.multinomial(shares, 400 * 8, replacement=True).reshape(400, 8)
    found = bound(independent_words(believed), tokens, draws=64, batch=200)
    # tight for every text: the bound is the NLL under what the model believes
    assert found.nats_per_token == pytest.approx(-(believed.log()[tokens]).mean().item(), abs=0.01)


def test_a_wrong_predictor_is_bounded_from_above_only() -> None:
    shares = torch.tensor([0.7, 0.3])
    model = independent_words(shares)
    with torch.no_grad():
        model.network.head.weight.copy_(torch.tensor([[3.0, 0.0], [-3.0, 1.0]]))  # reads the state as if it were clean
    tokens = torch.multinomial(shares, 100 * 8, replacement=True).reshape(100, 8)
    found = bound(model, tokens, draws=32)
    entropy = -(shares * shares.log()).sum().item()
    assert found.nats_per_token > entropy + 3 * found.standard_error


def test_on_stories_the_bound_lies_above_the_true_entropy() -> None:
    law = stories_law()
    shares = torch.tensor(word_shares(), dtype=torch.float32)
    model = independent_words(shares, width=32)
    tokens = torch.tensor(law.sample(np.random.default_rng(0), 24, 16))
    found = bound(model, tokens, draws=48)
    unigram_nll = -(shares.log()[tokens]).mean().item()
    assert found.nats_per_token == pytest.approx(unigram_nll, abs=0.12)
    entropy = law.block_entropy(16) / 16
    assert found.nats_per_token - entropy > 1.0  # at least the KL of the words' order, which it does not know


def test_batch_size_does_not_change_the_bound_and_the_seed_does() -> None:
    shares = torch.tensor([0.5, 0.2, 0.3])
    model = independent_words(shares)
    tokens = torch.randint(0, 3, (6, 5))
    whole, single = (bound(model, tokens, draws=4, batch=size) for size in (6, 1))
    assert whole.nats_per_token == pytest.approx(single.nats_per_token, rel=1e-6)
    assert bound(model, tokens, draws=4, seed=1).nats_per_token != whole.nats_per_token
    assert whole.kind.endswith("self-conditioned")


def test_the_direct_predictor_has_a_bound_too() -> None:
    torch.manual_seed(0)
    config = ConvergeFlowConfig(
        vocabulary=3, width=4, depth=1, heads=1, condition_width=8, length=4, dropout=0.0, predictor="direct"
    )
    found = bound(ConvergeFlowModel(config).eval(), torch.randint(0, 3, (8, 4)), draws=8)
    assert found.nats_per_token > math.log(3)  # it predicts zero everywhere


def test_proposal_is_a_density_and_draws_from_itself() -> None:
    proposal = Proposal.between(-1.0, 6.0, Gumbel(2.0, 0.8))
    u = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    gamma, density = proposal.draw(u)
    assert float(gamma.min()) >= -1.0 and float(gamma.max()) <= 6.0
    # E[1/p] is the length of the interval, E[g/p] the integral of g
    assert float((1 / density).mean()) == pytest.approx(7.0, rel=1e-4)
    assert float((gamma.square() / density).mean()) == pytest.approx((6**3 + 1) / 3, rel=1e-4)
    assert float(density.min()) >= 0.2 / 7 - 1e-9


def test_units() -> None:
    tokenizer = byte_tokenizer()
    assert bytes_per_token(np.array([[*b"ab", 256, *b"c"]]), tokenizer) == 1.0
    assert bits_per_byte(math.log(2) * 3, 1.5) == pytest.approx(2.0)


def test_mistakes_are_named() -> None:
    model = independent_words(torch.tensor([0.5, 0.5]))
    with pytest.raises(UserError, match="at least 1 draw"):
        bound(model, torch.zeros(1, 4, dtype=torch.long), draws=0)
    with pytest.raises(UserError, match="sequences, length"):
        bound(model, torch.zeros(4, dtype=torch.long), draws=1)
