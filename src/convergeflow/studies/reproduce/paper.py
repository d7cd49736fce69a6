"""The paper's own numbers as data: every row of every table, and the figures it states in its text.

The file `paper_numbers.json` beside this one holds facts only (settings, NFE, Gen. PPL, entropy) under the paper's
table labels. Nominal strengths are those of the paper's schedule (`settings.PAPER_SCHEDULE`); see `bench.carried_over`
for what they become at another width.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from convergeflow.errors import unknown_name
from convergeflow.flow.guidance import Controls


@dataclass(frozen=True)
class Row:
    """One sampling setting of the paper and what it gave."""

    table: str
    nfe: int
    controls: Controls
    gen_ppl: float
    entropy: float
    varied: str | None = None
    """The control that the row varies alone: refine, scg or ug."""
    variant: str | None = None
    """`standard` or `adaptive`, where one control is varied alone."""

    @property
    def configuration(self) -> str:
        """A, B or C where all controls share it; the varied control's own otherwise."""
        if self.varied is not None:
            return str(getattr(self.controls, f"{self.varied}_schedule"))
        return self.controls.refine_schedule

    @property
    def label(self) -> str:
        """The setting in a few words."""
        parts = [f"{self.configuration}"]
        names = (("refine", "K"), ("scg", "w_scg"), ("ug", "w_ug"))
        neutral = Controls()
        for name, letter in names:
            value = getattr(self.controls, name)
            if value != getattr(neutral, name) or name == self.varied:
                parts.append(f"{letter}={value:g}")
        return " ".join(parts)

    def facts(self) -> dict[str, Any]:
        """What descriptions of experiments choose rows by, and name curves after."""
        names = ("nfe", "varied", "variant", "configuration", "label")
        controls = {name: getattr(self.controls, name) for name in ("refine", "scg", "ug")}
        return {**{name: getattr(self, name) for name in names}, **controls}


@dataclass(frozen=True)
class System:
    """One line of the comparison of systems."""

    name: str
    family: str
    gen_ppl: float | None
    entropy: float
    parameters: str | None


@cache
def _document() -> dict[str, Any]:
    text = (resources.files("convergeflow.studies.reproduce") / "paper_numbers.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def statements() -> dict[str, Any]:
    """Numbers stated in the paper's text: the headline, the data's entropy, the agreement of the token rules, ..."""
    return dict(_document()["statements"])


def protocol() -> str:
    """How the paper made its numbers, in one line."""
    return str(_document()["protocol"])


def labels() -> list[str]:
    """The labels of all tables."""
    return list(_document()["tables"])


def title(label: str) -> str:
    return str(_table(label)["title"])


def _table(label: str) -> dict[str, Any]:
    tables = _document()["tables"]
    if label not in tables:
        raise unknown_name("table", label, tables)
    return dict(tables[label])


SYSTEMS = "tab:ppl_entropy_comparison"


def systems() -> list[System]:
    """The comparison of systems; the data itself has no Gen. PPL."""
    return [
        System(row["system"], row["family"], row["gen_ppl"], row["entropy"], row["parameters"])
        for row in _table(SYSTEMS)["rows"]
    ]


@cache
def rows(label: str) -> tuple[Row, ...]:
    """The rows of a table of sampling settings."""
    names = ("refine", "scg", "ug", "refine_schedule", "scg_schedule", "ug_schedule")
    return tuple(
        Row(
            label,
            row["nfe"],
            Controls(**{name: row[name] for name in names}),
            row["gen_ppl"],
            row["entropy"],
            row.get("varied"),
            row.get("variant"),
        )
        for row in _table(label)["rows"]
    )


def all_rows() -> list[Row]:
    """Every sampling setting of every table, in the paper's order."""
    return [row for label in labels() if label != SYSTEMS for row in rows(label)]


def find(nfe: int, controls: Controls) -> list[Row]:
    """All rows with this setting; the paper has more than one for some."""
    return [row for row in all_rows() if row.nfe == nfe and row.controls == controls]


def largest_contradiction() -> tuple[float, list[Row]]:
    """How far apart, as a share, two values of the paper for one setting are: no tolerance may be below this."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in all_rows():
        active = row.controls
        # A control at its neutral value is the same setting whatever its schedule.
        key = (
            row.nfe,
            (active.refine, active.refine_schedule if active.refine != 1 else "-"),
            (active.scg, active.scg_schedule if active.scg != 1.0 else "-"),
            (active.ug, active.ug_schedule if active.ug != 0.0 else "-"),
        )
        groups.setdefault(key, []).append(row)

    def spread(group: list[Row]) -> float:
        values = [row.gen_ppl for row in group]
        return max(values) / min(values) - 1.0

    worst = max(groups.values(), key=spread)
    return spread(worst), worst


def gen_ppl_at_entropy(curve: list[tuple[float, float]], entropy: float) -> float | None:
    """log Gen. PPL interpolated linearly in entropy along (gen_ppl, entropy) points; None outside their range."""
    ordered = sorted(curve, key=lambda point: point[1])
    levels = np.array([point[1] for point in ordered])
    if len(levels) < 2 or not levels[0] <= entropy <= levels[-1]:
        return None
    return float(np.exp(np.interp(entropy, levels, np.log([point[0] for point in ordered]))))
