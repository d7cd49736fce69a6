"""Runs experiments and writes one page of what came out: HTML that needs nothing beside it, and Markdown.

The page opens with all verdicts, then gives each experiment its question, figures, claims and numbers, the paper's
beside this run's. It is written anew after every experiment, so a stopped run leaves a page of what is done.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convergeflow import __version__, files
from convergeflow.results import pages
from convergeflow.results.claims import Taken, shared
from convergeflow.results.store import Pace, Store, readable
from convergeflow.studies.reproduce import cost, paper, team
from convergeflow.studies.reproduce.left import Left, left
from convergeflow.studies.reproduce.registry import Experiment
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
    """Run experiments in order; what is in the store already is not measured again. `page` names the report.

    Several processes, here or on other machines, may do this in one folder: each takes what is free, and comes back to
    an experiment until all of its points are there.
    """
    planned: dict[str, Left] = {}
    if store.measuring:
        planned = {each.name: each for each in announce(experiments, store, scale)}
        team.train_together(experiments, store, scale)

    def attempt(experiment: Experiment) -> tuple[ExperimentResult, float]:
        started = time.perf_counter()
        if experiment.name in planned:
            store.pace.begin(planned[experiment.name].points, planned[experiment.name].seconds)
        store.note(f"-- {experiment.name}: {experiment.question}")
        try:
            result = experiment.run(store, scale)
        except Taken:
            store.note(f"   {experiment.name}: other processes are at the rest of it")
            raise
        return result, time.perf_counter() - started if store.measuring else _took(store, experiment)

    finished: dict[str, Finished] = {}
    for experiment, (result, took) in shared(experiments, attempt):
        with store.turn("report"):
            done = Finished(
                experiment,
                result,
                experiment.judge(result),
                experiment.draw(result, store.figures),
                experiment.tabulate(result),
                took,
            )
            finished[experiment.name] = done
            for name, judgement in done.judgements.items():
                store.note(f"   {experiment.name}/{name}: {judgement.verdict}")
            files.write_json(store.folder / "results" / f"{experiment.name}.json", done.describe())
            write_pages(_ordered(finished, experiments), store, scale, page)
    return _ordered(finished, experiments)


def announce(experiments: Sequence[Experiment], store: Store, scale: ExperimentScale) -> list[Left]:
    """Say what is to be done and how long it takes; the store's progress counts from here."""
    planned = left(experiments, store, scale)
    points, seconds = sum(each.points for each in planned), sum(each.seconds for each in planned)
    store.pace = Pace(points, seconds, store.note)
    missing = sum(each.missing for each in planned)
    where = " on this machine as busy as it is now" if scale.scorer == "exact" else " by arithmetic"
    store.note(
        f"{len(experiments)} experiments at scale {scale.name}: about {missing} of {points} points are missing, "
        f"{readable(seconds)} for them{where}"
    )
    if scale.scorer != "exact":
        store.note(cost.total(experiments, scale).in_words(team.size()))
    return planned


def _took(store: Store, experiment: Experiment) -> float:
    """How long an experiment took when it was measured: to judge it again takes no time that says anything."""
    before = store.read(f"results/{experiment.name}.json") or {}
    return float(before.get("seconds", 0.0))


def _ordered(finished: Mapping[str, Finished], experiments: Sequence[Experiment]) -> list[Finished]:
    return [finished[experiment.name] for experiment in experiments if experiment.name in finished]


def write_pages(finished: Sequence[Finished], store: Store, scale: ExperimentScale, page: str) -> None:
    """PAGE.md and PAGE.html in the store."""
    text = _markdown_page(finished, store, scale)
    shown = pages.page(text, store.folder)
    for verdict in Verdict:
        kind = str(verdict).replace(" ", "-")
        shown = shown.replace(f"<strong>{verdict}</strong>", f'<strong class="{kind}">{verdict}</strong>')
    files.write_text(store.folder / f"{page}.md", text)
    files.write_text(store.folder / f"{page}.html", shown)


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
        + (
            "equal effective strength."
            if scale.strength == 1
            else f"{scale.strength:g} times their effective strength."
        ),
        "Verdicts: "
        + ", ".join(f"{number} {verdict}" for verdict, number in found.items())
        + ". They are computed from the records in this folder. `too noisy` asks for more samples; `needs another "
        "corpus` means that this run would have seen the paper's difference and it is not there (more samples could "
        "only find a smaller one), or that the claim is about numbers of the paper's corpus; `not measured` names what "
        "is missing. "
        "A difference counts if it is larger than 2 % and than two standard errors; "
        f"the paper itself has two values {share:.1%} apart for one setting "
        f"({rows[0].gen_ppl:.2f} and {rows[1].gen_ppl:.2f}).",
    ]


def _markdown_page(finished: Sequence[Finished], store: Store, scale: ExperimentScale) -> str:
    lines = [f"# Reproduction report, scale {scale.name}", ""]
    for paragraph in _introduction(finished, scale):
        lines += [paragraph, ""]
    rows = [
        (f"[{name}](#{name})", claim.statement, claim.reference, f"**{done.judgements[claim.name].verdict}**")
        for done in finished
        for name, claim in ((done.experiment.name, claim) for claim in done.experiment.claims)
    ]
    lines += ["## Verdicts", "", *pages.markdown_table(("experiment", "claim", "where", "verdict"), rows), ""]
    for done in finished:
        experiment = done.experiment
        lines += [f"## {experiment.name}", "", f"*{experiment.reference}.* {experiment.question}", ""]
        for figure in done.pictures:
            lines += [f"![{experiment.name}]({figure.relative_to(store.folder).as_posix()})", ""]
        for claim in experiment.claims:
            judgement = done.judgements[claim.name]
            said = f" Paper: {judgement.paper}." if judgement.paper else ""
            lines.append(
                f"- **{judgement.verdict}**: {claim.statement} ({claim.reference}). {judgement.evidence}.{said}"
            )
        lines.append("")
        for table in done.tables:
            lines += [f"**{table.title}**", "", *pages.markdown_table(table.columns, table.rows), ""]
    return "\n".join(lines)
