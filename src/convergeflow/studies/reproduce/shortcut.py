"""The previous-step shortcut against explicit refinement over the number of steps (Section 3.2).

The shortcut conditions a step on the previous step's prediction: one call per step, and a recursion whose depth is
hidden in N. Explicit refinement of depth K makes K + 1 calls per step. The claim is about sensitivity to N, so N is the
axis and the calls are stated beside it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from convergeflow.evaluation.estimate import Estimate
from convergeflow.flow.guidance import Controls
from convergeflow.sampling.settings import Settings
from convergeflow.studies.reproduce import plotting, trade_off
from convergeflow.studies.reproduce.bench import Bench
from convergeflow.studies.reproduce.registry import Cost, Experiment, Result, Table
from convergeflow.studies.reproduce.scale import Scale
from convergeflow.studies.reproduce.trade_off import language_claim
from convergeflow.studies.reproduce.verdict import Judgement, lower
from convergeflow.studies.reproduce.workspace import Workspace

DEPTHS = (1, 3)


def measure(workspace: Workspace, scale: Scale) -> Result:
    bench = Bench(workspace, scale)
    records = []
    for num_steps in scale.shortcut_steps:
        shortcut = Settings(nfe=num_steps, self_condition="previous")
        record = bench.measure(shortcut, label=f"shortcut, {num_steps} steps")
        records.append({**record, "way": "shortcut", "steps": num_steps, "nfe": num_steps})
        for depth in DEPTHS:
            nfe = (depth + 1) * num_steps
            explicit = Settings(nfe=nfe, controls=Controls(refine=depth))
            record = bench.measure(explicit, label=f"explicit K = {depth}, {num_steps} steps")
            records.append({**record, "way": f"K = {depth}", "steps": num_steps, "nfe": nfe})
    return Result("shortcut", scale.name, records, {"real": bench.real_text()["values"]})


def _series(result: Result, way: str) -> list[dict[str, Any]]:
    return sorted((r for r in result.records if r["way"] == way), key=lambda record: record["steps"])


def _sensitivity(result: Result, way: str) -> Estimate:
    """Range of log Gen. PPL over N: 0.1 is a change of about 10 %."""
    series = [record["values"] for record in _series(result, way)]
    worst = max(series, key=lambda values: values["gen_ppl"])
    best = min(series, key=lambda values: values["gen_ppl"])
    error = math.hypot(*(v["gen_ppl_se"] / v["gen_ppl"] for v in (worst, best)))
    return Estimate(math.log(worst["gen_ppl"] / best["gen_ppl"]), error, len(series))


def _less_sensitive(result: Result) -> Judgement:
    return lower(
        _sensitivity(result, "K = 3"),
        _sensitivity(result, "shortcut"),
        what="range of log Gen. PPL over N, refinement with K = 3 against the shortcut",
        paper="stated in words only",
    )


def _entropy_sensitivity(result: Result) -> Judgement:
    def spread(way: str) -> Estimate:
        series = [record["values"] for record in _series(result, way)]
        values = [v["entropy"] for v in series]
        return Estimate(max(values) - min(values), math.hypot(*(v["entropy_se"] for v in series[:2])), len(series))

    return lower(
        spread("K = 3"),
        spread("shortcut"),
        what="range of entropy over N in nats, K = 3 against the shortcut",
        paper="stated in words only",
    )


def draw(result: Result, folder: Path) -> list[Path]:
    figure, axes = plotting.panels(2, width=5.0)
    ways = list(dict.fromkeys(record["way"] for record in result.records))
    names = {
        "shortcut": "shortcut (N calls)",
        "K = 1": "explicit K = 1 (2N calls)",
        "K = 3": "explicit K = 3 (4N calls)",
    }
    for panel, number, unit in zip(axes, ("gen_ppl", "entropy"), ("Gen. PPL", "unigram entropy (nats)"), strict=True):
        for way, colour, marker in zip(ways, plotting.COLOURS, "os^", strict=False):
            series = _series(result, way)
            panel.errorbar(
                [record["steps"] for record in series],
                [record["values"][number] for record in series],
                yerr=[record["values"][f"{number}_se"] for record in series],
                marker=marker,
                color=colour,
                capsize=2,
                label=names[way],
            )
        real = result.values["real"]
        if number == "entropy" or min(r["values"]["gen_ppl"] for r in result.records) < 20 * real["gen_ppl"]:
            panel.axhline(real[number], color="grey", linestyle=":", label="real text")
        plotting.count_axis(panel, sorted({record["steps"] for record in result.records}))
        plotting.label_axes(panel, "solver steps N", unit, f"{unit.split(' (')[0]} over N ({result.scale})")
    axes[0].set_yscale("log")
    trade_off.plain_logarithm(axes[0])
    axes[0].legend(loc="best")
    return plotting.save(figure, folder, "shortcut")


def tabulate(result: Result) -> list[Table]:
    rows = [
        (
            r["way"],
            r["steps"],
            r["nfe"],
            r["values"]["gen_ppl"],
            r["values"]["gen_ppl_se"],
            r["values"]["entropy"],
            r["values"].get("valid"),
        )
        for r in result.records
    ]
    return [Table("Shortcut and explicit refinement over N", ("way", "N", "NFE", "PPL", "±", "H", "valid"), rows)]


EXPERIMENT = Experiment(
    name="shortcut",
    reference="Section 3.2 (self-conditioning shortcut)",
    question="Is explicit refinement less sensitive to the number of solver steps than the previous-step shortcut?",
    claims=(
        language_claim(
            "gen-ppl", "Gen. PPL changes less over N with explicit refinement", "Section 3.2", _less_sensitive
        ),
        language_claim(
            "entropy", "entropy changes less over N with explicit refinement", "Section 3.2", _entropy_sensitivity
        ),
    ),
    cost={"test": Cost(9, 7), "embedded": Cost(12, 260), "paper": Cost(15, 15 * 2500)},
    measure=measure,
    draw_figures=draw,
    tabulate=tabulate,
)
