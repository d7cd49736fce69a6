"""Results as text: Markdown, the same as HTML pages that need no other file to be read, and CSV."""

from __future__ import annotations

import base64
import csv
import html
import mimetypes
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import Any

from convergeflow import files
from convergeflow.evaluation.estimate import number
from convergeflow.evaluation.frontier import HOW, Frontier


def page(text: str, folder: Path) -> str:
    """Markdown as an HTML page (`page.html`) with its pictures inside, which lie in `folder`.

    HTML in the text is shown as it stands, not obeyed.
    """
    from markdown_it import MarkdownIt

    reader = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = reader.parse(text)
    for before, token in pairwise(tokens):
        if before.type == "heading_open":
            before.attrSet("id", token.content.lower().replace(" ", "-"))
        for picture in (child for child in token.children or () if child.type == "image"):
            file = folder / str(picture.attrs["src"])
            data = base64.b64encode(file.read_bytes()).decode()
            picture.attrSet("src", f"data:{mimetypes.guess_type(file.name)[0]};base64,{data}")
    body = reader.renderer.render(tokens, reader.options, {})
    frame = Template((resources.files("convergeflow.results") / "page.html").read_text(encoding="utf-8"))
    return frame.substitute(title=html.escape(tokens[1].content), body=body)


def cell(value: Any) -> str:
    """A value of a table in words."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.3g}"
    return str(value)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """The lines of a Markdown table; columns of numbers are set to the right."""

    def line(cells: Sequence[Any]) -> str:
        return "| " + " | ".join(cell(value).replace("|", "\\|") for value in cells) + " |"

    numbers = [all(type(row[index]) in (int, float, type(None)) for row in rows) for index in range(len(columns))]
    rule = "|" + "".join("---:|" if right else "---|" for right in numbers)
    return [line(columns), rule, *map(line, rows)]


def points_table(frontier: Mapping[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """The columns and rows of a frontier as `Frontier.describe` gives it; real text is the last row."""
    listed = [(curve["label"], point) for curve in frontier["curves"] for point in curve["points"]]
    if frontier.get("real"):
        listed.append(("real text", frontier["real"]))
    rows = [
        [
            label,
            point.get("value"),
            *(number(point[name], point.get(f"{name}_se")) for name in ("gen_ppl", "entropy")),
            *(point.get(name) for name in ("nfe", "n", "valid")),
        ]
        for label, point in listed
    ]
    return ["curve", frontier["control"], "Gen. PPL", "entropy (nats)", "NFE", "n", "valid"], rows


def frontier_page(frontier: Frontier, metrics: Sequence[tuple[str, Any, dict[str, Any]]], figure: str) -> str:
    """The report of a sweep in Markdown: figure, value at the data's entropy, points, and what a low Gen. PPL can hide.

    `metrics` holds (curve, value, table of `metrics.measure`) of each point; `figure` is a file beside the report.
    """
    model, corpus, versions = (frontier.facts.get(key) or {} for key in ("model", "corpus", "versions"))
    lines = [
        f"# {frontier.title}",
        "",
        f"Model {model.get('name', '-')} (weights {model.get('weights', '-')}), corpus {corpus.get('name', '-')} "
        f"(fingerprint {corpus.get('fingerprint', '-')}), {frontier.facts.get('length')} tokens, "
        f"{frontier.facts.get('n')} samples per point, scorer {frontier.scorer}, protocol {frontier.protocol}. "
        "All errors are standard errors over samples.",
        "",
        f"![{frontier.title}]({figure})",
        "",
        "## At the data's entropy",
        "",
        *(f"- **{label}**: {frontier.crossing(label).says}" for label in frontier.curves),
        "",
        f"How: {HOW}.",
        "",
        "## Points",
        "",
        *markdown_table(*points_table(frontier.describe())),
    ]
    names = list(dict.fromkeys(name for _, _, found in metrics for name in found if name != "entropy"))
    if names:
        rows = [[label, value, *(_metric(found.get(name)) for name in names)] for label, value, found in metrics]
        rows.append(["real text", None, *(_metric(metrics[0][2].get(name), "real", "real_se") for name in names)])
        lines += ["", "## What a low Gen. PPL can hide", ""]
        lines += markdown_table(["curve", frontier.control, *names], rows)
    made = ", ".join(f"{name} {version}" for name, version in versions.items())
    return "\n".join([*lines, "", "## Made with", "", f"    {frontier.facts.get('command') or '-'}", "", made, ""])


def _metric(row: dict[str, Any] | None, value: str = "value", se: str = "se") -> str:
    return "-" if row is None else number(row.get(value), row.get(se))


def write_frontier(frontier: Frontier, folder: Path, name: str) -> None:
    """The figure, PNG and SVG, and its numbers, CSV: one line per point, the data's own last."""
    from convergeflow.results import figures

    figures.save(figures.frontier_figure(frontier), folder, name)
    measured = ["nfe", "n", "gen_ppl", "gen_ppl_se", "entropy", "entropy_se", "valid", "record"]
    rows: list[list[Any]] = []
    for label, points in frontier.curves.items():
        for point in points:
            numbers = point.describe()
            rows.append([label, point.value, *(numbers[column] for column in measured)])
    if frontier.real:
        rows.append(["real text", None, *(frontier.real.get(column) for column in measured)])
    with files.replacing(folder / f"{name}.csv") as draft, open(draft, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["curve", frontier.control, *measured], *rows])
