"""The table and the verdict of a comparison, from its results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from convergeflow import files
from convergeflow.evaluation.estimate import Estimate, number
from convergeflow.evaluation.frontier import Frontier
from convergeflow.evaluation.generative import paired_ratio
from convergeflow.results import pages
from convergeflow.results.record import frontier_of
from convergeflow.studies.study import Study, SystemResult
from convergeflow.studies.systems import CONTROLLED
from convergeflow.systems import OURS

COLUMNS = (
    "system",
    "NFE",
    "Gen. PPL at data entropy",
    "own Gen. PPL",
    "own entropy",
    "valid",
    "NLL bound",
    "tokens/s",
    "training",
    "parameters",
    "without table",
)


def frontiers(results: Sequence[SystemResult], title: str, command: str | None = None) -> dict[int, Frontier]:
    """One figure per budget of calls with a curve for every system; the autoregressive one is in all of them."""
    fixed = [result for result in results if _is_ar(result.system)]
    budgets = sorted({result.nfe for result in results if not _is_ar(result.system)}) or [fixed[0].nfe]
    found = {}
    for nfe in budgets:
        curves: dict[str, Any] = {}
        for result in [r for r in results if r.nfe == nfe and not _is_ar(r.system)] + fixed:
            curves[result.system] = result.points
        found[nfe] = frontier_of(f"{title}, NFE {nfe}", "setting", curves, command=command)
    return found


def _is_ar(system: str) -> bool:
    return system.partition("@")[0] == "ar"


def rows(results: Sequence[SystemResult], figures: dict[int, Frontier]) -> list[dict[str, Any]]:
    """One row per system and budget, as JSON values."""
    found = []
    for result in results:
        default = result.points[0][1]
        figure = figures.get(result.nfe) or next(iter(figures.values()))
        likelihood = result.facts.get("likelihood") or {}
        found.append(
            {
                "system": result.system,
                "nfe": default["nfe"],
                "at_data_entropy": figure.crossing(result.system).describe(),
                "default": {
                    name: default.get(name)
                    for name in ("gen_ppl", "gen_ppl_se", "entropy", "entropy_se", "valid", "valid_se")
                },
                "likelihood": likelihood or None,
                "tokens_per_second": result.facts["tokens_per_second"],
                "training_seconds": result.facts["training_seconds"],
                "parameters": result.facts["parameters"],
                "parameters_without_table": result.facts["parameters_without_table"],
            }
        )
    return _with_training_error(found)


def _with_training_error(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of second training seeds (`ar@1`) go into those of the first: half the distance is the error of training."""
    for other in (row for row in table if "@" in row["system"]):
        name = other["system"].partition("@")[0]
        first = next((row for row in table if (row["system"], row["nfe"]) == (name, other["nfe"])), None)
        if first is None:  # another process is still at it
            continue
        values = [row["at_data_entropy"]["gen_ppl"] for row in (first, other)]
        distance = None if None in values else abs(values[0] - values[1]) / 2
        first["at_data_entropy"] |= {"training_se": distance, "second_seed": values[1]}
    return [row for row in table if "@" not in row["system"]]


def error_of(at: Mapping[str, Any]) -> float:
    """Standard error of a Gen. PPL at the data's entropy: that of the samples and, where it is known, of training."""
    return math.hypot(at["se"], at.get("training_se") or 0.0)


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table in words; a dash where a system has no such number."""
    at, default, likelihood = row["at_data_entropy"], row["default"], row["likelihood"]
    seconds = row["training_seconds"]
    return [
        row["system"],
        str(row["nfe"]),
        "never there" if at["gen_ppl"] is None else number(at["gen_ppl"], error_of(at)) + _seeds(at),
        "inf" if default["gen_ppl"] is None else number(default["gen_ppl"], default["gen_ppl_se"]),
        number(default["entropy"], default["entropy_se"]),
        "-" if default["valid"] is None else number(default["valid"], default["valid_se"]),
        "-" if not likelihood else number(likelihood["nats_per_token"], likelihood["standard_error"]),
        f"{row['tokens_per_second']:.0f}",
        "-" if seconds is None else f"{seconds / 60:.1f} min",
        f"{row['parameters']:,}",
        f"{row['parameters_without_table']:,}",
    ]


def _seeds(at: Mapping[str, Any]) -> str:
    return " (2 seeds)" if at.get("training_se") is not None else ""


def at_budget(table: Sequence[dict[str, Any]], nfe: int) -> list[dict[str, Any]]:
    """The rows of one budget of network calls; the autoregressive model has its own and is in all of them."""
    return [row for row in table if row["nfe"] == nfe or row["system"] == "ar"]


def ratio(table: Sequence[dict[str, Any]], to: str = "") -> tuple[Estimate, str] | None:
    """Our Gen. PPL at the data's entropy over `to`'s, or over the best other diffusion system's, and whose that is.

    None where either has no value there. LangFlow under our sampler shares half of what is compared: it is no rival.
    """
    there = {row["system"]: row["at_data_entropy"] for row in table if row["at_data_entropy"]["gen_ppl"] is not None}
    others = {name: float(at["gen_ppl"]) for name, at in there.items() if name not in (OURS, CONTROLLED, "ar")}
    best = to or min(others, key=lambda name: others[name], default="")
    if OURS not in there or best not in there:
        return None
    return quotient(there[OURS], there[best]["gen_ppl"], error_of(there[best])), best


def quotient(ours: Mapping[str, Any], value: float, error: float) -> Estimate:
    """Our Gen. PPL at the data's entropy over another one."""
    share = ours["gen_ppl"] / value
    return Estimate(share, share * math.hypot(error_of(ours) / ours["gen_ppl"], error / value), 0)


def verdict(table: Sequence[dict[str, Any]]) -> list[str]:
    """The paper's two ratios, as measured here at each budget, in sentences."""
    said = []
    for nfe in sorted({row["nfe"] for row in table if row["system"] == OURS}):
        rows = at_budget(table, nfe)
        if next(row for row in rows if row["system"] == OURS)["at_data_entropy"]["gen_ppl"] is None:
            said.append(f"NFE {nfe}: convergeflow's curve does not reach the data's entropy, so there is no ratio")
            continue
        for to, published, missing in (("", 0.55, "other diffusion model"), ("ar", 0.92, "AR value")):
            found = ratio(rows, to)
            if found is None:
                said.append(f"NFE {nfe}: no {missing} at that entropy")
            else:
                share = f"{found[0].value:.2f} of {found[1]}'s Gen. PPL at the data's entropy"
                said.append(f"NFE {nfe}: {share} (paper: {published})")
    return said


def objective_alone(results: Sequence[SystemResult]) -> list[dict[str, Any]]:
    """Our Gen. PPL over that of LangFlow's weights under the same sampler, for each setting, noise by noise.

    Both spent the same steps, ours the last of them on the mean squared error. A row without a setting is the geometric
    mean over the settings of its budget.
    """
    found = []
    for ours in (result for result in results if result.system == OURS):
        theirs = next((r for r in results if r.system == CONTROLLED and r.nfe == ours.nfe), None)
        if theirs is None:
            continue
        # Strengths are rescaled to each model's schedule, so labels may differ in the last digits: go by order.
        # Both are read in one order, and one of them may have needed fewer settings.
        pairs = list(zip(ours.points, theirs.points, strict=False))
        for label, chosen in [(pair[0][0], [pair]) for pair in pairs] + [(None, pairs)]:
            ratio = paired_ratio([(mine[1]["per_sample"], other[1]["per_sample"]) for mine, other in chosen])
            if ratio is not None:
                entropies = [pair[0][1]["entropy"] - pair[1][1]["entropy"] for pair in chosen]
                more = sum(entropies) / len(entropies)
                found.append({"nfe": ours.nfe, "setting": label, **ratio.describe(), "more_entropy": more})
    return found


def markdown(table: Sequence[dict[str, Any]], facts: dict[str, Any], objective: Sequence[dict[str, Any]] = ()) -> str:
    """The table and the verdict as a page."""
    lines = [f"# Comparison on {facts['corpus']}", "", facts["about"], ""]
    lines += pages.markdown_table(COLUMNS, [cells(row) for row in table])
    lines += ["", "## The paper's headline at this scale", ""]
    lines += [f"- {sentence}" for sentence in verdict(table)] or ["- convergeflow did not take part"]
    if objective:
        lines += ["", "## The objective alone", ""]
        lines += [
            "Gen. PPL of convergeflow over Gen. PPL of langflow's weights under the same sampler, noise by noise: what",
            "the last stage's mean squared error bought over as many more steps of cross-entropy.",
            "",
        ]
        shown = [
            [row["nfe"], row["setting"] or "**all**", number(row["value"], row["se"]), f"{row['more_entropy']:+.3f}"]
            for row in objective
        ]
        lines += pages.markdown_table(["NFE", "setting", "ratio", "more entropy"], shown)
    return "\n".join(lines) + "\n"


def write_comparison(study: Study, results: Sequence[SystemResult], corpus: str) -> dict[str, Any]:
    """table.json, table.md and a figure per budget in the study's folder; returns what table.json holds."""
    base, measurer, folder = study.base, study.measurer, study.store.folder
    figures = frontiers(results, f"All systems on {corpus}", measurer.command)
    table, objective = rows(results, figures), objective_alone(results)
    about = (
        f"{base.batch * base.corpus.length * base.total_steps:,} training tokens per system ({base.total_steps} steps "
        f"of {base.batch} x {base.corpus.length}), width {base.model.system.width}, depth {base.model.system.depth}; "
        f"{len(measurer.seeds)} samples per point, scorer {measurer.assessor.scorer.name}, protocol "
        f"{measurer.protocol.id}."
    )
    summary = {
        "kind": "comparison",
        "format": 1,
        "corpus": corpus,
        "about": about,
        "rows": table,
        "verdict": verdict(table),
        "objective": objective,
        "command": measurer.command,
        "frontiers": {str(nfe): figure.describe() for nfe, figure in figures.items()},
    }
    files.write_json(folder / "table.json", summary)
    files.write_text(folder / "table.md", markdown(table, {"corpus": corpus, "about": about}, objective))
    for nfe, figure in figures.items():
        firsts = {label: points for label, points in figure.curves.items() if "@" not in label}
        pages.write_frontier(replace(figure, curves=firsts), folder, f"frontier-nfe{nfe}")
    return summary
