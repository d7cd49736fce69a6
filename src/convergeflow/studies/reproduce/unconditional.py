"""Unconditional guidance added to refinement and self-conditioning guidance (Figure 6, Table "wug_wk_wcfg")."""

from __future__ import annotations

from pathlib import Path

from convergeflow.studies.reproduce import paper, trade_off
from convergeflow.studies.reproduce.bench import Bench
from convergeflow.studies.reproduce.registry import Cost, Experiment, Result
from convergeflow.studies.reproduce.scale import Scale
from convergeflow.studies.reproduce.trade_off import (
    Curve,
    by_scale,
    curve_of,
    frontier_ratio,
    language_claim,
    same_frontier,
)
from convergeflow.studies.reproduce.verdict import (
    Judgement,
    decide,
    every,
    exactly,
    not_testable,
    relative_resolution,
    show,
)
from convergeflow.studies.reproduce.workspace import Workspace

TABLE = "tab:wug_wk_wcfg_nfe64"


def _name(ug: float, refine: int) -> str:
    return f"w_ug = {ug:g}, K = {refine}"


def curves(scale: Scale) -> list[Curve]:
    strengths = by_scale(scale, test=(10.0, 40.0), embedded=(10.0, 20.0, 40.0))
    depths = by_scale(scale, test=(100,), embedded=(100,), paper_scale=(50, 100))
    guidance = by_scale(scale, test=(0.0, 0.5), embedded=(0.0, 0.5), paper_scale=(0.0, 0.25, 0.5))
    return [
        Curve(
            _name(ug, refine),
            trade_off.pick(
                [row for row in paper.rows(TABLE) if (row.controls.refine, row.controls.ug) == (refine, ug)],
                "scg",
                strengths,
            ),
        )
        for refine in depths
        for ug in guidance
    ]


def measure(workspace: Workspace, scale: Scale) -> Result:
    return trade_off.measure_curves(Bench(workspace, scale), curves(scale), "unconditional")


def _same(result: Result) -> Judgement:
    depths = sorted({int(record["curve"].split("K = ")[1]) for record in result.records})
    # The paper's own points are farther apart than this at high entropy: its statement is about the low end.
    return every(
        [same_frontier(result, _name(0.5, depth), _name(0.0, depth), tolerance=0.06) for depth in depths],
        what="frontier with w_ug = 0.5 against without",
    )


def _not_outward(result: Result) -> Judgement:
    found = []
    for depth in sorted({int(record["curve"].split("K = ")[1]) for record in result.records}):
        curves = curve_of(result, _name(0.5, depth)), curve_of(result, _name(0.0, depth))
        ratio, how = frontier_ratio(*curves)
        if ratio is None:
            found.append(not_testable(f"the curves with K = {depth} share no range of entropy in this run"))
            continue
        resolution = relative_resolution(ratio, exactly(1.0))
        outward = ratio.value < 1.0 - resolution
        evidence = f"Gen. PPL with over without w_ug {how}, K = {depth}: {show(ratio)}"
        # A run that cannot see a shift of a tenth cannot say that there is none.
        found.append(Judgement(decide(not outward, resolved=outward or resolution <= 0.1), evidence))
    return every(found, what="frontier with w_ug = 0.5 is not below the one without")


def draw(result: Result, folder: Path) -> list[Path]:
    names = list(dict.fromkeys(record["curve"] for record in result.records))
    depths = sorted({int(name.split("K = ")[1]) for name in names})
    figures = [
        (str(depth), f"w_ug with K = {depth}, NFE 64", [name for name in names if name.endswith(f"K = {depth}")])
        for depth in depths
    ]
    return trade_off.draw_curves(result, folder, "unconditional", figures)


EXPERIMENT = Experiment(
    name="unconditional",
    reference="Figure 6; Table of Appendix B.2 (w_ug)",
    question="Does unconditional guidance move along the frontier of the other two, or shift it?",
    claims=(
        language_claim(
            "not-outward", "adding w_ug does not shift the frontier outward", "Section 4.4, Figure 6", _not_outward
        ),
        language_claim("same-frontier", "adding w_ug moves along a similar frontier", "Section 4.4, Figure 6", _same),
        trade_off.numbers_claim("Table of Appendix B.2 (w_ug)"),
    ),
    cost={"test": Cost(4, 3), "embedded": Cost(6, 90), "paper": Cost(36, 24 * 1800)},
    measure=measure,
    draw_figures=draw,
    tabulate=trade_off.tabulate("w_ug with K and w_scg"),
)
