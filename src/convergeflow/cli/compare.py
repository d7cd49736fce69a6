"""`convergeflow compare`: every system on one corpus, one budget, one protocol; a table, a figure, a verdict."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from convergeflow.cli.console import note, print_json, print_table, progress
from convergeflow.errors import UserError


def compare(
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the preset, for all systems, as in batch=32."),
    ] = None,
    corpus: Annotated[
        str, typer.Option(help="The preset whose corpus, size and budget all share: stories, sotu or a YAML file.")
    ] = "stories",
    systems: Annotated[
        str, typer.Option(help="all, or names separated by commas; see `convergeflow list methods`.")
    ] = "all",
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Training steps per system, in the preset's proportions. [default: the preset's]"),
    ] = None,
    nfe: Annotated[str, typer.Option(help="Network calls per sample, separated by commas.")] = "16,64",
    num: Annotated[int, typer.Option("--num", "-n", min=2, help="Samples per point.")] = 128,
    bound: Annotated[int, typer.Option(min=0, help="Draws per text of the likelihood bound; 0 leaves it out.")] = 8,
    scorer: Annotated[str, typer.Option(help="exact, smollm2 or a causal LM. [default: what suits the corpus]")] = "",
    protocol: Annotated[str, typer.Option(help="How Gen. PPL is measured.")] = "ours-1",
    out: Annotated[
        Path | None, typer.Option(help="Folder; what is finished in it is kept. [default: out/compare-CORPUS]")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, or the name of a device.")] = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only estimate the time.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Compare all systems: equal size, tokens and batch, the same scorer, a frontier for each.

    Trains what is missing, samples every system along its own temperature or guidance at each NFE, and writes records,
    a figure per NFE, table.json and table.md. The time is estimated first; a stopped comparison goes on, and a system
    whose records are complete needs neither its weights nor new training.

    Example:
      convergeflow compare --corpus stories --dry-run
      convergeflow compare --corpus stories --steps 1200 model.depth=4
      convergeflow compare --corpus test --systems ar,mdlm,convergeflow --nfe 8 --num 8
    """
    from convergeflow.training import config as configuration

    base = configuration.resolve(corpus, list(changes or ()))
    budgets = _numbers(nfe)
    from convergeflow.studies.systems import on_budget, systems_named

    base = base if steps is None else on_budget(base, steps)
    wanted = systems_named(systems)
    folder = out or Path("out") / f"compare-{Path(corpus).stem}"
    study = _study(base, folder, wanted, budgets, num, bound, scorer, protocol, device)
    costs = study.costs()
    total = sum(cost.training + cost.sampling for cost in costs)
    if dry_run and json:
        print_json({"seconds": total, "systems": [vars(cost) for cost in costs]})
        return
    for cost in costs:
        note(
            f"{cost.system:18} {cost.parameters:>12,} parameters, training about {_span(cost.training)}, "
            f"sampling about {_span(cost.sampling)}"
        )
    note(f"together about {_span(total)}, without scoring; a stopped comparison goes on where it was")
    if dry_run:
        return
    _run(study, folder, corpus, json)


def _numbers(text: str) -> list[int]:
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UserError(f"--nfe takes whole numbers separated by commas, not {text!r}") from None
    if not found or found[0] < 3:
        raise UserError("--nfe must be at least 3: some systems need two steps and a decoding")
    return found


def _study(
    base: Any,
    folder: Path,
    systems: list[str],
    budgets: list[int],
    num: int,
    bound: int,
    scorer: str,
    protocol: str,
    device: str,
) -> Any:
    from convergeflow.cli.evaluate import default_scorer
    from convergeflow.evaluation.assessment import Assessor
    from convergeflow.evaluation.protocol import protocols_named
    from convergeflow.evaluation.reference import corpus_reference
    from convergeflow.evaluation.scorers import scorer_named
    from convergeflow.studies.study import Study
    from convergeflow.training.build import open_corpus

    chosen = protocols_named(protocol)
    if len(chosen) != 1:
        raise UserError("a comparison is made under one protocol")
    reference = corpus_reference(open_corpus(base), num, base.corpus.length)
    judge = scorer_named(scorer or default_scorer(reference), device=device, say=note)
    command = "convergeflow " + shlex.join(sys.argv[1:])
    return Study(
        base,
        folder,
        systems,
        budgets,
        num,
        Assessor(judge, reference),
        chosen[0],
        bound_draws=bound,
        device=device,
        note=note,
        command=command,
    )


def _run(study: Any, folder: Path, corpus: str, json: bool) -> None:
    from convergeflow.evaluation.record import write_record
    from convergeflow.evaluation.report import frontier_figure, save_figure
    from convergeflow.studies.table import COLUMNS, cells, frontiers, markdown, objective_alone, rows, verdict

    folder.mkdir(parents=True, exist_ok=True)
    with progress("comparing") as bar:
        study.advance = bar.advance
        results = list(study.run())
    figures = frontiers(results, f"All systems on {corpus}", study.command)
    table = rows(results, figures)
    base = study.base
    tokens = base.batch * base.corpus.length * base.total_steps
    about = (
        f"{tokens:,} training tokens per system ({base.total_steps} steps of {base.batch} x {base.corpus.length}), "
        f"width {base.model.system.width}, depth {base.model.system.depth}; {study.num} samples per point, scorer "
        f"{study.assessor.scorer.name}, protocol {study.protocol.id}."
    )
    said, objective = verdict(table), objective_alone(results)
    write_record(
        folder / "table.json",
        {
            "kind": "comparison",
            "format": 1,
            "corpus": corpus,
            "about": about,
            "rows": table,
            "verdict": said,
            "objective": objective,
            "command": study.command,
            "frontiers": {str(nfe): figure.describe() for nfe, figure in figures.items()},
        },
    )
    (folder / "table.md").write_text(markdown(table, {"corpus": corpus, "about": about}, objective), encoding="utf-8")
    for nfe, figure in figures.items():
        save_figure(frontier_figure(figure), folder, f"frontier-nfe{nfe}")
        figure.write_csv(folder / f"frontier-nfe{nfe}.csv")
    note(f"wrote table.md, table.json and the frontier figures in {folder}")
    if json:
        print_json({"about": about, "rows": table, "verdict": said})
        return
    print_table(COLUMNS, [cells(row) for row in table])
    for sentence in said:
        note(sentence)


def _span(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
