"""`convergeflow reproduce`: every table, figure and statement of the paper as a command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convergeflow.cli import console, options
from convergeflow.errors import UserError

if TYPE_CHECKING:
    from convergeflow.results.store import Store


def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME...|all", help="Experiments by name, or all of them.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help=f"{options.MODEL} It is sampled in place of the scale's, on text that it was trained for."),
    ] = None,
    scale: Annotated[
        str,
        typer.Option(
            help="test (minutes, tiny models), embedded (2.5 hours on 2 cores), basic, basic-gentle, paper, or a YAML "
            "file with `like: SCALE` and other sizes."
        ),
    ] = "test",
    out: Annotated[str, typer.Option(help="Folder for records, figures and the report.")] = "reproduction",
    precision: options.Precision = None,
    show: Annotated[bool, typer.Option("--list", help="List the experiments with their cost and stop.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what there is to do and what it costs.")] = False,
    judge: Annotated[
        bool, typer.Option("--judge", help="Judge again by the records of the folder; nothing is measured or trained.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Measure what the paper claims, and judge each claim by what was measured.

    Writes one record per measured point, figures, and a page (report.html and report.md for all, NAME.html and NAME.md
    for some) with a verdict per claim. The time is estimated first, without what the folder holds. A stopped run goes
    on where it was when the same command is given again. Several processes, on several machines too, share the work if
    they are given the same folder: torchrun --nproc-per-node 8 -m convergeflow reproduce ...

    Example:
      convergeflow reproduce --list
      convergeflow reproduce theorem1 --out theory
      convergeflow reproduce grids shortcut --scale embedded --model runs/mine --dry-run
      convergeflow reproduce all --scale embedded --out results
      convergeflow reproduce all --scale embedded --out results --judge
      convergeflow reproduce all --scale basic --dry-run
    """
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
    if not names:
        raise UserError("name an experiment or all (convergeflow reproduce --list shows them)")
    sizes = scale_by_name(scale)
    chosen = experiments_of(sizes, *names)
    if model is not None:
        from convergeflow.studies.reproduce.models import scale_with

        sizes = scale_with(sizes, model, chosen, console.note)

    from convergeflow.studies.reproduce import report

    if dry_run:
        planned = report.announce(chosen, Store(out, note=console.note), sizes)
        if json:
            console.print_json([vars(each) for each in planned])
            return
        rows = [[each.name, f"{each.missing} of {each.points}", readable(each.seconds)] for each in planned]
        console.print_table(("experiment", "points missing", "time"), rows)
        return
    store = _store(Path(out), judge)
    # Some experiments get a page of their own: the report of all must survive it.
    page = "report" if "all" in names else "-".join(each.name for each in chosen)
    finished = report.reproduce(chosen, store, sizes, page=page)
    console.print_result(
        {"scale": scale, "verdicts": report.counts(finished), "experiments": [d.describe() for d in finished]},
        ("experiment", "claim", "verdict"),
        [
            [done.experiment.name, claim, str(judgement.verdict)]
            for done in finished
            for claim, judgement in done.judgements.items()
        ],
        [f"report: {store.folder / page}.html"],
        as_json=json,
    )


def _store(folder: Path, judge: bool) -> Store:
    """The folder of records; who judges alone measures nothing in it and claims nothing."""
    from convergeflow.results.claims import Claims
    from convergeflow.results.store import Store

    if judge and not folder.is_dir():
        raise UserError(f"there is no folder {folder} to judge by: give --out the folder of a run of `reproduce`")
    return Store(folder, note=console.note, claims=None if judge else Claims(folder / "claims"), measuring=not judge)
