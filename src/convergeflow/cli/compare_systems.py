"""`convergeflow compare`: every system trained on one corpus with one budget, and measured by one protocol."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from convergeflow.cli import options
from convergeflow.cli.console import command_line, note, print_json, print_table, progress
from convergeflow.errors import UserError

if TYPE_CHECKING:
    from convergeflow.cli.compare import CompareOptions
    from convergeflow.studies.study import Study


def compare_systems(asked: CompareOptions) -> None:
    """Train what is missing, measure every system, and write the table."""
    from convergeflow.evaluation.assess import assessor_for
    from convergeflow.evaluation.protocol import protocol_named
    from convergeflow.evaluation.reference import corpus_reference
    from convergeflow.results.draw import Measurer
    from convergeflow.results.store import Store
    from convergeflow.studies.fair import FairStudy, with_seeds
    from convergeflow.studies.study import Study
    from convergeflow.studies.systems import on_budget, systems_named
    from convergeflow.training.build import open_corpus
    from convergeflow.training.config import resolve

    if asked.force:
        raise UserError("--force is for finished models: systems that are trained here are judged by their own corpus")
    options.check_draws(asked.bound)
    base = resolve(asked.corpus, list(asked.changes or ()))
    budgets = asked.budgets
    base = base if asked.steps is None else on_budget(base, asked.steps)
    wanted, chosen = systems_named(asked.systems), protocol_named(asked.protocol)
    store = Store(asked.out or Path("out") / f"compare-{Path(asked.corpus).stem}", note=note)
    reference = corpus_reference(open_corpus(base), asked.num, base.corpus.length)
    assessor = assessor_for(reference, asked.scorer, device=asked.device, say=note)
    measurer = Measurer(store, assessor, chosen, range(asked.num), base.corpus.length, command=command_line())
    kind, wanted = (FairStudy, with_seeds(wanted)) if asked.fair else (Study, wanted)
    _run(kind(base, wanted, budgets, measurer, bound_draws=asked.bound, device=asked.device), asked)


def _run(study: Study, asked: CompareOptions) -> None:
    """Say what it costs, run it, and write the table after every system: a stopped comparison leaves what it has."""
    from convergeflow.results.store import readable
    from convergeflow.studies import table

    costs = study.costs()
    total = sum(cost.training + cost.sampling for cost in costs)
    if asked.dry_run and asked.json:
        print_json({"seconds": total, "systems": [vars(cost) for cost in costs]})
        return
    for cost in costs:
        note(
            f"{cost.system:18} {cost.parameters:>12,} parameters, training about {readable(cost.training)}, "
            f"sampling about {readable(cost.sampling)}"
        )
    note(f"together about {readable(total)}, scoring and bounds included; a stopped comparison goes on where it was")
    if asked.dry_run:
        return
    results, summary = [], {}
    with progress("comparing") as bar:
        study.advance = bar.advance
        for result in study.run():
            results.append(result)
            summary = table.write_comparison(study, results, asked.corpus)
    note(f"wrote table.md, table.json and the frontier figures in {study.store.folder}")
    if asked.json:
        print_json({name: summary[name] for name in ("about", "rows", "verdict")})
        return
    print_table(table.COLUMNS, [table.cells(row) for row in summary["rows"]])
    for sentence in summary["verdict"]:
        note(sentence)
