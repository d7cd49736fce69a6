"""The midpoint grid t_i = (i + 0.5)/N against LangFlow's grid, whose first and last intervals are huge (Figure 9)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from convergeflow.sampling.settings import Settings
from convergeflow.studies.reproduce import plotting, trade_off
from convergeflow.studies.reproduce.bench import Bench
from convergeflow.studies.reproduce.registry import Cost, Experiment, Result, Table
from convergeflow.studies.reproduce.scale import Scale
from convergeflow.studies.reproduce.trade_off import language_claim
from convergeflow.studies.reproduce.verdict import Judgement, every
from convergeflow.studies.reproduce.workspace import Workspace

GRIDS = {"midpoint": "midpoint (paper's)", "langflow": "LangFlow's"}


def measure(workspace: Workspace, scale: Scale) -> Result:
    bench = Bench(workspace, scale)
    records = []
    for num_steps in scale.shortcut_steps:
        for grid in GRIDS:
            settings = Settings(nfe=num_steps, self_condition="previous", grid=grid)
            label = f"shortcut, {num_steps} steps" + ("" if grid == "midpoint" else ", LangFlow grid")
            records.append({**bench.measure(settings, label=label), "grid": grid, "steps": num_steps})
    return Result("grids", scale.name, records, {"real": bench.real_text()["values"]})


def _series(result: Result, grid: str) -> list[dict[str, Any]]:
    return sorted((r for r in result.records if r["grid"] == grid), key=lambda record: record["steps"])


def _better(result: Result) -> Judgement:
    pairs = zip(_series(result, "midpoint"), _series(result, "langflow"), strict=True)
    return every(
        [
            trade_off.gen_ppl_below(a, b, what=f"Gen. PPL at N = {a['steps']}, midpoint against LangFlow's grid")
            for a, b in pairs
        ],
        what="midpoint against LangFlow's grid at each N",
        paper="drawn in a figure only: slightly better across N",
    )


def draw(result: Result, folder: Path) -> list[Path]:
    figure, axes = plotting.panels(2, width=5.0)
    for panel, number, unit in zip(axes, ("gen_ppl", "entropy"), ("Gen. PPL", "unigram entropy (nats)"), strict=True):
        for (grid, label), colour, marker in zip(GRIDS.items(), plotting.COLOURS, "os", strict=False):
            series = _series(result, grid)
            panel.errorbar(
                [record["steps"] for record in series],
                [record["values"][number] for record in series],
                yerr=[record["values"][f"{number}_se"] for record in series],
                marker=marker,
                color=colour,
                capsize=2,
                label=label,
            )
        real = result.values["real"]
        if number == "entropy" or min(r["values"]["gen_ppl"] for r in result.records) < 20 * real["gen_ppl"]:
            panel.axhline(real[number], color="grey", linestyle=":", label="real text")
        plotting.count_axis(panel, [record["steps"] for record in _series(result, "midpoint")])
        plotting.label_axes(panel, "steps N = network calls", unit, f"{unit.split(' (')[0]} by grid ({result.scale})")
    axes[0].set_yscale("log")
    trade_off.plain_logarithm(axes[0])
    axes[0].legend(loc="best")
    return plotting.save(figure, folder, "grids")


def tabulate(result: Result) -> list[Table]:
    rows = [
        (
            GRIDS[r["grid"]],
            r["steps"],
            r["values"]["gen_ppl"],
            r["values"]["gen_ppl_se"],
            r["values"]["entropy"],
            r["values"].get("valid"),
        )
        for r in result.records
    ]
    return [Table("Two grids", ("grid", "N", "PPL", "±", "H", "valid"), rows)]


EXPERIMENT = Experiment(
    name="grids",
    reference="Figure 9 (Appendix B)",
    question="Is the midpoint grid better than LangFlow's at the same number of steps?",
    claims=(language_claim("midpoint", "the midpoint grid has the lower Gen. PPL", "Section 4, Figure 9", _better),),
    cost={"test": Cost(6, 2), "embedded": Cost(8, 40), "paper": Cost(10, 5 * 1800)},
    measure=measure,
    draw_figures=draw,
    tabulate=tabulate,
)
