"""Proposition 2: a smooth predictor can be right in the limit on the corruption path and its flow miss every token.

mu(x, t) = x/(alpha + sigma) tends to x* on the path, yet its flow multiplies the starting noise by a constant. Run with
the package's sampler under two schedules; the probability of ending at distance 1 or more from every embedding is
compared with the paper's lower bound P(||z|| >= 1 + sqrt d), which is a chi tail.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from scipy.stats import chi

from convergeflow.evaluation.estimate import mean
from convergeflow.flow.grid import theorem_grid
from convergeflow.flow.path import sample_path
from convergeflow.flow.schedule import Cosine, Linear, Schedule
from convergeflow.model.fused import nearest
from convergeflow.sampling.integration import integrate
from convergeflow.sampling.settings import Settings
from convergeflow.studies.reproduce import drawing, plotting, toys
from convergeflow.studies.reproduce.bench import Bench
from convergeflow.studies.reproduce.result import ExperimentResult, Record
from convergeflow.studies.reproduce.verdict import Judgement, at_most, decide, measured

VOCABULARY, WIDTH = 16, 4
SCHEDULES: dict[str, Schedule] = {"linear": Linear(), "cosine": Cosine()}


def _run(schedule_name: str, num_steps: int, trajectories: int) -> dict[str, Any]:
    schedule = SCHEDULES[schedule_name]
    table = toys.random_table(VOCABULARY, WIDTH, seed=9)
    predictor = toys.ScaledStatePredictor(table, schedule)
    grid = theorem_grid(num_steps, 0.5)
    settings = Settings(nfe=len(grid), self_condition="none", grid=tuple(grid.tolist()), decode="prediction")
    noise = toys.starting_noise(trajectories, 1, WIDTH, seed=4)
    outcome = integrate(predictor, settings, noise)
    end = schedule(grid[-1])
    distance = nearest(outcome.x / end.alpha, table).distance
    far = mean((distance >= 1.0).double().flatten().numpy())
    # On the corruption path itself, at the same time, the same predictor is nearly right.
    generator = torch.Generator().manual_seed(num_steps)
    x_star = table[torch.randint(VOCABULARY, (trajectories, 1), generator=generator)]
    fresh = torch.randn(x_star.shape, generator=generator, dtype=torch.float64)
    path = sample_path(x_star, fresh, end.expand(trajectories))
    level = end.expand(trajectories)
    error = (predictor(path, level, None).weigh(path, level).mu - x_star).norm(dim=-1)
    return {
        "far": far.value,
        "far_se": far.se,
        "path_error": float(error.mean()),
        "last_t": float(grid[-1]),
        "lower_bound": float(chi.sf(1 + math.sqrt(WIDTH), WIDTH)),
    }


def measure(bench: Bench) -> tuple[list[Record], dict[str, Any]]:
    num = bench.scale.toy_trajectories
    records = [
        bench.workspace.point(
            "counterexample",
            {"schedule": name, "steps": num_steps, "trajectories": num, "width": WIDTH},
            partial(_run, name, num_steps, num),
            label=f"x/(alpha+sigma), {name} schedule, {num_steps} steps",
        )
        for name, num_steps in itertools.product(SCHEDULES, bench.scale.toy_steps)
    ]
    return [{**record, "steps": record["key"]["steps"]} for record in records], {}


def _series(result: ExperimentResult, schedule: str) -> list[dict[str, Any]]:
    return [record for record in result.records if record["key"]["schedule"] == schedule]


def accurate(result: ExperimentResult) -> Judgement:
    ends = [_series(result, name)[-1]["values"] for name in SCHEDULES]
    starts = [_series(result, name)[0]["values"] for name in SCHEDULES]
    falling = all(end["path_error"] < 0.5 * start["path_error"] for start, end in zip(starts, ends, strict=True))
    evidence = "; ".join(
        f"{name}: mean ||mu - x*|| {start['path_error']:.3g} -> {end['path_error']:.3g} (t = {end['last_t']:.4f})"
        for name, start, end in zip(SCHEDULES, starts, ends, strict=True)
    )
    return Judgement(decide(falling, resolved=True), evidence)


def constant_probability(result: ExperimentResult) -> Judgement:
    lowest = [min(measured(r["values"], "far").value for r in _series(result, name)) for name in SCHEDULES]
    bound = result.records[0]["values"]["lower_bound"]
    last = [measured(_series(result, name)[-1]["values"], "far") for name in SCHEDULES]
    holds = all(estimate.value - 2 * estimate.se >= bound for estimate in last)
    evidence = "; ".join(
        f"{name}: P(distance >= 1) = {estimate.value:.3f} ± {estimate.se:.2g} at the largest N, never below {low:.3f}"
        for name, estimate, low in zip(SCHEDULES, last, lowest, strict=True)
    )
    return Judgement(decide(holds, resolved=True), evidence, f"lower bound P(||z|| >= 1 + sqrt d) = {bound:.3f}")


def does_not_fall(result: ExperimentResult) -> Judgement:
    drops = []
    for name in SCHEDULES:
        series = _series(result, name)
        # "For all sufficiently large N": on the coarsest grids x/alpha is still far from its limit.
        drops.append(series[len(series) // 2]["values"]["far"] - series[-1]["values"]["far"])
    noise = max(2 * math.hypot(r["values"]["far_se"], r["values"]["far_se"]) for r in result.records)
    return at_most(max(drops), max(0.02, noise), what="fall of that probability from a medium to the largest N")


def draw(result: ExperimentResult) -> Figure:
    figure, axes = plotting.panels(2, width=5.2)
    for name, colour, marker in zip(SCHEDULES, plotting.COLOURS, "os", strict=False):
        series = _series(result, name)
        steps = [record["steps"] for record in series]
        drawing.series(axes[0], series, "steps", "far", marker=marker, color=colour, label=f"flow, {name} schedule")
        errors = [record["values"]["path_error"] for record in series]
        axes[1].loglog(steps, errors, marker=marker, color=colour, label=f"{name} schedule")
    bound = result.records[0]["values"]["lower_bound"]
    axes[0].axhline(bound, color="black", linestyle=":", label=f"paper's lower bound, {bound:.3f}")
    axes[0].set_ylim(0, 1.08)
    plotting.label_axes(
        axes[0], "steps N", r"P( $\min_j \Vert x/\alpha - e_j\Vert \geq 1$ )", "The flow misses every embedding ..."
    )
    axes[0].legend(loc="center right")
    plotting.label_axes(
        axes[1],
        "steps N (the last time tends to 1)",
        r"mean $\Vert \mu(x_t, t) - x_\star\Vert$",
        "... though μ is right in the limit on the path",
    )
    axes[1].legend()
    for panel in axes:
        plotting.count_axis(panel, [record["steps"] for record in _series(result, "linear")])
    plotting.plain_logarithm(axes[1])
    return figure
