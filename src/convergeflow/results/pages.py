"""Results as text: HTML pages that need no other file to be read, Markdown tables, and CSV."""

from __future__ import annotations

import csv
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from convergeflow import files
from convergeflow.evaluation.estimate import number
from convergeflow.evaluation.frontier import HOW, Frontier

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
 body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 66rem; margin: 2rem auto; padding: 0 1rem; color: #1d2429; }}
 h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.15rem; margin-top: 2.2rem; }}
 svg, img {{ max-width: 100%; height: auto; }}
 .scroll {{ overflow-x: auto; }}
 table {{ border-collapse: collapse; font-size: 14px; margin: .6rem 0 1.4rem; }}
 th, td {{ padding: .25rem .7rem .25rem 0; text-align: left; border-bottom: 1px solid #dde3e7; vertical-align: top; }}
 td.n {{ text-align: right; font-variant-numeric: tabular-nums; }}
 code, pre {{ font: 13px/1.45 ui-monospace, monospace; background: #f3f5f6; padding: .1rem .3rem; }}
 pre {{ padding: .8rem; overflow-x: auto; }}
{style}</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def page(title: str, body: str, style: str = "") -> str:
    """A whole page; `body` is HTML, `style` are more rules for it."""
    return PAGE.format(title=html.escape(title), body=body, style=style)


def cell(value: Any) -> str:
    """A value of a table in words."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.3g}"
    return str(value)


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """An HTML table of texts and numbers."""

    def shown(value: Any) -> str:
        kind = ' class="n"' if isinstance(value, (int, float)) and not isinstance(value, bool) else ""
        return f"<td{kind}>{html.escape(cell(value))}</td>"

    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    lines = "".join("<tr>" + "".join(map(shown, row)) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """The lines of a Markdown table."""

    def line(cells: Sequence[Any]) -> str:
        return "| " + " | ".join(cell(value).replace("|", "\\|") for value in cells) + " |"

    return [line(columns), "|" + "---|" * len(columns), *map(line, rows)]


def frontier_page(frontier: Frontier, metrics: Sequence[tuple[str, Any, dict[str, Any]]]) -> str:
    """The report of a sweep: figure, value at the data's entropy, points, and the metrics that a low Gen. PPL can hide.

    `metrics` holds (curve, value, table of `metrics.measure`) of each point.
    """
    from convergeflow.results import figures  # matplotlib is slow to import, and the other pages need none of it

    crossings = "".join(
        f"<li><b>{html.escape(label)}</b>: {html.escape(frontier.crossing(label).says)}</li>"
        for label in frontier.curves
    )
    rows: list[list[Any]] = [
        [
            label,
            point.value,
            number(point.gen_ppl, point.gen_ppl_se),
            number(point.entropy, point.entropy_se),
            point.nfe,
            point.n,
            point.valid,
        ]
        for label, points in frontier.curves.items()
        for point in points
    ]
    if real := frontier.real:
        shown = [number(real.get(name), real.get(f"{name}_se")) for name in ("gen_ppl", "entropy")]
        rows.append(["real text", "", *shown, "", real.get("n"), real.get("valid")])
    body = [
        f"<p>{_facts(frontier)}</p>",
        figures.svg(figures.frontier_figure(frontier)),
        f"<h2>At the data's entropy</h2><ul>{crossings}</ul><p>How: {html.escape(HOW)}.</p>",
        "<h2>Points</h2>",
        table(["curve", frontier.control, "Gen. PPL", "entropy (nats)", "NFE", "n", "valid"], rows),
        _metric_table(frontier, metrics),
        "<h2>Made with</h2>",
        f"<pre>{html.escape(str(frontier.facts.get('command') or '-'))}</pre>",
        f"<p>{html.escape(', '.join(f'{k} {v}' for k, v in (frontier.facts.get('versions') or {}).items()))}</p>",
    ]
    return page(frontier.title, "\n".join(part for part in body if part))


def _facts(frontier: Frontier) -> str:
    model, corpus = (frontier.facts.get(key) or {} for key in ("model", "corpus"))
    text = (
        f"Model {model.get('name', '-')} (weights {model.get('weights', '-')}), corpus {corpus.get('name', '-')} "
        f"(fingerprint {corpus.get('fingerprint', '-')}), {frontier.facts.get('length')} tokens, "
        f"{frontier.facts.get('n')} samples per point, scorer {frontier.scorer}, protocol {frontier.protocol}. "
        "All errors are standard errors over samples."
    )
    return html.escape(text)


def _metric_table(frontier: Frontier, metrics: Sequence[tuple[str, Any, dict[str, Any]]]) -> str:
    names = list(dict.fromkeys(name for _, _, found in metrics for name in found if name != "entropy"))
    if not names:
        return ""
    rows = [[label, value, *(_metric(found.get(name)) for name in names)] for label, value, found in metrics]
    rows.append(["real text", "", *(_metric(metrics[0][2].get(name), "real", "real_se") for name in names)])
    return "<h2>What a low Gen. PPL can hide</h2>" + table(["curve", frontier.control, *names], rows)


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
