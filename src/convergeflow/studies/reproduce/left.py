"""What is left to do in a folder, and how long it takes on this machine as busy as it is now.

The descriptions of experiments have costs that were measured on two CPU cores. What a folder holds already costs
nothing, and a short trial says how much faster or slower than planned this machine makes samples.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from convergeflow.errors import UserError
from convergeflow.results.store import Missing, Store
from convergeflow.studies.reproduce import cost, engine, models
from convergeflow.studies.reproduce.registry import Experiment, experiment_by_name
from convergeflow.studies.reproduce.scale import ExperimentScale

TRIAL, TRIAL_CALLS = 16, 6
"""Samples and network calls of the trial."""
MEASURED_ON = "controls"
"""The experiment whose cost is that of network calls alone: by its plan a call took so and so long."""


@dataclass(frozen=True)
class Left:
    """What an experiment still takes."""

    name: str
    points: int
    missing: int
    """Points that are not kept; all of them where one missing model hides which."""
    seconds: float


def left(experiments: Sequence[Experiment], store: Store, scale: ExperimentScale) -> list[Left]:
    """What the experiments still take; at the paper's scale on one A100, else here and now."""
    kept = (store.folder / "records").is_dir()
    found = []
    for experiment in experiments:
        points = experiment.cost[scale.like].points
        # Plans were measured with exact scores; with a scorer the cost is a sum.
        planned = scale.scorer == "exact" or scale.name == "paper"
        seconds = experiment.cost[scale.like].seconds if planned else cost.work(experiment, scale).seconds
        missing = min(points, _missing(experiment, store, scale)) if kept else points
        found.append(Left(experiment.name, points, missing, seconds * missing / max(1, points)))
    if scale.scorer != "exact" or not any(each.seconds for each in found):
        return found
    slower = _slower(store, scale)
    return [replace(each, seconds=each.seconds * slower) for each in found]


def _missing(experiment: Experiment, store: Store, scale: ExperimentScale) -> int:
    """Points of an experiment that the folder does not hold."""
    reader = Store(store.folder, measuring=False)
    if "missing" not in experiment.run(reader, scale).values:
        return 0
    return reader.lacking or experiment.cost[scale.like].points


def _slower(store: Store, scale: ExperimentScale) -> float:
    """The time of a network call over what the plan assumes; 1 where the model to try is not trained yet."""
    try:
        model = models.sampled_model(Store(store.folder, measuring=False), scale).load()
    except (UserError, Missing):
        return 1.0
    began = time.perf_counter()
    drawn = model.sample(TRIAL, scale.length, seeds=range(TRIAL), nfe=TRIAL_CALLS)
    here = (time.perf_counter() - began) / (TRIAL * drawn.nfe)
    plan = experiment_by_name(MEASURED_ON)
    calls = sum(point["nfe"] for family in plan.points for point in engine.expand(family, scale))
    return here * calls * scale.num_samples / plan.cost[scale.like].seconds
