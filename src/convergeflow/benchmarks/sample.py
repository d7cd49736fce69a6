"""Sampling: our sampler, with and without shared kernel scores and with freezing, against the plain one.

The setting is the headline's shape, about nine network calls at each grid point under guidance that grows towards the
data, on a shortened grid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from convergeflow.benchmarks import measure, plain
from convergeflow.benchmarks.models import Size, build, plain_twin
from convergeflow.benchmarks.plain import PlainModel
from convergeflow.device import trunk_autocast
from convergeflow.flow.guidance import Controls
from convergeflow.sampling.driver import Driver
from convergeflow.sampling.integration import cohort
from convergeflow.sampling.settings import Freeze, Settings

CPU = torch.device("cpu")
CALLS_PER_POINT = 9
"""The headline spends 64 calls on 7 points."""
GRID = (0.5, 0.93)
"""Two of its times: the middle, and the last."""
GUIDANCE = 2.0
"""A moderate strength: extrapolation multiplies rounding differences, and tokens are to be compared."""


def settings_for(points: int) -> Settings:
    """The measured setting on the last `points` times of the grid."""
    controls = Controls.configuration("A", refine=CALLS_PER_POINT - 1, scg=GUIDANCE)
    return Settings(nfe=CALLS_PER_POINT * points, controls=controls, grid=GRID[-points:])


class Contest:
    """One model, one starting noise, every way to sample it."""

    def __init__(
        self, size: Size, points: int, kind: type[PlainModel] = PlainModel, device: torch.device = CPU
    ) -> None:
        self.size, self.kind, self.device = size, kind, device
        self.model = build(size).eval().to(device)
        self.settings = settings_for(points)
        rng = torch.Generator().manual_seed(2)
        noise = torch.randn(size.sample_batch, size.length, size.width, generator=rng, dtype=torch.float64)
        self.noise = noise.to(device)

    def named(self) -> dict[str, Callable[[], Tensor]]:
        """Contestant -> function that returns tokens."""
        return {"plain": self.plain, "tiled": lambda: self.ours(shared=False), "shared": lambda: self.ours(shared=True)}

    def ours(self, *, shared: bool, freeze: bool = False) -> Tensor:
        settings = replace(self.settings, freeze=Freeze() if freeze else None)
        batch = cohort(self.model.bind(), settings, self.noise)
        driver = Driver(None if shared else 0)
        driver.add(batch)
        with trunk_autocast(self.device):
            driver.run()
        return batch.end().decoded.by("weight")

    def plain(self) -> Tensor:
        plan = self.settings.plan(self.model.schedule)
        gammas = plan.points.gamma.tolist()
        model = plain_twin(self.model, self.kind)
        with self.device:  # it makes its constants on the default device
            return plain.sample(model, self.noise, gammas, plan.allocation.refinements, plan.w_scg)


@torch.no_grad()
def run(size: Size, repeats: int = 3, points: int = 2) -> dict[str, Any]:
    """Times, memory and agreement of one size."""
    contest = Contest(size, points)
    cases: dict[str, Callable[[], Tensor]] = {
        **contest.named(),
        "frozen": lambda: contest.ours(shared=True, freeze=True),
    }
    tokens: dict[str, Tensor] = {}

    def run_case(name: str) -> None:
        tokens[name] = cases[name]()

    contestants = {name: partial(run_case, name) for name in cases} | {measure.GEMM: measure.gemm_case()}
    time, processor = measure.alternate(contestants, repeats, warm_up=int(repeats > 1))
    rss = {
        name: measure.in_fresh_process("sample", size=vars(size), points=points, contestant=name)["peak_rss_mb"]
        for name in contest.named()
    }
    flops = {name: _flops(size, points, shared=name == "shared") for name in ("tiled", "shared")}
    agreement = {name: float((ids == tokens["plain"]).double().mean()) for name, ids in tokens.items()}
    calls = CALLS_PER_POINT * points
    return {
        "size": vars(size),
        "calls": calls,
        "speedup_vs_plain": time["plain"] / time["shared"],
        "speedup_tiled_only": time["plain"] / time["tiled"],
        "speedup_with_freezing": time["plain"] / time["frozen"],
        "peak_rss_mb": rss["shared"],
        "tiled_peak_rss_mb": rss["tiled"],
        "plain_peak_rss_mb": rss["plain"],
        "gemm_peak_fraction": measure.fraction_of_peak(flops["shared"], time, "shared"),
        "processor_gemm_peak_fraction": measure.fraction_of_peak(flops["shared"], processor, "shared"),
        "tiled_gemm_peak_fraction": measure.fraction_of_peak(flops["tiled"], time, "tiled"),
        # No sampler that does these products can be faster than this: what the plain one takes over bare GEMMs.
        "roofline_vs_plain": processor["plain"] * measure.gemm_rate(processor[measure.GEMM]) / flops["shared"],
        "tiled_roofline_vs_plain": processor["plain"] * measure.gemm_rate(processor[measure.GEMM]) / flops["tiled"],
        "gemm_gflops": measure.gemm_rate(time[measure.GEMM]) / 1e9,
        "tokens_equal": agreement["shared"] == 1.0 and agreement["tiled"] == 1.0,
        "token_agreement": agreement,
        "seconds_per_call": {name: value / calls for name, value in time.items() if name in cases},
        "processor_seconds_per_call": {name: value / calls for name, value in processor.items() if name in cases},
        "tokens_per_second_and_call": size.sample_batch * size.length * calls / time["shared"],
        "repeats": repeats,
        "machine": measure.machine(),
    }


def _flops(size: Size, points: int, *, shared: bool) -> float:
    rows = size.sample_batch * size.length
    calls = CALLS_PER_POINT * points
    products = 2 * calls + points if shared else 3 * calls
    head = measure.head_flops(rows, size.width, size.vocabulary, products)
    return head + calls * measure.trunk_flops(rows, size.length, size.width, size.depth)


@torch.no_grad()
def memory(size: dict[str, Any], points: int, contestant: str) -> dict[str, float]:
    """Peak resident memory of a whole sampling process (called in a fresh one)."""
    contest = Contest(Size(**size), points)
    # One grid point has the peak of many.
    contest.settings = replace(settings_for(1), nfe=3, grid=GRID[-1:])
    contest.named()[contestant]()
    return {"peak_rss_mb": measure.peak_of_process()}
