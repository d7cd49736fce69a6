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

from convergeflow import __version__, files
from convergeflow.results import pages
from convergeflow.results.store import Pace, Store, readable
from convergeflow.studies.reproduce import paper
from convergeflow.studies.reproduce.registry import Claim, Experiment
from convergeflow.studies.reproduce.result import ExperimentResult, ReportTable
from convergeflow.studies.reproduce.scale import ExperimentScale
from convergeflow.studies.reproduce.verdict import Judgement, Verdict


@dataclass(frozen=True)
class Finished:
    """An experiment that ran to its end."""

    experiment: Experiment
    result: ExperimentResult
    judgements: dict[str, Judgement]
    figures: list[Path]
    tables: list[ReportTable]
    seconds: float

    @property
    def pictures(self) -> list[Path]:
        """The figures that a page shows."""
        return [path for path in self.figures if path.suffix == ".png"]

    def describe(self) -> dict[str, Any]:
        """As JSON values, for `results/NAME.json`."""
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
    experiments: Sequence[Experiment], store: Store, scale: ExperimentScale, *, page: str = "report"
) -> list[Finished]:
    """Run experiments in order; what is in the store already is not measured again. `page` names the report."""
    costs = [experiment.cost[scale.like] for experiment in experiments]
    points, seconds = sum(cost.points for cost in costs), sum(cost.seconds for cost in costs)
    store.pace = Pace(points, seconds, store.note)
    store.note(
        f"{len(experiments)} experiments at scale {scale.name}: about {points} points, "
        f"{readable(seconds)} if none is done yet"
    )
    finished: list[Finished] = []
    for experiment in experiments:
        started = time.perf_counter()
        store.note(f"-- {experiment.name}: {experiment.question}")
        result = experiment.run(store, scale)
        done = Finished(
            experiment,
            result,
            experiment.judge(result),
            experiment.draw(result, store.figures),
            experiment.tabulate(result),
            time.perf_counter() - started,
        )
        finished.append(done)
        for name, judgement in done.judgements.items():
            store.note(f"   {experiment.name}/{name}: {judgement.verdict}")
        files.write_json(store.folder / "results" / f"{experiment.name}.json", done.describe())
        write_pages(finished, store, scale, page)
    return finished


def write_pages(
    finished: Sequence[Finished], store: Store, scale: ExperimentScale, page: str = "report"
) -> tuple[Path, Path]:
    """PAGE.html and PAGE.md in the store."""
    written = store.folder / f"{page}.html", store.folder / f"{page}.md"
    written[0].write_text(_html_page(finished, scale), encoding="utf-8")
    written[1].write_text(_markdown_page(finished, store, scale), encoding="utf-8")
    return written


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


def _verdict_rows(finished: Sequence[Finished]) -> list[tuple[Finished, Claim, Judgement]]:
    return [(done, claim, done.judgements[claim.name]) for done in finished for claim in done.experiment.claims]


def _markdown_page(finished: Sequence[Finished], store: Store, scale: ExperimentScale) -> str:
    lines = [f"# Reproduction report, scale {scale.name}", ""]
    for paragraph in _introduction(finished, scale):
        lines += [paragraph, ""]
    rows = [
        (f"[{done.experiment.name}](#{done.experiment.name})", claim.statement, claim.reference, judgement.verdict)
        for done, claim, judgement in _verdict_rows(finished)
    ]
    lines += ["## Verdicts", "", *pages.markdown_table(("experiment", "claim", "where", "verdict"), rows), ""]
    for done in finished:
        name = done.experiment.name
        lines += [f'<a id="{name}"></a>', f"## {name}", ""]
        lines += [f"*{done.experiment.reference}.* {done.experiment.question}", ""]
        for figure in done.pictures:
            lines += [f"![{name}]({figure.relative_to(store.folder).as_posix()})", ""]
        for _, claim, judgement in _verdict_rows([done]):
            said = f" Paper: {judgement.paper}." if judgement.paper else ""
            lines.append(
                f"- **{judgement.verdict}**: {claim.statement} ({claim.reference}). {judgement.evidence}.{said}"
            )
        lines.append("")
        for table in done.tables:
            lines += [f"**{table.title}**", "", *pages.markdown_table(table.columns, table.rows), ""]
    return "\n".join(lines)


_STYLE = """
 .v { display: inline-block; padding: 0 .5em; border-radius: .4em; white-space: nowrap; font-size: 13px; }
 .reproduced { background: #d8f0de; } .not-reproduced { background: #f8d9d9; }
 .not-testable-here { background: #ececec; }
 .e { color: #555; font-size: 14px; } details { margin: .8em 0; }
"""


def _badge(verdict: Verdict) -> str:
    return f'<span class="v {str(verdict).replace(" ", "-")}">{verdict}</span>'


def _html_page(finished: Sequence[Finished], scale: ExperimentScale) -> str:
    parts = [
        *(f"<p>{_code(paragraph)}</p>" for paragraph in _introduction(finished, scale)),
        "<table><thead><tr><th>experiment</th><th>claim</th><th>where</th><th>verdict</th></tr></thead><tbody>",
        *(
            f'<tr><td><a href="#{done.experiment.name}">{done.experiment.name}</a></td>'
            f"<td>{html.escape(claim.statement)}</td><td>{html.escape(claim.reference)}</td>"
            f"<td>{_badge(judgement.verdict)}</td></tr>"
            for done, claim, judgement in _verdict_rows(finished)
        ),
        "</tbody></table>",
    ]
    for done in finished:
        name, reference, question = done.experiment.name, done.experiment.reference, done.experiment.question
        parts.append(f'<h2 id="{name}">{name}</h2>')
        parts.append(f"<p><em>{html.escape(reference)}.</em> {html.escape(question)}</p>")
        for figure in done.pictures:
            data = base64.b64encode(figure.read_bytes()).decode()
            parts.append(f'<p><img alt="{name}" src="data:image/png;base64,{data}"></p>')
        parts.append("<ul>")
        for _, claim, judgement in _verdict_rows([done]):
            said = f" Paper: {html.escape(judgement.paper)}." if judgement.paper else ""
            parts.append(
                f"<li>{_badge(judgement.verdict)} {html.escape(claim.statement)} "
                f'<span class="e">({html.escape(claim.reference)})<br>'
                f"{html.escape(judgement.evidence)}.{said}</span></li>"
            )
        parts.append("</ul>")
        for table in done.tables:
            shown = pages.table(table.columns, table.rows)
            parts.append(f"<details open><summary>{html.escape(table.title)}</summary>{shown}</details>")
    return pages.page(f"Reproduction report, scale {scale.name}", "\n".join(parts), _STYLE)


def _code(text: str) -> str:
    """Escaped text with `names` as code."""
    pieces = html.escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(pieces))
