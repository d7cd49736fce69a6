"""The headline on natural text: what `systems` measures, on the State of the Union speeches (Figure 1, Table 1).

Stories are scored exactly but written by a program. At embedded scale this experiment samples the shipped `sotu-whole`
and lets SmolLM2 score it, where that is at hand; other systems are the models named `rival-NAME` in the workspace that
have its vocabulary. At the other scales the corpus is the scale's own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from convergeflow.errors import UserError
from convergeflow.evaluation.estimate import Estimate
from convergeflow.studies.reproduce import paper, systems
from convergeflow.studies.reproduce.registry import Claim, Cost, Experiment, Result, Table
from convergeflow.studies.reproduce.scale import LANGUAGE_SCALES, Scale
from convergeflow.studies.reproduce.verdict import Judgement, below, exactly, not_testable
from convergeflow.studies.reproduce.workspace import Workspace

MODEL = "sotu-whole"


def spoken(scale: Scale) -> Scale:
    """The scale with natural text in the place of stories."""
    if scale.name != "embedded":
        return scale
    return replace(scale, corpus="sotu", model=MODEL, scorer="smollm2")


def measure(workspace: Workspace, scale: Scale) -> Result:
    try:
        found = systems.measure(workspace, spoken(scale))
    except UserError as error:
        # A model, a text or a scorer that is not on this machine leaves the claims undecided, not the report unwritten.
        if scale.name != "embedded":
            raise
        return Result("natural", scale.name, [], {"missing": str(error)})
    return replace(found, experiment="natural")


def _ratio(result: Result) -> Judgement:
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
        if record["system"] != systems.OURS and record["values"].get("method") != "ar"
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
        what=f"Gen. PPL at the data's entropy over that of {best['system']} (entropy {best['values']['entropy']:.3f})",
        paper=said,
    )


def draw(result: Result, folder: Path) -> list[Path]:
    return [] if "missing" in result.values else systems.draw(result, folder)


def tabulate(result: Result) -> list[Table]:
    if "missing" in result.values:
        return []
    found = systems.tabulate(result)[1:]
    return [replace(found[0], title="This run (speeches, scored by SmolLM2)"), *found[1:]]


EXPERIMENT = Experiment(
    name="natural",
    reference="Figure 1; Table 1, on natural text",
    question="Does the headline carry over to a small model of natural English?",
    claims=(
        Claim(
            "ratio",
            "at the data's entropy Gen. PPL is 0.55 of the best other diffusion model's, or less",
            "Table 1",
            _ratio,
            scales=LANGUAGE_SCALES,
        ),
    ),
    cost={"test": Cost(3, 2), "embedded": Cost(5, 400), "paper": Cost(20, 20 * 1800)},
    measure=measure,
    draw_figures=draw,
    tabulate=tabulate,
)
