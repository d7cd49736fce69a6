"""What an experiment measured, and how its records are looked up."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

Record = dict[str, Any]
"""A measured point as the store keeps it, with what the experiment knows of it beside: its curve, its setting."""


def field_of(record: Record, where: str) -> Any:
    """A field of a record, or else of its values; `paper.label` is a field of a field. None where there is none."""
    found: Any = record
    for name in where.split("."):
        found = found.get(name, found.get("values", {}).get(name))
    return found


@dataclass(frozen=True)
class ExperimentResult:
    """What an experiment measured, as JSON values."""

    experiment: str
    scale: str
    records: list[Record]
    """One per point, as kept in the store."""
    values: dict[str, Any] = field(default_factory=dict)
    """What was computed from them."""

    def curves(self, patterns: list[str] | tuple[str, ...] = ("*",)) -> list[str]:
        """The names of the measured curves that match one of the patterns (`*` is any text), in their order."""
        names = dict.fromkeys(record["curve"] for record in self.records if "curve" in record)
        return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]

    def curve(self, name: str) -> list[Record]:
        """The records of a curve in the order of its control."""
        return sorted((r for r in self.records if r.get("curve") == name), key=lambda record: record["order"])

    def values_of(self, **wanted: Any) -> dict[str, Any]:
        """The values of the first record whose own fields, or whose key, hold what is wanted."""
        found: dict[str, Any] = next(
            record["values"] for record in self.records if {**record["key"], **record}.items() >= wanted.items()
        )
        return found


@dataclass(frozen=True)
class ReportTable:
    """Rows for the report."""

    title: str
    columns: list[str]
    rows: list[list[Any]]
