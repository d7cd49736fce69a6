"""`convergeflow compare`: every system on one corpus, one budget, one protocol; a table, a figure, a verdict."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convergeflow.cli import options
from convergeflow.cli.console import command_line, note, print_json, print_table, progress
from convergeflow.errors import UserError

if TYPE_CHECKING:
    from convergeflow.studies.study import Study


def compare(
    context: typer.Context,
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL...|KEY=VALUE...",
            help="Finished models to compare, or changes to the recipe for all systems, as in batch=32.",
        ),
    ] = None,
    corpus: Annotated[
        str, typer.Option(help="The recipe whose corpus, size and budget all share: stories, sotu or a YAML file.")
    ] = "stories",
    systems: Annotated[
        str, typer.Option(help="all, or names separated by commas; see `convergeflow list methods`.")
    ] = "all",
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Training steps per system, in the recipe's proportions. [default: the recipe's]"),
    ] = None,
    nfe: Annotated[str, typer.Option(help="Network calls per sample, separated by commas.")] = "16,64",
    num: options.PerPoint = 128,
    bound: Annotated[int, typer.Option(min=0, help="Draws per text of the likelihood bound; 0 leaves it out.")] = 8,
    scorer: options.Scorer = "",
    protocol: options.OneProtocol = "ours-1",
    out: Annotated[
        Path | None, typer.Option(help="Folder; what is finished in it is kept. [default: out/compare-CORPUS]")
    ] = None,
    precision: options.Precision = None,
    checkpoints: Annotated[
        str | None,
        typer.Option(help="Compare finished models instead of training: a YAML table, or table1 (the paper's)."),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes that sample --checkpoints on this machine.")] = 1,
    part: Annotated[
        str | None, typer.Option(help="Only draw the samples of part I/N of --checkpoints, as on one of N machines.")
    ] = None,
    device: options.Device = "auto",
    fair: Annotated[
        bool,
        typer.Option(
            "--fair",
            help="Offer the recipe's extras to every system, choose each one's learning rate from three on a short "
            "pilot, and train the flows and AR from two seeds.",
        ),
    ] = False,
    force: options.Force = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only estimate the time.")] = False,
    json: options.Json = False,
) -> None:
    """Compare all systems at equal size, tokens and batch, with one scorer, and draw a frontier for each.

    Trains what is missing, samples every system along its own temperature or guidance at each NFE, and writes records,
    a figure per NFE, table.json and table.md. The time is estimated first; a stopped comparison goes on, and a system
    whose records are complete needs neither its weights nor new training.

    With finished models as arguments nothing is trained: each is sampled along its own controls with --nfe network
    calls (64 if that is not given), read at the entropy of real text, and judged against the first.

    Example:
      convergeflow compare stories-small runs/mine --num 256
      convergeflow compare --corpus stories --dry-run
      convergeflow compare --corpus stories --steps 1200 model.depth=4 --fair --num 64
      convergeflow compare --corpus test --systems ar,mdlm,convergeflow --nfe 8 --num 8
      convergeflow compare --checkpoints table1 --dry-run
      convergeflow compare --checkpoints my-table.yaml --processes 4 --out out/table
    """
    if checkpoints is not None:
        from convergeflow.cli.checkpoints import compare_checkpoints

        _refuse_training_options(context)
        places = {"device": device, "precision": precision}
        compare_checkpoints(checkpoints, out, systems, processes, part, places, dry_run, json)
        return
    if processes > 1 or part is not None:
        raise UserError("--processes and --part belong to --checkpoints")
    if models := [word for word in changes or () if "=" not in word or Path(word).exists()]:
        from convergeflow.cli.compare_models import compare_models

        _refuse_changes(context, len(models) < len(changes or ()))
        given = _given(context)
        chosen_corpus = corpus if "corpus" in given else None
        how: dict[str, Any] = {
            "num": num,
            "scorer": scorer,
            "protocol": protocol,
            "device": device,
            "dry_run": dry_run,
            "json": json,
        }
        budgets = _numbers(nfe) if "nfe" in given else [64]
        compare_models(models, corpus=chosen_corpus, force=force, budgets=budgets, out=out, **how)
        return
    if force:
        raise UserError("--force is for finished models: systems that are trained here are judged by their own corpus")
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

    options.check_draws(bound)
    base = resolve(corpus, list(changes or ()))
    budgets = _numbers(nfe)
    base = base if steps is None else on_budget(base, steps)
    wanted, chosen = systems_named(systems), protocol_named(protocol)
    store = Store(out or Path("out") / f"compare-{Path(corpus).stem}", note=note)
    reference = corpus_reference(open_corpus(base), num, base.corpus.length)
    assessor = assessor_for(reference, scorer, device=device, say=note)
    measurer = Measurer(store, assessor, chosen, range(num), base.corpus.length, command=command_line())
    kind, wanted = (FairStudy, with_seeds(wanted)) if fair else (Study, wanted)
    _run(kind(base, wanted, budgets, measurer, bound_draws=bound, device=device), corpus, dry_run, json)


def _run(study: Study, corpus: str, dry_run: bool, json: bool) -> None:
    """Say what it costs, run it, and write the table after every system: a stopped comparison leaves what it has."""
    from convergeflow.results.store import readable
    from convergeflow.studies import table

    costs = study.costs()
    total = sum(cost.training + cost.sampling for cost in costs)
    if dry_run and json:
        print_json({"seconds": total, "systems": [vars(cost) for cost in costs]})
        return
    for cost in costs:
        note(
            f"{cost.system:18} {cost.parameters:>12,} parameters, training about {readable(cost.training)}, "
            f"sampling about {readable(cost.sampling)}"
        )
    note(f"together about {readable(total)}, scoring and bounds included; a stopped comparison goes on where it was")
    if dry_run:
        return
    results, summary = [], {}
    with progress("comparing") as bar:
        study.advance = bar.advance
        for result in study.run():
            results.append(result)
            summary = table.write_comparison(study, results, corpus)
    note(f"wrote table.md, table.json and the frontier figures in {study.store.folder}")
    if json:
        print_json({name: summary[name] for name in ("about", "rows", "verdict")})
        return
    print_table(table.COLUMNS, [table.cells(row) for row in summary["rows"]])
    for sentence in summary["verdict"]:
        note(sentence)


def _refuse_changes(context: typer.Context, mixed: bool) -> None:
    """Finished models are what they are."""
    if mixed or _given(context) & {"systems", "steps", "bound", "fair"}:
        raise UserError(
            "finished models are compared as they are: KEY=VALUE, --systems, --steps, --bound, --fair train"
        )


def _given(context: typer.Context) -> set[str]:
    """The options that were typed."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def _refuse_training_options(context: typer.Context) -> None:
    """A table of checkpoints says itself what is measured and how."""
    for name in ("changes", "corpus", "steps", "nfe", "num", "bound", "scorer", "protocol", "force", "fair"):
        if name in _given(context):
            raise UserError(f"`{name}` is for systems that are trained; with --checkpoints the table's file says it")


def _numbers(text: str) -> list[int]:
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UserError(f"--nfe takes whole numbers separated by commas, not {text!r}") from None
    if found[0] < 3:
        raise UserError("--nfe must be at least 3: some systems need two steps and a decoding")
    return found
