"""The options of the small-scale recipe: what the trunk reads besides the state, and how the head starts."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from convergeflow.flow.schedule import Gumbel, Linear
from convergeflow.model import backbone, fused
from convergeflow.model.network import FlowNetwork, Shape
from convergeflow.model.small_scale import EvidencePooling, Extras, Neighbours, SmallScaleNetwork
from convergeflow.model.views import WHOLE, AfterWords


def network_with(**options: Any) -> SmallScaleNetwork:
    torch.manual_seed(0)
    shape = Shape(vocabulary=7, width=16, depth=1, heads=2, condition_width=8)
    return SmallScaleNetwork(shape, Extras(gate_init=1.0, **options)).eval()


def what_the_trunk_reads(network: SmallScaleNetwork, x: Tensor, time: float, condition: Tensor | None) -> Tensor:
    read: list[Tensor] = []
    handle = network.backbone.register_forward_hook(lambda module, args, out: read.append(args[0]))
    at = Linear()(torch.full((len(x),), time, dtype=torch.float64))
    network(x, at, condition)
    handle.remove()
    return read[0]


def test_without_its_options_it_is_the_papers_network() -> None:
    shape = Shape(vocabulary=7, width=16, depth=1, heads=2, condition_width=8)
    made = []
    for build in (lambda: FlowNetwork(shape), lambda: SmallScaleNetwork(shape, Extras())):
        torch.manual_seed(3)
        made.append(build().state_dict())
    assert made[0].keys() == made[1].keys()
    assert all(torch.equal(value, made[1][name]) for name, value in made[0].items())


def test_by_default_the_trunk_reads_the_state() -> None:
    network = network_with()
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(what_the_trunk_reads(network, x, 0.3, None), x)
    assert float(network.head.weight.detach().abs().sum()) == 0.0


def test_the_prediction_at_hand_is_the_earlier_one_where_there_is_one() -> None:
    network = network_with(context_free_input=True)
    x, time = torch.randn(2, 5, 16), 0.3
    at = Linear()(torch.full((2,), time, dtype=torch.float64))
    alone = network.without_context(x, at, network.embedding.rows()).mu.detach()
    torch.testing.assert_close(what_the_trunk_reads(network, x, time, None), time * x + alone)
    condition = torch.randn(2, 5, 16)
    torch.testing.assert_close(what_the_trunk_reads(network, x, time, condition), time * x + condition)
    condition[1] = 0.0  # the second example has none
    mixed = torch.stack([condition[0], alone[1]])
    torch.testing.assert_close(what_the_trunk_reads(network, x, time, condition), time * x + mixed)


def test_a_pair_reads_the_clean_words_before_it_in_both_copies() -> None:
    network = network_with(neighbours=2)
    x = torch.randn(1, 6, 16)
    read: list[Tensor] = []
    network.backbone.register_forward_hook(lambda module, args, out: read.append(args[0]))
    at = Linear()(torch.full((1, 3), 0.3, dtype=torch.float64))
    network(x[:, 3:], at, view=AfterWords(x[:, :3], at, torch.arange(3)))
    assert network.neighbours is not None
    back = network.neighbours(x[:, :3], WHOLE)
    torch.testing.assert_close(read[0], x + torch.cat([back, back], 1))


def test_a_head_that_starts_along_the_table_prefers_what_it_reads() -> None:
    network = network_with(head_init=0.5)
    torch.testing.assert_close(network.head.weight.detach(), 0.5 * network.embedding.rows().detach())


def test_pooled_evidence_is_the_posterior_of_one_word_seen_twice() -> None:
    # Two positions that are known to hold the same word, any word being equally likely: the posterior of both has the
    # kernel scores of both. alpha stands in for the kernel alpha/sigma^2 of the other one, so noise must be large.
    network = network_with(pool_evidence=True).double()
    assert network.pooling is not None
    with torch.no_grad():
        network.pooling.offset.fill_(1e3)
    schedule = Gumbel(4.0, 0.8, 1e-5)
    at = schedule.at_gamma(torch.full((3,), 7.0, dtype=torch.float64))
    table = network.embedding.rows()
    x = 20 * torch.randn(3, 2, 16, dtype=torch.float64)
    twice = (float(at.kernel[0]) * (x[:, :1] + x[:, 1:]) @ table.mT).softmax(-1).expand(3, 2, 7)
    torch.testing.assert_close(network(x, at).logits(x, at).softmax(-1), twice, rtol=0.02, atol=1e-4)
    assert network(x, at).scores(x) is None  # the evidence changes the state that the kernel sees
    torch.testing.assert_close(network(x, at).weigh(x, at).mu, twice @ table, rtol=0.02, atol=1e-2)


def test_pooled_evidence_stays_bounded_towards_the_data() -> None:
    network = network_with(pool_evidence=True).double()
    assert network.pooling is not None
    with torch.no_grad():
        network.pooling.offset.fill_(1e3)
    table = network.embedding.rows().detach()
    x = table[torch.tensor([[0, 1]])]  # two different words, wrongly taken for one
    pooled = []
    for time in (0.2, 0.9, 0.99):
        at = Linear()(torch.full((1,), time, dtype=torch.float64))
        with torch.no_grad():
            pooled.append(float(network(time * x, at).logits(time * x, at).softmax(-1)[0, 0, 0]))
    assert pooled[0] < 0.9 and pooled[1] > 0.999 and pooled[2] == 1.0


def test_neighbours_look_back_only_and_no_further_than_their_reach() -> None:
    torch.manual_seed(0)
    neighbours = Neighbours(4, reach=2)
    x = torch.randn(1, 6, 4, requires_grad=True)
    out = neighbours(x, WHOLE)
    for position in range(6):
        (seen,) = torch.autograd.grad(out[0, position].sum(), x, retain_graph=True)
        touched = (seen[0].abs().sum(-1) > 0).nonzero()[:, 0].tolist()
        assert touched == list(range(max(0, position - 2), position))
    nearest = torch.nn.functional.linear(x[0, 2], neighbours.mix.weight[:, :4])
    second = torch.nn.functional.linear(x[0, 1], neighbours.mix.weight[:, 4:])
    torch.testing.assert_close(out[0, 3], nearest + second)


def test_evidence_is_pooled_from_others_and_in_a_pair_from_the_clean_words_before() -> None:
    torch.manual_seed(0)
    pooling = EvidencePooling(8)
    h = torch.randn(1, 6, 8)

    def sources(starts: torch.Tensor | None) -> list[list[int]]:
        values = torch.randn(1, 6, 8, requires_grad=True)
        level = Linear()(torch.ones(1, 3))
        out = pooling(h, values, WHOLE if starts is None else AfterWords(h[:, :3], level, starts))
        rows = []
        for position in range(6):
            (seen,) = torch.autograd.grad(out[0, position].sum(), values, retain_graph=True)
            assert float(seen.max()) < 0.1, "nothing is pooled at the beginning"
            rows.append((seen[0, :, 0] > 0).nonzero()[:, 0].tolist())
        return rows

    assert sources(None) == [[q for q in range(6) if q != p] for p in range(6)]
    assert sources(torch.arange(3)) == [[], [0], [0, 1], [], [0], [0, 1]]
    assert sources(torch.tensor([0, 1, 1])) == [[], [0], [0, 1], [], [0, 5], [0, 4]]


def test_what_a_call_keeps_serves_calls_outside_of_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_workspace", threading.local())
    backbone._rotation.cache_clear()
    network = network_with()
    x, at = torch.randn(2, 5, 16), Linear()(torch.full((2,), 0.5, dtype=torch.float64))
    with torch.inference_mode():
        inside = network(x, at).weigh(x, at).mu
    outside = network(x, at).weigh(x, at).mu
    outside.sum().backward()
    assert torch.equal(inside, outside)
