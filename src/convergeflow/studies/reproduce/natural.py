"""The headline on natural text: what `systems` measures, on the State of the Union speeches (Figure 1, Table 1).

Stories are scored exactly but written by a program. At embedded scale this experiment samples the shipped `sotu-whole`
and lets SmolLM2 score it, where that is at hand; other systems are the models named `rival-NAME` in the workspace that
have its vocabulary. At the other scales the corpus is the scale's own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from convergeflow.errors import UserError
from convergeflow.evaluation.estimate import Estimate
from convergeflow.studies.reproduce import paper, systems
from convergeflow.studies.reproduce.bench import Bench
from convergeflow.studies.reproduce.result import ExperimentResult, Record, ReportTable
from convergeflow.studies.reproduce.scale import ExperimentScale
from convergeflow.studies.reproduce.verdict import Judgement, below, exactly, not_testable

MODEL = "sotu-whole"


def spoken(scale: ExperimentScale) -> ExperimentScale:
    """The scale with natural text in the place of stories."""
    if scale.name != "embedded":
        return scale
    return replace(scale, corpus="sotu", model=MODEL, scorer="smollm2")


def measure(bench: Bench) -> tuple[list[Record], dict[str, Any]]:
    try:
        return systems.measure(Bench(bench.workspace, spoken(bench.scale)))
    except UserError as error:
        # A model, a text or a scorer that is not on this machine leaves the claims undecided, not the report unwritten.
        if bench.scale.name != "embedded":
            raise
        return [], {"missing": str(error)}


def ratio(result: ExperimentResult) -> Judgement:
    """Ours at the data's entropy over the best other diffusion model, at that model's own entropy."""
    listed = {system.name: system for system in paper.systems()}
    ours, theirs = listed["ConvergeFlow"].gen_ppl, listed["LangFlow"].gen_ppl
    assert ours is not None and theirs is not None
    said = f"{ours} against {theirs}: {ours / theirs:.2f}"
    if "missing" in result.values:
        return not_testable(result.values["missing"], said)
    compared = systems.compared_ratio(result)
    if compared is not None:
        what = f"Gen. PPL at the data's entropy over {compared[1]}'s, both trained on one budget"
        return below(compared[0], exactly(ours / theirs), what=what, paper=said)
    rivals = [
        record
        for record in systems.usable(result)
        if record["curve"] != systems.OURS and record["values"].get("method") != "ar"
    ]
    crossing = result.values["at_data_entropy"]
    if not rivals or crossing["gen_ppl"] is None:
        why = crossing["says"] if crossing["gen_ppl"] is None else "no other diffusion model of this corpus is at hand"
        return not_testable(why, said)
    best = min(rivals, key=lambda record: float(record["values"]["gen_ppl"]))
    value, error = best["values"]["gen_ppl"], best["values"]["gen_ppl_se"]
    ratio = crossing["gen_ppl"] / value
    spread = ratio * ((crossing["se"] / crossing["gen_ppl"]) ** 2 + (error / value) ** 2) ** 0.5
    return below(
        Estimate(ratio, spread, best["values"]["n"]),
        exactly(ours / theirs),
        what=f"Gen. PPL at the data's entropy over that of {best['curve']} (entropy {best['values']['entropy']:.3f})",
        paper=said,
    )


draw = systems.draw


def tabulate(result: ExperimentResult) -> list[ReportTable]:
    """The tables of `systems` without the paper's own."""
    ours, *others = systems.tabulate(result)[1:]
    return [replace(ours, title="This run (speeches, scored by SmolLM2)"), *others]
