"""A training step: loss, gradients, AdamW and the average of the weights, against the plain one.

Both start from the same weights and see the same tokens, times, noise and dropout, so their losses can be compared.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from convergeflow.benchmarks import measure, plain
from convergeflow.benchmarks.head import HeadSize, training_flops
from convergeflow.benchmarks.models import Size, build, plain_twin
from convergeflow.benchmarks.plain import PlainModel
from convergeflow.device import trunk_autocast
from convergeflow.flow.grid import training_times
from convergeflow.randomness import RowDraws
from convergeflow.training.config import EmaConfig, OptimizerConfig, StageConfig
from convergeflow.training.ema import WeightAverage
from convergeflow.training.optimizer import StageOptimizer

CPU = torch.device("cpu")
RATE = 1e-5
MEMORY = ("peak_rss_mb", "beyond_state_mb")
DECAY = 0.9999


class Batch:
    """The same inputs for both: step number -> tokens, times and row-wise random numbers."""

    def __init__(self, size: Size) -> None:
        self.size = size

    def tokens(self, step: int) -> Tensor:
        rng = torch.Generator().manual_seed(100 + step)
        return torch.randint(self.size.vocabulary, (self.size.train_batch, self.size.length), generator=rng)

    def times(self, step: int) -> Tensor:
        return training_times(self.size.train_batch, seed=step)

    def draws(self, step: int) -> RowDraws:
        return RowDraws([1000 * step + row for row in range(self.size.train_batch)])


class Ours:
    """The package's own loss, optimizer and average."""

    def __init__(self, size: Size, recompute: bool = False, device: torch.device = CPU) -> None:
        self.batch, self.device = Batch(size), device
        self.model = build(size).to(device)
        stage = StageConfig(name="bench", steps=1, objective="mse", lr=RATE, self_condition=size.self_condition)
        self.model.enter_stage(stage)
        self.model.train()
        self.model.network.backbone.recompute = recompute
        self.optimizer = StageOptimizer(self.model.named_parameters(), stage, OptimizerConfig())
        self.average = WeightAverage(self.model, EmaConfig(decay=DECAY))
        self.count = 0

    def step(self) -> float:
        torch.manual_seed(self.count)
        step = self.count
        tokens = self.batch.tokens(step).to(self.device)
        with trunk_autocast(self.device):
            loss = self.model.loss(tokens, times=self.batch.times(step), draws=self.batch.draws(step)).total
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.count += 1
        self.average.update(self.model, self.count)
        return float(loss.detach())

    def parameters(self) -> list[Tensor]:
        return list(self.model.parameters())


class Plain:
    """The plain loss with the library's default AdamW and an average written as in the paper's recipe."""

    def __init__(self, size: Size, kind: type[PlainModel] = PlainModel, device: torch.device = CPU) -> None:
        self.batch, self.device = Batch(size), device
        model = build(size)
        self.schedule = model.schedule
        self.model = plain_twin(model.to(device), kind, copy=True)
        del model
        self.trained = [weight for weight in self.model.weights.values() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=RATE, weight_decay=0.0)
        self.average = copy.deepcopy({name: value.detach() for name, value in self.model.weights.items()})
        self.count = 0

    def step(self) -> float:
        size, draws = self.batch.size, self.batch.draws(self.count)
        torch.manual_seed(self.count)
        gamma = self.schedule(self.batch.times(self.count)).gamma
        noise = draws.normal(size.length, size.width)
        active = torch.zeros(size.train_batch, dtype=torch.bool)
        if size.self_condition > 0:
            active = draws.uniform() < size.self_condition
        inputs = (each.to(self.device) for each in (self.batch.tokens(self.count), gamma, noise, active))
        with self.device:  # the plain model makes its constants on the default device
            loss = plain.loss(self.model, *inputs)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.count += 1
        with torch.no_grad():
            for name, value in self.model.weights.items():
                self.average[name].mul_(DECAY).add_(value, alpha=1 - DECAY)
        return float(loss.detach())

    def parameters(self) -> list[Tensor]:
        return list(self.model.weights.values())


def run(size: Size, repeats: int = 3) -> dict[str, Any]:
    """Times, memory and agreement of one size."""
    names = (("ours", ""), ("plain", "plain_"), ("recompute", "recompute_"))
    found = {name: measure.in_fresh_process("train", size=vars(size), contestant=name) for name, _ in names}
    memory_of = {f"{before}{what}": found[name][what] for what in MEMORY for name, before in names}
    ours, rival = Ours(size), Plain(size)
    runners: dict[str, Ours | Plain] = {"plain": rival, "ours": ours, "recompute": Ours(size, recompute=True)}
    losses: dict[str, list[float]] = {name: [] for name in runners}
    cases = {name: partial(lambda name: losses[name].append(runners[name].step()), name) for name in runners}
    time, processor = measure.alternate({**cases, measure.GEMM: measure.gemm_case()}, repeats)
    difference = max(
        abs(a - b) / abs(b)
        for name in ("ours", "recompute")
        for a, b in zip(losses[name], losses["plain"], strict=True)
    )
    return {
        "size": vars(size),
        "speedup_vs_plain": time["plain"] / time["ours"],
        # Activations computed again (`recompute: true`): the memory target, at a price in time.
        "recompute_speedup_vs_plain": time["plain"] / time["recompute"],
        **memory_of,
        "gemm_peak_fraction": measure.fraction_of_peak(_flops(size), time, "ours"),
        "processor_gemm_peak_fraction": measure.fraction_of_peak(_flops(size), processor, "ours"),
        "gemm_gflops": measure.gemm_rate(time[measure.GEMM]) / 1e9,
        "tokens_equal": _tokens_equal(ours, rival),
        "loss_difference": difference,
        "seconds_per_step": {name: time[name] for name in cases},
        "processor_seconds_per_step": {name: processor[name] for name in cases},
        "tokens_per_second": size.train_batch * size.length / time["ours"],
        "repeats": repeats,
        "machine": measure.machine(),
    }


@torch.no_grad()
def _tokens_equal(ours: Ours, rival: Plain) -> bool:
    """Whether both trained networks name the same most likely tokens on a fresh noisy batch of one row."""
    size = ours.batch.size
    gamma = torch.tensor([4.0])
    rng = torch.Generator().manual_seed(5)
    x = torch.randn(1, size.length, size.width, generator=rng)
    ours.model.eval()
    at = ours.model.schedule.at_gamma(gamma.double())
    mine = ours.model.network(x, at).weigh(x, at, details=True).token
    ours.model.train()
    assert mine is not None
    return bool(torch.equal(mine, rival.model.logits(x, gamma, None).argmax(-1)))


def _flops(size: Size) -> float:
    """Forward, twice that backward, the head's own count, and the self-conditioning pass on its share of rows."""
    rows = size.train_batch * size.length
    trunk = measure.trunk_flops(rows, size.length, size.width, size.depth)
    first_pass = size.self_condition * (trunk + measure.head_flops(rows, size.width, size.vocabulary))
    return 3 * trunk + training_flops(HeadSize(rows, size.width, size.vocabulary)) + first_pass


def memory(size: dict[str, Any], contestant: str) -> dict[str, float]:
    """Peak memory of two steps, whole and beyond what a step must hold (called in a fresh process)."""
    start = measure.resident()
    shape = Size(**size)
    runner: Ours | Plain = Plain(shape) if contestant == "plain" else Ours(shape, recompute=contestant == "recompute")
    runner.step()
    with measure.PeakMemory() as watch:
        runner.step()
    parameters = runner.parameters()
    # Parameters and their average; gradient and two moments where trained.
    state = sum(p.numel() * p.element_size() * (2 + 3 * p.requires_grad) for p in parameters) / 2**20
    return {"peak_rss_mb": watch.peak, "beyond_state_mb": watch.peak - start - state, "state_mb": state}
