"""Quality against network calls: a model, the same without training but with its calls spent better, and its student.

All points start from the same noises, so ratios of Gen. PPL are taken noise by noise. A target is met or missed only if
the number lies two standard errors away from it. How a sampler ends is looked at as well: the predictions that drive
its steps, which guidance may push out of the convex hull of the embeddings, and the state after a closing step with the
last of them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from convergeflow.evaluation.estimate import Estimate, mean
from convergeflow.evaluation.exact import exact_scores
from convergeflow.evaluation.metrics import pairwise_overlap
from convergeflow.flow.path import normalised_distance, spread
from convergeflow.flow.solver import step_data
from convergeflow.model.fused import nearest
from convergeflow.results.trace import percentile_band
from convergeflow.sampling.cohort import Step
from convergeflow.sampling.settings import Settings
from convergeflow.studies.reproduce import drawing, models, trade_off
from convergeflow.studies.reproduce.bench import Bench, seeds_of
from convergeflow.studies.reproduce.models import KeptModel
from convergeflow.studies.reproduce.result import ExperimentResult, Record
from convergeflow.studies.reproduce.verdict import Judgement, decide, measured, not_measured, show

STUDENT = "stories-swift"
OUTSIDE = 1.001
"""A prediction longer than this times sqrt(width) is certainly outside the hull, whose points are no longer than 1."""
PANELS = {
    "gen_ppl": "Gen. PPL",
    "stories": "whole stories valid",
    "slot_kl": "slot KL (nats per choice)",
    "overlap": "4-grams that two samples share",
}
Place = tuple[str, int]
"""A curve, and the number of network calls."""


def _model(bench: Bench, point: dict[str, Any]) -> KeptModel:
    return models.found(bench.store, STUDENT) if point["whose"] == "student" else bench.model


def budget(bench: Bench, settings: Settings, point: dict[str, Any], label: str) -> Record:
    """The kind of point that the description names: samples scored, with whole stories and variety beside."""
    kept, num = _model(bench, point), bench.scale.num_samples
    record = bench.measure(settings, kept=kept, label=label)
    key = {"settings": settings.describe(), "model": kept.weights, "n": num, "length": bench.scale.length}

    def compute() -> dict[str, Any]:
        ids = np.asarray(bench.samples(kept, settings, num)[0]["weight"], dtype=np.int64)
        whole = exact_scores(ids).metrics["valid_stories"]
        overlap = pairwise_overlap(ids, 4, bench.load(kept).config.vocabulary)
        found = {"stories": whole, "overlap": overlap}
        values = {name: estimate.value for name, estimate in found.items()}
        return {**values, **{f"{name}_se": estimate.se for name, estimate in found.items()}}

    beside = bench.store.point("calls", key, compute, label=f"{label}, whole stories")
    return {**record, "values": {**record["values"], **beside["values"]}}


def ending(bench: Bench, settings: Settings, point: dict[str, Any], label: str) -> Record:
    """The other kind: how far predictions leave the hull, and where the state ends."""
    kept, num = _model(bench, point), bench.scale.trace_sequences
    key = {"settings": settings.describe(), "model": kept.weights, "n": num, "ends": True}

    def compute() -> dict[str, Any]:
        model = bench.load(kept)
        steps: list[Step] = []
        model.sample(num, bench.scale.length, seeds=seeds_of(num), settings=settings, observe=steps.append, batch=num)
        return _ends(steps, model.schedule(torch.ones((), dtype=torch.float64)))

    return bench.store.point("endings", key, compute, label=label)


def _ends(steps: list[Step], end: Any) -> dict[str, Any]:
    """Norms of the driving predictions over sqrt(width), and normalised distances after a closing step to `end`."""
    width = steps[0].mu.shape[-1]
    norms = torch.stack([step.mu.norm(dim=-1) for step in steps]) / math.sqrt(width)
    last = steps[-1]
    x = step_data(last.x_t, last.mu, last.at, end.expand(len(last.x_t)))
    scale = spread(end.alpha.expand(len(x)), x)[..., 0].expand(x.shape[:-1])
    found = nearest(x, last.table, scale=scale, second=True)
    assert found.second_distance is not None

    def band(distance: Tensor) -> dict[str, float]:
        return vars(percentile_band(normalised_distance(distance, end.expand(len(x)), width)))

    return {
        "outside": float((norms > OUTSIDE).double().mean()),
        "longest": float(norms.max()),
        "nearest": band(found.distance),
        "second": band(found.second_distance),
        "positions": int(norms[0].numel()),
    }


def draw(result: ExperimentResult) -> Figure:
    """Quality, whole stories and variety over the number of calls."""
    shown = replace(result, records=[record for record in result.records if "gen_ppl" in record["values"]])
    panels = [
        {
            "title": f"{title} ({{scale}})",
            "over": "nfe",
            "x": "network calls",
            "y": title,
            "counts": True,
            "log": number == "gen_ppl",
            "lines": [{"curve": name, "number": number, "label": name} for name in shown.curves()],
        }
        for number, title in PANELS.items()
    ]
    return drawing.lines(shown, panels, width=4.4)


# ---------------------------------------------------------------------------------------------------------- judges


def _at(result: ExperimentResult, place: Place) -> Record | None:
    curve, calls = place
    return next((record for record in result.curve(curve) if record["nfe"] == calls), None)


def _ratio(
    result: ExperimentResult, left: Place, right: Place, number: str, times: float, what: str, *, most: bool
) -> Judgement:
    """A number of one point is at most, or at least, so many times that of another; Gen. PPL noise by noise."""
    records = [_at(result, tuple(place)) for place in (left, right)]  # type: ignore[arg-type]
    one, other = records
    if one is None or other is None:
        return not_measured("not measured at this scale")
    values = [measured(record["values"], number) for record in (one, other)]
    ratio = trade_off.paired_ratio([one], [other]) if number == "gen_ppl" else None
    if ratio is None:
        value = values[0].value / values[1].value
        ratio = Estimate(value, value * math.hypot(*(each.se / each.value for each in values)), 0)
    met = ratio.value <= times if most else ratio.value >= times
    bound = f"{'at most' if most else 'at least'} {times:g}"
    evidence = f"{what}: {show(values[0])} against {show(values[1])}, ratio {show(ratio)} ({bound})"
    return Judgement(decide(met, resolved=abs(ratio.value - times) > 2 * ratio.se), evidence)


ratio_at_most, ratio_at_least = partial(_ratio, most=True), partial(_ratio, most=False)


def same_entropy(result: ExperimentResult, left: Place, right: Place, within: float, what: str) -> Judgement:
    """The entropies of two points differ by at most so many nats; compared noise by noise."""
    records = [_at(result, tuple(place)) for place in (left, right)]  # type: ignore[arg-type]
    if any(record is None for record in records):
        return not_measured("not measured at this scale")
    each = [np.array(record["values"]["per_sample"]["entropy"]) for record in records if record is not None]
    apart = mean(each[0] - each[1])
    evidence = f"{what}: apart by {show(apart)} nats (at most {within:g})"
    resolved = abs(abs(apart.value) - within) > 2 * apart.se
    return Judgement(decide(abs(apart.value) <= within, resolved=resolved), evidence)


def hull(result: ExperimentResult, teacher: str, student: str) -> Judgement:
    """The teacher's guided predictions leave the hull of the embeddings, the student's do not."""
    found = [next((record["values"] for record in result.curve(name)), None) for name in (teacher, student)]
    guided, weighted = found
    if guided is None or weighted is None:
        return not_measured("not measured at this scale")
    evidence = (
        f"predictions longer than an embedding: model {guided['outside']:.1%} (longest {guided['longest']:.2f} times), "
        f"student {weighted['outside']:.1%} (longest {weighted['longest']:.4f} times)"
    )
    return Judgement(decide(guided["outside"] > 0 and weighted["outside"] == 0, resolved=True), evidence)


def nearer(result: ExperimentResult, student: str, teacher: str) -> Judgement:
    """After a closing step the student's states are as near to one embedding as noise is, or nearer than the teacher's.

    The rule: the 99th percentile of the nearest normalised distance is at most the teacher's, and below the second's
    1st percentile.
    """
    found = [next((record["values"] for record in result.curve(name)), None) for name in (student, teacher)]
    here, there = found
    if here is None or there is None:
        return not_measured("not measured at this scale")
    evidence = ", ".join(
        f"{name}: nearest {v['nearest']['low']:.3f} to {v['nearest']['high']:.3f}, second from {v['second']['low']:.3f}"
        for name, v in (("student", here), ("teacher", there))
    )
    met = here["nearest"]["high"] <= there["nearest"]["high"] and here["nearest"]["high"] < here["second"]["low"]
    return Judgement(decide(met, resolved=True), evidence)
