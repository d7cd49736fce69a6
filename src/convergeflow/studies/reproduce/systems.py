"""All systems in one table and figure: Gen. PPL against entropy, at the data's entropy where reached (Figure 1).

Every model that ships with the package (or lies in the store) and speaks the corpus' vocabulary is sampled through the
one protocol that all systems follow. No system is known here by its name except ConvergeFlow, which is measured along
the curve of configuration C. Such models may have been trained for longer or shorter. So where `convergeflow compare`
has put its table (`comparison-CORPUS/table.json` in the store), systems are judged by that: one budget for all.
"""

from __future__ import annotations

import json
import math
from typing import Any

from matplotlib.figure import Figure

from convergeflow.evaluation.estimate import Estimate
from convergeflow.evaluation.frontier import FrontierPoint, interpolate
from convergeflow.results import figures
from convergeflow.studies.reproduce import drawing, engine, models, paper
from convergeflow.studies.reproduce.bench import Bench, seeds_of
from convergeflow.studies.reproduce.registry import experiment_by_name
from convergeflow.studies.reproduce.result import ExperimentResult, Record, ReportTable
from convergeflow.studies.reproduce.verdict import Judgement, below, equal, exactly, measured, not_testable
from convergeflow.zoo import load_model, shipped_folder, shipped_models

OURS = "ConvergeFlow"
NFE = 64


def measure(bench: Bench) -> tuple[list[Record], dict[str, Any]]:
    records, values = engine.measure(experiment_by_name("systems").points, bench)
    records += [{**_rival(bench, name), "curve": name} for name in _others(bench)]
    real = values["real"]
    crossing = interpolate([_point(r) for r in records if r["curve"] == OURS], real["entropy"], real["entropy_se"])
    return records, {"real": real, "at_data_entropy": crossing.describe(), "comparison": _compared(bench)}


def _compared(bench: Bench) -> list[dict[str, Any]]:
    """The rows of a comparison on this corpus at this budget of calls (AR has its own), if there is one."""
    path = bench.store.folder / f"comparison-{bench.scale.corpus}" / "table.json"
    if bench.scale.name == "test" or not path.is_file():
        return []
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return [row for row in rows if row["system"] == "ar" or row["nfe"] == NFE]


def compared_ratio(result: ExperimentResult, to: str = "") -> tuple[Estimate, str] | None:
    """Our Gen. PPL at the data's entropy over the best other diffusion system's in a comparison, or over `to`'s."""
    there = {
        row["system"]: row["at_data_entropy"]
        for row in result.values.get("comparison") or []
        if row["at_data_entropy"]["gen_ppl"] is not None
    }
    ours = there.get("convergeflow")
    # LangFlow under our sampler shares half of what is compared: it is listed, and no rival.
    others = {name: at for name, at in there.items() if name not in ("convergeflow", "langflow+controls", "ar")}
    best = to or min(others, key=lambda name: float(others[name]["gen_ppl"]), default="")
    if ours is None or best not in there:
        return None
    theirs = there[best]
    ratio = ours["gen_ppl"] / theirs["gen_ppl"]
    spread = ratio * math.hypot(ours["se"] / ours["gen_ppl"], theirs["se"] / theirs["gen_ppl"])
    return Estimate(ratio, spread, 0), best


def _point(record: Record) -> FrontierPoint:
    """A measured point as the frontier's interpolation takes it."""
    return FrontierPoint.from_record(record["paper"]["label"], {**record["values"], "nfe": NFE, "seeds": "reproduce"})


def _others(bench: Bench) -> list[str]:
    """Models of other systems that speak this corpus."""
    folder = bench.store.folder / "models"
    local = sorted(path.name for path in folder.glob("rival-*")) if folder.is_dir() else []
    if bench.scale.like != "embedded":
        return local  # shipped models are larger than `test` allows, and do not speak the corpus of `paper`
    spoken = [name for name in shipped_models() if _vocabulary(name) == bench.reference.vocabulary]
    return [name for name in [*spoken, *local] if name != bench.scale.model]


def _vocabulary(shipped: str) -> int:
    return int(json.loads((shipped_folder() / shipped / "config.json").read_text(encoding="utf-8"))["vocabulary"])


def _rival(bench: Bench, name: str) -> dict[str, Any]:
    kept = models.found(bench.store, name)
    scale = bench.scale
    key = {"system": name, "model": kept.weights, "n": scale.num_samples, "length": scale.length, "nfe": NFE}

    def compute() -> dict[str, Any]:
        model = load_model(kept.folder)
        if model.config.vocabulary != bench.reference.vocabulary:
            return {"skipped": "another vocabulary"}
        drawn = model.sample(scale.num_samples, scale.length, seeds=seeds_of(scale.num_samples), nfe=NFE)
        return {**bench.score(drawn.ids.numpy()), "method": model.method, "nfe_counted": drawn.nfe}

    return bench.store.point("systems", key, compute, label=f"system {name}")


def usable(result: ExperimentResult) -> list[dict[str, Any]]:
    """The records of systems that speak the corpus."""
    return [record for record in result.records if "gen_ppl" in record["values"]]


def headline(result: ExperimentResult) -> Judgement:
    said = paper.statements()
    found = result.values["at_data_entropy"]
    if found["gen_ppl"] is None:
        return not_testable(found["says"], f"{said['headline_gen_ppl']} at {said['headline_entropy']}")
    return equal(
        Estimate(found["gen_ppl"], found["se"], len(result.records)),
        exactly(said["headline_gen_ppl"]),
        what="Gen. PPL at the data's entropy",
        paper=f"{said['headline_gen_ppl']} at {said['headline_entropy']}",
    )


def best(result: ExperimentResult) -> Judgement:
    compared = compared_ratio(result)
    if compared is not None:
        ratio, other = compared
        what = f"Gen. PPL at the data's entropy over {other}'s, both trained on one budget"
        return below(ratio, exactly(1.0), what=what, paper="33.17 against 60.09 (LangFlow): 0.55")
    rivals = [record for record in usable(result) if record["curve"] != OURS]
    if not rivals:
        return not_testable("no other system ships for this corpus yet", "33.17 against 60.09 (LangFlow)")
    ours = min((r for r in usable(result) if r["curve"] == OURS), key=lambda record: record["values"]["gen_ppl"])
    best = min(rivals, key=lambda record: record["values"]["gen_ppl"])
    return below(
        measured(ours["values"], "gen_ppl"),
        measured(best["values"], "gen_ppl"),
        what=f"lowest Gen. PPL of ConvergeFlow against {best['curve']}",
        paper="33.17 against 60.09 (LangFlow)",
    )


def against(result: ExperimentResult, *, to: str, bound: float) -> Judgement:
    said = f"{bound:g}"
    compared = compared_ratio(result, to)
    if compared is None:
        return not_testable("no comparison on one budget lies in the output folder (convergeflow compare)", said)
    ratio, other = compared
    what = f"Gen. PPL at the data's entropy over {other}'s, both trained on one budget"
    return below(ratio, exactly(bound), what=what, paper=said)


def draw(result: ExperimentResult) -> Figure:
    figure, (theirs, ours) = figures.panels(2, width=5.4, height=4.2)
    for index, system in enumerate(paper.systems()):
        if system.gen_ppl is None:
            continue
        mine = system.name == OURS
        theirs.plot(
            [system.entropy],
            [system.gen_ppl],
            "*" if mine else "o",
            markersize=12 if mine else 6,
            color=figures.COLOURS[index % len(figures.COLOURS)],
        )
        # Some systems lie close together; their names go to different sides.
        left = system.name in ("SEDD Absorb", "SEDD Uniform", "LangFlow")
        above = {"SEDD Absorb": 5, "SEDD Uniform": -9, "LangFlow": -11}.get(system.name, -3)
        theirs.annotate(
            system.name,
            (system.entropy, system.gen_ppl),
            xytext=(-7 if left else 8, above),
            textcoords="offset points",
            fontsize=8.5,
            ha="right" if left else "left",
        )
    theirs.axvline(paper.statements()["data_entropy"], color="grey", linestyle=":")
    theirs.set_xlim(5.3, 5.68)
    theirs.set_yscale("log")
    theirs.set_ylim(30, 125)
    figures.plain_logarithm(theirs)
    curve = result.curve(OURS)
    drawing.curve(ours, curve, label=f"{OURS}, C", colour=figures.COLOURS[0])
    for index, record in enumerate((r for r in usable(result) if r["curve"] != OURS), start=1):
        look = {"marker": "s^Dvph"[index % 6], "colour": figures.COLOURS[index % 8], "line": ""}
        drawing.curve(ours, [record], label=record["curve"], **look)
    real = result.values["real"]
    ours.axvline(real["entropy"], color="grey", linestyle=":")
    drawing.mark_real(ours, real, [record["values"]["gen_ppl"] for record in curve])
    drawing.logarithmic(ours)
    figures.label_axes(theirs, "unigram entropy (nats)", "Gen. PPL (GPT-2 Large)", "Paper (dotted: the data's entropy)")
    figures.label_axes(ours, "unigram entropy (nats)", "Gen. PPL", f"This run ({result.scale})")
    ours.legend(loc="best")
    return figure


def tabulate(result: ExperimentResult) -> list[ReportTable]:
    published = [(s.name, s.family, s.gen_ppl, s.entropy, s.parameters) for s in paper.systems()]
    rows = [
        (
            r["curve"],
            r["label"],
            r["values"]["gen_ppl"],
            r["values"]["gen_ppl_se"],
            r["values"]["entropy"],
            r["values"].get("valid"),
        )
        for r in usable(result)
    ]
    real = result.values["real"]
    rows.append(("real text", "", real["gen_ppl"], real["gen_ppl_se"], real["entropy"], real.get("valid")))
    compared = [
        (
            row["system"],
            row["nfe"],
            row["at_data_entropy"]["gen_ppl"],
            row["at_data_entropy"]["se"],
            row["default"]["gen_ppl"],
            row["default"]["entropy"],
            row["default"]["valid"],
        )
        for row in result.values.get("comparison") or []
    ]
    columns = ("system", "NFE", "PPL at the data's entropy", "±", "PPL by default", "H by default", "valid")
    found = result.values["at_data_entropy"]
    rows.append((OURS, "interpolated at the data's entropy", found["gen_ppl"], found["se"], real["entropy"], None))
    return [
        ReportTable("Paper (OpenWebText, GPT-2 Large)", ("system", "family", "PPL", "H", "size"), published),
        ReportTable("This run", ("system", "setting", "PPL", "±", "H", "valid"), rows),
        *([ReportTable("Trained on one budget (convergeflow compare)", columns, compared)] if compared else []),
    ]
