"""The best use of a few network calls, without training: how many steps, how much refinement, guidance and heat, where.

A budget of calls can go into steps or into refinements, with more or less guidance, at a higher or lower temperature,
by either of two solvers, at grid points of many kinds. `search` tries the ways in turn on held-out noises, each from
the best found before, and keeps what has the lowest Gen. PPL at the entropy of a reference: the same preset with all
its calls. `fit_grid` moves the grid points until trajectories end where those of the reference end, noise by noise.
Whatever is not better than the preset itself is not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from convergeflow.evaluation.generative import paired_ratio
from convergeflow.evaluation.scorers import Advance, silent
from convergeflow.flow.grid import midpoint_grid
from convergeflow.flow.guidance import Controls
from convergeflow.results.draw import Measurer
from convergeflow.results.record import Record
from convergeflow.sampling.cohort import Step
from convergeflow.sampling.settings import Settings
from convergeflow.systems.convergeflow import ConvergeFlowModel

ENTROPY = 0.02
"""Nats by which the entropy of samples may differ from the reference's."""
STRENGTHS = (0.4, 0.6, 1.6)
"""Guidance is tried at these multiples of the preset's."""
HEATS = (0.7, 1.4)
"""And temperature at these."""
WARPS = (0.3, 0.15)
"""Steps of the search for a grid, in the logarithms of its two exponents."""


@dataclass(frozen=True)
class Tried:
    """Settings, what was measured with them, and the file of the record."""

    settings: Settings
    record: Record
    file: str

    def row(self) -> dict[str, Any]:
        """A line of the table."""
        chosen, record = self.settings, self.record
        recursive = chosen.self_condition == "recursive"
        return {
            "condition": chosen.self_condition,
            "steps": record["sampling"]["plan"]["num_steps"],
            "refine": chosen.controls.refine if recursive else None,
            "scg": chosen.controls.scg if recursive else None,
            "temperature": chosen.temperature,
            "solver": chosen.solver,
            "grid": chosen.grid if isinstance(chosen.grid, str) else "fitted",
            **{name: record[name] for name in ("gen_ppl", "gen_ppl_se", "entropy", "nfe")},
            "record": self.file,
        }


def splits(base: Settings, calls: int) -> Iterator[Settings]:
    """Every way to spend the calls on steps and refinements, by both solvers; the preset's own way is one of them."""
    yield replace(base, nfe=calls)
    most = min(8, calls // 2 - 1)
    refinements = [each for each in (1, 2, 3, 5, 7) if each <= most]
    for solver in ("euler", "multistep"):
        yield replace(base, nfe=calls, controls=Controls(), self_condition="previous", solver=solver)
        for each in refinements:
            controls = replace(base.controls, refine=each, refine_schedule="A")
            yield replace(base, nfe=calls, controls=controls, self_condition="recursive", solver=solver)


def strengths(best: Settings, base: Settings) -> Iterator[Settings]:
    """The best split with other strengths of guidance."""
    if best.self_condition == "recursive":
        for times in STRENGTHS:
            yield replace(best, controls=replace(best.controls, scg=times * base.controls.scg))


def heats(best: Settings, base: Settings) -> Iterator[Settings]:
    """The best so far at other temperatures."""
    for times in HEATS:
        yield replace(best, temperature=times * base.temperature)


@dataclass(frozen=True)
class Tuning:
    """A search for one model: where it begins, how points are measured, and what it is compared with."""

    measurer: Measurer
    model: ConvergeFlowModel
    about: Mapping[str, Any]
    base: Settings
    advance: Advance = silent

    def measure(self, settings: Settings, seeds: Sequence[int] | None = None) -> Tried:
        """The record of settings on the study's noises, or on others."""
        measurer = self.measurer if seeds is None else replace(self.measurer, seeds=seeds)
        key = {"length": measurer.length, "seed": measurer.seeds[0]}
        label = _short(settings)
        found, file = measurer.point(
            "tune", self.model, {"settings": settings}, about=self.about, key=key, label=label, advance=self.advance
        )
        return Tried(settings, found, file)

    def search(self, calls: int) -> tuple[Tried, list[Tried]]:
        """The reference and everything that was tried, best first."""
        reference = self.measure(self.base)
        tried: dict[str, Tried] = {}

        def attempt(candidates: Iterator[Settings]) -> Settings:
            for settings in candidates:
                tried.setdefault(str(settings.describe()), self.measure(settings))
            return ranked(reference, list(tried.values()))[0].settings

        best = attempt(splits(self.base, calls))
        best = attempt(strengths(best, self.base))
        attempt(heats(best, self.base))
        return reference, ranked(reference, list(tried.values()))

    def fit_grid(self, settings: Settings, seeds: Sequence[int]) -> tuple[Settings, dict[str, Any]]:
        """The same with the grid whose trajectories end nearest to the reference's, on noises of its own."""
        length = self.measurer.length or self.model.config.length
        ends = self.model.sample(len(seeds), length, seeds=seeds, settings=self.base, batch=len(seeds)).ids
        steps = len(settings.plan(self.model.schedule))

        def distance(warp: tuple[float, float]) -> float:
            return end_distance(self.model, on_warp(settings, steps, warp), seeds, ends)

        warp, nearest, plain = pattern_search(distance)
        facts = {"warp": list(warp), "distance": nearest, "distance_of_the_midpoint_grid": plain, "noises": len(seeds)}
        return on_warp(settings, steps, warp), facts


def tune(tuning: Tuning, calls: int, *, grid: bool = True) -> dict[str, Any]:
    """Search, then compare what was found on noises that nothing was chosen on; as JSON values.

    The preset with fewer calls, the best split and the fitted grid come in this order, and each must beat the one that
    is kept so far.
    """
    seeds, num = tuning.measurer.seeds, len(tuning.measurer.seeds)
    fresh = range(seeds[0] + num, seeds[0] + 2 * num)
    reference, tried = tuning.search(calls)
    rivals = {"the preset": replace(tuning.base, nfe=calls), "the best split": tried[0].settings}
    fitted = None
    if grid:
        others = range(seeds[0] + 2 * num, seeds[0] + 3 * num)
        rivals["the fitted grid"], fitted = tuning.fit_grid(tried[0].settings, others)
    found = {label: tuning.measure(settings, fresh) for label, settings in rivals.items()}
    kept = "the preset"
    for label, each in found.items():
        kept = label if better(each, found[kept]) else kept
    whole = tuning.measure(tuning.base, fresh)
    return {
        "model": dict(tuning.about),
        "settings": found[kept].settings.describe(),
        "chosen": kept,
        "fresh": {"all calls": whole.row(), **{label: each.row() for label, each in found.items()}},
        "reference": reference.row(),
        "fitted": fitted,
        "tried": [each.row() for each in tried],
    }


def ranked(reference: Tried, tried: Sequence[Tried]) -> list[Tried]:
    """By Gen. PPL; settings at the reference's entropy come before the others, which go by how far they are from it."""

    def order(each: Tried) -> tuple[float, float]:
        apart = abs(each.record["entropy"] - reference.record["entropy"])
        gen_ppl = math.inf if each.record["gen_ppl"] is None else float(each.record["gen_ppl"])
        return max(0.0, apart - ENTROPY), gen_ppl

    return sorted(tried, key=order)


def better(left: Tried, right: Tried) -> bool:
    """Whether Gen. PPL is lower noise by noise, by more than its standard error."""
    ratio = paired_ratio([(left.record["per_sample"], right.record["per_sample"])])
    return ratio is not None and ratio.value + ratio.se < 1.0


def warped(steps: int, warp: tuple[float, float]) -> tuple[float, ...]:
    """The midpoint grid through u -> 1 - (1 - u^a)^b, which keeps both ends; (1, 1) changes nothing."""
    a, b = warp
    return tuple((1.0 - (1.0 - midpoint_grid(steps) ** a) ** b).tolist())


def on_warp(settings: Settings, steps: int, warp: tuple[float, float]) -> Settings:
    """The same settings on a warped grid."""
    return replace(settings, grid=warped(steps, warp))


def end_distance(model: ConvergeFlowModel, settings: Settings, seeds: Sequence[int], ends: Tensor) -> float:
    """Mean squared distance per dimension between the last prediction and the embeddings of given end points."""
    found: list[float] = []

    def note(step: Step) -> None:
        if step.index == step.num_steps - 1:
            found.append(float((step.last.mu - step.table[ends.to(step.table.device)]).square().mean()))

    model.sample(len(seeds), ends.shape[1], seeds=seeds, settings=settings, batch=len(seeds), observe=note)
    return found[-1]


def pattern_search(distance: Callable[[tuple[float, float]], float]) -> tuple[tuple[float, float], float, float]:
    """The two exponents of the nearest grid, its distance, and that of the plain grid: by steps that are halved."""
    best, plain = (0.0, 0.0), distance((1.0, 1.0))
    lowest = plain
    for size in WARPS:
        moved = True
        while moved:
            moved = False
            for across, up in ((size, 0.0), (-size, 0.0), (0.0, size), (0.0, -size)):
                here = (best[0] + across, best[1] + up)
                if max(map(abs, here)) <= 1.2 and (value := distance((math.exp(here[0]), math.exp(here[1])))) < lowest:
                    best, lowest, moved = here, value, True
    return (math.exp(best[0]), math.exp(best[1])), lowest, plain


def _short(settings: Settings) -> str:
    """What varies in a search."""
    controls = settings.controls
    recursive = settings.self_condition == "recursive"
    how = f"K {controls.refine}, w_scg {controls.scg:g}" if recursive else settings.self_condition
    where = "" if isinstance(settings.grid, str) else ", fitted grid"
    return f"{how}, T {settings.temperature:g}, {settings.solver}{where}, NFE {settings.nfe}"
