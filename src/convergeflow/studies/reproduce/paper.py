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


def _rows(label: str) -> list[dict[str, Any]]:
    tables = _document()["tables"]
    if label not in tables:
        raise unknown_name("table", label, tables)
    return list(tables[label]["rows"])


SYSTEMS = "tab:ppl_entropy_comparison"


def systems() -> list[dict[str, Any]]:
    """The comparison of systems: system, family, gen_ppl (none for the data itself), entropy, parameters."""
    return _rows(SYSTEMS)


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
        for row in _rows(label)
    )


def all_rows() -> list[Row]:
    """Every sampling setting of every table, in the paper's order."""
    return [row for label in _document()["tables"] if label != SYSTEMS for row in rows(label)]


def largest_contradiction() -> tuple[float, list[Row]]:
    """How far apart, as a share, two values of the paper for one setting are: no tolerance may be below this."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    neutral = Controls()
    for row in all_rows():
        key: list[Any] = [row.nfe]
        for name in ("refine", "scg", "ug"):
            value = getattr(row.controls, name)
            # A control at its neutral value is the same setting whatever its schedule.
            schedule = getattr(row.controls, f"{name}_schedule") if value != getattr(neutral, name) else "-"
            key.append((value, schedule))
        groups.setdefault(tuple(key), []).append(row)

    def spread(group: list[Row]) -> float:
        values = [row.gen_ppl for row in group]
        return max(values) / min(values) - 1.0

    worst = max(groups.values(), key=spread)
    return spread(worst), worst
