"""The frontier that the page draws: Gen. PPL against entropy of saved evaluation records.

`python -m convergeflow.serving.frontier docs/results > frontier.json` writes what the package ships.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CORPORA = {
    "stories": ("stories-small", "comparison-stories"),
    "basic": ("basic-small", "comparison-basic/steps-1000"),
    "sotu": ("sotu-small", "comparison-sotu"),
}
"""Corpus -> the folders of its records."""
SHOWN = ("refine", "scg", "ug", "refine_schedule", "scg_schedule", "ug_schedule")
CALLS = 64
"""Comparisons are shown at this budget, of the first training seed; records of shipped models at any."""


def frontiers(results: Path) -> dict[str, Any]:
    """Per corpus: the value of real text, and a point for every record."""
    found = {}
    for corpus, folders in CORPORA.items():
        records = [record for folder in folders for record in _records(results, folder)]
        real = next((record["real"] for record in records if record.get("real")), None)
        points = sorted((_point(record) for record in records), key=lambda point: (point["curve"], point["gen_ppl"]))
        shown = None if real is None else {"gen_ppl": _short(real["gen_ppl"]), "entropy": _short(real["entropy"])}
        found[corpus] = {"real": shown, "points": points}
    return found


def _records(results: Path, folder: str) -> Iterator[dict[str, Any]]:
    comparison = folder.startswith("comparison")
    for file in sorted((results / folder).glob("records/*.json" if comparison else "*.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(record, dict) or record.get("kind") != "evaluation":
            continue
        if comparison and (record["nfe"] != CALLS or "@" in file.name):
            continue
        if comparison or record["model"]["name"] == folder:
            yield {**record, "file": f"docs/results/{file.relative_to(results).as_posix()}"}


def _point(record: dict[str, Any]) -> dict[str, Any]:
    sampling, shipped = record["sampling"], "/" not in record["model"]["name"]
    controls = sampling.get("controls", {})
    return {
        "curve": record["model"]["name"] if shipped else record["model"]["method"],
        "shipped": shipped,
        "gen_ppl": _short(record["gen_ppl"]),
        "entropy": _short(record["entropy"]),
        "n": record["n"],
        "nfe": record["nfe"],
        "temperature": sampling.get("temperature", 1.0),
        "base_temperature": sampling.get("base_temperature", 1.0),
        "controls": {name: _short(controls[name]) for name in SHOWN if name in controls},
        "record": record["file"],
    }


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    json.dump(frontiers(Path(sys.argv[1])), sys.stdout, indent=None, separators=(",", ":"), sort_keys=True)
