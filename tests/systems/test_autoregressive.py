from __future__ import annotations

import math

import pytest
import torch

from convergeflow.errors import UserError
from convergeflow.randomness import RowDraws, derive_seed
from convergeflow.sampling.wrappers import Clamp
from convergeflow.systems.autoregressive import AutoregressiveModel
from convergeflow.systems.rival import RivalConfig


def model(vocabulary: int = 7, **changes: int) -> AutoregressiveModel:
    torch.manual_seed(0)
    shape = {"vocabulary": vocabulary, "width": 16, "depth": 2, "heads": 2, **changes}
    made = AutoregressiveModel(RivalConfig(**shape, dropout=0.0))
    torch.nn.init.normal_(made.network.head.weight)
    return made.eval()


TOKENS = torch.randint(0, 7, (4, 9), generator=torch.Generator().manual_seed(1))


def test_no_token_sees_those_after_it() -> None:
    causal = model()
    changed = TOKENS.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 7
    before, after = (causal.network(causal.shifted(tokens))[0] for tokens in (TOKENS, changed))
    assert torch.equal(before[:, :6], after[:, :6])  # logits 0..5 predict tokens 0..5 from those before
    assert not torch.allclose(before[:, 6:], after[:, 6:])


def test_a_fresh_model_pays_log_v() -> None:
    fresh = AutoregressiveModel(RivalConfig(vocabulary=50257, width=8, depth=1, heads=1))
    loss = fresh.loss(TOKENS, times=torch.rand(4), draws=RowDraws(range(4))).total
    assert float(loss.detach()) == pytest.approx(math.log(50257), abs=1e-4)  # 10.825


def test_keys_and_values_kept_from_before_change_nothing() -> None:
    causal = model()
    whole, _ = causal.network(TOKENS)
    first, cache = causal.network(TOKENS[:, :4])
    middle, cache = causal.network(TOKENS[:, 4:6], cache)
    last, _ = causal.network(TOKENS[:, 6:], cache)
    assert torch.allclose(whole, torch.cat([first, middle, last], dim=1), atol=1e-5)
    kept = causal.sample(6, 9, seeds=range(6), nfe=1)
    again = causal.sample(6, 9, seeds=range(6), nfe=1, cache=False)
    assert torch.equal(kept.ids, again.ids) and kept.nfe == again.nfe == 9


def test_the_start_row_is_never_sampled_and_prompts_are_continued() -> None:
    causal = model()
    ids = causal.sample(16, 9, seeds=range(16), nfe=1, temperature=5.0).ids
    assert int(ids.max()) < 7
    known = torch.tensor([True, True] + [False] * 7)
    clamp = Clamp(torch.tensor([3, 1] + [0] * 7), known)
    assert bool((causal.sample(4, 9, seeds=range(4), nfe=1, clamp=clamp).ids[:, :2] == torch.tensor([3, 1])).all())
    with pytest.raises(UserError, match="gaps"):
        causal.sample(4, 9, seeds=range(4), nfe=1, clamp=Clamp(clamp.tokens, ~known))


def test_likelihood_does_not_depend_on_the_batch() -> None:
    causal = model()
    whole = causal.bound(TOKENS, draws=RowDraws(range(4)))
    halves = [causal.bound(TOKENS[i : i + 2], draws=RowDraws([0, 1])).nats_per_token for i in (0, 2)]
    assert whole.kind == "exact" and whole.tokens == 36
    assert whole.nats_per_token == pytest.approx(sum(halves) / 2, abs=1e-6)


def test_a_markov_chain_is_learned_to_its_entropy_rate() -> None:
    chain = torch.tensor([[0.1, 0.6, 0.3], [0.7, 0.1, 0.2], [0.25, 0.25, 0.5]], dtype=torch.float64)
    values, vectors = torch.linalg.eig(chain.T)
    stationary = vectors[:, values.real.argmax()].real
    stationary = stationary / stationary.sum()
    rate = float(-(stationary[:, None] * chain * chain.log()).sum())
    first = float(-(stationary * stationary.log()).sum())
    length = 12
    generator = torch.Generator().manual_seed(0)

    def blocks(num: int) -> torch.Tensor:
        x = [torch.multinomial(stationary, num, replacement=True, generator=generator)]
        for _ in range(length - 1):
            x.append(torch.multinomial(chain[x[-1]], 1, generator=generator)[:, 0])
        return torch.stack(x, dim=1)

    causal = model(3)
    causal.train()
    optimizer = torch.optim.AdamW(causal.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    for step in range(150):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - step / 150)
        loss = causal.loss(blocks(64), times=torch.rand(64), draws=RowDraws([])).total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    truth = (first + (length - 1) * rate) / length
    found = causal.bound(blocks(1000), draws=RowDraws(range(1000)))
    assert found.nats_per_token == pytest.approx(truth, abs=0.03)
    ids = causal.sample(300, length, seeds=[derive_seed(0, i) for i in range(300)], nfe=1).ids
    table = torch.zeros(3, 3).double()
    for left, right in zip(ids[:, :-1].flatten().tolist(), ids[:, 1:].flatten().tolist(), strict=True):
        table[left, right] += 1
    assert torch.allclose(table / table.sum(1, keepdim=True), chain, atol=0.08)
