"""Theorem 1: the flow of an embedding-weighted predictor ends at token embeddings, whatever its Lipschitz base weight.

Toys under the linear schedule on the theorem's grid, max (t_{k+1} - t_k)/(1 - t_{k+1})^3 < delta, with N steps: the
exact prior of one token, the exact context of two dependent tokens, and a base weight that is deliberately wrong. The
theorem fixes delta; its proof also uses delta^2 N = O(1), so the grid with delta = 1/sqrt(N) is run beside it. The
counterexample of Proposition 2 on the same grid shows what failing looks like.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
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
from convergeflow.studies.reproduce.registry import Claim, Cost, Experiment, Result
from convergeflow.studies.reproduce.scale import Scale
from convergeflow.studies.reproduce.verdict import Judgement, Verdict, below, decide, equal, exactly, measured
from convergeflow.studies.reproduce.workspace import Workspace

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


def measure(workspace: Workspace, scale: Scale) -> Result:
    records = []
    for grid_name in GRIDS:
        for name in TOYS:
            for num_steps in scale.toy_steps:
                key = {
                    "toy": name,
                    "grid": grid_name,
                    "steps": num_steps,
                    "trajectories": scale.toy_trajectories,
                    "vocabulary": VOCABULARY,
                    "width": WIDTH,
                }
                records.append(
                    workspace.point(
                        "theorem1",
                        key,
                        lambda name=name, grid_name=grid_name, num_steps=num_steps: _run(  # type: ignore[misc]
                            name, grid_name, num_steps, scale.toy_trajectories
                        ),
                        label=f"flow of '{name}', {num_steps} steps, delta {grid_name}",
                    )
                )
    return Result("theorem1", scale.name, records)


def _series(result: Result, toy: str, grid: str) -> list[dict[str, Any]]:
    chosen = [record for record in result.records if record["key"]["toy"] == toy and record["key"]["grid"] == grid]
    return sorted(chosen, key=lambda record: record["key"]["steps"])


def _converges(toy: str) -> Any:
    def judge(result: Result) -> Judgement:
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

    return judge


def _rate(result: Result) -> Judgement:
    """What is left is sigma times a Gaussian: the normalised distance has the median of a chi variable over sqrt(d)."""
    last = _series(result, "prior", "fixed")[-1]["values"]
    return equal(
        exactly(last["normalised_median"]),
        exactly(float(chi.median(WIDTH)) / math.sqrt(WIDTH)),
        tolerance=0.1,
        what="median of ||x - alpha e||/(sigma sqrt d) against that of pure noise",
    )


def _law(result: Result) -> Judgement:
    """With the exact prior the tokens that the flow reaches follow that prior."""
    last = _series(result, "prior", "fixed")[-1]["values"]
    return below(
        exactly(last["law_error"]),
        exactly(3 * last["law_noise"]),
        what="total variation from the prior, against 3x noise",
    )


def _counterexample_stays(result: Result) -> Judgement:
    series = [record["values"] for record in _series(result, "unconstrained", "fixed")]
    last = measured(series[-1], "outside")
    ok = last.value - 2 * last.se > 0.5
    return Judgement(
        decide(ok, resolved=True),
        f"share that never arrives: {series[0]['outside']:.3f} at N = {result.records[0]['key']['steps']}, "
        f"{last.value:.3f} at the largest N",
    )


def _condition(result: Result) -> Judgement:
    worst = max(record["values"]["ratio"] / record["values"]["delta"] for record in result.records)
    return Judgement(
        Verdict.REPRODUCED if worst < 1.0 else Verdict.NOT_REPRODUCED,
        f"largest ratio / delta on all grids: {worst:.4f}",
    )


def draw(result: Result, folder: Path) -> list[Path]:
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
    return plotting.save(figure, folder, "theorem1")


def _claim(name: str, statement: str, judge: Any) -> Claim:
    return Claim(name, statement, "Theorem 1", judge)


EXPERIMENT = Experiment(
    name="theorem1",
    reference="Theorem 1",
    question="Does the flow end at token embeddings, even when the base weight f is wrong?",
    claims=(
        _claim("grid", "the grids satisfy the theorem's condition", _condition),
        _claim("exact-prior", "x at t_N tends to an embedding: one token with its exact prior", _converges("prior")),
        _claim("exact-context", "the same for two dependent tokens with their exact context", _converges("context")),
        _claim(
            "wrong-f",
            "the same for a wrong but Lipschitz f: errors of the predictor do not matter",
            _converges("wrong"),
        ),
        Claim(
            "rate",
            "the normalised distance to the nearest embedding tends to that of noise, about one",
            "Theorem 1, Figure 2a",
            _rate,
        ),
        _claim("law", "with the exact prior, tokens are reached with their prior probabilities", _law),
        Claim(
            "contrast",
            "an unconstrained predictor on the same grid does not arrive",
            "Theorem 1 against Proposition 2",
            _counterexample_stays,
        ),
    ),
    cost={"test": Cost(24, 6), "embedded": Cost(40, 240), "paper": Cost(56, 3600)},
    measure=measure,
    draw_figures=draw,
)
