"""Freezing what has converged: which share of the network calls it saves, what it changes. Not in the paper.

Saved calls are counted over live sequences: a finished sequence leaves the batch, and so does, for the rest of a grid
point, one whose refinement has reached its fixed point. Tokens are compared position by position with the same seeds
sampled without freezing. On the midpoint grid little can be saved, and nothing by settled sequences: a learned schedule
spreads its steps by what is left to decide, so some words are open to the end. The `closing` grid goes on from there.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from convergeflow.sampling.settings import PRESETS, Freeze, Settings
from convergeflow.studies.reproduce import plotting
from convergeflow.studies.reproduce.bench import Bench, seeds_of
from convergeflow.studies.reproduce.registry import Cost, Experiment, Result, Table
from convergeflow.studies.reproduce.scale import Scale
from convergeflow.studies.reproduce.trade_off import by_scale, language_claim
from convergeflow.studies.reproduce.verdict import Judgement, at_least, at_most
from convergeflow.studies.reproduce.workspace import Workspace

CRITERIA = tuple(Freeze(change=change) for change in (0.0, 3e-3, 1e-2))
"""Settled tokens alone, then fixed points of the refinement as well."""
SAMPLERS = ("standard", "headline", "closing")
TARGET_SAVED = 0.20
TARGET_CHANGED = 0.0
TOKENS = 10_000
"""At least a fifth of the calls, and no token in ten thousand."""
DEFAULT = Freeze()


def measure(workspace: Workspace, scale: Scale) -> Result:
    bench = Bench(workspace, scale)
    criteria = by_scale(scale, test=(DEFAULT,), embedded=CRITERIA) or CRITERIA
    closing = replace(bench.settings(128, PRESETS["config-a"].controls), grid="closing")
    settings_of = (Settings(nfe=64), bench.settings(64, PRESETS["headline"].controls), closing)
    records = []
    for preset, settings in zip(SAMPLERS, settings_of, strict=True):
        for freeze in criteria:
            record = _point(bench, preset, replace(settings, freeze=freeze))
            records.append({**record, "preset": preset, **asdict(freeze)})
    return Result("freezing", scale.name, records, {})


def _point(bench: Bench, preset: str, settings: Settings) -> dict[str, Any]:
    assert settings.freeze is not None
    length = bench.scale.length
    num = bench.scale.num_samples if bench.scale.name == "test" else math.ceil(TOKENS / length)
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

    label = f"{preset}, {_named(asdict(settings.freeze))}"
    return bench.workspace.point("freezing", key, compute, label=label)


def _default(result: Result, preset: str) -> dict[str, Any]:
    found: dict[str, Any] = next(
        record["values"]
        for record in result.records
        if record["preset"] == preset and record.items() >= asdict(DEFAULT).items()
    )
    return found


def _saves(result: Result, *, preset: str) -> Judgement:
    values = _default(result, preset)
    return at_least(values["saved"], TARGET_SAVED, what=f"share of calls saved ({preset}, default criterion)")


def _keeps(result: Result, *, preset: str) -> Judgement:
    values = _default(result, preset)
    what = f"share of {values['positions']} tokens changed ({preset}, default criterion)"
    return at_most(values["changed"], TARGET_CHANGED, what=what)


def _named(criterion: dict[str, Any]) -> str:
    refinement = f"change {criterion['change']:g}" if criterion["change"] else "all refinements"
    return f"weight {criterion['weight']:g} x {criterion['patience']}, {refinement}"


def draw(result: Result, folder: Path) -> list[Path]:
    names = list(dict.fromkeys(_named(record) for record in result.records))
    figure, axes = plotting.panels(2, width=5.2)
    for offset, preset, colour in zip((-0.27, 0.0, 0.27), SAMPLERS, plotting.COLOURS, strict=False):
        found = {_named(record): record["values"] for record in result.records if record["preset"] == preset}
        places = [names.index(name) + offset for name in found]
        axes[0].barh(places, [100 * v["saved"] for v in found.values()], 0.25, color=colour, label=preset)
        axes[1].barh(places, [1e4 * v["changed"] for v in found.values()], 0.25, color=colour, label=preset)
    for axis, target, what in zip(
        axes,
        (100 * TARGET_SAVED, 1e4 * TARGET_CHANGED),
        ("network calls saved (%)", "tokens changed (per 10,000)"),
        strict=True,
    ):
        axis.axvline(target, color="grey", linestyle=":", linewidth=1)
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        plotting.label_axes(axis, what, "", f"Freezing ({result.scale}); dotted: target")
    axes[0].legend(loc="best")
    return plotting.save(figure, folder, "freezing")


def tabulate(result: Result) -> list[Table]:
    rows = [
        (
            r["preset"],
            r["weight"],
            r["patience"],
            r["change"],
            r["values"]["saved"],
            r["values"]["changed_tokens"],
            r["values"]["positions"],
        )
        for r in result.records
    ]
    header = ("preset", "weight", "patience", "change", "calls saved", "tokens changed", "of")
    return [Table("Freezing", header, rows)]


EXPERIMENT = Experiment(
    name="freezing",
    reference="not in the paper",
    question="How much work can be skipped because the flow has converged, and what does it change?",
    claims=tuple(
        claim
        for preset in SAMPLERS
        for claim in (
            language_claim(
                f"saves-{preset}",
                f"freezing saves at least a fifth of the calls ({preset} sampler)",
                "a target of ours",
                partial(_saves, preset=preset),
            ),
            language_claim(
                f"keeps-{preset}",
                f"freezing changes no token in ten thousand ({preset} sampler)",
                "a target of ours",
                partial(_keeps, preset=preset),
            ),
        )
    ),
    cost={"test": Cost(3, 6), "embedded": Cost(9, 600), "paper": Cost(9, 9 * 1800)},
    measure=measure,
    draw_figures=draw,
    tabulate=tabulate,
)
