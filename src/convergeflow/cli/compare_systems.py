"""`convergeflow compare`: every system trained on one corpus with one budget, and measured by one protocol."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from convergeflow.cli import options
from convergeflow.cli.console import command_line, note, print_json, print_result, progress
from convergeflow.errors import UserError

if TYPE_CHECKING:
    from convergeflow.cli.compare import CompareOptions
    from convergeflow.studies.study import Study, SystemResult, Trial


def compare_systems(asked: CompareOptions) -> None:
    """Train what is missing, measure every system, and write the table; of several budgets the smallest first.

    Processes that are given one folder share the systems and budgets among them.
    """
    from convergeflow.results.store import readable

    studies = _studies(asked)
    costs = {study.base.total_steps: study.costs() for study in studies}
    total = sum(cost.training + cost.sampling for each in costs.values() for cost in each)
    if asked.dry_run and asked.json:
        listed = [{**vars(cost), "steps": steps} for steps, each in costs.items() for cost in each]
        print_json({"seconds": total, "systems": listed})
        return
    for steps, each in costs.items():
        if len(costs) > 1:
            note(f"{steps} steps")
        for cost in each:
            note(
                f"{cost.system:18} {cost.parameters:>12,} parameters, training about {readable(cost.training)}, "
                f"sampling about {readable(cost.sampling)}"
            )
    note(f"together about {readable(total)}, scoring and bounds included; a stopped comparison goes on where it was")
    if not asked.dry_run:
        _run(studies, asked)


def _studies(asked: CompareOptions) -> list[Study]:
    """A comparison for each budget of training steps; the second seeds belong to the largest."""
    from convergeflow.evaluation.assess import assessor_for
    from convergeflow.evaluation.protocol import protocol_named
    from convergeflow.evaluation.reference import corpus_reference
    from convergeflow.results.claims import Claims
    from convergeflow.results.draw import Measurer
    from convergeflow.results.store import Store
    from convergeflow.studies.curve import folder_of
    from convergeflow.studies.fair import FairStudy, with_seeds
    from convergeflow.studies.study import Study
    from convergeflow.studies.systems import on_budget, systems_named
    from convergeflow.training.build import open_corpus
    from convergeflow.training.config import resolve

    if asked.force:
        raise UserError("--force is for finished models: systems that are trained here are judged by their own corpus")
    options.check_draws(asked.bound)
    recipe = resolve(asked.corpus, list(asked.changes or ()))
    wanted, chosen, rates = systems_named(asked.systems), protocol_named(asked.protocol), asked.multiples
    lengths, several = asked.lengths, len(asked.lengths) > 1
    if several and not asked.fair:
        raise UserError("several --steps are compared by --fair alone: add it")
    bases = [recipe if steps is None else on_budget(recipe, steps) for steps in lengths]
    out = asked.out or Path("out") / f"compare-{Path(asked.corpus).stem}"
    reference = corpus_reference(open_corpus(recipe), asked.num, recipe.corpus.length)
    assessor = assessor_for(reference, asked.scorer, device=asked.device, say=note)
    studies: list[Study] = []
    trials: dict[str, Trial] = {}
    for base in bases:
        folder = folder_of(out, base.total_steps) if several else out
        store, length, command = (
            Store(folder, note=note, claims=Claims(folder / "claims")),
            base.corpus.length,
            command_line(),
        )
        measurer = Measurer(store, assessor, chosen, range(asked.num), length, command=command)
        how: dict[str, Any] = {"bound_draws": asked.bound, "device": asked.device, "trials": trials}
        if asked.fair:
            systems = with_seeds(wanted, seeds=1 if several and base is not bases[-1] else 2)
            studies.append(FairStudy(base, systems, asked.budgets, measurer, rates=rates, enclosing=several, **how))
        else:
            studies.append(Study(base, wanted, asked.budgets, measurer, **how))
    return studies


def _run(studies: list[Study], asked: CompareOptions) -> None:
    """Write the table after every system, and the page of several budgets after each: what is stopped leaves those."""
    from convergeflow.results.claims import shared
    from convergeflow.studies import curve, table

    largest, several = studies[-1], len(studies) > 1
    out = largest.store.folder.parent
    found: dict[int, dict[str, list[SystemResult]]] = {study.base.total_steps: {} for study in studies}
    summaries: dict[int, dict[str, Any]] = {}
    with progress("comparing") as bar:
        for study in studies:
            study.advance = bar.advance
        work = [(study, system) for study in studies for system in study.systems]
        for (study, system), made in shared(work, lambda each: each[0].results(each[1])):
            here = found[study.base.total_steps]
            here[system] = made
            results = [result for name in study.systems for result in here.get(name, [])]
            with largest.store.turn("table"):
                summary = table.write_comparison(study, results, asked.corpus)
                if len(here) == len(study.systems):
                    note(f"wrote table.md, table.json and the frontier figures in {study.store.folder}")
                    summaries[study.base.total_steps] = summary
                    if several:
                        real = results[0].points[0][1]["real"]
                        entries = curve.write(out, summaries, real, complete=len(summaries) == len(studies))
    summary = summaries[max(summaries)]
    if several:
        note(f"wrote budgets.md, budgets.json and the figure in {out}")
    told = {name: summary[name] for name in ("about", "rows", "verdict")} | ({"budgets": entries} if several else {})
    rows = [table.cells(row) for row in told["rows"]]
    print_result(told, table.COLUMNS, rows, told["verdict"], as_json=asked.json)
