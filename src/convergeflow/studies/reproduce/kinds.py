"""The kinds of points that a description can ask for; each measures one point and gives its record.

`samples` are scored under one token rule; `agreement` compares the token rules on the same samples; `freezing` counts
the network calls that freezing saves and the tokens that it changes.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

from convergeflow.evaluation.estimate import mean
from convergeflow.sampling.settings import Freeze, Settings
from convergeflow.studies.reproduce.bench import Bench, seeds_of
from convergeflow.studies.reproduce.result import Record

FREEZING_TOKENS = 10_000
"""Tokens that freezing is tried on, at least."""


def samples(bench: Bench, settings: Settings, point: dict[str, Any], label: str) -> Record:
    """Gen. PPL and entropy of samples under one token rule, `weight` if the point names none."""
    return bench.measure(settings, label=label, rule=point.get("rule", "weight"))


def agreement(bench: Bench, settings: Settings, point: dict[str, Any], label: str) -> Record:
    """Share of positions at which rules agree, with its error over samples."""
    num = max(4, bench.scale.num_samples // 2)
    key = {"steps": point["steps"], "model": bench.model.weights, "n": num, "length": bench.scale.length}

    def compute() -> dict[str, Any]:
        ids, _ = bench.samples(bench.model, settings, num)
        values: dict[str, Any] = {}
        for rule in ("distance", "prediction"):
            each = mean((ids["weight"] == ids[rule]).mean(1))
            values[rule], values[f"{rule}_se"] = each.value, each.se
        return {**values, "positions": int(ids["weight"].size)}

    if not bench.store.has("agreement", key):
        bench.samples(bench.model, settings, num)  # not within the point, so that all processes share the parts
    return bench.store.point("agreement", key, compute, label=label)


def freezing(bench: Bench, settings: Settings, point: dict[str, Any], label: str) -> Record:
    """Share of calls saved, and of tokens that differ from the same seeds sampled without freezing."""
    criterion = Freeze(change=point["change"])
    settings = replace(settings, freeze=criterion)
    length = bench.scale.length
    num = bench.scale.num_samples if bench.scale.name == "test" else math.ceil(FREEZING_TOKENS / length)
    key = {"settings": settings.describe(), "model": bench.model.weights, "n": num}

    def compute() -> dict[str, Any]:
        plain, _ = bench.samples(bench.model, replace(settings, freeze=None), num)
        drawn = bench.load(bench.model).sample(num, length, seeds=seeds_of(num), settings=settings)
        changed = (drawn.ids.numpy() != plain["weight"]).sum()
        return {
            "saved": 1 - float(drawn.extras["calls"].double().mean()) / settings.nfe,
            "changed": float(changed) / drawn.ids.numel(),
            "changed_tokens": int(changed),
            "positions": drawn.ids.numel(),
        }

    named = criterion_name(asdict(criterion))
    record = bench.store.point("freezing", key, compute, label=f"{label}, {named}")
    return {**record, **asdict(criterion)}


def criterion_name(criterion: dict[str, Any]) -> str:
    refinement = f"change {criterion['change']:g}" if criterion["change"] else "all refinements"
    return f"weight {criterion['weight']:g} x {criterion['patience']}, {refinement}"
