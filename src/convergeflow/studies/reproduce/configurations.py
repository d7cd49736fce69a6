"""Configurations A, B and C: where along the trajectory guidance and refinement are spent (Figure 8, Appendix B.3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from convergeflow.studies.reproduce import paper, trade_off
from convergeflow.studies.reproduce.bench import Bench
from convergeflow.studies.reproduce.registry import Cost, Experiment, Result
from convergeflow.studies.reproduce.scale import Scale
from convergeflow.studies.reproduce.trade_off import Curve, by_scale, curve_of, language_claim, lies_below, lowers
from convergeflow.studies.reproduce.verdict import Judgement, decide, every
from convergeflow.studies.reproduce.workspace import Workspace

LETTERS = ("A", "B", "C")


def _name(letter: str, nfe: int) -> str:
    return f"{letter}, NFE {nfe}"


def curves(scale: Scale) -> list[Curve]:
    found = []
    for nfe in scale.budgets if scale.name == "paper" else scale.budgets[:1]:
        rows = paper.rows(f"tab:guidance_nfe{nfe}")
        for letter in LETTERS:
            chosen = by_scale(
                scale,
                test={"A": (1.5, 3.5), "B": (6.0, 15.0), "C": (20.0, 40.0)}[letter],
                embedded={"A": (1.5, 2.5, 3.5), "B": (6.0, 10.0, 15.0), "C": (20.0, 30.0, 40.0)}[letter],
            )
            of_letter = [row for row in rows if row.configuration == letter]
            found.append(Curve(_name(letter, nfe), trade_off.pick(of_letter, "scg", chosen)))
    if scale.name == "paper":
        # The complete sweeps of A and B; their points that appear above are shared.
        for label, letter in (("tab:baseline_nfe", "A"), ("tab:cfgb_kb_nfe", "B")):
            for nfe in scale.budgets:
                rows = tuple(row for row in paper.rows(label) if row.nfe == nfe)
                for refine in sorted({row.controls.refine for row in rows}):
                    of_depth = tuple(row for row in rows if row.controls.refine == refine)
                    found.append(Curve(f"{letter} with K = {refine}, sweep at {nfe}", of_depth))
    return found


def measure(workspace: Workspace, scale: Scale) -> Result:
    return trade_off.measure_curves(Bench(workspace, scale), curves(scale), "configurations")


def _extreme(result: Result, letter: str, number: str, smallest: bool) -> tuple[float, float]:
    """(value, error) of a configuration's most extreme point."""
    records = curve_of(result, _name(letter, 64))
    choose = min if smallest else max
    best = choose(records, key=lambda record: record["values"][number])
    return best["values"][number], best["values"][f"{number}_se"]


def _order(number: str, smallest: bool, first: str, what: str) -> Callable[[Result], Judgement]:
    def judge(result: Result) -> Judgement:
        found = {letter: _extreme(result, letter, number, smallest) for letter in LETTERS}
        others = [found[letter] for letter in LETTERS if letter != first]
        rival = (min if smallest else max)(others)
        gap = (rival[0] - found[first][0]) * (1 if smallest else -1)
        noise = max(2 * math.hypot(found[first][1], rival[1]), 0.02 * abs(rival[0]) if number == "gen_ppl" else 0.0)
        shown = ", ".join(f"{letter} {value:.4g} ± {error:.2g}" for letter, (value, error) in found.items())
        theirs = {
            letter: (min if smallest else max)(
                record["paper"][number] for record in curve_of(result, _name(letter, 64))
            )
            for letter in LETTERS
        }
        said = ", ".join(f"{letter} {value:.4g}" for letter, value in theirs.items())
        return Judgement(decide(gap > 0, resolved=abs(gap) > noise), f"{what} at NFE 64: {shown}", said)

    return judge


def _strength(result: Result) -> Judgement:
    return every(
        [lowers(result, _name(letter, 64), number) for letter in LETTERS for number in ("gen_ppl", "entropy")],
        what="strongest against weakest w_scg in each configuration",
    )


def _overlap(result: Result) -> Judgement:
    return lies_below(result, _name("C", 64), _name("B", 64))


def draw(result: Result, folder: Path) -> list[Path]:
    nfes = sorted({record["nfe"] for record in result.records})
    figures = [(str(nfe), f"configurations, NFE {nfe}", [_name(letter, nfe) for letter in LETTERS]) for nfe in nfes]
    return trade_off.draw_curves(result, folder, "configurations", figures)


EXPERIMENT = Experiment(
    name="configurations",
    reference="Figure 8; Tables of Appendix B.3 (A, B, C)",
    question="Which allocation of guidance along the trajectory serves which part of the frontier?",
    claims=(
        language_claim(
            "strength", "in each configuration a larger w_scg lowers Gen. PPL and entropy", "Section 4.5", _strength
        ),
        language_claim(
            "a-lowest",
            "A reaches the lowest Gen. PPL",
            "Section 4.5, Figure 8",
            _order("gen_ppl", True, "A", "lowest Gen. PPL"),
        ),
        language_claim(
            "a-entropy",
            "A reaches the lowest entropy",
            "Section 4.5, Figure 8",
            _order("entropy", True, "A", "lowest entropy"),
        ),
        language_claim(
            "c-entropy",
            "C preserves the greatest entropy",
            "Section 4.5, Figure 8",
            _order("entropy", False, "C", "highest entropy"),
        ),
        language_claim(
            "overlap", "where B and C overlap, C (with its larger K) has the lower Gen. PPL", "Section 4.5", _overlap
        ),
        trade_off.numbers_claim("Tables of Appendix B.3"),
    ),
    cost={"test": Cost(6, 6), "embedded": Cost(9, 120), "paper": Cost(116, 90 * 1800)},
    measure=measure,
    draw_figures=draw,
    tabulate=trade_off.tabulate("Configurations A, B, C"),
)
