"""Block after block: the law of an exact predictor, budgets to the last call, prompts, and training's own pass."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from convergeflow.errors import UserError
from convergeflow.flow.guidance import Controls
from convergeflow.flow.schedule import Linear
from convergeflow.model.head import KernelLogF, LogF
from convergeflow.model.views import AfterWords
from convergeflow.randomness import RowDraws
from convergeflow.results.trace import Trace
from convergeflow.sampling.blocks import pieces
from convergeflow.sampling.integration import integrate
from convergeflow.sampling.settings import Freeze, Settings
from convergeflow.sampling.wrappers import Clamp
from convergeflow.systems.convergeflow import ConvergeFlowConfig, ConvergeFlowModel
from exact_predictor import ExactPredictor

START = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
NEXT = torch.tensor([[0.1, 0.8, 0.1], [0.6, 0.1, 0.3], [0.25, 0.25, 0.5]], dtype=torch.float64)


class ExactChain(ExactPredictor):
    """The posterior of the next word of a Markov chain, one word a block."""

    law: Tensor = START

    def after(self, words: Tensor) -> ExactChain:
        behind = copy(self)
        behind.law = NEXT[words[:, -1]]
        return behind

    def rows(self, index: Tensor) -> ExactChain:
        some = copy(self)
        some.law = self.law[index]
        return some

    def __call__(self, x: Tensor, at: Any, condition: Tensor | None) -> LogF:
        # The head's bias is shared by all rows; a row's own prior enters through one-hot features instead.
        return KernelLogF(
            self.law.log().expand(len(x), 3)[:, None], torch.eye(3, dtype=torch.float64), None, self.table
        )


@pytest.mark.parametrize(("solver", "steps"), [("euler", 60), ("kernel", 1)])
def test_an_exact_chain_is_sampled_with_its_own_law(solver: str, steps: int) -> None:
    predictor = ExactChain(START, 16, Linear())
    settings = Settings(nfe=4 * steps + 3, self_condition="none", solver=solver)
    noise = RowDraws(range(4000)).normal(4, 16, dtype=torch.float64)
    tokens = integrate(predictor, settings, noise, pieces=pieces(settings, 4, 1), window=4).decoded.by("weight")
    first = torch.bincount(tokens[:, 0], minlength=3) / len(tokens)
    assert torch.allclose(first.double(), START, atol=0.03)
    pairs = torch.stack([tokens[:, :-1].flatten(), tokens[:, 1:].flatten()])
    counts = torch.zeros(3, 3, dtype=torch.float64).index_put_(tuple(pairs), torch.tensor(1.0).double(), True)
    assert torch.allclose(counts / counts.sum(1, keepdim=True), NEXT, atol=0.03)


def test_rows_that_finish_a_block_early_wait_for_the_others() -> None:
    """An observer sees one grid point of one block at a time, and the words before it."""
    seen: list[Any] = []
    predictor = ExactChain(START, 16, Linear())
    settings = Settings(nfe=4 * 40 + 3, self_condition="none", freeze=Freeze(weight=0.99, patience=1))
    noise = RowDraws(range(12)).normal(4, 16, dtype=torch.float64)
    end = integrate(predictor, settings, noise, pieces=pieces(settings, 4, 1), window=4, observe=seen.append)
    assert len(set(end.calls.tolist())) > 3, "some rows were to finish early"
    places = [(step.block, step.index) for step in seen]
    assert places == sorted(set(places)) and {block for block, _ in places} == {0, 1, 2, 3}
    for step in seen:
        words = end.decoded.by("weight")[step.rows, : step.block]
        assert step.before is None if step.block == 0 else torch.equal(step.before, words)


def block_model(seed: int = 0, **changes: Any) -> ConvergeFlowModel:
    torch.manual_seed(seed)
    options = {"vocabulary": 13, "length": 8, "block_length": 4, "context_free_input": True, "neighbours": 2}
    model = ConvergeFlowModel(ConvergeFlowConfig.of_size("test", **{**options, **changes})).eval()
    for name, parameter in model.network.named_parameters():
        if "embedding" not in name:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


@pytest.mark.parametrize("pool_evidence", [False, True])
@pytest.mark.parametrize("conditioned", [False, True])
def test_a_block_sees_in_sampling_what_it_saw_in_training(pool_evidence: bool, conditioned: bool) -> None:
    network = block_model(pool_evidence=pool_evidence).network.double()
    table = network.embedding.rows()
    tokens = torch.randint(0, 13, (3, 8))
    clean, x = table[tokens], torch.randn(3, 8, 32, dtype=torch.float64)
    at = Linear()(torch.rand(3, 2, dtype=torch.float64).repeat_interleave(4, 1))
    condition = torch.randn_like(x) if conditioned else None
    starts = torch.tensor([0, 0, 0, 0, 4, 4, 4, 4]).expand(3, -1)
    together = network(x, at, condition, AfterWords.plain(clean, starts), table).weigh(x, at, targets=tokens)
    assert together.cross_entropy is not None and together.cross_entropy.shape == (3, 8)
    for first in (0, 4):
        span = slice(first, first + 4)
        given = None if condition is None else condition[:, span]
        behind, here, level = network.remember(clean[:, :first], table), x[:, span], at[:, span]
        answer = network(here, level, given, behind, table)
        alone = answer.weigh(here, level)
        torch.testing.assert_close(alone.mu, together.mu[:, span])
        torch.testing.assert_close(answer.logits(here, level).softmax(-1) @ table, alone.mu)
        rows = behind.rows(torch.tensor([1, 2]))
        some = network(here[1:], level[1:], None if given is None else given[1:], rows, table)
        torch.testing.assert_close(some.weigh(here[1:], level[1:]).mu, alone.mu[1:])


@pytest.mark.parametrize("nfe", [3, 8, 9, 64])
@pytest.mark.parametrize("self_condition", ["none", "previous"])
def test_the_budget_is_spent_exactly_and_batches_do_not_matter(nfe: int, self_condition: str) -> None:
    model = block_model()
    settings = Settings(nfe=nfe, self_condition=self_condition)
    together = model.sample(3, 8, seeds=[5, 6, 7], settings=settings)
    assert together.extras["calls"].tolist() == [nfe] * 3 and together.nfe == nfe
    assert together.settings["num_blocks"] == 2
    alone = [model.sample(1, 8, seeds=[seed], settings=settings).ids for seed in (5, 6, 7)]
    assert torch.equal(together.ids, torch.cat(alone))


def test_too_small_a_budget_and_a_prompt_without_room_are_refused() -> None:
    with pytest.raises(UserError, match="raise `nfe` to 31"):
        pieces(Settings(nfe=30), 64, 4)
    with pytest.raises(UserError, match="blocks of up to 4"):
        pieces(Settings(block=8), 64, 4)
    with pytest.raises(UserError, match="all tokens at once"):
        pieces(Settings(block=8), 64, None)
    with pytest.raises(UserError, match="raise `length`"):
        pieces(Settings(nfe=8), 4, 4, known=4)


@pytest.mark.parametrize(("length", "least"), [(6, 11), (9, 17)])
def test_a_presets_calls_are_raised_to_what_a_longer_text_needs(length: int, least: int) -> None:
    words = Settings(nfe=12, self_condition="none", solver="kernel", block=1)
    model = block_model()
    chosen = model.with_enough_calls(words, length)
    assert chosen.nfe == max(12, least)
    samples = model.sample(2, length, seeds=[0, 1], settings=chosen)
    assert samples.ids.shape == (2, length) and samples.nfe == chosen.nfe
    with pytest.raises(UserError, match=f"raise `nfe` to {least}"):
        model.sample(1, length, seeds=[0], settings=replace(words, nfe=least - 1))


def test_shorter_blocks_than_the_longest_can_be_chosen() -> None:
    settings = Settings(nfe=31, self_condition="previous", block=2)
    made = block_model().sample(2, 8, seeds=[1, 2], settings=settings)
    assert (made.settings["block_length"], made.settings["num_blocks"]) == (2, 4)
    # A model that has learned blocks of two only makes the same: the length of training is no part of the network.
    assert torch.equal(made.ids, block_model(block_length=2).sample(2, 8, seeds=[1, 2], settings=settings).ids)


def test_all_controls_and_freezing_act_on_blocks() -> None:
    model = block_model()
    settings = Settings(nfe=40, controls=Controls(refine=3, scg=1.5, ug=0.05), temperature=0.7)
    plain = model.sample(4, 8, seeds=range(4), settings=settings)
    frozen = model.sample(4, 8, seeds=range(4), settings=replace(settings, freeze=Freeze()))
    assert frozen.ids.shape == plain.ids.shape == (4, 8)
    assert float(frozen.extras["calls"].double().mean()) <= 40
    logits = model.sample(2, 8, seeds=range(2), settings=settings, want_logits=True)
    assert torch.equal(logits.extras["logits"].argmax(-1), logits.ids)


def test_a_prompt_of_any_length_is_the_context_itself() -> None:
    model = block_model()
    settings = Settings(nfe=25, self_condition="previous")
    whole = model.sample(2, 8, seeds=[1, 2], settings=settings)
    # The first block as a prompt: the second one starts from the same noise and sees the same words.
    known = torch.zeros(2, 8, dtype=torch.bool)
    known[:, :4] = True
    again = model.sample(
        2, 8, seeds=[1, 2], settings=Settings(nfe=13, self_condition="previous"), clamp=Clamp(whole.ids, known)
    )
    assert torch.equal(again.ids, whole.ids)
    known[:, :5] = True
    odd = model.sample(2, 8, seeds=[1, 2], settings=settings, clamp=Clamp(whole.ids, known))
    assert torch.equal(odd.ids[:, :5], whole.ids[:, :5]) and odd.ids.shape == (2, 8)
    # A gap: the words after it are put along the path of their block, as without blocks.
    known[:, 2:4] = False
    gap = model.sample(2, 8, seeds=[1, 2], settings=settings, clamp=Clamp(whole.ids, known))
    assert torch.equal(gap.ids[known], whole.ids[known])


def test_text_goes_on_beyond_the_length_of_training() -> None:
    model = block_model()
    settings = Settings(nfe=54, self_condition="previous")
    long = model.sample(2, 20, seeds=[1, 2], settings=settings)
    assert long.ids.shape == (2, 20)
    # Up to the length of training nothing is out of sight: the beginning is that of the short text.
    noise = torch.randn(2, 20, 32, dtype=torch.float64)
    long = model.sample(2, 20, seeds=[1, 2], settings=settings, noise=noise)
    short = model.sample(2, 8, seeds=[1, 2], settings=Settings(nfe=21, self_condition="previous"), noise=noise[:, :8])
    assert torch.equal(long.ids[:, :8], short.ids)


def test_a_trace_puts_blocks_side_by_side() -> None:
    trace = Trace()
    calls: list[int] = []

    def observe(step: Any) -> None:
        trace(step)
        calls.append(step.calls)

    made = block_model().sample(
        3, 8, seeds=range(3), settings=Settings(nfe=12, self_condition="previous"), observe=observe
    )
    arrays = trace.arrays()
    # Six steps, a call that reads the first block, five steps.
    assert arrays["token"].shape == (6, 3, 8) and calls == [1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12]
    assert np.array_equal(arrays["token"][-1], made.ids.numpy())
