"""All systems in one table and figure: Gen. PPL against entropy, at the data's entropy where reached (Figure 1).

Every model that ships with the package or lies in the store, and has the vocabulary of the corpus, is sampled in the
one way that all systems share. ConvergeFlow alone is known by its name: it is measured along configuration C. These
models may have been trained for different times. So if `convergeflow compare` has put its table into the store
(`comparison-CORPUS`, in the folder or beside it), systems are judged by that table, where all have one budget; of
several budgets by that of the largest. It is another study, of other models: the evidence names it.
"""

from __future__ import annotations

import json
from typing import Any

from matplotlib.figure import Figure

from convergeflow.evaluation.estimate import Estimate
from convergeflow.evaluation.frontier import FrontierPoint, interpolate
from convergeflow.results import figures
from convergeflow.studies import curve, table
from convergeflow.studies.reproduce import drawing, engine, models, paper
from convergeflow.studies.reproduce.bench import Bench, seeds_of
from convergeflow.studies.reproduce.registry import Experiment
from convergeflow.studies.reproduce.result import ExperimentResult, Record
from convergeflow.studies.reproduce.verdict import Judgement, below, equal, exactly, not_measured
from convergeflow.zoo import load_model

OURS = "ConvergeFlow"
NFE = 64


def measure(experiment: Experiment, bench: Bench) -> tuple[list[Record], dict[str, Any]]:
    records, values = engine.measure(experiment, bench)
    others = [{**_other(bench, name), "curve": name, "order": 0} for name in _others(bench)]
    real = values["real"]
    crossing = interpolate([_point(record) for record in records], real["entropy"], real["entropy_se"])
    return records + [record for record in others if "gen_ppl" in record["values"]], {
        "real": real,
        "at_data_entropy": crossing.describe(),
        "published": paper.systems(),
        **_compared(bench),
    }


def _compared(bench: Bench) -> dict[str, Any]:
    """A comparison on this corpus: its rows at this budget of calls (AR has its own), and which study they are of."""
    name = f"comparison-{bench.scale.corpus}"
    places = [folder / name for folder in (bench.store.folder, bench.store.folder.resolve().parent)]
    path = next((found for found in map(curve.judging_table, places) if found is not None), None)
    if bench.scale.name == "test" or path is None:
        return {"comparison": []}
    found = json.loads(path.read_text(encoding="utf-8"))
    return {
        "comparison": [_with_error(row) for row in table.at_budget(found["rows"], NFE)],
        "judged_by": {"study": name, "about": found["about"], "command": found["command"]},
    }


def _with_error(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the whole standard error of its value, that of training included."""
    at = row["at_data_entropy"]
    return row if at["gen_ppl"] is None else {**row, "at_data_entropy": {**at, "error": table.error_of(at)}}


def _point(record: Record) -> FrontierPoint:
    """A measured point as the frontier's interpolation takes it."""
    return FrontierPoint.from_record(record["paper"]["label"], {**record["values"], "nfe": NFE, "seeds": "reproduce"})


def _others(bench: Bench) -> list[str]:
    """Models of other systems in the output folder; those that ship for the page were trained on other budgets."""
    folder = bench.store.folder / "models"
    return sorted(path.name for path in folder.glob("rival-*")) if folder.is_dir() else []


def _other(bench: Bench, name: str) -> dict[str, Any]:
    kept = models.found(bench.store, name)
    scale = bench.scale
    key = {"system": name, "model": kept.weights, "n": scale.num_samples, "length": scale.length, "nfe": NFE}

    def compute() -> dict[str, Any]:
        model = load_model(kept.folder)
        if model.config.vocabulary != bench.reference.vocabulary:
            return {"skipped": "another vocabulary"}
        bench.assessor.check(model, [bench.protocol])
        drawn = model.sample(scale.num_samples, scale.length, seeds=seeds_of(scale.num_samples), nfe=NFE)
        return {**bench.score(drawn.ids.numpy()), "method": model.method, "nfe_counted": drawn.nfe}

    return bench.store.point("systems", key, compute, label=f"system {name}")


def headline(result: ExperimentResult) -> Judgement:
    said = paper.statements()
    found = result.values["at_data_entropy"]
    if found["gen_ppl"] is None:
        return not_measured(found["says"], f"{said['headline_gen_ppl']} at {said['headline_entropy']}")
    return equal(
        Estimate(found["gen_ppl"], found["se"], len(result.records)),
        exactly(said["headline_gen_ppl"]),
        what="Gen. PPL at the data's entropy",
        paper=f"{said['headline_gen_ppl']} at {said['headline_entropy']}",
    )


def against(result: ExperimentResult, bound: float, paper: str, to: str = "", sampled: bool = False) -> Judgement:
    """Our Gen. PPL at the data's entropy is below `bound` times that of `to`, or of the best other diffusion system.

    Without a comparison on one budget, `sampled` lets the models of the output folder decide, each at its own entropy.
    """
    rows = result.values.get("comparison") or []
    compared, study = table.ratio(rows, to), result.values.get("judged_by") or {}
    if compared is not None:
        said = f"judged by another study, {study['study']}, not by the models of this one ({study['about']})"
        what = f"{said}; Gen. PPL at the data's entropy over {compared[1]}'s{_without(rows)}"
        return below(compared[0], exactly(bound), what=what, paper=paper)
    if not sampled:
        return not_measured("no comparison on one budget lies in the output folder (convergeflow compare)", paper)
    ours = result.values["at_data_entropy"]
    others = [r for r in result.records if r["curve"] != OURS and r["values"].get("method") != "ar"]
    if ours["gen_ppl"] is None or not others:
        missing = "no other diffusion model of this corpus is in the output folder"
        return not_measured(ours["says"] if ours["gen_ppl"] is None else missing, paper)
    best = min(others, key=lambda record: float(record["values"]["gen_ppl"]))
    values = best["values"]
    what = f"Gen. PPL at the data's entropy over that of {best['curve']} (entropy {values['entropy']:.3f})"
    ratio = table.quotient(ours, values["gen_ppl"], values["gen_ppl_se"])
    return below(ratio, exactly(bound), what=what, paper=paper)


def _without(rows: list[dict[str, Any]]) -> str:
    """Which systems of a comparison have no value at the data's entropy, so that they cannot be the best."""
    absent = [row["system"] for row in rows if row["at_data_entropy"]["gen_ppl"] is None]
    return f" ({', '.join(absent)} never there)" if absent else ""


def draw(result: ExperimentResult) -> Figure:
    figure, (theirs, ours) = figures.panels(2, width=5.4, height=4.2)
    listed = [system for system in paper.systems() if system["gen_ppl"] is not None]
    for index, system in enumerate(listed):
        name, at = system["system"], (system["entropy"], system["gen_ppl"])
        mark, size = ("*", 12) if name == OURS else ("o", 6)
        theirs.plot(*at, mark, markersize=size, color=figures.COLOURS[index % len(figures.COLOURS)])
        # Some systems lie close together; their names go to different sides.
        left = name in ("SEDD Absorb", "SEDD Uniform", "LangFlow")
        offset = (-7 if left else 8, {"SEDD Absorb": 5, "SEDD Uniform": -9, "LangFlow": -11}.get(name, -3))
        side: Any = "right" if left else "left"
        theirs.annotate(name, at, xytext=offset, textcoords="offset points", fontsize=8.5, ha=side)
    theirs.axvline(paper.statements()["data_entropy"], color="grey", linestyle=":")
    theirs.set_xlim(5.3, 5.68)
    theirs.set_ylim(30, 125)
    figures.logarithmic(theirs)
    for index, name in enumerate(result.curves()):
        look = {"marker": "os^Dvph"[index % 7], "colour": figures.COLOURS[index % len(figures.COLOURS)]}
        label = f"{OURS}, C" if name == OURS else name
        drawing.curve(ours, result.curve(name), label=label, **look)
    real = result.values["real"]
    ours.axvline(real["entropy"], color="grey", linestyle=":")
    drawing.mark_real(ours, real, [record["values"]["gen_ppl"] for record in result.curve(OURS)])
    figures.logarithmic(ours)
    figures.label_axes(theirs, drawing.ENTROPY, "Gen. PPL (GPT-2 Large)", "Paper (dotted: the data's entropy)")
    figures.label_axes(ours, drawing.ENTROPY, "Gen. PPL", f"This run ({result.scale})")
    ours.legend(loc="best")
    return figure
