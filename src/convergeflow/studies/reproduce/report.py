"""Runs experiments and writes one page of what came out: HTML that needs nothing beside it, and Markdown.

The page opens with all verdicts, then gives each experiment its question, figures, claims and numbers, the paper's
beside this run's. It is written anew after every experiment, so a stopped run leaves a page of what is done.
"""

from __future__ import annotations

import base64
import html
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convergeflow import __version__
from convergeflow.studies.reproduce import paper
from convergeflow.studies.reproduce.registry import Experiment
from convergeflow.studies.reproduce.result import ExperimentResult, ReportTable
from convergeflow.studies.reproduce.scale import ExperimentScale
from convergeflow.studies.reproduce.verdict import Judgement, Verdict
from convergeflow.studies.reproduce.workspace import Progress, Workspace, readable, write_json


@dataclass(frozen=True)
class Finished:
    """An experiment that ran to its end."""

    experiment: Experiment
    result: ExperimentResult
    judgements: dict[str, Judgement]
    figures: list[Path]
    tables: list[ReportTable]
    seconds: float

    def describe(self) -> dict[str, Any]:
        """For `reproduce --json`."""
        return {
            "name": self.experiment.name,
            "reference": self.experiment.reference,
            "scale": self.result.scale,
            "points": len(self.result.records),
            "seconds": round(self.seconds, 1),
            "claims": {
                claim.name: {
                    "statement": claim.statement,
                    "reference": claim.reference,
                    **self.judgements[claim.name].describe(),
                }
                for claim in self.experiment.claims
            },
            "figures": [f"{path.parent.name}/{path.name}" for path in self.figures],
        }


def reproduce(
    experiments: Sequence[Experiment], workspace: Workspace, scale: ExperimentScale, *, page: str = "report"
) -> list[Finished]:
    """Run experiments in order; what is in the workspace already is not measured again. `page` names the report."""
    costs = [experiment.cost[scale.name] for experiment in experiments]
    points, seconds = sum(cost.points for cost in costs), sum(cost.seconds for cost in costs)
    workspace.progress = Progress(points, seconds, workspace.note)
    workspace.note(
        f"{len(experiments)} experiments at scale {scale.name}: about {points} points, "
        f"{readable(seconds)} if none is done yet"
    )
    finished: list[Finished] = []
    for experiment in experiments:
        started = time.perf_counter()
        workspace.note(f"-- {experiment.name}: {experiment.question}")
        result = experiment.run(workspace, scale)
        done = Finished(
            experiment,
            result,
            experiment.judge(result),
            experiment.draw(result, workspace.figures),
            experiment.tabulate(result),
            time.perf_counter() - started,
        )
        finished.append(done)
        for name, judgement in done.judgements.items():
            workspace.note(f"   {experiment.name}/{name}: {judgement.verdict}")
        write_json(workspace.folder / "results" / f"{experiment.name}.json", done.describe())
        write_pages(finished, workspace, scale, page)
    return finished


def write_pages(
    finished: Sequence[Finished], workspace: Workspace, scale: ExperimentScale, page: str = "report"
) -> tuple[Path, Path]:
    """PAGE.html and PAGE.md in the workspace."""
    pages = workspace.folder / f"{page}.html", workspace.folder / f"{page}.md"
    pages[0].write_text(_html_page(finished, scale), encoding="utf-8")
    pages[1].write_text(_markdown_page(finished, workspace, scale), encoding="utf-8")
    return pages


def counts(finished: Sequence[Finished]) -> dict[str, int]:
    """How many claims came to each verdict."""
    verdicts = [judgement.verdict for done in finished for judgement in done.judgements.values()]
    return {str(verdict): verdicts.count(verdict) for verdict in Verdict}


def _introduction(finished: Sequence[Finished], scale: ExperimentScale) -> list[str]:
    found = counts(finished)
    share, rows = paper.largest_contradiction()
    return [
        f"Scale `{scale.name}`: corpus {scale.corpus}, {scale.num_samples} samples of {scale.length} tokens per point, "
        f"scorer {scale.scorer}. convergeflow {__version__}, Python {platform.python_version()}, {platform.machine()}.",
        f"The paper's numbers: {paper.protocol()}. Its nominal strengths are carried over to this model's schedule at "
        "equal effective strength.",
        "Verdicts: "
        + ", ".join(f"{number} {verdict}" for verdict, number in found.items())
        + ". They are computed from "
        "the records in this folder. A difference counts if it is larger than 2 % and than two standard errors; "
        f"the paper itself has two values {share:.1%} apart for one setting "
        f"({rows[0].gen_ppl:.2f} and {rows[1].gen_ppl:.2f}).",
    ]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.3g}"
    return str(value)


# ---------------------------------------------------------------------------------------------------- Markdown


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    def line(cells: Sequence[Any]) -> str:
        return "| " + " | ".join(_cell(cell).replace("|", "\\|") for cell in cells) + " |"

    return [line(columns), "|" + "---|" * len(columns), *(line(row) for row in rows)]


def _markdown_page(finished: Sequence[Finished], workspace: Workspace, scale: ExperimentScale) -> str:
    lines = [f"# Reproduction report, scale {scale.name}", ""]
    for paragraph in _introduction(finished, scale):
        lines += [paragraph, ""]
    lines += ["## Verdicts", ""]
    rows = [
        (
            f"[{done.experiment.name}](#{done.experiment.name})",
            claim.statement,
            claim.reference,
            done.judgements[claim.name].verdict,
        )
        for done in finished
        for claim in done.experiment.claims
    ]
    lines += [*_markdown_table(("experiment", "claim", "where", "verdict"), rows), ""]
    for done in finished:
        lines += [
            f'<a id="{done.experiment.name}"></a>',
            f"## {done.experiment.name}",
            "",
            f"*{done.experiment.reference}.* {done.experiment.question}",
            "",
        ]
        for figure in done.figures:
            if figure.suffix == ".png":
                lines += [f"![{done.experiment.name}]({figure.relative_to(workspace.folder).as_posix()})", ""]
        for claim in done.experiment.claims:
            judgement = done.judgements[claim.name]
            said = f" Paper: {judgement.paper}." if judgement.paper else ""
            lines.append(
                f"- **{judgement.verdict}**: {claim.statement} ({claim.reference}). {judgement.evidence}.{said}"
            )
        lines.append("")
        for table in done.tables:
            lines += [f"**{table.title}**", "", *_markdown_table(table.columns, table.rows), ""]
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------------------- HTML

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:1080px;margin:2em auto;padding:0 1em;color:#222}
h1,h2{line-height:1.2} h2{margin-top:2.2em;border-top:1px solid #ddd;padding-top:1em}
table{border-collapse:collapse;font-size:14px;margin:.6em 0 1.4em} td,th{padding:3px 10px;
border-bottom:1px solid #e4e4e4;text-align:left;vertical-align:top} td.n{text-align:right;
font-variant-numeric:tabular-nums} img{max-width:100%}
.v{display:inline-block;padding:0 .5em;border-radius:.4em;white-space:nowrap;font-size:13px}
.reproduced{background:#d8f0de}.not-reproduced{background:#f8d9d9}.not-testable-here{background:#ececec}
.scroll{overflow-x:auto} .e{color:#555;font-size:14px} details{margin:.8em 0} code{background:#f4f4f4;padding:0 .2em}
"""


def _badge(verdict: Verdict) -> str:
    return f'<span class="v {str(verdict).replace(" ", "-")}">{verdict}</span>'


def _html_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)

    def cell(value: Any) -> str:
        kind = ' class="n"' if isinstance(value, (int, float)) and not isinstance(value, bool) else ""
        return f"<td{kind}>{html.escape(_cell(value))}</td>"

    body = "".join("<tr>" + "".join(cell(value) for value in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _html_page(finished: Sequence[Finished], scale: ExperimentScale) -> str:
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>ConvergeFlow: reproduction, scale {scale.name}</title><style>{_STYLE}</style>",
        f"<h1>Reproduction report, scale {scale.name}</h1>",
        *(f"<p>{_code(paragraph)}</p>" for paragraph in _introduction(finished, scale)),
        "<table><thead><tr><th>experiment</th><th>claim</th><th>where</th><th>verdict</th></tr></thead><tbody>",
    ]
    for done in finished:
        for claim in done.experiment.claims:
            parts.append(
                f'<tr><td><a href="#{done.experiment.name}">{done.experiment.name}</a></td>'
                f"<td>{html.escape(claim.statement)}</td><td>{html.escape(claim.reference)}</td>"
                f"<td>{_badge(done.judgements[claim.name].verdict)}</td></tr>"
            )
    parts.append("</tbody></table>")
    for done in finished:
        parts.append(f'<h2 id="{done.experiment.name}">{done.experiment.name}</h2>')
        parts.append(
            f"<p><em>{html.escape(done.experiment.reference)}.</em> {html.escape(done.experiment.question)}</p>"
        )
        for figure in done.figures:
            if figure.suffix == ".png":
                data = base64.b64encode(figure.read_bytes()).decode()
                parts.append(f'<p><img alt="{done.experiment.name}" src="data:image/png;base64,{data}"></p>')
        parts.append("<ul>")
        for claim in done.experiment.claims:
            judgement = done.judgements[claim.name]
            said = f" Paper: {html.escape(judgement.paper)}." if judgement.paper else ""
            parts.append(
                f"<li>{_badge(judgement.verdict)} {html.escape(claim.statement)} "
                f'<span class="e">({html.escape(claim.reference)})<br>'
                f"{html.escape(judgement.evidence)}.{said}</span></li>"
            )
        parts.append("</ul>")
        for table in done.tables:
            shown = _html_table(table.columns, table.rows)
            parts.append(f"<details open><summary>{html.escape(table.title)}</summary>{shown}</details>")
    return "\n".join(parts)


def _code(text: str) -> str:
    """Escaped text with `names` as code."""
    pieces = html.escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(pieces))
