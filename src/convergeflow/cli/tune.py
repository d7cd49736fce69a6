"""`convergeflow tune`: the best use of a few network calls, found on held-out noises, without training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from convergeflow.cli import options
from convergeflow.cli.console import command_line, hint, note, print_result, progress
from convergeflow.errors import UserError

COLUMNS = ("condition", "steps", "refine", "scg", "temperature", "solver", "grid", "gen_ppl", "gen_ppl_se", "entropy")


def tune(
    model: options.ModelArgument = None,
    calls: Annotated[int, typer.Option(min=2, help="Network calls per sample.")] = 16,
    preset: Annotated[
        str | None,
        typer.Option(
            help="Where the search starts; with all its calls it is the reference. [default: the model's, or sharp]"
        ),
    ] = None,
    grid: Annotated[bool, typer.Option("--grid/--no-grid", help="Fit the grid points too.")] = True,
    num: options.PerPoint = 64,
    length: options.Length = None,
    seed: options.Seed = 500_000,
    scorer: options.Scorer = "",
    protocol: options.OneProtocol = "ours-1",
    corpus: options.Corpus = None,
    force: options.Force = False,
    batch: options.Batch = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for tuned-CALLS.json and the records. [default: beside the model, or out/tune]"),
    ] = None,
    precision: options.Precision = None,
    device: options.Device = "auto",
    json: options.Json = False,
) -> None:
    """Find the best steps, refinement, guidance, temperature and grid for a number of network calls.

    Settings are compared on held-out noises, at the entropy that the preset has with all its calls. The last comparison
    uses noises on which nothing was chosen; what is not better there is not used. The file that is written is a preset
    for `generate`, `evaluate` and `sweep`. A stopped search goes on with the first point that is missing.

    Example:
      convergeflow tune stories-small --calls 16 --out out/tune
      convergeflow generate --preset out/tune/tuned-16.json
    """
    from convergeflow import files, zoo
    from convergeflow.evaluation.assess import assessor_for
    from convergeflow.evaluation.protocol import protocol_named
    from convergeflow.evaluation.reference import find_reference
    from convergeflow.results.cost import check_request
    from convergeflow.results.draw import Measurer, origin
    from convergeflow.results.store import Store
    from convergeflow.sampling.plan import preset_for
    from convergeflow.studies import tune as study

    chosen = protocol_named(protocol)
    name = model or zoo.DEFAULT_MODEL
    loaded = zoo.load_model(name, device=device)
    flow = loaded.as_flow()
    if flow is None or flow.config.block_length is not None:
        raise UserError(f"{name}: tune is for flows that carry the whole sequence at once")
    base = preset_for(preset or flow.config.preset or "sharp", flow.schedule)
    if calls >= base.nfe:
        raise UserError(f"the preset makes {base.nfe} calls itself: give --calls a smaller number, or another --preset")
    length = length or flow.config.length
    check_request(flow, num, length, batch or 1)
    folder = out or (Path(name) if Path(name).is_dir() else Path("out/tune"))
    real = corpus or zoo.trained_on(name, length)
    reference = find_reference(real, flow.tokenizer, num, length, note, trained_on=flow.trained_on, force=force)
    assessor = assessor_for(reference, scorer, device=device, say=note)
    store = Store(folder, note=note)
    measurer = Measurer(store, assessor, chosen, range(seed, seed + num), length, batch, command_line())
    with progress("tuning", None) as bar:
        tuning = study.Tuning(measurer, flow, origin(name, flow), base, bar.advance)
        result = {"kind": "tuned", "format": 1, **study.tune(tuning, calls, grid=grid), "command": command_line()}
    path = folder / f"tuned-{calls}.json"
    files.write_json(path, result)
    rows = [{"": label, **row} for label, row in result["fresh"].items()]
    use = f"chosen: {result['chosen']}; use it with: " + hint("generate", "--model", name, "--preset", path)
    print_result(result, ["", *COLUMNS], rows, ["", use], as_json=json)
