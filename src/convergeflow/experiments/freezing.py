"""Freezing what has converged: which share of the network calls it saves, what it changes. Not in the paper.

Saved calls are counted over live sequences: a finished sequence leaves the batch. Tokens are compared position by
position with the same seeds sampled without freezing.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from convergeflow.experiments import plotting
from convergeflow.experiments.bench import Bench, seeds_of
from convergeflow.experiments.registry import Cost, Experiment, Result, Table
from convergeflow.experiments.scale import Scale
from convergeflow.experiments.trade_off import by_scale, language_claim
from convergeflow.experiments.verdict import Judgement, at_least, at_most
from convergeflow.experiments.workspace import Workspace
from convergeflow.sampling import PRESETS, Freeze, Settings

CRITERIA = tuple(Freeze(weight, patience) for weight in (0.99, 0.999, 0.9999) for patience in (1, 2, 3))
TARGET_SAVED = 0.20
TARGET_CHANGED = 1e-4
"""At least a fifth of the calls, and no token in ten thousand."""
DEFAULT = Freeze()


def measure(workspace: Workspace, scale: Scale) -> Result:
    bench = Bench(workspace, scale)
    criteria = by_scale(scale, test=(DEFAULT,), embedded=CRITERIA) or CRITERIA
    presets = {"standard": Settings(nfe=64), "headline": bench.settings(64, PRESETS["headline"].controls)}
    records = []
    for preset, settings in presets.items():
        for freeze in criteria:
            record = _point(bench, preset, replace(settings, freeze=freeze))
            records.append({**record, "preset": preset, "weight": freeze.weight, "patience": freeze.patience})
    return Result("freezing", scale.name, records, {})


def _point(bench: Bench, preset: str, settings: Settings) -> dict[str, Any]:
    assert settings.freeze is not None
    key = {"settings": asdict(settings), "model": bench.model.weights, "n": bench.scale.num_samples}

    def compute() -> dict[str, Any]:
        num, length = bench.scale.num_samples, bench.scale.length
        plain, _ = bench.samples(bench.model, replace(settings, freeze=None), num)
        drawn = bench.load(bench.model).sample(num, length, seeds=seeds_of(num), settings=settings)
        changed = (drawn.ids.numpy() != plain["weight"]).sum()
        return {
            "saved": 1 - float(drawn.extras["calls"].double().mean()) / settings.nfe,
            "changed": float(changed) / drawn.ids.numel(),
            "changed_tokens": int(changed),
            "positions": drawn.ids.numel(),
        }

    label = f"{preset}, weight {settings.freeze.weight:g}, patience {settings.freeze.patience}"
    return bench.workspace.point("freezing", key, compute, label=label)


def _default(result: Result, preset: str) -> dict[str, Any]:
    found: dict[str, Any] = next(
        record["values"]
        for record in result.records
        if (record["preset"], record["weight"], record["patience"])
        == (preset, DEFAULT.weight, DEFAULT.patience)
    )
    return found


def _saves(result: Result, *, preset: str) -> Judgement:
    values = _default(result, preset)
    return at_least(values["saved"], TARGET_SAVED, what=f"share of calls saved ({preset}, default criterion)")


def _keeps(result: Result, *, preset: str) -> Judgement:
    values = _default(result, preset)
    what = f"share of {values['positions']} tokens changed ({preset}, default criterion)"
    return at_most(values["changed"], TARGET_CHANGED, what=what)


def draw(result: Result, folder: Path) -> list[Path]:
    figure, axes = plotting.panels(1, width=6.0)
    for preset, colour in zip(("standard", "headline"), plotting.COLOURS, strict=False):
        for record in result.records:
            if record["preset"] != preset:
                continue
            values = record["values"]
            marker = "o^s"[record["patience"] - 1]
            axes[0].plot(100 * values["saved"], 1e4 * values["changed"], marker, color=colour)
            axes[0].annotate(
                f"{record['weight']:g}", (100 * values["saved"], 1e4 * values["changed"]),
                textcoords="offset points", xytext=(4, 4), fontsize=7,
            )  # fmt: skip
        axes[0].plot([], [], "o", color=colour, label=preset)
    for patience, marker in enumerate("o^s", start=1):
        axes[0].plot([], [], marker, color="grey", label=f"patience {patience}")
    axes[0].axvline(100 * TARGET_SAVED, color="grey", linestyle=":", linewidth=1)
    axes[0].axhline(1e4 * TARGET_CHANGED, color="grey", linestyle=":", linewidth=1)
    title = f"Freezing ({result.scale}); numbers are the weight threshold"
    plotting.label_axes(axes[0], "network calls saved (%)", "tokens changed (per 10,000)", title)
    axes[0].legend(loc="best")
    return plotting.save(figure, folder, "freezing")


def tabulate(result: Result) -> list[Table]:
    rows = [
        (r["preset"], r["weight"], r["patience"], r["values"]["saved"], r["values"]["changed_tokens"],
         r["values"]["positions"])
        for r in result.records
    ]  # fmt: skip
    return [Table("Freezing", ("preset", "weight", "patience", "calls saved", "tokens changed", "of"), rows)]


EXPERIMENT = Experiment(
    name="freezing",
    reference="not in the paper",
    question="How much work can be skipped because the flow has converged, and what does it change?",
    claims=tuple(
        claim
        for preset in ("standard", "headline")
        for claim in (
            language_claim(
                f"saves-{preset}",
                f"freezing saves at least a fifth of the calls ({preset} sampler)",
                "a target of ours",
                partial(_saves, preset=preset),
            ),
            language_claim(
                f"keeps-{preset}",
                f"freezing changes at most one token in ten thousand ({preset} sampler)",
                "a target of ours",
                partial(_keeps, preset=preset),
            ),
        )
    ),
    cost={"test": Cost(2, 4), "embedded": Cost(18, 200), "paper": Cost(18, 18 * 1800)},
    measure=measure,
    draw_figures=draw,
    tabulate=tabulate,
)
