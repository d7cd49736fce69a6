"""Curves of Gen. PPL against entropy: measured beside the paper's, drawn side by side, and compared at equal entropy.

One curve lies below another if its log Gen. PPL, interpolated linearly in entropy, is smaller on average over the
entropies that both cover. Errors of Gen. PPL and of entropy (through the slope) both enter. Where a control does not
move entropy at all, there is nothing to trade and every point is at equal entropy: then the lowest points of two curves
are compared.

All points start from the same noises. So two settings are compared noise by noise where that can be done: what they
make of one noise is subtracted before anything is averaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convergeflow.evaluation import generative
from convergeflow.evaluation.estimate import Estimate
from convergeflow.studies.reproduce import paper, plotting
from convergeflow.studies.reproduce.bench import Bench
from convergeflow.studies.reproduce.registry import Claim, Result, Table
from convergeflow.studies.reproduce.scale import LANGUAGE_SCALES, Scale
from convergeflow.studies.reproduce.verdict import (
    Judgement,
    below,
    equal,
    every,
    exactly,
    lower,
    measured,
    not_testable,
    show,
)

Record = dict[str, Any]
plain_logarithm = plotting.plain_logarithm


@dataclass(frozen=True)
class Curve:
    """Rows of the paper that belong together, in the order of their control."""

    name: str
    rows: tuple[paper.Row, ...]
    figure: str = ""
    """The panel it is drawn in."""


def pick(rows: Sequence[paper.Row], control: str, values: Sequence[float] | None) -> tuple[paper.Row, ...]:
    """The rows with these values of a control; all of them for None."""
    return tuple(row for row in rows if values is None or getattr(row.controls, control) in values)


def measure_curves(bench: Bench, curves: Sequence[Curve], experiment: str) -> Result:
    """All points of all curves, and real text."""
    records = [
        {**bench.row(row), "curve": curve.name, "figure": curve.figure, "nfe": row.nfe, "order": order}
        for curve in curves
        for order, row in enumerate(curve.rows)
    ]
    return Result(experiment, bench.scale.name, records, {"real": bench.real_text()["values"]})


def curve_of(result: Result, name: str) -> list[Record]:
    return sorted(
        (record for record in result.records if record.get("curve") == name), key=lambda record: record["order"]
    )


def points_of(records: Sequence[Record], source: str = "values") -> list[tuple[float, float]]:
    """(Gen. PPL, entropy) of this run (`values`) or of the paper (`paper`)."""
    return [(record[source]["gen_ppl"], record[source]["entropy"]) for record in records]


def ratio_at_equal_entropy(left: Sequence[Record], right: Sequence[Record], source: str = "values") -> Estimate | None:
    """Gen. PPL of `left` over that of `right` at the entropies both reach; None where they share none."""
    curves = [sorted(points_of(records, source), key=lambda point: point[1]) for records in (left, right)]
    low = max(curve[0][1] for curve in curves)
    high = min(curve[-1][1] for curve in curves)
    if any(len(curve) < 2 for curve in curves) or not high > low:
        return None
    levels = np.linspace(low, high, 9)
    logs = [np.interp(levels, [point[1] for point in curve], np.log([point[0] for point in curve])) for curve in curves]
    value = math.exp(float(np.mean(logs[0] - logs[1])))
    if source == "paper":
        return exactly(value)
    errors = [_log_error(records, curve) for records, curve in zip((left, right), curves, strict=True)]
    return Estimate(value, value * math.hypot(*errors), len(left) + len(right))


def paired_ratio(left: Sequence[Record], right: Sequence[Record]) -> Estimate | None:
    """Gen. PPL of `left` over that of `right`, point by point and noise by noise; None where points have no pairs."""
    parts = [[record["values"].get("per_sample") for record in records] for records in (left, right)]
    if len(left) != len(right) or any(each is None for side in parts for each in side):
        return None
    return generative.paired_ratio(list(zip(*parts, strict=True)))


def same_entropy(records: Sequence[Record]) -> bool:
    """Whether no two of these points can be told apart by their entropy."""
    low, high = (choose(records, key=lambda r: r["values"]["entropy"])["values"] for choose in (min, max))
    return bool(high["entropy"] - low["entropy"] <= 2 * math.hypot(low["entropy_se"], high["entropy_se"]))


def frontier_ratio(left: Sequence[Record], right: Sequence[Record]) -> tuple[Estimate | None, str]:
    """Gen. PPL of `left` over that of `right` at equal entropy, and how it was found."""
    if left and right and same_entropy([*left, *right]):
        lowest = [min(records, key=lambda r: float(r["values"]["gen_ppl"])) for records in (left, right)]
        ratio = paired_ratio([lowest[0]], [lowest[1]])
        if ratio is not None:
            return ratio, "at equal entropy (no setting changes it: lowest points, noise by noise)"
    return ratio_at_equal_entropy(left, right), "at equal entropy"


def gen_ppl_below(left: Record, right: Record, *, what: str, paper: str = "") -> Judgement:
    """The claim that one point has a lower Gen. PPL than another, noise by noise where it can be had."""
    one, other = measured(left["values"], "gen_ppl"), measured(right["values"], "gen_ppl")
    ratio = paired_ratio([left], [right])
    if ratio is None:
        return below(one, other, what=what, paper=paper)
    return below(ratio, exactly(1.0), what=f"{what}: {show(one)} against {show(other)}; noise by noise", paper=paper)


def _log_error(records: Sequence[Record], curve: list[tuple[float, float]]) -> float:
    """Standard error of a curve's log Gen. PPL: its points' own, and their entropy's through the curve's slope."""
    span = curve[-1][1] - curve[0][1]
    slope = (math.log(curve[-1][0]) - math.log(curve[0][0])) / span if span else 0.0
    squares = [
        (r["values"]["gen_ppl_se"] / r["values"]["gen_ppl"]) ** 2 + (slope * r["values"]["entropy_se"]) ** 2
        for r in records
    ]
    # An average along the curve rests on about two independent points.
    return math.sqrt(float(np.mean(squares)) / 2)


def lies_below(result: Result, left: str, right: str, *, tolerance: float = 0.0) -> Judgement:
    """Curve `left` has the lower Gen. PPL at equal entropy."""
    records = curve_of(result, left), curve_of(result, right)
    ratio, how = frontier_ratio(*records)
    theirs = ratio_at_equal_entropy(*records, source="paper")
    said = "" if theirs is None else f"the paper's points: ratio {theirs.value:.3f}"
    if ratio is None:
        return not_testable(f"'{left}' and '{right}' share no range of entropy in this run", said)
    return below(ratio, exactly(1.0), what=f"Gen. PPL of '{left}' over '{right}' {how}", paper=said)


def same_frontier(result: Result, left: str, right: str, *, tolerance: float) -> Judgement:
    """The two curves are one within the tolerance."""
    records = curve_of(result, left), curve_of(result, right)
    ratio, how = frontier_ratio(*records)
    theirs = ratio_at_equal_entropy(*records, source="paper")
    said = "" if theirs is None else f"the paper's points: ratio {theirs.value:.3f}"
    if ratio is None:
        return not_testable(f"'{left}' and '{right}' share no range of entropy in this run", said)
    return equal(
        ratio, exactly(1.0), tolerance=tolerance, what=f"Gen. PPL of '{left}' over '{right}' {how}", paper=said
    )


def lowers(result: Result, curve: str, number: str) -> Judgement:
    """The strongest setting of a curve has a lower Gen. PPL (or entropy) than its weakest."""
    records = curve_of(result, curve)
    first, last = records[0], records[-1]
    said = f"{first['paper'][number]:.4g} -> {last['paper'][number]:.4g}"
    if number == "entropy":
        left, right = measured(last["values"], number), measured(first["values"], number)
        return lower(left, right, what=f"entropy of '{curve}' in nats, strongest against weakest setting", paper=said)
    return gen_ppl_below(last, first, what=f"Gen. PPL of '{curve}', strongest against weakest setting", paper=said)


def numbers_claim(reference: str) -> Claim:
    """Every point equals the paper's: only the paper's own scale can say."""

    def judge(result: Result) -> Judgement:
        found = []
        for record in result.records:
            if "paper" not in record:
                continue
            for number in ("gen_ppl", "entropy"):
                found.append(
                    equal(
                        measured(record["values"], number),
                        exactly(record["paper"][number]),
                        what=f"{number} at {record['paper']['label']}",
                    )
                )
        return every(found, what="points within 2 % of the paper's")

    return Claim(
        "numbers",
        "the table's Gen. PPL and entropy, point by point",
        reference,
        judge,
        scales=("paper",),
        needs="OpenWebText, the paper's checkpoint and GPT-2 Large",
    )


def language_claim(name: str, statement: str, reference: str, judge: Callable[[Result], Judgement]) -> Claim:
    """A claim about text: scales whose model writes none cannot test it."""
    return Claim(name, statement, reference, judge, scales=LANGUAGE_SCALES)


def entropy_range(records: Sequence[Record], source: str = "values") -> float:
    entropies = [point[1] for point in points_of(records, source)]
    return max(entropies) - min(entropies)


def draw_curves(
    result: Result, folder: Path, name: str, figures: Sequence[tuple[str, str, Sequence[str]]]
) -> list[Path]:
    """For each figure (key, title, curve names) a row of two panels: the paper's points and this run's."""
    figure, axes = plotting.panels(2 * len(figures), columns=2, width=5.0, height=3.6)
    real = result.values.get("real")
    for index, (_, title, names) in enumerate(figures):
        theirs, ours = axes[2 * index], axes[2 * index + 1]
        for number, curve in enumerate(names):
            records = curve_of(result, curve)
            if not records:
                continue
            colour = plotting.COLOURS[number % len(plotting.COLOURS)]
            marker, line = "os^Dvp*h"[number % 8], "-" if number % 2 == 0 or len(names) > 4 else "--"
            published = [(entropy, gen_ppl) for gen_ppl, entropy in points_of(records, "paper")]
            found = [(entropy, gen_ppl) for gen_ppl, entropy in points_of(records)]
            errors = [(r["values"]["entropy_se"] or 0.0, r["values"]["gen_ppl_se"] or 0.0) for r in records]
            plotting.trade_off(theirs, published, label=curve, colour=colour, marker=marker, line=line)
            plotting.trade_off(ours, found, label=curve, colour=colour, marker=marker, line=line, errors=errors)
        theirs.axvline(paper.statements()["data_entropy"], color="grey", linestyle=":", linewidth=1.2, label="data")
        if real is not None:
            ours.axvline(real["entropy"], color="grey", linestyle=":", linewidth=1.2)
            mark_real(ours, real, [point[0] for name in names for point in points_of(curve_of(result, name))])
        ours.set_yscale("log")
        theirs.set_yscale("log")
        for panel in (theirs, ours):
            plotting.plain_logarithm(panel)
        scorer = "exact law" if result.scale != "paper" else "GPT-2 Large"
        plotting.label_axes(theirs, "unigram entropy (nats)", "Gen. PPL (GPT-2 Large)", f"Paper: {title}")
        plotting.label_axes(
            ours, "unigram entropy (nats)", f"Gen. PPL ({scorer})", f"This run ({result.scale}): {title}"
        )
        theirs.legend(loc="best")
        ours.legend(loc="best")
    return plotting.save(figure, folder, name)


def mark_real(axes: Any, real: dict[str, Any], around: Sequence[float]) -> None:
    """A star for real text; where it is far below everything else a note, so that the curves keep the panel."""
    if around and min(around) > 20 * real["gen_ppl"]:
        axes.plot([], [], " ", label=f"real text: {real['gen_ppl']:.3g}, below")
    else:
        axes.plot([real["entropy"]], [real["gen_ppl"]], "k*", markersize=10, label="real text")


def tabulate(title: str) -> Callable[[Result], list[Table]]:
    """A table of every point: the paper's numbers and this run's."""

    def table(result: Result) -> list[Table]:
        columns = ("curve", "setting (paper's)", "NFE", "N", "paper: PPL", "paper: H", "PPL", "±", "H", "±", "valid")
        rows: list[tuple[Any, ...]] = []
        for record in result.records:
            if "paper" not in record:
                continue
            values = record["values"]
            rows.append(
                (
                    record["curve"],
                    record["paper"]["label"],
                    record["nfe"],
                    values["steps"],
                    record["paper"]["gen_ppl"],
                    record["paper"]["entropy"],
                    values["gen_ppl"],
                    values["gen_ppl_se"],
                    values["entropy"],
                    values["entropy_se"],
                    values.get("valid"),
                )
            )
        real = result.values.get("real")
        if real is not None:
            said = paper.statements()["data_entropy"]
            rows.append(
                (
                    "real text",
                    "",
                    None,
                    None,
                    None,
                    said,
                    real["gen_ppl"],
                    real["gen_ppl_se"],
                    real["entropy"],
                    real["entropy_se"],
                    real.get("valid"),
                )
            )
        return [Table(title, columns, rows)]

    return table


def by_scale(scale: Scale, *, test: Any, embedded: Any, paper_scale: Any = None) -> Any:
    """The choice of a scale; None means everything the paper has."""
    return {"test": test, "embedded": embedded, "paper": paper_scale}[scale.name]
