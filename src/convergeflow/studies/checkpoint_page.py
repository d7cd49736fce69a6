"""The page of a table of checkpoints: each paper's claim beside the measured value, and the frontier with both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from convergeflow import files
from convergeflow.evaluation.estimate import number
from convergeflow.evaluation.frontier import Frontier
from convergeflow.results import pages
from convergeflow.results.record import frontier_of
from convergeflow.studies.checkpoints import CheckpointStudy, Entry, ratio_to_claim, shown

COLUMNS = (
    "system",
    "setting",
    "NFE",
    "Gen. PPL",
    "entropy",
    "claimed Gen. PPL",
    "claimed entropy",
    "measured / claimed",
    "parameters",
)
Rows = Sequence[tuple[Entry, Mapping[str, Any]]]


def frontier(study: CheckpointStudy, rows: Rows) -> Frontier:
    """A curve for every entry, and the claims."""
    curves: dict[str, list[Any]] = {}
    for entry, found in rows:
        curves.setdefault(entry.name, []).append((found["point"], dict(found), found["file"]))
    made = frontier_of(study.table.title, "setting", curves, command=study.measurer.command)
    claims = {entry.name: asdict(entry.claim) for entry, _ in rows if entry.claim is not None}
    return replace(made, facts={**made.facts, "claims": claims})


def values(entry: Entry, found: Mapping[str, Any]) -> dict[str, Any]:
    """One row as JSON values."""
    claim = entry.claim if found["point"] == shown(entry.points[0]) else None  # a claim is of one setting: the first
    kept = ("point", "nfe", "gen_ppl", "gen_ppl_se", "entropy", "entropy_se", "parameters", "n")
    return {
        "system": entry.name,
        **{name: found.get(name) for name in kept},
        "claim": None if claim is None else asdict(claim),
        "measured_over_claimed": ratio_to_claim(found, claim),
        "source": entry.source,
        "revision": entry.how.get("revision"),
        "weights": found["model"]["weights"],
        "record": found["file"],
    }


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row in words; a dash where there is no such number."""
    claim, ratio = row["claim"] or {}, row["measured_over_claimed"]
    return [
        row["system"],
        row["point"],
        str(row["nfe"]),
        number(row["gen_ppl"], row["gen_ppl_se"]),
        number(row["entropy"], row["entropy_se"]),
        "-" if claim.get("gen_ppl") is None else f"{claim['gen_ppl']:g}",
        "-" if claim.get("entropy") is None else f"{claim['entropy']:g}",
        "-" if ratio is None else f"{ratio:.3f}",
        f"{row['parameters']:,}",
    ]


def write_page(study: CheckpointStudy, rows: Rows) -> dict[str, Any]:
    """table.json, table.md, table.html and the frontier in the study's folder; returns what table.json holds."""
    table, measurer = study.table, study.measurer
    folder = measurer.store.folder
    figure = frontier(study, rows)
    listed = [values(entry, found) for entry, found in rows]
    reference = measurer.assessor.reference
    about = (
        f"{table.num} samples of {table.length} tokens per point, scorer {measurer.assessor.scorer.name}, protocol "
        f"{measurer.protocol.id}, real text {'none' if reference is None else reference.name}. Weights and samplers "
        "are the authors' own; all errors are standard errors over samples."
    )
    pages.write_frontier(figure, folder, "frontier")
    lines = [f"# {table.title}", "", about, "", *pages.markdown_table(COLUMNS, [cells(row) for row in listed])]
    lines += ["", "![measured and claimed](frontier.png)", "", "Hollow circles: what the papers claim.", ""]
    if remarks := _remarks(study, rows):
        lines += ["## To be read with it", "", *(f"- {remark}" for remark in remarks), ""]
    if missing := [entry.name for entry in table.entries if entry.source is None]:
        lines += [f"Left out, because their weights have no hub name: {', '.join(missing)}.", ""]
    lines += ["## Made with", "", f"    {measurer.command or '-'}", ""]
    text = "\n".join(lines)
    summary = {
        "kind": "checkpoints",
        "format": 1,
        "title": table.title,
        "about": about,
        "rows": listed,
        "left_out": missing,
        "frontier": figure.describe(),
        "command": measurer.command,
    }
    files.write_json(folder / "table.json", summary)
    files.write_text(folder / "table.md", text)
    files.write_text(folder / "table.html", pages.page(text, folder))
    return summary


def _remarks(study: CheckpointStudy, rows: Rows) -> list[str]:
    """Where each claim stands, and what makes a row differ from the others."""
    found = []
    entries = {entry.name: entry for entry, _ in rows}
    reference = study.measurer.assessor.reference
    for entry in entries.values():
        if entry.claim is not None and entry.claim.where:
            found.append(f"{entry.name}: claimed in {entry.claim.where}")
        if entry.remark:
            found.append(f"{entry.name}: {entry.remark}")
        own = next(record for of, record in rows if of is entry)
        same = reference is None or own["corpus"].get("statistics_blocks", 0) > 0
        if not same and study.measurer.protocol.entropy_on == "ids":
            found.append(f"{entry.name} has a vocabulary of its own: its entropy is not on the others' scale")
    return found
