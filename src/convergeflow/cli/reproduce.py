"""`convergeflow reproduce`: every table, figure and statement of the paper as a command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from convergeflow.cli import options


def reproduce(
    name: Annotated[str | None, typer.Argument(metavar="NAME|all", help="An experiment, or all of them.")] = None,
    scale: Annotated[
        str,
        typer.Option(
            help="test (minutes, tiny models), embedded (2.5 hours on 2 cores), basic, paper, or a YAML file with "
            "`like: SCALE` and other sizes."
        ),
    ] = "test",
    out: Annotated[str, typer.Option(help="Folder for records, figures and the report.")] = "reproduction",
    precision: options.Precision = None,
    show: Annotated[bool, typer.Option("--list", help="List the experiments with their cost and stop.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what there is to do and what it costs.")] = False,
    json: options.Json = False,
) -> None:
    """Measure what the paper claims, and judge each claim by what was measured.

    Writes one record per measured point, figures, and a page (report.html and report.md for all, NAME.html and NAME.md
    for one) with a verdict per claim. A stopped run goes on where it was when the same command is given again. Several
    processes, on several machines too, share the work if they are given the same folder: torchrun --nproc-per-node 8 -m
    convergeflow reproduce ...

    Example:
      convergeflow reproduce --list
      convergeflow reproduce theorem1 --out theory
      convergeflow reproduce all --scale embedded --out results
      convergeflow reproduce all --scale basic --dry-run
    """
    from convergeflow.cli import console
    from convergeflow.errors import UserError
    from convergeflow.results.claims import Claims
    from convergeflow.results.store import Store, readable
    from convergeflow.studies.reproduce.registry import experiments, experiments_of
    from convergeflow.studies.reproduce.scale import SCALES, scale_by_name

    if show:
        listed = [experiment.describe() for experiment in experiments().values()]
        if json:
            console.print_json(listed)
            return
        columns = ("name", "reference", *SCALES)
        console.print_table(
            columns,
            [
                [entry["name"], entry["reference"], *(readable(entry["cost"][size]["seconds"]) for size in SCALES)]
                for entry in listed
            ],
        )
        return
    if name is None:
        raise UserError("name an experiment or all (convergeflow reproduce --list shows them)")
    sizes = scale_by_name(scale)
    chosen = experiments_of(sizes, name)

    from convergeflow.studies.reproduce.report import announce, counts
    from convergeflow.studies.reproduce.report import reproduce as run

    if dry_run:
        announce(chosen, Store(out, note=console.note), sizes)
        return
    store = Store(out, note=console.note, claims=Claims(Path(out) / "claims"))
    # One experiment gets a page of its own: the report of all must survive it.
    page = "report" if name == "all" else name
    finished = run(chosen, store, sizes, page=page)
    if json:
        console.print_json(
            {"scale": scale, "verdicts": counts(finished), "experiments": [d.describe() for d in finished]}
        )
        return
    console.print_table(
        ("experiment", "claim", "verdict"),
        [
            [done.experiment.name, claim, str(judgement.verdict)]
            for done in finished
            for claim, judgement in done.judgements.items()
        ],
    )
    print(f"report: {store.folder / page}.html")
