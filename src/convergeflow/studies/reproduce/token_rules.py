"""The token rules on the same samples: Gen. PPL and entropy of each (Figure 7), and their agreement over N (Sec. 4.1).

`weight` is the largest final weight, `distance` the embedding nearest to the closed state, `prediction` the one nearest
to the final mu (what the published code calls distance). Reading a sample by another rule costs no network call.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

from convergeflow.evaluation.estimate import Estimate, mean
from convergeflow.sampling.settings import Settings
from convergeflow.studies.reproduce import paper, plotting, trade_off
from convergeflow.studies.reproduce.bench import Bench
from convergeflow.studies.reproduce.registry import Cost, Experiment, Result, Table
from convergeflow.studies.reproduce.scale import Scale
from convergeflow.studies.reproduce.trade_off import by_scale, language_claim
from convergeflow.studies.reproduce.verdict import Judgement, decide, every, measured, show
from convergeflow.studies.reproduce.workspace import Workspace

RULES = ("weight", "distance", "prediction")


def measure(workspace: Workspace, scale: Scale) -> Result:
    bench = Bench(workspace, scale)
    strengths = by_scale(scale, test=(20.0, 40.0), embedded=(20.0, 30.0, 40.0))
    records: list[dict[str, Any]] = []
    for nfe in scale.budgets if scale.name == "paper" else scale.budgets[:1]:
        rows = [row for row in paper.rows(f"tab:guidance_nfe{nfe}") if row.configuration == "C"]
        for row in trade_off.pick(rows, "scg", strengths):
            settings = bench.settings(row.nfe, row.controls)
            for rule in RULES:
                record = bench.measure(settings, label=f"NFE {nfe}, {row.label}", rule=rule)
                records.append({**record, "part": "curve", "rule": rule, "nfe": nfe, "scg": row.controls.scg})
    for num_steps in scale.agreement_steps:
        records.append({**_agreement(bench, num_steps), "part": "agreement", "steps": num_steps})
    return Result("token-rules", scale.name, records, {"real": bench.real_text()["values"]})


def _agreement(bench: Bench, num_steps: int) -> dict[str, Any]:
    """Share of positions at which rules agree, with its error over samples."""
    # The paper's default: one call per step, conditioned on the previous prediction.
    settings = Settings(nfe=num_steps, self_condition="previous")
    num = max(4, bench.scale.num_samples // 2)
    key = {"steps": num_steps, "model": bench.model.weights, "n": num, "length": bench.scale.length}

    def compute() -> dict[str, Any]:
        ids, _ = bench.samples(bench.model, settings, num)
        values: dict[str, Any] = {}
        for rule in ("distance", "prediction"):
            each = mean((ids["weight"] == ids[rule]).mean(1))
            values[rule], values[f"{rule}_se"] = each.value, each.se
        return {**values, "positions": int(ids["weight"].size)}

    return bench.workspace.point("agreement", key, compute, label=f"agreement of the token rules, {num_steps} steps")


def _curve(result: Result, rule: str, nfe: int = 64) -> list[dict[str, Any]]:
    return [r for r in result.records if r["part"] == "curve" and r["rule"] == rule and r["nfe"] == nfe]


def _agreements(result: Result) -> list[dict[str, Any]]:
    return [record for record in result.records if record["part"] == "agreement"]


def _overlap(result: Result, *, rule: str) -> Judgement:
    # The same samples are read twice: their own noise cancels, so the difference itself is what counts.
    found = []
    for a, b in zip(_curve(result, rule), _curve(result, "weight"), strict=True):
        apart = a["values"]["gen_ppl"] / b["values"]["gen_ppl"] - 1
        shown = [show(measured(record["values"], "gen_ppl")) for record in (a, b)]
        evidence = f"by {rule} {shown[0]}, by weight {shown[1]} at w_scg = {a['scg']:g} ({apart:+.1%})"
        found.append(Judgement(decide(abs(apart) <= 0.05, resolved=True), evidence))
    return every(found, what="Gen. PPL of the two rules within 5 % on the same samples")


def _near_one(result: Result, *, rule: str) -> Judgement:
    said = paper.statements()
    low = min(record["values"][rule] for record in _agreements(result))
    shown = ", ".join(f"N = {r['steps']}: {r['values'][rule]:.2%}" for r in _agreements(result))
    return Judgement(
        decide(low >= said["agreement_low"] - 0.02, resolved=True),
        f"weight and {rule} rules agree: {shown}",
        f"{said['agreement_low']:.2%} to {said['agreement_high']:.2%} for N = 32 to 512",
    )


def _grows(result: Result, *, rule: str) -> Judgement:
    series = _agreements(result)
    first, last = measured(series[0]["values"], rule), measured(series[-1]["values"], rule)
    gap = last.value - first.value
    noise = 2 * math.hypot(first.se, last.se)
    both = min(first.value, last.value) >= 0.999
    return Judgement(
        decide(gap > 0, resolved=gap > noise or gap < -noise) if not both else decide(True, resolved=gap >= 0),
        f"agreement of weight and {rule} from {_percent(first)} at N = {series[0]['steps']} "
        f"to {_percent(last)} at N = {series[-1]['steps']}",
        "rises with N",
    )


def _percent(estimate: Estimate) -> str:
    return f"{estimate.value:.2%} ± {estimate.se:.2%}"


def draw(result: Result, folder: Path) -> list[Path]:
    figure, axes = plotting.panels(2, width=5.2)
    for rule, colour, marker in zip(RULES, plotting.COLOURS, "os^", strict=False):
        records = _curve(result, rule)
        points = [(entropy, gen_ppl) for gen_ppl, entropy in trade_off.points_of(records)]
        errors = [(r["values"]["entropy_se"], r["values"]["gen_ppl_se"]) for r in records]
        line = "-" if rule == "weight" else "--"
        plotting.trade_off(axes[0], points, label=rule, colour=colour, marker=marker, line=line, errors=errors)
    plotting.label_axes(
        axes[0], "unigram entropy (nats)", "Gen. PPL", f"This run ({result.scale}): three rules, same samples, NFE 64"
    )
    axes[0].legend(title="token rule")
    series = _agreements(result)
    steps = [record["steps"] for record in series]
    for rule, colour, marker in (("distance", plotting.COLOURS[1], "s"), ("prediction", plotting.COLOURS[2], "^")):
        axes[1].errorbar(
            steps,
            [100 * record["values"][rule] for record in series],
            yerr=[100 * record["values"][f"{rule}_se"] for record in series],
            marker=marker,
            color=colour,
            capsize=2,
            label=f"weight = {rule}",
        )
    said = paper.statements()
    axes[1].plot(
        said["agreement_steps"],
        [100 * said["agreement_low"], 100 * said["agreement_high"]],
        "k*:",
        markersize=9,
        label="paper (its two ends)",
    )
    plotting.count_axis(axes[1], sorted({*steps, *said["agreement_steps"]}))
    plotting.label_axes(axes[1], "steps N", "positions that agree (%)", "Agreement of the token rules")
    axes[1].legend(loc="best")
    return plotting.save(figure, folder, "token-rules")


def tabulate(result: Result) -> list[Table]:
    rows = [
        (
            r["label"],
            r["rule"],
            r["values"]["gen_ppl"],
            r["values"]["gen_ppl_se"],
            r["values"]["entropy"],
            r["values"].get("valid"),
        )
        for r in result.records
        if r["part"] == "curve"
    ]
    agreements = [
        (r["steps"], r["values"]["distance"], r["values"]["distance_se"], r["values"]["prediction"])
        for r in _agreements(result)
    ]
    return [
        Table("The same samples under three token rules", ("setting", "rule", "PPL", "±", "H", "valid"), rows),
        Table("Agreement with the weight rule", ("N", "distance", "±", "prediction"), agreements),
    ]


EXPERIMENT = Experiment(
    name="token-rules",
    reference="Figure 7; Section 4.1 (agreement over N)",
    question="Do the parameter-free token rules read the same text from a sample?",
    # The published code takes the token nearest to the final prediction, and the paper's numbers are its; the paper's
    # equation takes the one nearest to the final state.
    claims=tuple(
        claim
        for rule, suffix, of in (("prediction", "", "published code"), ("distance", "-state", "paper's equation"))
        for claim in (
            language_claim(
                f"overlap{suffix}",
                f"the Gen. PPL-entropy curves of the weight rule and of the {of} nearly overlap",
                "Section 4.4, Figure 7",
                partial(_overlap, rule=rule),
            ),
            language_claim(
                f"agreement{suffix}",
                f"the weight rule and that of the {of} agree at about 99 % of positions or more",
                "Section 4.1",
                partial(_near_one, rule=rule),
            ),
            language_claim(
                f"grows{suffix}",
                f"agreement with the rule of the {of} rises as the discretisation becomes finer",
                "Section 4.1",
                partial(_grows, rule=rule),
            ),
        )
    ),
    cost={"test": Cost(9, 6), "embedded": Cost(14, 200), "paper": Cost(71, 10 * 1800)},
    measure=measure,
    draw_figures=draw,
    tabulate=tabulate,
)
