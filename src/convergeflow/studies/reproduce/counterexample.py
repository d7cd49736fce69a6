"""Proposition 2: a smooth predictor can be right in the limit on the corruption path and its flow miss every token.

mu(x, t) = x/(alpha + sigma) tends to x* on the path, yet its flow multiplies the starting noise by a constant. Run with
the package's sampler under two schedules; the probability of ending at distance 1 or more from every embedding is
compared with the paper's lower bound P(||z|| >= 1 + sqrt d), which is a chi tail.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from scipy.stats import chi

from convergeflow.evaluation.estimate import mean
from convergeflow.flow.grid import theorem_grid
from convergeflow.flow.path import sample_path
from convergeflow.flow.schedule import Cosine, Linear, Schedule
from convergeflow.model.fused import nearest
from convergeflow.sampling.settings import Settings
from convergeflow.studies.reproduce import toys
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
    outcome = toys.flow(predictor, grid, toys.starting_noise(trajectories, 1, WIDTH, seed=4))
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


def flow(bench: Bench, settings: Settings, point: dict[str, Any], label: str) -> Record:
    """The kind of point that the description names: where the flow ends under one schedule."""
    name, steps, num = point["schedule"], point["steps"], bench.scale.toy_trajectories
    key = {"schedule": name, "steps": steps, "trajectories": num, "width": WIDTH}
    return bench.store.point("counterexample", key, partial(_run, name, steps, num), label=label)


def accurate(result: ExperimentResult) -> Judgement:
    ends = [result.curve(name)[-1]["values"] for name in SCHEDULES]
    starts = [result.curve(name)[0]["values"] for name in SCHEDULES]
    falling = all(end["path_error"] < 0.5 * start["path_error"] for start, end in zip(starts, ends, strict=True))
    evidence = "; ".join(
        f"{name}: mean ||mu - x*|| {start['path_error']:.3g} -> {end['path_error']:.3g} (t = {end['last_t']:.4f})"
        for name, start, end in zip(SCHEDULES, starts, ends, strict=True)
    )
    return Judgement(decide(falling, resolved=True), evidence)


def constant_probability(result: ExperimentResult) -> Judgement:
    lowest = [min(measured(r["values"], "far").value for r in result.curve(name)) for name in SCHEDULES]
    bound = result.records[0]["values"]["lower_bound"]
    last = [measured(result.curve(name)[-1]["values"], "far") for name in SCHEDULES]
    holds = all(estimate.value - 2 * estimate.se >= bound for estimate in last)
    evidence = "; ".join(
        f"{name}: P(distance >= 1) = {estimate.value:.3f} ± {estimate.se:.2g} at the largest N, never below {low:.3f}"
        for name, estimate, low in zip(SCHEDULES, last, lowest, strict=True)
    )
    return Judgement(decide(holds, resolved=True), evidence, f"lower bound P(||z|| >= 1 + sqrt d) = {bound:.3f}")


def does_not_fall(result: ExperimentResult) -> Judgement:
    drops = []
    for name in SCHEDULES:
        series = result.curve(name)
        # "For all sufficiently large N": on the coarsest grids x/alpha is still far from its limit.
        drops.append(series[len(series) // 2]["values"]["far"] - series[-1]["values"]["far"])
    noise = max(2 * math.hypot(r["values"]["far_se"], r["values"]["far_se"]) for r in result.records)
    return at_most(max(drops), max(0.02, noise), what="fall of that probability from a medium to the largest N")
