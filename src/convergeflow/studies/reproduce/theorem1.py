"""Theorem 1: the flow of an embedding-weighted predictor ends at token embeddings, whatever its Lipschitz base weight.

Toys under the linear schedule on the theorem's grid, max (t_{k+1} - t_k)/(1 - t_{k+1})^3 < delta, with N steps: the
exact prior of one token, the exact context of two dependent tokens, and a base weight that is deliberately wrong. The
theorem fixes delta; its proof also uses delta^2 N = O(1), so the grid with delta = 1/sqrt(N) is run beside it. The
counterexample of Proposition 2 on the same grid shows what failing looks like.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from scipy.stats import chi
from torch import Tensor

from convergeflow.evaluation.estimate import mean
from convergeflow.flow.grid import THEOREM_DELTA, theorem_grid, theorem_ratio
from convergeflow.flow.schedule import Linear
from convergeflow.model.fused import nearest
from convergeflow.sampling.integration import integrate
from convergeflow.sampling.settings import Settings
from convergeflow.sampling.wrappers import Predictor
from convergeflow.studies.reproduce import plotting, toys
from convergeflow.studies.reproduce.bench import Bench
from convergeflow.studies.reproduce.result import ExperimentResult, Record
from convergeflow.studies.reproduce.verdict import Judgement, Verdict, below, decide, equal, exactly, measured

VOCABULARY, WIDTH = 8, 8
RADIUS = 0.5
"""A state farther than this from every embedding has not arrived; embeddings lie about 4 apart."""
TOYS = {
    "prior": "exact prior, one token",
    "context": "exact context, two tokens",
    "wrong": "deliberately wrong f",
    "unconstrained": "x/(α+σ), no embeddings (Prop. 2)",
}
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
    noise = toys.starting_noise(trajectories, length, WIDTH, seed=4)
    settings = Settings(nfe=len(grid), self_condition="none", grid=tuple(grid.tolist()), decode="prediction")
    outcome = integrate(predictor, settings, noise)
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


def measure(bench: Bench) -> tuple[list[Record], dict[str, Any]]:
    scale = bench.scale
    size = {"trajectories": scale.toy_trajectories, "vocabulary": VOCABULARY, "width": WIDTH}
    records = [
        bench.workspace.point(
            "theorem1",
            {"toy": name, "grid": grid, "steps": num_steps, **size},
            partial(_run, name, grid, num_steps, scale.toy_trajectories),
            label=f"flow of '{name}', {num_steps} steps, delta {grid}",
        )
        for grid, name, num_steps in itertools.product(GRIDS, TOYS, scale.toy_steps)
    ]
    return records, {}


def _series(result: ExperimentResult, toy: str, grid: str) -> list[dict[str, Any]]:
    chosen = [record for record in result.records if record["key"]["toy"] == toy and record["key"]["grid"] == grid]
    return sorted(chosen, key=lambda record: record["key"]["steps"])


def converges(result: ExperimentResult, toy: str) -> Judgement:
    """The flow of a toy arrives at embeddings on both grids."""
    found = []
    for grid in GRIDS:
        series = [record["values"] for record in _series(result, toy, grid)]
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
    last = _series(result, "prior", "fixed")[-1]["values"]
    return equal(
        exactly(last["normalised_median"]),
        exactly(float(chi.median(WIDTH)) / math.sqrt(WIDTH)),
        tolerance=0.1,
        what="median of ||x - alpha e||/(sigma sqrt d) against that of pure noise",
    )


def law(result: ExperimentResult) -> Judgement:
    """With the exact prior the tokens that the flow reaches follow that prior."""
    last = _series(result, "prior", "fixed")[-1]["values"]
    return below(
        exactly(last["law_error"]),
        exactly(3 * last["law_noise"]),
        what="total variation from the prior, against 3x noise",
    )


def counterexample_stays(result: ExperimentResult) -> Judgement:
    series = [record["values"] for record in _series(result, "unconstrained", "fixed")]
    last = measured(series[-1], "outside")
    ok = last.value - 2 * last.se > 0.5
    return Judgement(
        decide(ok, resolved=True),
        f"share that never arrives: {series[0]['outside']:.3f} at N = {result.records[0]['key']['steps']}, "
        f"{last.value:.3f} at the largest N",
    )


def condition(result: ExperimentResult) -> Judgement:
    worst = max(record["values"]["ratio"] / record["values"]["delta"] for record in result.records)
    return Judgement(
        Verdict.REPRODUCED if worst < 1.0 else Verdict.NOT_REPRODUCED,
        f"largest ratio / delta on all grids: {worst:.4f}",
    )


def draw(result: ExperimentResult) -> Figure:
    figure, axes = plotting.panels(3, width=4.6)
    for (toy, label), colour, marker in zip(TOYS.items(), plotting.COLOURS, "os^D", strict=False):
        for grid, line in (("fixed", "-"), ("shrinking", "--")):
            series = _series(result, toy, grid)
            steps = [record["key"]["steps"] for record in series]
            outside = [record["values"]["outside"] for record in series]
            axes[0].plot(
                steps, outside, linestyle=line, marker=marker, color=colour, label=label if grid == "fixed" else None
            )
            if grid == "fixed":
                middle = [record["values"]["distance_median"] for record in series]
                high = [record["values"]["distance_99"] for record in series]
                axes[1].loglog(steps, middle, marker=marker, color=colour)
                axes[1].fill_between(steps, middle, high, color=colour, alpha=0.15, linewidth=0)
    axes[0].set_ylim(-0.04, 1.04)
    axes[0].plot([], [], color="grey", linestyle="-", label=GRIDS["fixed"])
    axes[0].plot([], [], color="grey", linestyle="--", label=GRIDS["shrinking"])
    plotting.label_axes(
        axes[0], "steps N", f"share farther than {RADIUS} from all $e_j$", "Has the state arrived at an embedding?"
    )
    steps = [record["key"]["steps"] for record in _series(result, "prior", "fixed")]
    sigma = [1.0 - record["values"]["last_t"] for record in _series(result, "prior", "fixed")]
    axes[1].loglog(steps, [s * math.sqrt(2 * WIDTH) for s in sigma], color="black", linestyle=":", label="σ √(2d)")
    plotting.label_axes(axes[1], "steps N", "distance to the nearest $e_j$", "Median and 99th percentile (δ = 0.5)")
    axes[1].legend(loc="lower left")
    for panel in axes[:2]:
        plotting.count_axis(panel, steps)
    plotting.plain_logarithm(axes[1])
    handles, labels = axes[0].get_legend_handles_labels()
    axes[2].axis("off")
    axes[2].legend(handles, labels, loc="center left", fontsize=9.5, title="base weight f / predictor")
    return figure
