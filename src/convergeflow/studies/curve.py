"""How a comparison changes with the budget of training: the paper's two ratios, and what its objective buys, at each.

Every budget is a comparison of its own, in a folder `steps-N` of one folder. The page here is made from their tables
alone. The largest budget is the comparison proper; the smaller ones say where the ratios are going.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convergeflow import files
from convergeflow.evaluation.estimate import Estimate, number
from convergeflow.results import pages
from convergeflow.studies import table
from convergeflow.systems import OURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RATIOS = (("", "the best other diffusion system", 0.55), ("ar", "AR", 0.92))
"""Whom the paper's ratios are against, in words, and their values there."""
Summary = Mapping[str, Any]
"""What `table.write_comparison` returns for one budget."""


def folder_of(out: Path, steps: int) -> Path:
    """Where the comparison with this budget is."""
    return out / f"steps-{steps}"


def budgets(found: Mapping[int, Summary]) -> list[dict[str, Any]]:
    """One entry per budget of training and of network calls, in their order, as JSON values."""
    entries = []
    for steps, summary in sorted(found.items()):
        rows = summary["rows"]
        for nfe in sorted({row["nfe"] for row in rows if row["system"] == OURS}):
            here = table.at_budget(rows, nfe)
            alone = next((r for r in summary["objective"] if r["nfe"] == nfe and r["setting"] is None), None)
            entries.append(
                {
                    "steps": steps,
                    "nfe": nfe,
                    "at_data_entropy": {row["system"]: row["at_data_entropy"] for row in here},
                    "ratios": [_ratio(here, to, published) for to, _, published in RATIOS],
                    "objective": alone,
                }
            )
    return entries


def _ratio(rows: Sequence[dict[str, Any]], to: str, published: float) -> dict[str, Any] | None:
    found = table.ratio(rows, to)
    if found is None:
        return None
    estimate, other = found
    return {
        "value": estimate.value,
        "se": estimate.se,
        "to": other,
        "paper": published,
        "says": says(estimate, published),
    }


def says(ratio: Estimate, published: float) -> str:
    """The verdict on one of the paper's ratios: beyond two standard errors of it, or too noisy."""
    if abs(ratio.value - published) <= 2 * ratio.se:
        return "too noisy"
    return "reproduced" if ratio.value < published else "not reproduced"


def trend(entries: Sequence[dict[str, Any]], which: int) -> str:
    """Whether a ratio falls from the smallest to the largest budget: only if two standard errors tell them apart."""
    known = [(entry["steps"], entry["ratios"][which]) for entry in entries if entry["ratios"][which] is not None]
    name = RATIOS[which][1]
    if len({steps for steps, _ in known}) < 2:
        return f"over {name}: fewer than two budgets have a ratio, so there is no trend"
    (first, before), (last, after) = known[0], known[-1]
    change = math.log(after["value"] / before["value"])
    error = math.hypot(before["se"] / before["value"], after["se"] / after["value"])
    said = "no trend is resolved" if abs(change) <= 2 * error else "it falls" if change < 0 else "it rises"
    ends = [
        f"{number(entry['value'], entry['se'])} at {steps} steps" for steps, entry in ((first, before), (last, after))
    ]
    return f"over {name}: {ends[0]}, {ends[1]}: {said}"


def markdown(entries: Sequence[dict[str, Any]], about: Mapping[str, Any]) -> str:
    """The page of all budgets."""
    systems = list(dict.fromkeys(name for entry in entries for name in entry["at_data_entropy"]))
    rows = [
        [
            entry["steps"],
            entry["nfe"],
            *(_cell(entry["at_data_entropy"].get(name)) for name in systems),
            *(_words(ratio) for ratio in entry["ratios"]),
            "-" if entry["objective"] is None else number(entry["objective"]["value"], entry["objective"]["se"]),
        ]
        for entry in entries
    ]
    heads = [f"over {name} (paper: {published})" for _, name, published in RATIOS]
    columns = ["steps", "NFE", *systems, *heads, "MSE over continued CE, one sampler"]
    lines = [f"# Comparison on {about['corpus']}, budget by budget", "", f"The largest budget: {about['about']}", ""]
    lines += [
        "Gen. PPL at the data's entropy of each system, and the ratios of ours:",
        "",
        *pages.markdown_table(columns, rows),
    ]
    lines += [
        "",
        "![Gen. PPL and ratios over the budget](budgets.png)",
        "",
        "## Do the ratios change with the budget?",
        "",
    ]
    for nfe in sorted({entry["nfe"] for entry in entries}):
        here = [entry for entry in entries if entry["nfe"] == nfe]
        lines += [f"- NFE {nfe}, {trend(here, which)}" for which in range(len(RATIOS))]
    return "\n".join(lines) + "\n"


def _cell(at: Mapping[str, Any] | None) -> str:
    if at is None:
        return "-"
    return "never there" if at["gen_ppl"] is None else number(at["gen_ppl"], table.error_of(at))


def _words(ratio: Mapping[str, Any] | None) -> str:
    return "-" if ratio is None else f"{number(ratio['value'], ratio['se'])} ({ratio['to']}): {ratio['says']}"


def write(out: Path, found: Mapping[int, Summary], real: Mapping[str, Any], *, complete: bool) -> list[dict[str, Any]]:
    """budgets.json, budgets.md and budgets.png from the tables of all budgets; returns what budgets.json lists.

    Only a `complete` comparison names the table that the paper's claims are judged by: that of the largest budget.
    """
    entries = budgets(found)
    largest = found[max(found)]
    about = {name: largest[name] for name in ("corpus", "about", "command")}
    judged = f"{folder_of(out, max(found)).name}/table.json" if complete else None
    kept = {"kind": "budgets", "format": 1, **about, "judged_by": judged, "real": dict(real), "budgets": entries}
    files.write_json(out / "budgets.json", kept)
    files.write_text(out / "budgets.md", markdown(entries, about))
    _draw(entries, out, real)
    return entries


def judging_table(folder: Path) -> Path | None:
    """The table of a comparison in `folder` that the paper's claims are judged by, if there is one."""
    if (folder / "table.json").is_file():
        return folder / "table.json"
    if not (folder / "budgets.json").is_file():
        return None
    judged = json.loads((folder / "budgets.json").read_text(encoding="utf-8"))["judged_by"]
    return None if judged is None else folder / judged


def _draw(entries: Sequence[dict[str, Any]], out: Path, real: Mapping[str, Any]) -> None:
    """Left Gen. PPL at the data's entropy of every system, right the ratios with the paper's as lines."""
    from convergeflow.results import figures

    nfe = max(entry["nfe"] for entry in entries)
    here = [entry for entry in entries if entry["nfe"] == nfe]
    steps = sorted({entry["steps"] for entry in here})
    with figures.style():
        figure, (left, right) = figures.panels(2, width=5.4, height=4.2)
        names = dict.fromkeys(name for entry in here for name in entry["at_data_entropy"])
        for index, name in enumerate(sorted(names, key=lambda name: name == "ar")):  # the frontiers' order and colours
            points = [(entry["steps"], entry["at_data_entropy"].get(name)) for entry in here]
            known = [
                (at, row["gen_ppl"], table.error_of(row)) for at, row in points if row and row["gen_ppl"] is not None
            ]
            look: dict[str, Any] = {"color": figures.COLOURS[index], "marker": figures.MARKERS[index], "capsize": 2}
            _with_bars(left, known, label=name, **look)
        if real.get("gen_ppl") is not None:
            left.axhline(real["gen_ppl"], color="grey", linestyle=":", label="real text")
        for which, (_, name, published) in enumerate(RATIOS):
            ratios = [(entry["steps"], entry["ratios"][which]) for entry in here if entry["ratios"][which] is not None]
            colour = figures.COLOURS[which]
            known = [(at, ratio["value"], ratio["se"]) for at, ratio in ratios]
            _with_bars(right, known, color=colour, marker="o", capsize=2, label=f"over {name}")
            right.axhline(published, color=colour, linestyle="--", linewidth=1, label=f"the paper's {published}")
        for axes in (left, right):
            figures.count_axis(axes, steps)
            figures.logarithmic(axes)
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3 if axes is left else 2)
        figures.label_axes(
            left, "training steps of every system", "Gen. PPL at the data's entropy", f"{nfe} network calls"
        )
        figures.label_axes(
            right, "training steps of every system", "our Gen. PPL over another's", "bars: one standard error"
        )
        figures.save(figure, out, "budgets")


def _with_bars(axes: Axes, points: Sequence[tuple[int, float, float]], **look: Any) -> None:
    """A line through (steps, value, standard error)."""
    axes.errorbar(
        [at for at, _, _ in points], [value for _, value, _ in points], [error for _, _, error in points], **look
    )
