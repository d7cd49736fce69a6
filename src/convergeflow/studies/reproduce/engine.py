"""Carries out the description of an experiment: expands its points, has them measured, and makes its tables.

A description lists families of points. A family with a `table` takes the paper's rows that pass `where` and the values
of the scale under `at`; one without takes every combination of `each`, of the values `at` the scale, and of `over`
(a field of the scale), on top of the settings it has `set`. A scale that `at` does not name leaves the family out.
`curve` and `label` are templates of these names; points whose curve has one name belong together, in their order. The
`kind` of a family is the function that measures a point: of the experiment's own module, or of `kinds.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from convergeflow.flow.guidance import Controls
from convergeflow.results.claims import Taken
from convergeflow.sampling.settings import PRESETS, Settings
from convergeflow.studies.reproduce import kinds, paper
from convergeflow.studies.reproduce.bench import Bench
from convergeflow.studies.reproduce.result import ExperimentResult, Record, ReportTable, field_of
from convergeflow.studies.reproduce.scale import ExperimentScale

if TYPE_CHECKING:
    from convergeflow.studies.reproduce.registry import Experiment

Family = Mapping[str, Any]
SETTINGS = {field.name for field in fields(Settings)}
CONTROLS = {field.name for field in fields(Controls)}


def measure(experiment: Experiment, bench: Bench) -> tuple[list[Record], dict[str, Any]]:
    """The records of all points; real text beside them where samples are scored.

    `Taken` if other processes still work on some of them; all that was free is done then.
    """
    records: list[Record] = []
    sizes: dict[str, int] = {}
    busy: Taken | None = None
    for family in experiment.points:
        kind = family.get("kind", "samples")
        point_of = experiment.own(kind) or getattr(kinds, kind)
        for point in expand(family, bench.scale):
            row = point.pop("row", None)
            curve = family["curve"].format(**point)
            try:
                settings = _settings(family, point, bench) if row is None else bench.settings(row.nfe, row.controls)
                label = family.get("label", "NFE {nfe}, {label}").format(**point)
                measured = point_of(bench, settings, point, label)
            except Taken as elsewhere:  # another process is at it, or nobody may be: there are other points
                busy = elsewhere
                bench.store.lacking += 1
                continue
            record = {**point, **measured, "curve": curve, "order": sizes.get(curve, 0)}
            if row is not None:
                record["paper"] = {"gen_ppl": row.gen_ppl, "entropy": row.entropy, "label": row.label}
            sizes[curve] = record["order"] + 1
            records.append(record)
    if busy is not None:
        raise busy
    scored = any("gen_ppl" in record["values"] for record in records)
    return records, {"real": bench.real_text()["values"]} if scored else {}


def expand(family: Family, scale: ExperimentScale) -> list[dict[str, Any]]:
    """What varies from point to point, by name; `row` is the paper's row where there is one."""
    chosen = family.get("at", {scale.like: {}}).get(scale.like)
    if chosen is None:
        return []
    over = {name: getattr(scale, size) for name, size in family.get("over", {}).items()}
    if "table" not in family:
        return list(_combinations({}, {**family.get("each", {}), **chosen, **over}))
    points = [{**row.facts(), "row": row} for label in _list(family["table"]) for row in paper.rows(label)]
    for name, wanted in {**family.get("where", {}), **chosen}.items():
        points = [point for point in points if point[name] in _list(wanted)]
    points.sort(key=lambda point: [point[name] for name in family.get("sort", ())])
    return [combined for point in points for combined in _combinations(point, family.get("each", {}))]


def _combinations(point: dict[str, Any], values: Mapping[str, Iterable[Any]]) -> Iterable[dict[str, Any]]:
    for combination in itertools.product(*values.values()):
        yield {**point, **dict(zip(values, combination, strict=True))}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _settings(family: Family, point: dict[str, Any], bench: Bench) -> Settings:
    """The settings of a point that is not the paper's; `steps` of `calls` network calls each make its NFE."""
    if "steps" in point:
        point["nfe"] = family.get("calls", 1) * point["steps"]
    given = {**family.get("set", {}), **point}
    chosen = {name: value for name, value in given.items() if name in SETTINGS}
    if "preset" in family:
        return replace(bench.settings(chosen["nfe"], PRESETS[family["preset"]].controls), **chosen)
    controls = Controls(**{name: value for name, value in given.items() if name in CONTROLS})
    return Settings(controls=controls, **chosen)


FRONTIER_COLUMNS = (
    ("curve", "curve"),
    ("setting (paper's)", "paper.label"),
    ("NFE", "nfe"),
    ("N", "steps"),
    ("paper: PPL", "paper.gen_ppl"),
    ("paper: H", "paper.entropy"),
    ("PPL", "gen_ppl"),
    ("±", "gen_ppl_se"),
    ("H", "entropy"),
    ("±", "entropy_se"),
    ("valid", "valid"),
)


def tabulate(table: Mapping[str, Any], result: ExperimentResult) -> ReportTable:
    """A table of the records: every point of the curves it names, the paper's numbers and real text by default.

    `rows` names a value of the result to tabulate instead; `real` adds real text to columns of its own.
    """
    columns = table.get("columns", FRONTIER_COLUMNS)
    chosen = set(result.curves(table.get("curves", ["*"])))
    records = [record for record in result.records if record.get("curve") in chosen]
    if "rows" in table:
        records = _list(result.values[table["rows"]])
    records.sort(key=lambda record: [record[name] for name in table.get("sort", ())])
    if table.get("real", columns is FRONTIER_COLUMNS):
        said = {"entropy": paper.statements()["data_entropy"]}
        records.append({"curve": "real text", "steps": None, "paper": said, "values": result.values["real"]})
    names = table.get("names", {})
    rows = [[field_of(record, where) for _, where in columns] for record in records]
    rows = [[names.get(cell, cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    return ReportTable(table["title"], [header for header, _ in columns], rows)
