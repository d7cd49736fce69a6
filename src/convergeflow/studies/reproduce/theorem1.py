"""Theorem 1: the flow of an embedding-weighted predictor ends at token embeddings, whatever its Lipschitz base weight.

Toys under the linear schedule on the theorem's grid, max (t_{k+1} - t_k)/(1 - t_{k+1})^3 < delta, with N steps: the
exact prior of one token, the exact context of two dependent tokens, and a base weight that is deliberately wrong. The
theorem fixes delta; its proof also uses delta^2 N = O(1), so the grid with delta = 1/sqrt(N) is run beside it. The
counterexample of Proposition 2 on the same grid shows what failing looks like.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from scipy.stats import chi
from torch import Tensor

from convergeflow.evaluation.estimate import mean
from convergeflow.flow.grid import THEOREM_DELTA, theorem_grid
from convergeflow.flow.schedule import Linear
from convergeflow.model.fused import nearest
from convergeflow.sampling.settings import Settings
from convergeflow.sampling.wrappers import Predictor
from convergeflow.studies.reproduce import toys
from convergeflow.studies.reproduce.bench import Bench
from convergeflow.studies.reproduce.result import ExperimentResult, Record
from convergeflow.studies.reproduce.verdict import Judgement, below, decide, equal, exactly, measured

VOCABULARY, WIDTH = 8, 8
RADIUS = 0.5
"""A state farther than this from every embedding has not arrived; embeddings lie about 4 apart."""
GRIDS = {"fixed": "δ = 0.5", "shrinking": "δ = 1/√N"}


def _toy(name: str) -> tuple[Predictor, int, Tensor]:
    """Predictor, length, and the law of a token under the toy's own prior."""
    table = toys.random_table(VOCABULARY, WIDTH, seed=3)
    generator = torch.Generator().manual_seed(11)
    log_prior = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).log_softmax(-1)
    if name == "prior":
        return toys.ToyPredictor(table, Linear(), toys.prior_base(log_prior)), 1, log_prior.exp()
    if name == "wrong":
        return (toys.ToyPredictor(table, Linear(), toys.wrong_base(VOCABULARY, WIDTH, seed=5)), 1, log_prior.exp())
    if name == "unconstrained":
        return toys.ScaledStatePredictor(table, Linear()), 1, log_prior.exp()
    raw = 1.5 * torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64)
    log_joint = raw.flatten().log_softmax(-1).reshape(VOCABULARY, VOCABULARY)
    return toys.ToyPredictor(table, Linear(), toys.joint_base(log_joint, table)), 2, log_joint.exp().sum(1)


def _run(name: str, grid_name: str, num_steps: int, trajectories: int) -> dict[str, Any]:
    predictor, length, law = _toy(name)
    delta = THEOREM_DELTA if grid_name == "fixed" else 1.0 / math.sqrt(num_steps)
    grid = theorem_grid(num_steps, delta)
    outcome = toys.flow(predictor, grid, toys.starting_noise(trajectories, length, WIDTH, seed=4))
    found = nearest(outcome.x, predictor.table)
    distance = found.distance
    end = Linear()(grid[-1])
    left = (outcome.x - end.alpha * predictor.table[found.token]).norm(dim=-1) / (end.sigma * math.sqrt(WIDTH))
    outside = mean((distance > RADIUS).double().flatten().numpy())
    first = found.token[:, 0]
    share = torch.bincount(first, minlength=VOCABULARY).double() / len(first)
    return {
        "outside": outside.value,
        "outside_se": outside.se,
        "distance_median": float(distance.quantile(0.5)),
        "distance_99": float(distance.quantile(0.99)),
        "normalised_median": float(left.quantile(0.5)),
        "last_t": float(grid[-1]),
        "ratio": theorem_ratio(grid),
        "delta": delta,
        "law_error": float(0.5 * (share - law).abs().sum()),
        # Two independent samples of this size from one law differ by this much on average.
        "law_noise": float(0.5 * (2 * law * (1 - law) / (math.pi * len(first))).sqrt().sum()),
        "agreement": float((found.token == outcome.decoded.by("prediction")).double().mean()),
    }


def theorem_ratio(grid: Tensor) -> float:
    """max_k (t_{k+1} - t_k)/(1 - t_{k+1})^3 of a grid."""
    return float((grid.diff() / (1.0 - grid[1:]) ** 3).max())


def flow(bench: Bench, settings: Settings, point: dict[str, Any], label: str) -> Record:
    """The kind of point that the description names: where the flow of a toy ends."""
    toy, grid, steps, trajectories = point["toy"], point["delta"], point["steps"], bench.scale.toy_trajectories
    size = {"trajectories": trajectories, "vocabulary": VOCABULARY, "width": WIDTH}
    compute = partial(_run, toy, grid, steps, trajectories)
    record = bench.store.point("theorem1", {"toy": toy, "grid": grid, "steps": steps, **size}, compute, label=label)
    return {**record, "noise": (1.0 - record["values"]["last_t"]) * math.sqrt(2 * WIDTH)}


def _series(result: ExperimentResult, toy: str, grid: str) -> list[dict[str, Any]]:
    return [record["values"] for record in result.curve(f"{toy}, {grid}")]


def converges(result: ExperimentResult, toy: str) -> Judgement:
    """The flow of a toy arrives at embeddings on both grids."""
    found = []
    for grid in GRIDS:
        series = _series(result, toy, grid)
        first, last = series[0], series[-1]
        arrives = last["outside"] <= 0.02 if grid == "fixed" else last["outside"] < first["outside"]
        falls = last["distance_99"] < first["distance_99"]
        found.append((arrives and falls, grid, first, last))
    evidence = "; ".join(
        f"{GRIDS[grid]}: share farther than {RADIUS} from every embedding {first['outside']:.3f} -> "
        f"{last['outside']:.3f}, 99th percentile of the distance {first['distance_99']:.3g} -> "
        f"{last['distance_99']:.3g} at t_N = {last['last_t']:.4f}"
        for _, grid, first, last in found
    )
    return Judgement(decide(all(ok for ok, *_ in found), resolved=True), evidence)


def rate(result: ExperimentResult) -> Judgement:
    """What is left is sigma times a Gaussian: the normalised distance has the median of a chi variable over sqrt(d)."""
    last = _series(result, "prior", "fixed")[-1]
    return equal(
        exactly(last["normalised_median"]),
        exactly(float(chi.median(WIDTH)) / math.sqrt(WIDTH)),
        tolerance=0.1,
        what="median of ||x - alpha e||/(sigma sqrt d) against that of pure noise",
    )


def law(result: ExperimentResult) -> Judgement:
    """With the exact prior the tokens that the flow reaches follow that prior."""
    last = _series(result, "prior", "fixed")[-1]
    return below(
        exactly(last["law_error"]),
        exactly(3 * last["law_noise"]),
        what="total variation from the prior, against 3x noise",
    )


def counterexample_stays(result: ExperimentResult) -> Judgement:
    series = _series(result, "unconstrained", "fixed")
    last = measured(series[-1], "outside")
    ok = last.value - 2 * last.se > 0.5
    return Judgement(
        decide(ok, resolved=True),
        f"share that never arrives: {series[0]['outside']:.3f} at N = {result.records[0]['key']['steps']}, "
        f"{last.value:.3f} at the largest N",
    )


def condition(result: ExperimentResult) -> Judgement:
    worst = max(record["values"]["ratio"] / record["values"]["delta"] for record in result.records)
    return Judgement(decide(worst < 1.0, resolved=True), f"largest ratio / delta on all grids: {worst:.4f}")
