"""Does the flow reach embeddings? Weighted against direct predictor from random init, with one fixed table (Figure 2).

Both models share network, table, data and objective and differ in their output alone. A linear schedule is used: at the
end of LangFlow's clamped one the nearest and second-nearest distances are still close. Training stops at log-SNR 7, as
the loss weight has no bound beyond; distances are followed to log-SNR 6.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.stats import chi

from convergeflow.flow.schedule import Linear
from convergeflow.results import figures
from convergeflow.results.trace import Trace, percentile_band
from convergeflow.sampling.settings import Settings
from convergeflow.studies.reproduce import engine, models
from convergeflow.studies.reproduce.bench import Bench, seeds_of
from convergeflow.studies.reproduce.registry import Experiment
from convergeflow.studies.reproduce.result import ExperimentResult, Record
from convergeflow.studies.reproduce.verdict import Judgement, decide, equal, exactly

TRAINED_TO, FOLLOWED_TO, POINTS = 7.0, 6.0, 48
PREDICTORS = {"weighted": "embedding-weighted", "direct": "unconstrained direct"}


def _grid() -> tuple[float, ...]:
    """Midpoints in time to log-SNR 2, then evenly spaced in log-SNR, where the two predictors part."""
    start = Linear().time_at(2.0)
    early = (torch.arange(POINTS // 2, dtype=torch.float64) + 0.5) / (POINTS // 2) * start
    late = Linear().time_at(torch.linspace(2.0, FOLLOWED_TO, POINTS - POINTS // 2 + 1, dtype=torch.float64)[1:])
    return tuple(torch.cat([early, late]).tolist())


def distances(bench: Bench, settings: Settings, point: dict[str, Any], label: str) -> Record:
    """The kind of point that the description names: distances along the flow of one predictor, trained for it."""
    scale, predictor = bench.scale, point["predictor"]
    kept = models.scratch_model(bench.store, scale, predictor, bench.start, TRAINED_TO)
    key = {"predictor": predictor, "model": kept.weights, "sequences": scale.trace_sequences, "points": POINTS}
    return bench.store.point("convergence", key, partial(_follow, bench, kept), label=label)


def train(bench: Bench) -> None:
    """The models of both predictors."""
    for predictor in PREDICTORS:
        models.scratch_model(bench.store, bench.scale, predictor, bench.start, TRAINED_TO)


def _follow(bench: Bench, kept: models.KeptModel) -> dict[str, Any]:
    model, trace, grid, num = bench.load(kept), Trace(), _grid(), bench.scale.trace_sequences
    settings = Settings(nfe=len(grid), self_condition="previous", grid=grid, decode="prediction")
    model.sample(num, bench.scale.length, seeds=seeds_of(num), settings=settings, observe=trace)
    arrays = trace.arrays()
    bands = {
        name: [vars(percentile_band(torch.as_tensor(values))) for values in arrays[name]]
        for name in ("nearest", "second")
    }
    return {
        "log_snr": [round(value, 4) for value in trace.log_snr],
        **bands,
        "width": int(model.config.width),
        "positions": int(np.prod(arrays["nearest"].shape[1:])),
    }


def _ends(result: ExperimentResult, predictor: str) -> tuple[dict[str, float], dict[str, float]]:
    """The bands of the nearest and of the second-nearest distance at the end of the flow."""
    values = result.values_of(predictor=predictor)
    return values["nearest"][-1], values["second"][-1]


def _noise_band(width: int) -> tuple[float, float]:
    """1st and 99th percentile of ||z||/sqrt d: what the nearest distance of a converged state looks like."""
    low, high = chi.ppf([0.01, 0.99], width) / math.sqrt(width)
    return float(low), float(high)


def approaches_one(result: ExperimentResult) -> Judgement:
    values = result.values_of(predictor="weighted")
    return equal(
        exactly(values["nearest"][-1]["middle"]),
        exactly(0.5 * sum(_noise_band(values["width"]))),
        tolerance=0.05,
        what=f"middle of the nearest distance's 1-99 % band at log-SNR {values['log_snr'][-1]:g} against pure noise",
        paper="approaches one",
    )


def concentrated(result: ExperimentResult) -> Judgement:
    low, high = _noise_band(result.values_of(predictor="weighted")["width"])
    nearest = [_ends(result, predictor)[0] for predictor in PREDICTORS]
    width, other = (band["high"] - band["low"] for band in nearest)
    return Judgement(
        decide(width <= 1.25 * (high - low) and other > 1.02 * width, resolved=True),
        f"1-99 % band of the nearest distance at the end: weighted {width:.3f}, direct {other:.3f}, "
        f"pure noise {high - low:.3f}",
        "tightly concentrated against substantially greater variation",
    )


def separated(result: ExperimentResult, predictor: str, clearly: bool, paper: str) -> Judgement:
    """The bands of the nearest and the second-nearest distance are apart at the end of the flow, or they are not."""
    nearest, second = _ends(result, predictor)
    apart = second["low"] / nearest["high"]
    return Judgement(
        decide((apart > 1.02) == clearly, resolved=True),
        f"second-nearest (1st percentile) over nearest (99th) at the end of the flow, {predictor}: {apart:.2f} "
        "(above 1 the bands do not touch)",
        paper,
    )


def direct_grows(result: ExperimentResult) -> Judgement:
    weighted, direct = (_ends(result, predictor)[0]["middle"] for predictor in PREDICTORS)
    return Judgement(
        decide(direct > 1.02 * weighted, resolved=True),
        f"nearest distance at the end: direct {direct:.3f}, weighted {weighted:.3f}",
        "both distances of the direct predictor increase",
    )


def alike_in_noise(result: ExperimentResult) -> Judgement:
    found = [record["values"] for record in result.records]
    worst = max(values["second"][0]["middle"] / values["nearest"][0]["middle"] - 1 for values in found)
    return Judgement(
        decide(worst < 0.05, resolved=True),
        f"second over nearest minus one at the first grid point: {worst:.3f}",
        "nearly indistinguishable",
    )


def measure(experiment: Experiment, bench: Bench) -> tuple[list[Record], dict[str, Any]]:
    """The points, and the rows of the table: both distances at a few noise levels."""
    records, _ = engine.measure(experiment, bench)
    rows = []
    for record in records:
        values = record["values"]
        for level in (0.0, 2.0, 4.0, FOLLOWED_TO):
            index = int(np.argmin([abs(found - level) for found in values["log_snr"]]))
            row = {"predictor": record["predictor"], "log_snr": values["log_snr"][index]}
            rows.append({**row, "nearest": values["nearest"][index], "second": values["second"][index]})
    return records, {"levels": rows}


def draw(result: ExperimentResult) -> Figure:
    figure, axes = figures.panels(2, width=5.2)
    top = max(band["high"] for record in result.records for band in record["values"]["second"])
    for panel, (predictor, title) in zip(axes, PREDICTORS.items(), strict=True):
        values = result.values_of(predictor=predictor)
        bands = {
            name: tuple([band[end] for band in values[name]] for end in ("low", "high"))
            for name in ("nearest", "second")
        }
        figures.draw_distances(panel, values["log_snr"], bands)
        panel.set_title(f"{title} predictor ({result.scale})")
        panel.set_yscale("log")
        panel.set_ylim(0.3, 1.3 * top)
        panel.set_xlim(-8.3, FOLLOWED_TO + 0.3)
    return figure
