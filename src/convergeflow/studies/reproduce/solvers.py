"""Solvers at small budgets: what buys quality when network calls are few? Not in the paper.

Euler, the multistep solver (no extra calls), Heun (two predictions per step) and the kernel solver (log f constant
along a step, the kernel exact; passes of the head between the calls) spend the same NFE; each traces a curve over
w_scg, and curves are compared at equal entropy: noise by noise where the entropies of all points agree, else by
interpolation.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from convergeflow.flow.guidance import Controls
from convergeflow.sampling.settings import Settings
from convergeflow.studies.reproduce import plotting, trade_off
from convergeflow.studies.reproduce.bench import Bench
from convergeflow.studies.reproduce.registry import Cost, Experiment, Result, Table
from convergeflow.studies.reproduce.scale import Scale
from convergeflow.studies.reproduce.trade_off import (
    by_scale,
    curve_of,
    language_claim,
    paired_ratio,
    ratio_at_equal_entropy,
    same_entropy,
)
from convergeflow.studies.reproduce.verdict import Judgement, below, exactly, not_testable
from convergeflow.studies.reproduce.workspace import Workspace

SOLVERS = ("euler", "multistep", "heun", "kernel")
BUDGETS = (8, 16)
EVERY = (0.5, 1.0, 1.5, 2.0, 3.0)


def measure(workspace: Workspace, scale: Scale) -> Result:
    bench = Bench(workspace, scale)
    strengths = by_scale(scale, test=(1.0, 2.0), embedded=EVERY) or EVERY
    records = []
    for nfe in BUDGETS:
        for solver in SOLVERS:
            for order, scg in enumerate(strengths):
                settings = Settings(nfe=nfe, solver=solver, controls=Controls(scg=scg))
                record = bench.measure(settings, label=f"NFE {nfe}, {solver}, w_scg {scg:g}")
                records.append({**record, "curve": f"{solver}, NFE {nfe}", "nfe": nfe, "scg": scg, "order": order})
    return Result("solvers", scale.name, records, {"real": bench.real_text()["values"]})


def _beats_euler(result: Result, *, nfe: int, solver: str) -> Judgement:
    ours, euler = curve_of(result, f"{solver}, NFE {nfe}"), curve_of(result, f"euler, NFE {nfe}")
    # Where the solvers' entropies agree at each w_scg, equal w_scg is equal entropy, and every strength has its say.
    matched = all(same_entropy(pair) for pair in zip(ours, euler, strict=True))
    ratio = (paired_ratio(ours, euler) if matched else None) or ratio_at_equal_entropy(ours, euler)
    if ratio is None:
        return not_testable(f"{solver} and euler share no range of entropy at NFE {nfe} in this run")
    return below(ratio, exactly(1.0), what=f"Gen. PPL of {solver} over euler at NFE {nfe} and equal entropy")


def draw(result: Result, folder: Path) -> list[Path]:
    figure, axes = plotting.panels(len(BUDGETS), width=5.0)
    for panel, nfe in zip(axes, BUDGETS, strict=False):
        for solver, colour, marker in zip(SOLVERS, plotting.COLOURS, "os^D", strict=False):
            records = curve_of(result, f"{solver}, NFE {nfe}")
            points = [(entropy, gen_ppl) for gen_ppl, entropy in trade_off.points_of(records)]
            errors = [(r["values"]["entropy_se"] or 0.0, r["values"]["gen_ppl_se"] or 0.0) for r in records]
            plotting.trade_off(panel, points, label=solver, colour=colour, marker=marker, errors=errors)
        panel.axvline(result.values["real"]["entropy"], color="grey", linestyle=":", linewidth=1.2, label="data")
        panel.set_yscale("log")
        trade_off.plain_logarithm(panel)
        plotting.label_axes(panel, "unigram entropy (nats)", "Gen. PPL", f"NFE {nfe} ({result.scale})")
        panel.legend(loc="best")
    return plotting.save(figure, folder, "solvers")


def tabulate(result: Result) -> list[Table]:
    rows = [
        (
            r["curve"],
            r["scg"],
            r["values"]["steps"],
            r["values"]["gen_ppl"],
            r["values"]["gen_ppl_se"],
            r["values"]["entropy"],
            r["values"]["entropy_se"],
            r["values"].get("valid"),
        )
        for r in result.records
    ]
    return [Table("Solvers at small budgets", ("curve", "w_scg", "N", "PPL", "±", "H", "±", "valid"), rows)]


EXPERIMENT = Experiment(
    name="solvers",
    reference="not in the paper",
    question="Does a second-order solver, or one that follows the kernel, beat Euler when network calls are few?",
    claims=tuple(
        language_claim(
            f"{solver}-{nfe}",
            f"{solver} has a lower Gen. PPL than euler at NFE {nfe} and equal entropy",
            "a question of ours",
            partial(_beats_euler, nfe=nfe, solver=solver),
        )
        for nfe in BUDGETS
        for solver in SOLVERS[1:]
    ),
    cost={"test": Cost(16, 8), "embedded": Cost(40, 180), "paper": Cost(40, 40 * 300)},
    measure=measure,
    draw_figures=draw,
    tabulate=tabulate,
)
