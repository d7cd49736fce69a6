"""A result as one JSON record: numbers with errors, real text beside them, and everything needed to make it again.

Two records are put side by side only if they were measured on the same corpus, length, protocol and scorer.
"""

from __future__ import annotations

import json
import math
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from convergeflow.errors import UserError
from convergeflow.evaluation.estimate import number
from convergeflow.evaluation.frontier import Frontier, FrontierPoint
from convergeflow.evaluation.metrics import about
from convergeflow.results.pages import cell, points_table

FORMAT = 1
Record = dict[str, Any]
PACKAGES = ("convergeflow", "torch", "transformers", "tokenizers", "numpy", "scipy")


def package_versions() -> dict[str, str]:
    """Versions of what computed a result."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    commit = commit_of(Path(__file__))
    return versions if commit is None else {**versions, "commit": commit}


@cache
def commit_of(file: Path) -> str | None:
    """The commit of a file in a clone, with `-dirty` if the clone has changed since; None if git does not keep it."""
    # An environment inside somebody else's clone is no part of it: git must know the file itself.
    asked = (
        ["ls-files", "--error-unmatch", file.name],
        ["describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"],
    )
    try:
        for words in asked:
            done = subprocess.run(["git", *words], cwd=file.parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def make(measured: Mapping[str, Any], *, command: str | None = None, **extra: Any) -> Record:
    """The record of what `Assessor.assess` measured, with everything needed to make it again."""
    return {
        "kind": "evaluation",
        "format": FORMAT,
        **measured,
        "versions": package_versions(),
        "command": command,
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **extra,
    }


# --- comparing ---


def identity(record: Mapping[str, Any]) -> dict[str, Any]:
    """What must agree before two records are compared."""
    return {
        "corpus": record.get("corpus", {}).get("fingerprint"),
        "length": record.get("length"),
        "protocol": record.get("protocol"),
        "scorer": record.get("scorer_details", {}).get("weights"),
    }


def check_comparable(records: Sequence[Mapping[str, Any]]) -> None:
    """Refuse records that measure different things."""
    differing = []
    for key in identity({}):
        values = list(dict.fromkeys(identity(record)[key] for record in records))
        if len(values) > 1:
            differing.append(f"{key}: {' and '.join(map(str, values))}")
    if differing:
        raise UserError(
            f"these results measure different things and cannot be compared ({'; '.join(differing)}); "
            "make them with one corpus and protocol"
        )


Points = Sequence[tuple[Any, Record, str | None]]
"""(value of the control, record, file) of each point of a curve."""


def frontier_of(title: str, control: str, curves: Mapping[str, Points], *, command: str | None = None) -> Frontier:
    """The frontier of records along a control; records that measure different things are refused."""
    records = [record for points in curves.values() for _, record, _ in points]
    if not records:
        raise UserError("a frontier needs at least one point")
    check_comparable(records)
    first = records[0]
    exact = first.get("exact") or {}
    floor = math.exp(exact["entropy_per_token"]) if first["scorer"] == "exact" and exact else None
    facts = {name: first.get(name) for name in ("model", "corpus", "length", "n", "versions", "arithmetic")}
    return Frontier(
        title,
        control,
        {label: [FrontierPoint.from_record(*point) for point in points] for label, points in curves.items()},
        first.get("real") or {},
        first["scorer"],
        first["protocol"],
        {**facts, "command": command},
        floor,
    )


# --- reading ---


def render(record: Any) -> str:
    """A record as text for people."""
    try:
        if isinstance(record, dict) and isinstance(record.get("records"), list):
            return render_protocols(record["records"])
        if isinstance(record, dict) and record.get("kind") == "frontier":
            return _render_frontier(record)
        if isinstance(record, dict) and "gen_ppl" in record:
            return "\n".join([*_headline(record), "", *_metric_lines(record), "", *_origin_lines(record)])
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, ArithmeticError) as wrong:
        said = " ".join(str(wrong).split())[:80]
        raise UserError(f"this record is damaged or of another version ({type(wrong).__name__}: {said})") from None
    raise UserError("this JSON file is not a record of `convergeflow evaluate` or `convergeflow sweep`")


def _headline(record: Record) -> list[str]:
    real = record.get("real") or {}
    judge = record.get("scorer") or "the scorer"
    told = {
        "gen_ppl": f"how unlikely {judge} finds a text; lower is better, real text is the aim",
        "entropy": "how varied the words of a text are; real text is the aim",
        "valid": "share that the law of the data can write",
    }
    rows = [["", "samples", "real text", ""]]
    named = {"gen_ppl": "Gen. PPL", "entropy": "entropy (nats)", "valid": "valid samples"}
    for key, label in named.items():
        if key in record:
            pair = [number(numbers.get(key), numbers.get(f"{key}_se")) for numbers in (record, real)]
            rows.append([label, *pair, told[key]])
    rows.append(["n", str(record["n"]), str(real.get("n", "-")), "texts"])
    rows.append(["NFE", str(record.get("nfe", "-")), "-", "network calls for each"])
    return _columns(rows)


def _metric_lines(record: Record) -> list[str]:
    rows = [["metric", "samples", "real text", ""]]
    for name, row in record.get("metrics", {}).items():
        rows.append([name, number(row["value"], row["se"]), number(row.get("real"), row.get("real_se")), about(name)])
    lines = _columns(rows) if len(rows) > 1 else []
    likelihood = record.get("likelihood")
    if likelihood:
        lines.append("")
        value = number(likelihood["nats_per_token"], likelihood["standard_error"])
        text = f"likelihood bound   {value} nats per token"
        if likelihood.get("bits_per_byte") is not None:
            text += f", {likelihood['bits_per_byte']:.3f} bits per byte"
        text += f" ({likelihood['kind']}, {likelihood['draws']} draws, {likelihood['tokens']} tokens)"
        lines.append(text)
        if likelihood.get("kl_at_most") is not None:
            lines.append(f"forward KL to the law of the data at most {likelihood['kl_at_most']:.3f} nats per token")
    return lines


def _origin_lines(record: Record) -> list[str]:
    scorer, corpus, model = (record.get(key) or {} for key in ("scorer_details", "corpus", "model"))
    rows = [
        ("model", f"{model.get('name', '-')} (weights {model.get('weights', '-')})"),
        ("corpus", f"{corpus.get('name', '-')} (fingerprint {corpus.get('fingerprint', '-')})"),
        ("scorer", f"{record.get('scorer', '-')} ({scorer.get('weights', '-')}; {record.get('arithmetic', '-')})"),
        ("protocol", f"{record.get('protocol', '-')}: {record.get('protocol_details', {}).get('about', '')}"),
        ("length", f"{record.get('length', '-')} tokens"),
        ("seeds", json.dumps(record.get("seeds"))),
        ("sampling", _brief(record.get("sampling") or {})),
        ("versions", ", ".join(f"{name} {version}" for name, version in (record.get("versions") or {}).items())),
        ("command", record.get("command") or "-"),
        ("made", record.get("created") or "-"),
    ]
    if record.get("truncated"):
        rows.insert(4, ("cut", f"{record['truncated']} samples were longer than the protocol scores"))
    return [f"{name:<10}{value}" for name, value in rows]


def _brief(settings: Mapping[str, Any]) -> str:
    """Settings without the plan, which is long."""
    kept = {key: value for key, value in settings.items() if key != "plan" and value is not None}
    return json.dumps(kept, ensure_ascii=False)


def render_protocols(records: Sequence[Record]) -> str:
    """The same samples under several protocols, with the difference of each to the first."""
    first = records[0]
    rows = [["protocol", "Gen. PPL", "change", "entropy", "real text", "scored tokens", "computed in"]]
    for record in records:
        change = 100 * (record["gen_ppl"] / first["gen_ppl"] - 1)
        real = record.get("real") or {}
        rows.append(
            [
                record["protocol"],
                number(record["gen_ppl"], record["gen_ppl_se"]),
                "-" if record is first else f"{change:+.1f} %",
                number(record["entropy"], record["entropy_se"]),
                number(real.get("gen_ppl"), real.get("gen_ppl_se")),
                str(record["scored_tokens"]),
                record["arithmetic"],
            ]
        )
    what = [f"{record['protocol']}: {record['protocol_details']['about']}" for record in records]
    return "\n".join([*_columns(rows), "", *what])


def _render_frontier(record: Record) -> str:
    columns, rows = points_table(record)
    told = [i for i, _ in enumerate(columns) if any(row[i] is not None for row in rows)]
    columns, rows = [columns[i] for i in told], [[row[i] for i in told] for row in rows]
    lines = _columns([columns, *([cell(value) for value in row] for row in rows)])
    said = [f"{curve['label']}: {curve['at_data_entropy']['says']}" for curve in record["curves"]]
    return "\n".join([record.get("title", "frontier"), "", *lines, *said])


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
