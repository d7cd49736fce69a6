"""`convergeflow compare A B ...`: finished models at matched entropy, with a verdict for each against the first."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING

from convergeflow.cli.console import command_line, note, print_json, print_result, progress
from convergeflow.errors import UserError

if TYPE_CHECKING:
    from convergeflow.cli.compare import CompareOptions

NFE = 64
"""Network calls per sample, if none are given: models need no second number."""


def compare_models(names: Sequence[str], asked: CompareOptions, given: Set[str]) -> None:
    """Estimate, sample, score, and say which model is better at one entropy."""
    from convergeflow import zoo
    from convergeflow.evaluation.assess import assessor_for
    from convergeflow.evaluation.protocol import protocol_named
    from convergeflow.evaluation.reference import find_reference
    from convergeflow.results.draw import Measurer
    from convergeflow.results.store import Store, readable
    from convergeflow.studies import matched

    nfe, chosen, num = _checked(names, asked, given), protocol_named(asked.protocol), asked.num
    corpus = asked.corpus if "corpus" in given else None
    models = {name: zoo.load_model(name, device=asked.device) for name in names}
    matched.check_tokens(models)
    length = min(int(model.config.length) for model in models.values())
    for name, model in models.items():
        real = corpus or zoo.trained_on(name, length)
        reference = find_reference(
            real, model.tokenizer, num, length, note, trained_on=model.trained_on, force=asked.force
        )
        if reference is None:
            raise UserError(f"there is no real text to take an entropy from: prepare the corpus of {name}, or name it")
    costs = matched.seconds(models, nfe, num, length)
    if asked.dry_run and asked.json:
        print_json({"seconds": sum(costs.values()), "models": costs})
        return
    for name, cost in costs.items():
        note(f"{name}: sampling about {readable(cost)}")
    note(f"together about {readable(sum(costs.values()))} if no point is kept, without scoring")
    if asked.dry_run:
        return
    assessor = assessor_for(reference, asked.scorer, device=asked.device, say=note)
    store = Store(asked.out or Path("out") / "compare-models", note=note)
    measurer = Measurer(store, assessor, chosen, range(num), length, command=command_line())
    with progress("comparing") as bar:
        points = dict(matched.measure(measurer, models, nfe, bar.advance))
    summary = matched.write_matched(measurer, points, nfe)
    note(f"wrote compare.md, compare.json and the frontier in {store.folder}")
    told = {name: summary[name] for name in ("nfe", "rows", "verdicts")}
    rows, verdicts = [matched.cells(row) for row in told["rows"]], [verdict["says"] for verdict in told["verdicts"]]
    print_result(told, matched.COLUMNS, rows, verdicts, as_json=asked.json)


def _checked(names: Sequence[str], asked: CompareOptions, given: Set[str]) -> int:
    """The one number of network calls; what only training systems have is refused."""
    if len(names) < len(asked.changes or ()) or given & {"systems", "steps", "bound", "fair", "rates"}:
        raise UserError(
            "finished models are compared as they are: KEY=VALUE, --systems, --steps, --bound, --fair, --rates train"
        )
    if len(set(names)) < len(names) or len(names) < 2:
        raise UserError("name two models or more, each once: `convergeflow compare A B`")
    budgets = asked.budgets if "nfe" in given else [NFE]
    if len(budgets) > 1:
        raise UserError("models are compared at one --nfe")
    return budgets[0]
