"""A frontier: one control varies, a second one may separate the curves, and everything else stays fixed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from convergeflow import files
from convergeflow.errors import UserError
from convergeflow.evaluation.frontier import Frontier
from convergeflow.evaluation.scorers import Advance, silent
from convergeflow.files import parse_json
from convergeflow.results import pages
from convergeflow.results.draw import Measurer
from convergeflow.results.record import Record, frontier_of
from convergeflow.results.store import Pace
from convergeflow.systems.protocol import LanguageModel

WHOLE_NUMBERS = ("nfe", "refine", "freeze_patience")
NOT_NUMBERS = ("nan", "inf", "+inf", "-inf", "infinity", "-infinity")


@dataclass(frozen=True)
class Planned:
    """A point before it is measured: its curve, the value of the control, the arguments of `model.sample`."""

    curve: str
    value: Any
    options: dict[str, Any]


def plan(
    model: LanguageModel,
    control: str,
    values: str,
    by: str | None,
    arguments: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> list[Planned]:
    """Every point of a sweep; impossible ones are refused before anything runs.

    `values` are separated by commas, `by` is control=values, and `arguments` turns changed controls into the arguments
    of `model.sample`.
    """
    second, _, texts = (by or "").partition("=")
    if by is not None and (not second or not texts):
        raise UserError(f"`by` needs control=values, as in nfe=64,128, not {by!r}")
    if second.replace("-", "_") == control.replace("-", "_"):
        raise UserError(f"`by` needs another control than `control` {control}, which varies along each curve")
    curves = [(model.method, {})] if by is None else [(f"{second} {v}", {second: v}) for v in _values(second, texts)]
    points = []
    for label, fixed in curves:
        for value in _values(control, values):
            options = arguments({**fixed, control: value})
            if (flow := model.as_flow()) is not None and "settings" in options:
                for piece in flow.pieces(options["settings"], model.config.length):
                    piece.settings.plan(flow.schedule)
            points.append(Planned(label, value, options))
    return points


def _values(control: str, text: str) -> list[Any]:
    found: list[Any] = []
    if not text.strip(", "):
        raise UserError(f"no values for {control}: give them separated by commas")
    for part in (piece.strip() for piece in text.split(",")):
        if not part:
            raise UserError(f"an empty value for {control} in {text!r}: give values separated by single commas")
        try:
            value = parse_json(part)
        except UserError:
            value = part
        if isinstance(value, dict | list | bool) or value is None or part.lower() in NOT_NUMBERS:
            raise UserError(f"`{control}` takes numbers or names, not {part!r}")
        if control in WHOLE_NUMBERS and not isinstance(value, int):
            raise UserError(f"`{control}` takes whole numbers, not {part!r}")
        found.append(value)
    if len(set(map(str, found))) < len(found):
        raise UserError(f"the values of {control} must differ: {text}")
    return found


def sweep(
    measurer: Measurer,
    model: LanguageModel,
    points: Sequence[Planned],
    *,
    about: Mapping[str, Any],
    control: str,
    advance: Advance = silent,
) -> Frontier:
    """Measure what is not in the store yet, and write the frontier: JSON, CSV, figure and page."""
    store = measurer.store
    store.pace = Pace(len(points), float(len(points)), store.note)
    key = {"length": measurer.length, "seed": measurer.seeds[0]}
    curves: dict[str, list[tuple[Any, Record, str]]] = {}
    for point in points:
        label = f"{point.curve}, {control} {point.value}"
        name = re.sub(r"[^\w.-]", "-", f"{point.curve}-{control}-{point.value}")[:60]
        found = measurer.point(name, model, point.options, about=about, key=key, label=label, advance=advance)
        curves.setdefault(point.curve, []).append((point.value, *found))
    records = [record for points in curves.values() for _, record, _ in points]
    calls = sorted({record["nfe"] for record in records})
    title = f"{about['name']}: {control} at NFE {calls[0]}" + (f" to {calls[-1]}" if len(calls) > 1 else "")
    frontier = frontier_of(title, control, curves, command=measurer.command)
    files.write_json(store.folder / "frontier.json", frontier.describe())
    pages.write_frontier(frontier, store.folder, "frontier")
    metrics = [(label, value, record["metrics"]) for label, points in curves.items() for value, record, _ in points]
    text = pages.frontier_page(frontier, metrics, "frontier.svg")
    files.write_text(store.folder / "report.html", pages.page(text, store.folder))
    return frontier
