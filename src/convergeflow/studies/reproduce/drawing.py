"""The figures that descriptions of experiments name, and what figures of the modules share.

A description gives the name of a function here and its arguments. Every function draws from a result alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from convergeflow.results import figures
from convergeflow.studies.reproduce import paper
from convergeflow.studies.reproduce.kinds import criterion_name
from convergeflow.studies.reproduce.result import ExperimentResult, Record, field_of
from convergeflow.studies.reproduce.scale import scale_by_name
from convergeflow.studies.reproduce.trade_off import points_of

ENTROPY = "unigram entropy (nats)"
SCORERS = {"exact": "exact law", "smollm2": "SmolLM2", "gpt2-large": "GPT-2 Large"}


def draw(description: Mapping[str, Any], result: ExperimentResult) -> Figure:
    """The figure of a description: `{name of a function: its arguments}`."""
    ((name, arguments),) = description.items()
    figure: Figure = globals()[name](result, **(arguments or {}))
    return figure


# ------------------------------------------------------------------------------------------------------- shared


def series(axes: Axes, records: Sequence[Record], x: str, number: str, **look: Any) -> None:
    """A number over a field of the records, with bars of one standard error where it has one."""
    errors = [field_of(record, f"{number}_se") for record in records]
    axes.errorbar(
        [record[x] for record in records],
        [field_of(record, number) for record in records],
        yerr=None if None in errors else errors,
        capsize=2,
        **look,
    )


def curve(axes: Axes, records: Sequence[Record], source: str = "values", **look: Any) -> None:
    """Gen. PPL over entropy in the order of the control, with bars for this run's points."""
    errors = None
    if source == "values":
        errors = [(r["values"]["entropy_se"] or 0.0, r["values"]["gen_ppl_se"] or 0.0) for r in records]
    points = [(entropy, gen_ppl) for gen_ppl, entropy in points_of(records, source)]
    figures.trade_off(axes, points, errors=errors, **look)


def mark_real(axes: Axes, real: dict[str, Any], around: Sequence[float]) -> None:
    """A star for real text; where it is far below everything else a note, so that the curves keep the panel."""
    if around and min(around) > 20 * real["gen_ppl"]:
        axes.plot([], [], " ", label=f"real text: {real['gen_ppl']:.3g}, below")
    else:
        axes.plot([real["entropy"]], [real["gen_ppl"]], "k*", markersize=10, label="real text")


# -------------------------------------------------------------------------------------------- named by descriptions


def frontiers(result: ExperimentResult, panels: Sequence[Mapping[str, Any]], beside_the_paper: bool = True) -> Figure:
    """A panel (title, curves) of this run's points for each that has a curve; the paper's points to its left."""
    shown = [(panel["title"], result.curves(panel["curves"])) for panel in panels]
    shown = [(title, names) for title, names in shown if names]
    sources = ("paper", "values") if beside_the_paper else ("values",)
    figure, axes = figures.panels(len(sources) * len(shown), columns=2, width=5.0, height=3.6)
    for place, ((title, names), source) in zip(axes, itertools.product(shown, sources), strict=True):
        _frontier(place, result, title, names, source)
    return figure


def _frontier(axes: Axes, result: ExperimentResult, title: str, names: Sequence[str], source: str) -> None:
    for number, name in enumerate(names):
        look = {
            "label": name,
            "colour": figures.COLOURS[number % len(figures.COLOURS)],
            "marker": "os^Dvp*h"[number % 8],
            "line": "-" if number % 2 == 0 or len(names) > 4 else "--",
        }
        curve(axes, result.curve(name), source, **look)
    scorer = SCORERS[scale_by_name("paper" if source == "paper" else result.scale).scorer]
    whose = "Paper" if source == "paper" else f"This run ({result.scale})"
    entropy = paper.statements()["data_entropy"]
    if source == "values":
        entropy = result.values["real"]["entropy"]
        around = [point[0] for name in names for point in points_of(result.curve(name))]
        mark_real(axes, result.values["real"], around)
    axes.axvline(entropy, color="grey", linestyle=":", linewidth=1.2, label="the data's entropy")
    figures.logarithmic(axes)
    figures.label_axes(axes, ENTROPY, f"Gen. PPL ({scorer})", f"{whose}: {title}")
    axes.legend(loc="best")


def lines(result: ExperimentResult, panels: Sequence[Mapping[str, Any]], width: float = 5.0) -> Figure:
    """Numbers over a field of the records.

    A panel has a `title`, its `over` (a field) and `x` and `y` (what the axes say), and `lines`: each a `number` with a
    `label`, of one `curve` or of all records, perhaps with a band up to another number (`to`). `levels` are horizontal
    lines at a number, or at a field of the first record or of real text. `log` and `counts` choose the axes.
    """
    figure, axes = figures.panels(len(panels), width=width)
    for panel, said in zip(axes, panels, strict=True):
        for index, line in enumerate(said["lines"]):
            records = result.curve(line["curve"]) if "curve" in line else result.records
            if None in [field_of(record, line["number"]) for record in records]:
                continue
            look = {"color": figures.COLOURS[index % len(figures.COLOURS)], "marker": "os^Dvp*h"[index % 8]}
            look |= {name: line[name] for name in ("color", "marker", "label", "linestyle") if name in line}
            series(panel, records, said["over"], line["number"], **look)
            if "to" in line:
                x, low, high = (
                    [field_of(r, name) for r in records] for name in (said["over"], line["number"], line["to"])
                )
                panel.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)
        for level in said.get("levels", ()):
            _level(panel, result, **level)
        if said.get("counts"):
            figures.count_axis(panel, sorted({record[said["over"]] for record in result.records}))
        if said.get("log"):
            figures.logarithmic(panel)
        if "limits" in said:
            panel.set_ylim(*said["limits"])
        figures.label_axes(panel, said["x"], said["y"], said["title"].format(scale=result.scale))
        if panel.get_legend_handles_labels()[1]:
            panel.legend(loc="best")
    return figure


def _level(axes: Axes, result: ExperimentResult, at: float | str, label: str) -> None:
    """A dotted horizontal line; real text far below everything else is left out, so that the curves keep the panel."""
    height = at
    if isinstance(at, str):
        source = {"real": result.values.get("real"), **result.records[0]}
        height = float(field_of(source, at))
        if at == "real.gen_ppl" and min(r["values"]["gen_ppl"] for r in result.records) >= 20 * height:
            return
    axes.axhline(float(height), color="grey", linestyle=":", label=label.format(float(height)))


def token_rules(result: ExperimentResult, rules: Sequence[str]) -> Figure:
    """The same samples by each rule, and the agreement of the rules over the number of steps."""
    figure, (samples, agree) = figures.panels(2, width=5.2)
    _frontier(samples, result, "the same samples by each rule", [f"{rule}, NFE 64" for rule in rules], "values")
    agreement, said = result.curve("agreement"), paper.statements()
    for rule, colour, marker in zip(rules, figures.COLOURS, "os^", strict=False):
        if rule != "weight":
            series(agree, agreement, "steps", rule, marker=marker, color=colour, label=f"weight = {rule}")
    ends = [said["agreement_low"], said["agreement_high"]]
    agree.plot(said["agreement_steps"], ends, "k*:", markersize=9, label="paper (its two ends)")
    figures.count_axis(agree, sorted({*(record["steps"] for record in agreement), *said["agreement_steps"]}))
    figures.label_axes(agree, "steps N", "share of positions that agree", "Agreement of the token rules")
    agree.legend(loc="best")
    return figure


def freezing(result: ExperimentResult, saved: float, changed: float) -> Figure:
    """Bars of what each criterion saves and changes, beside the two targets."""
    names = list(dict.fromkeys(criterion_name(record) for record in result.records))
    figure, axes = figures.panels(2, width=5.2)
    for offset, sampler, colour in zip((-0.27, 0.0, 0.27), result.curves(), figures.COLOURS, strict=False):
        found = {criterion_name(record): record["values"] for record in result.curve(sampler)}
        places = [names.index(name) + offset for name in found]
        axes[0].barh(places, [100 * v["saved"] for v in found.values()], 0.25, color=colour, label=sampler)
        axes[1].barh(places, [1e4 * v["changed"] for v in found.values()], 0.25, color=colour, label=sampler)
    targets = (100 * saved, 1e4 * changed)
    for axis, target, what in zip(
        axes, targets, ("network calls saved (%)", "tokens changed (per 10,000)"), strict=True
    ):
        axis.axvline(target, color="grey", linestyle=":", linewidth=1)
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        figures.label_axes(axis, what, "", f"Freezing ({result.scale}); dotted: target")
    axes[0].legend(loc="best")
    return figure
