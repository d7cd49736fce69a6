"""A result as one JSON record: numbers with errors, real text beside them, and everything needed to make it again.

Two records are put side by side only if they were measured on the same corpus, length, protocol and scorer;
`check_comparable` refuses otherwise unless it is told to let it pass.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from convergeflow.errors import UserError
from convergeflow.evaluation.metrics import about

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
    return versions


def now() -> str:
    """The present time, to the second, in UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def describe_seeds(seeds: Sequence[int]) -> dict[str, Any]:
    """Consecutive seeds as a range, others as a list."""
    if len(seeds) and list(seeds) == list(range(seeds[0], seeds[0] + len(seeds))):
        return {"first": int(seeds[0]), "count": len(seeds)}
    return {"list": [int(seed) for seed in seeds], "count": len(seeds)}


def write_record(path: str | Path, record: Any) -> None:
    """Write JSON in one step: a reader sees the old file or the new one."""
    path = Path(path)
    draft = path.with_name(f".unfinished-{path.name}")
    with open(draft, "w", encoding="utf-8") as file:
        json.dump(record, file, indent=1, ensure_ascii=False, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def read_record(path: str | Path) -> Record:
    """An evaluation record from a file."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError):
        raise UserError(f"{path} is not a JSON record") from None
    if not isinstance(record, dict) or "gen_ppl" not in record:
        raise UserError(f"{path} is not an evaluation record: it has no gen_ppl")
    return record


# --- comparing ---


def identity(record: Mapping[str, Any]) -> dict[str, Any]:
    """What must agree before two records are compared."""
    return {
        "corpus": record.get("corpus", {}).get("fingerprint"),
        "length": record.get("length"),
        "protocol": record.get("protocol"),
        "scorer": record.get("scorer_details", {}).get("weights"),
    }


def differences(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The identifying values in which records differ."""
    found: dict[str, list[Any]] = {}
    for key in ("corpus", "length", "protocol", "scorer"):
        values = list(dict.fromkeys(identity(record)[key] for record in records))
        if len(values) > 1:
            found[key] = values
    return found


def check_comparable(records: Sequence[Mapping[str, Any]], *, force: bool = False) -> list[str]:
    """Refuse records that measure different things; with `force` say what differs and let it pass."""
    said = [f"{key}: {' and '.join(map(str, values))}" for key, values in differences(records).items()]
    if said and not force:
        raise UserError(
            f"these results measure different things and cannot be compared ({'; '.join(said)}); "
            "make them with one corpus and protocol, or use --force"
        )
    return said


# --- reading ---


def render(record: Any) -> str:
    """A record as text for people."""
    if isinstance(record, dict) and isinstance(record.get("records"), list):
        return render_protocols(record["records"])
    if isinstance(record, dict) and record.get("kind") == "frontier":
        return _render_frontier(record)
    if not isinstance(record, dict) or "gen_ppl" not in record:
        raise UserError("this JSON file is not a record of `convergeflow evaluate` or `convergeflow sweep`")
    return "\n".join([*_headline(record), "", *_metric_lines(record), "", *_origin_lines(record)])


def _headline(record: Record) -> list[str]:
    real = record.get("real") or {}
    rows = [["", "samples", "real text"]]
    named = {"gen_ppl": "Gen. PPL", "entropy": "entropy (nats)", "valid": "valid samples"}
    for key, label in named.items():
        if key in record:
            pair = [number(numbers.get(key), numbers.get(f"{key}_se")) for numbers in (record, real)]
            rows.append([label, *pair])
    rows.append(["n", str(record["n"]), str(real.get("n", "-"))])
    rows.append(["NFE", str(record.get("nfe", "-")), "-"])
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
    lines = [record.get("title", "frontier"), ""]
    rows = [["curve", record["control"], "Gen. PPL", "entropy", "NFE"]]
    for curve in record["curves"]:
        for point in curve["points"]:
            rows.append(
                [
                    curve["label"],
                    f"{point['value']}",
                    number(point["gen_ppl"], point["gen_ppl_se"]),
                    number(point["entropy"], point["entropy_se"]),
                    str(point["nfe"]),
                ]
            )
    lines += _columns(rows)
    for curve in record["curves"]:
        lines.append(f"{curve['label']}: {curve['at_data_entropy']['says']}")
    return "\n".join(lines)


def number(value: float | None, se: float | None = None) -> str:
    """A value with its standard error, to the digit that the error allows."""
    if value is None or not math.isfinite(value):
        return "-"
    if se is None or not math.isfinite(se) or se == 0:
        return f"{value:.4g}"
    digits = max(0, 1 - math.floor(math.log10(se)))
    return f"{value:.{digits}f} ± {se:.{digits}f}"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
