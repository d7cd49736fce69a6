"""Each control alone, constant against time-adaptive (Figure 4, Tables "trade-off" at NFE 64 and 128)."""

from __future__ import annotations

from pathlib import Path

from convergeflow.studies.reproduce import paper, trade_off
from convergeflow.studies.reproduce.bench import Bench
from convergeflow.studies.reproduce.registry import Cost, Experiment, Result
from convergeflow.studies.reproduce.scale import Scale
from convergeflow.studies.reproduce.trade_off import Curve, curve_of, entropy_range, language_claim, lies_below, lowers
from convergeflow.studies.reproduce.verdict import Judgement, decide, every
from convergeflow.studies.reproduce.workspace import Workspace

CONTROLS = {"scg": "w_scg", "ug": "w_ug", "refine": "K"}
CHOSEN: dict[tuple[str, int], dict[tuple[str, str], tuple[float, ...]]] = {
    ("embedded", 64): {
        ("refine", "standard"): (1, 3, 5),
        ("refine", "adaptive"): (10, 20, 40),
        ("scg", "standard"): (1.0, 2.0, 4.0, 8.0),
        ("scg", "adaptive"): (20.0, 60.0, 100.0),
        ("ug", "standard"): (0.02, 0.04, 0.08),
        ("ug", "adaptive"): (0.5, 2.0),
    },
    ("embedded", 128): {
        ("refine", "standard"): (1, 5),
        ("refine", "adaptive"): (10, 40),
        ("scg", "standard"): (1.0, 8.0),
        ("scg", "adaptive"): (20.0, 100.0),
        ("ug", "standard"): (0.02, 0.08),
        ("ug", "adaptive"): (0.5, 2.0),
    },
    ("test", 64): {
        ("refine", "standard"): (1, 5),
        ("refine", "adaptive"): (10, 40),
        ("scg", "standard"): (1.0, 8.0),
        ("scg", "adaptive"): (20.0, 100.0),
        ("ug", "standard"): (0.02, 0.08),
        ("ug", "adaptive"): (0.5, 2.0),
    },
    ("test", 128): {("scg", "standard"): (1.0, 8.0), ("scg", "adaptive"): (20.0, 100.0)},
}
"""Values of the paper that a scale runs; at paper scale all of them."""


def name_of(control: str, variant: str, nfe: int) -> str:
    return f"{CONTROLS[control]} {variant}, NFE {nfe}"


def curves(scale: Scale) -> list[Curve]:
    found = []
    for nfe in scale.budgets:
        chosen = None if scale.name == "paper" else CHOSEN[(scale.name, nfe)]
        for control in CONTROLS:
            for variant in ("standard", "adaptive"):
                rows = [
                    row for row in paper.rows(f"tab:trade-off_{nfe}") if (row.varied, row.variant) == (control, variant)
                ]
                if chosen is not None and (control, variant) not in chosen:
                    continue
                values = None if chosen is None else chosen[(control, variant)]
                found.append(Curve(name_of(control, variant, nfe), trade_off.pick(rows, control, values)))
    return found


def measure(workspace: Workspace, scale: Scale) -> Result:
    return trade_off.measure_curves(Bench(workspace, scale), curves(scale), "controls")


def _names(result: Result, nfe: int | None = None) -> list[str]:
    found = dict.fromkeys(record["curve"] for record in result.records)
    return [name for name in found if nfe is None or name.endswith(f"NFE {nfe}")]


def _effective(result: Result) -> Judgement:
    found = [lowers(result, name, number) for name in _names(result) for number in ("gen_ppl", "entropy")]
    return every(found, what="strongest against weakest setting of each curve, Gen. PPL and entropy")


def _adaptive(result: Result) -> Judgement:
    pairs = [
        lies_below(result, name_of(control, "adaptive", nfe), name_of(control, "standard", nfe))
        for nfe in (64, 128)
        for control in CONTROLS
        if name_of(control, "adaptive", nfe) in _names(result)
    ]
    return every(pairs, what="adaptive against standard at equal entropy")


def _broadest(result: Result) -> Judgement:
    ranges = {c: entropy_range(curve_of(result, name_of(c, "adaptive", 64))) for c in CONTROLS}
    theirs = {c: entropy_range(curve_of(result, name_of(c, "adaptive", 64)), "paper") for c in CONTROLS}
    shown = ", ".join(f"{CONTROLS[c]} {value:.4f}" for c, value in ranges.items())
    said = ", ".join(f"{CONTROLS[c]} {value:.4f}" for c, value in theirs.items())
    errors = [record["values"]["entropy_se"] for record in curve_of(result, name_of("refine", "adaptive", 64))]
    resolved = abs(ranges["scg"] - ranges["refine"]) > 2 * max(errors)
    return Judgement(
        decide(ranges["refine"] < ranges["scg"], resolved=resolved),
        f"range of entropy covered by the adaptive controls at NFE 64: {shown} nats",
        said,
    )


def draw(result: Result, folder: Path) -> list[Path]:
    titles = {"scg": "self-conditioning guidance", "ug": "unconditional guidance", "refine": "iterative refinement"}
    figures: list[tuple[str, str, list[str]]] = []
    for nfe in (64, 128):
        for control, title in titles.items():
            names = [name_of(control, variant, nfe) for variant in ("standard", "adaptive")]
            if any(name in _names(result) for name in names):
                figures.append((f"{control}{nfe}", title, names))
        if nfe == 64:
            figures.append(("adaptive", "the three adaptive controls", [name_of(c, "adaptive", 64) for c in CONTROLS]))
    return trade_off.draw_curves(result, folder, "controls", figures)


EXPERIMENT = Experiment(
    name="controls",
    reference="Figure 4; Tables of Appendix B.1, NFE 64 and 128",
    question="Does each control trade entropy for Gen. PPL, and better so when strong near the data only?",
    claims=(
        language_claim(
            "effective", "raising a control lowers Gen. PPL at the cost of entropy", "Section 4.3, Figure 4", _effective
        ),
        language_claim(
            "adaptive", "time-adaptive variants have the better frontier", "Section 4.3, Figure 4a-c", _adaptive
        ),
        language_claim(
            "broadest",
            "guidance spans a broader range than refinement, whose range is narrow",
            "Section 4.3, Figure 4d",
            _broadest,
        ),
        trade_off.numbers_claim("Tables of Appendix B.1"),
    ),
    cost={"test": Cost(17, 20), "embedded": Cost(31, 700), "paper": Cost(57, 57 * 1800)},
    measure=measure,
    draw_figures=draw,
    tabulate=trade_off.tabulate("Each control alone"),
)
