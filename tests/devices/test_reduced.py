"""Steps of training in bfloat16 on a CPU: close to float32 by bounds that 8 bits give, and for steps alone.

Whether the operands of the head are rounded is the library's choice; the bounds hold either way.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from ten_sentences import LENGTH, TOKENS, WORDS, fresh, stage
from torch import Tensor
from torch.nn import functional

from convergeflow import device
from convergeflow.device import FULL, REDUCED, attend, precision_of, reduced_products, reduces
from convergeflow.flow.grid import training_times
from convergeflow.model import fused
from convergeflow.model.fused import exact_products, filled_in, weigh
from convergeflow.randomness import RowDraws
from convergeflow.training.config import resolve
from convergeflow.training.run import Reporter, make_accelerator, train
from convergeflow.training.trainer import Trainer

CPU, META = torch.device("cpu"), torch.device("meta")
UNIT = 2.0**-8
"""bfloat16 has 8 bits: rounding to it is off by at most this share."""
PRODUCT = 2 * UNIT + UNIT**2
"""Of the product of two rounded numbers."""
SUMS = 1e-4
"""Room for the float32 sums of both sides, relative to what they sum."""


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that has the instructions."""
    monkeypatch.setattr(device, "bfloat16_pays", lambda device: True)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_the_head_is_within_the_rounding_of_its_operands() -> None:
    """Every bound is arithmetic on the operands: a logit moves by `delta` at most, a weight by exp(2 delta) - 1."""
    h, weight, bias = normal(96, 48, seed=0), 0.2 * normal(500, 48, seed=1), normal(500, seed=2)
    table = 48**0.5 * functional.normalize(normal(500, 48, seed=3), dim=-1)
    targets = torch.arange(96) * 5
    kernel = torch.linspace(0.05, 0.4, 96)
    x = table[targets] + 2.0 * normal(96, 48, seed=4)

    def run(reduced: bool) -> tuple[Any, list[Tensor]]:
        leaves = [h.clone().requires_grad_(), weight.clone().requires_grad_(), bias.clone().requires_grad_()]
        with reduced_products(CPU, reduced):
            done = weigh(*leaves, x, kernel, table, targets=targets)
            done.cross_entropy.sum().backward()
        return done, [leaf.grad for leaf in leaves]

    (exact, gradients), (found, others) = run(False), run(True)
    scaled = kernel[:, None] * x
    sizes = h.abs() @ weight.abs().T + scaled.abs() @ table.abs().T + bias.abs()
    delta = (PRODUCT + SUMS) * sizes.amax(1)
    w = (h @ weight.T + scaled @ table.T + bias).softmax(-1)
    assert ((found.log_normaliser - exact.log_normaliser).abs() <= delta).all()
    assert ((found.cross_entropy - exact.cross_entropy).abs() <= 2 * delta).all()
    moved = (2 * delta).expm1()[:, None] + PRODUCT + SUMS
    assert ((found.mu - exact.mu).abs() <= moved * (w @ table.abs())).all()
    # The change of the logits is w - [target], whose second part is exact.
    change = moved * w + (PRODUCT + SUMS) * functional.one_hot(targets, 500)
    bounds = [change @ weight.abs(), change.T @ h.abs(), change.sum(0)]
    for gradient, other, bound in zip(gradients, others, bounds, strict=True):
        assert ((gradient - other).abs() <= bound).all()


OPTIONS = {"context_free_input": True, "neighbours": 2, "head_init": 0.5, "pool_evidence": True}


@pytest.mark.parametrize("objective", ["ce", "mse"])
def test_a_step_is_within_the_rounding_of_its_products(objective: str) -> None:
    """Shares of 2^-8 add up over the products that follow one another: 6 in a layer, 4 around them, 2 in the head."""
    model = fresh("convergeflow", **OPTIONS)
    model.set_unigram(torch.bincount(TOKENS.flatten(), minlength=len(WORDS)))
    model.enter_stage(stage(objective, 1))
    model.train()

    def run(reduced: bool) -> tuple[float, Tensor]:
        model.zero_grad()
        draws, times = RowDraws(range(len(TOKENS))), training_times(len(TOKENS), seed=0)
        with reduced_products(CPU, reduced):
            with torch.autocast("cpu", torch.bfloat16, enabled=reduced):
                loss = model.loss(TOKENS, times=times, draws=draws).total
            loss.backward()
        every = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        return float(loss.detach()), torch.cat(every)

    (exact, gradient), (found, other) = run(False), run(True)
    products = 2 * 6 + 4 + 2
    assert 0 < abs(found - exact) < products * UNIT * exact
    assert (other - gradient).norm() < 2 * products * UNIT * gradient.norm(), "backward there are as many again"


def test_attention_written_out_is_the_librarys() -> None:
    q, k, v = (normal(2, 3, 10, 8, seed=seed).bfloat16() for seed in range(3))
    mask = torch.ones(10, 10, dtype=torch.bool).tril()
    for given in (None, mask):
        results = []
        for dtype, attention in ((torch.float32, functional.scaled_dot_product_attention), (torch.bfloat16, attend)):
            leaves = [part.clone().to(dtype).requires_grad_() for part in (q, k, v)]
            out = attention(*leaves, attn_mask=given)
            out.float().square().sum().backward()
            results.append([out.detach().float(), *(leaf.grad.float() for leaf in leaves)])
        # Scores, weights and result are rounded, each by its share; the backward pass rounds as often again.
        for exact, found in zip(*results, strict=True):
            assert 0 < (found - exact).norm() < 6 * UNIT * exact.norm()
    wide = [part.float().requires_grad_() for part in (q, k, v)]
    assert torch.equal(attend(*wide, attn_mask=mask), functional.scaled_dot_product_attention(*wide, attn_mask=mask))


def test_rows_that_have_a_prediction_need_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The products themselves stay float32 here, so both ways may differ by the rounding of sums alone."""
    model = fresh("convergeflow", **OPTIONS).network
    table, at = model.embedding.rows().detach(), fresh("convergeflow").schedule(torch.linspace(0.1, 0.9, 5))
    x, condition = normal(5, LENGTH, 32, seed=0), normal(5, LENGTH, 32, seed=1)
    condition[[0, 3]] = 0.0
    condition[4, 2] = 0.0
    asked: list[int] = []

    def make(rows: Any) -> Tensor:
        asked.append(len(x[rows]))
        return model.without_context(x[rows], at[rows], table).mu

    missing = ~condition.any(-1)
    whole = filled_in(condition, missing, make)
    assert torch.equal(whole, torch.where(missing[..., None], model.without_context(x, at, table).mu, condition))
    monkeypatch.setattr(fused, "reduces", lambda device: True)
    part = filled_in(condition, missing, make)
    torch.testing.assert_close(part, whole)
    assert torch.equal(part[~missing], condition[~missing])
    assert filled_in(condition + 1, torch.zeros_like(missing), make).equal(condition + 1)
    assert asked == [5, 3], "all rows in float32, then those that miss something, then none"


def test_the_table_says_what_holds_and_ends_with_the_block(able: None) -> None:
    with reduced_products(CPU):
        assert precision_of(CPU) == REDUCED and precision_of(META) == FULL
        assert precision_of(CPU, torch.float64) == device.DOUBLE
        with exact_products():
            assert torch.get_float32_matmul_precision() == "medium"
    with pytest.raises(ZeroDivisionError), reduced_products(CPU):
        raise ZeroDivisionError
    for where, wanted in ((CPU, False), (META, True)):
        with reduced_products(where, wanted):
            assert precision_of(CPU) == FULL and torch.get_float32_matmul_precision() == "highest"
    assert precision_of(CPU) == FULL and torch.get_float32_matmul_precision() == "highest"


class Kept(torch.nn.Linear):
    """Notes under which autocast it is called, and whether that keeps casts."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen: list[tuple[bool, bool]] = []

    def forward(self) -> Tensor:  # type: ignore[override]
        self.seen.append((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))
        return self.weight


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    """One for bfloat16; the library keeps what the first one of a process was made for."""
    AcceleratorState._reset_state(True)
    yield Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize("distilled", [False, True])
def test_steps_are_reduced_and_looking_is_not(
    distilled: bool, tmp_path: Path, able: None, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "training")
    from toy import ToyCorpus, ToyModel, toy_config

    seen: dict[str, set[tuple[bool, bool]]] = {}

    class Watched(ToyModel):
        def __getattribute__(self, name: str) -> Any:
            if name in ("loss", "monitor", "sample"):
                seen.setdefault(name, set()).add((reduces(CPU), torch.is_autocast_enabled("cpu")))
            return super().__getattribute__(name)

    changes = {"distill": {"teacher": "somebody"}} if distilled else {}
    config = toy_config(evaluate_every=1, sample_every=1, **changes)
    config = config.model_copy(update={"stages": (config.stages[0].model_copy(update={"steps": 2, "warmup": 0}),)})
    Trainer(config, Watched(), ToyCorpus(), tmp_path, accelerator=accelerator).run()  # type: ignore[arg-type]
    assert seen == {"loss": {(not distilled, True)}, "monitor": {(False, False)}, "sample": {(False, False)}}


def test_a_weight_is_cast_for_each_pass() -> None:
    """Older versions of torch gave the cast of a pass without gradients to the pass with them, which then had none."""
    AcceleratorState._reset_state(True)
    prepared = make_accelerator(resolve("test", ["precision=bf16", "device=cpu"]))
    model = prepared.prepare_model(Kept())
    with prepared.autocast():
        assert torch.is_autocast_enabled("cpu") and not torch.is_autocast_cache_enabled()
        model()
    model()
    assert model.seen == [(True, False)] * 2
    AcceleratorState._reset_state(True)


def test_a_cpu_without_the_instructions_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convergeflow.training.run.bfloat16_pays", lambda device: False)
    monkeypatch.setattr(device, "bfloat16_pays", lambda device: False)
    AcceleratorState._reset_state(True)

    def heard(message: str) -> None:
        raise KeyboardInterrupt(message)

    with pytest.raises(KeyboardInterrupt, match=r"no instructions for bfloat16.*fp32 is faster"):
        train(resolve("test", ["precision=bf16", "device=cpu"]), tmp_path / "run", reporter=Reporter(warn=heard))
    AcceleratorState._reset_state(True)
    with reduced_products(CPU):
        assert not reduces(CPU)
