"""Proposition 3: where the prediction tends to an embedding, the weights tend to one-hot.

Its proof gives 1 - max w <= (1 - ||mu||^2/||e||^2)/rho for embeddings of equal norm whose cosines are at most 1 - rho.
The bound is checked on random weights and along a flow of the package's sampler; two equal embeddings (rho = 0) show
why the separation is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from convergeflow.flow.grid import theorem_grid
from convergeflow.flow.schedule import Linear
from convergeflow.results import figures
from convergeflow.sampling.cohort import Step
from convergeflow.sampling.settings import Settings
from convergeflow.studies.reproduce import toys
from convergeflow.studies.reproduce.bench import Bench
from convergeflow.studies.reproduce.result import ExperimentResult, Record
from convergeflow.studies.reproduce.verdict import Judgement, at_least, at_most, decide

VOCABULARY, WIDTH, SHOWN = 12, 16, 300


def _separation(table: Tensor) -> float:
    """rho: one minus the largest absolute cosine of two rows."""
    directions = table / table.norm(dim=-1, keepdim=True)
    cosines = (directions @ directions.T).abs()
    cosines.fill_diagonal_(0.0)
    return 1.0 - float(cosines.max())


def _gap(mu: Tensor) -> Tensor:
    """1 - ||mu||^2/||e||^2."""
    return 1.0 - mu.square().sum(-1) / WIDTH


def _on_random_weights(num: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(21)
    table = toys.random_table(VOCABULARY, WIDTH, seed=13)
    # From flat to peaked: the concentration of the weights runs over ten orders of magnitude.
    sharpness = 10 ** (3.5 * torch.rand(num, 1, generator=generator, dtype=torch.float64) - 1.0)
    w = (sharpness * torch.randn(num, VOCABULARY, generator=generator, dtype=torch.float64)).softmax(-1)
    gap, rest = _gap(w @ table), 1.0 - w.max(-1).values
    rho = _separation(table)
    keep = gap > 1e-12  # below, rounding of ||mu||^2 is all there is
    return {
        "rho": rho,
        "worst_ratio": float((rho * rest[keep] / gap[keep]).max()),
        "gap": gap[keep][:SHOWN].tolist(),
        "rest": rest[keep][:SHOWN].tolist(),
    }


def _along_flow(trajectories: int, num_steps: int) -> dict[str, Any]:
    table = toys.random_table(VOCABULARY, WIDTH, seed=13)
    predictor = toys.ToyPredictor(table, Linear(), toys.wrong_base(VOCABULARY, WIDTH, seed=17))
    steps: list[tuple[float, Tensor, Tensor]] = []

    def observe(step: Step) -> None:
        assert step.last.top_weight is not None
        steps.append((step.t, _gap(step.mu).flatten(), 1.0 - step.last.top_weight.flatten()))

    grid = theorem_grid(num_steps, 0.5)[1:]
    noise = toys.starting_noise(trajectories, 1, WIDTH, seed=2)
    outcome = toys.flow(predictor, grid, noise, decode="weight", observe=observe)
    # The weights decide early: geometric spacing shows it.
    shown = sorted({round(value) for value in torch.logspace(0, math.log10(len(steps)), 24).tolist()})
    picked = [steps[index - 1] for index in shown]
    rho = _separation(table)
    worst = max(
        float((rho * rest[gap > 1e-12] / gap[gap > 1e-12]).max()) for _, gap, rest in steps if (gap > 1e-12).any()
    )
    return {
        "rho": rho,
        "worst_ratio": worst,
        "t": [t for t, _, _ in picked],
        "rest_median": [float(rest.median()) for _, _, rest in picked],
        "rest_99": [float(rest.quantile(0.99)) for _, _, rest in picked],
        "end_rest_99": float(steps[-1][2].quantile(0.99)),
        "agreement": outcome.decoded.agreements()["weight=prediction"],
    }


def _twins() -> dict[str, Any]:
    """Two equal embeddings: mu is an embedding exactly, the weights stay at one half each."""
    table = toys.random_table(VOCABULARY, WIDTH, seed=13)
    table[1] = table[0]
    w = torch.zeros(VOCABULARY, dtype=torch.float64)
    w[:2] = 0.5
    return {"rho": _separation(table), "distance": float((w @ table - table[0]).norm()), "top_weight": float(w.max())}


def part(bench: Bench, settings: Settings, point: dict[str, Any], label: str) -> Record:
    """The kind of point that the description names: one of the three parts."""
    trajectories, steps = bench.scale.toy_trajectories, min(4096, max(bench.scale.toy_steps))
    parts: dict[str, tuple[Callable[..., dict[str, Any]], dict[str, int]]] = {
        "weights": (_on_random_weights, {"num": 20 * trajectories}),
        "flow": (_along_flow, {"trajectories": trajectories, "steps": steps}),
        "twins": (_twins, {}),
    }
    compute, size = parts[point["part"]]
    key = {"part": point["part"], **size, "vocabulary": VOCABULARY, "width": WIDTH}
    return bench.store.point("proposition3", key, partial(compute, *size.values()), label=label)


def one_hot(result: ExperimentResult) -> Judgement:
    flow = result.values_of(part="flow")
    judgement = at_most(flow["end_rest_99"], 0.02, what="99th percentile of 1 - max w at the end of the flow")
    also = f"{judgement.evidence}; the weight and prediction rules agree at {flow['agreement']:.2%} of positions"
    return Judgement(decide(flow["end_rest_99"] <= 0.02 and flow["agreement"] >= 0.98, resolved=True), also)


def separation_needed(result: ExperimentResult) -> Judgement:
    twins = result.values_of(part="twins")
    return at_least(
        1.0 - twins["top_weight"],
        0.02,
        what=f"1 - max w with two equal embeddings, ||mu - e|| = {twins['distance']:.1g}",
    )


def draw(result: ExperimentResult) -> Figure:
    figure, (left, right) = figures.panels(2, width=5.2)
    weights, flow = result.values_of(part="weights"), result.values_of(part="flow")
    left.loglog(weights["gap"], weights["rest"], ".", color=figures.COLOURS[0], markersize=3, label="random weights")
    ends = [1e-12, 1.0]
    left.loglog(ends, [end / weights["rho"] for end in ends], color="black", linestyle=":", label="bound of the proof")
    left.set_xlim(1e-12, 2)
    left.set_ylim(1e-13, 30)
    title = f"All points lie below the bound (ρ = {weights['rho']:.2f})"
    figures.label_axes(left, r"$1 - \Vert\mu\Vert^2 / \Vert e\Vert^2$", r"$1 - \max_j w_j$", title)
    left.legend(loc="lower right")
    log_snr = [2 * math.log(t / (1.0 - t)) for t in flow["t"]]
    for name, label, marker in (("rest_median", "median", "o"), ("rest_99", "99th percentile", "s")):
        # Below the rounding of 1 - w there is nothing to see.
        visible = [(x, y) for x, y in zip(log_snr, flow[name], strict=True) if y > 1e-16]
        right.semilogy(*zip(*visible, strict=True), marker=marker, label=label)
    right.axhline(1e-16, color="grey", linestyle=":", linewidth=1, label="one-hot to rounding")
    right.set_xlim(log_snr[0] - 0.3, log_snr[-1] + 0.3)
    title = "Weights become one-hot along the flow"
    figures.label_axes(right, "log-SNR along the flow (nats)", r"$1 - \max_j w_j$", title)
    right.legend()
    return figure
