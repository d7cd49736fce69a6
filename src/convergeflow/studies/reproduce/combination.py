"""Refinement and guidance together, K x w_scg, both time-adaptive (Figure 5, Tables "wk_wcfg" at NFE 64 and 128)."""

from __future__ import annotations

from pathlib import Path

from convergeflow.studies.reproduce import paper, trade_off
from convergeflow.studies.reproduce.bench import Bench
from convergeflow.studies.reproduce.registry import Cost, Experiment, Result
from convergeflow.studies.reproduce.scale import Scale
from convergeflow.studies.reproduce.trade_off import Curve, by_scale, language_claim, lies_below, lowers
from convergeflow.studies.reproduce.verdict import Judgement, every
from convergeflow.studies.reproduce.workspace import Workspace

ALONE = "guidance alone, NFE 64"


def _name(refine: int, nfe: int) -> str:
    return f"K = {refine}, NFE {nfe}"


def curves(scale: Scale) -> list[Curve]:
    strengths = by_scale(scale, test=(10.0, 40.0), embedded=(10.0, 20.0, 40.0))
    depths = by_scale(scale, test=(25, 100), embedded=(25, 50, 100), paper_scale=(25, 50, 100, 200))
    found = []
    for nfe in scale.budgets if scale.name == "paper" else scale.budgets[:1]:
        rows = paper.rows(f"tab:wk_wcfg_{nfe}")
        for refine in sorted({row.controls.refine for row in rows}):
            if refine in depths:
                of_depth = [row for row in rows if row.controls.refine == refine]
                found.append(Curve(_name(refine, nfe), trade_off.pick(of_depth, "scg", strengths)))
    alone = [row for row in paper.rows("tab:trade-off_64") if (row.varied, row.variant) == ("scg", "adaptive")]
    # The points of the controls experiment: measured once.
    chosen = by_scale(scale, test=(20.0, 100.0), embedded=(20.0, 60.0, 100.0))
    return [*found, Curve(ALONE, trade_off.pick(alone, "scg", chosen))]


def measure(workspace: Workspace, scale: Scale) -> Result:
    return trade_off.measure_curves(Bench(workspace, scale), curves(scale), "combination")


def _deeper(result: Result) -> Judgement:
    pairs = [lies_below(result, _name(100, 64), _name(25, 64))]
    if any(record["curve"] == _name(50, 64) for record in result.records):
        pairs.append(lies_below(result, _name(50, 64), _name(25, 64)))
    return every(pairs, what="larger K against smaller K at equal entropy")


def _better_than_alone(result: Result) -> Judgement:
    return lies_below(result, _name(100, 64), ALONE)


def _strength(result: Result) -> Judgement:
    names = dict.fromkeys(record["curve"] for record in result.records if record["curve"] != ALONE)
    return every(
        [lowers(result, name, number) for name in names for number in ("gen_ppl", "entropy")],
        what="strongest against weakest w_scg at each K, Gen. PPL and entropy",
    )


def draw(result: Result, folder: Path) -> list[Path]:
    names = list(dict.fromkeys(record["curve"] for record in result.records))
    figures = [
        (str(nfe), f"K × w_scg, NFE {nfe}", [name for name in names if name.endswith(f"NFE {nfe}")])
        for nfe in (64, 128)
        if any(name.endswith(f"NFE {nfe}") for name in names)
    ]
    return trade_off.draw_curves(result, folder, "combination", figures)


EXPERIMENT = Experiment(
    name="combination",
    reference="Figure 5; Tables of Appendix B.2 (K x w_scg)",
    question="Does deeper refinement shift the frontier of guidance?",
    claims=(
        language_claim(
            "strength", "at fixed K, raising w_scg lowers Gen. PPL and entropy", "Section 4.4, Figure 5", _strength
        ),
        language_claim(
            "deeper", "a larger K_iscr lowers Gen. PPL at comparable entropy", "Section 4.4, Figure 5", _deeper
        ),
        language_claim("combined", "the combination beats guidance alone", "Section 4.4", _better_than_alone),
        trade_off.numbers_claim("Tables of Appendix B.2"),
    ),
    cost={"test": Cost(7, 8), "embedded": Cost(13, 250), "paper": Cost(42, 37 * 1800)},
    measure=measure,
    draw_figures=draw,
    tabulate=trade_off.tabulate("K × w_scg, time-adaptive"),
)
