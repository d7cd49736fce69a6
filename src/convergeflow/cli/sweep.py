"""`convergeflow sweep`: Gen. PPL against entropy along one control, as figure, table and page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convergeflow.cli import options
from convergeflow.cli.console import command_line, note, print_json, progress
from convergeflow.cli.sampling_options import SamplingOptions, parse_knobs, sample_arguments, takes_sampling_options
from convergeflow.errors import UserError, unknown_name
from convergeflow.markup import printable

if TYPE_CHECKING:
    from convergeflow.systems.protocol import LanguageModel


@takes_sampling_options
def sweep(
    sampling: SamplingOptions,
    model: options.ModelArgument = None,
    control: Annotated[
        str, typer.Option(help="What varies: scg, refine, ug, nfe, ... or a control of the method such as temperature.")
    ] = "scg",
    values: Annotated[str, typer.Option(help="Its values, separated by commas.")] = "1,1.5,2,3,4",
    by: Annotated[
        str | None, typer.Option(help="A second control, one curve per value, as in schedule=A,C or nfe=64,128.")
    ] = None,
    num: options.PerPoint = 128,
    length: options.Length = None,
    seed: options.Seed = 0,
    knobs: options.Knobs = None,
    scorer: options.Scorer = "",
    protocol: options.OneProtocol = "ours-1",
    corpus: options.Corpus = None,
    force: options.Force = False,
    batch: options.Batch = None,
    out: Annotated[
        Path, typer.Option(help="Folder for records, figure, table and page; finished points in it are not made again.")
    ] = Path("out/sweep"),
    precision: options.Precision = None,
    device: options.Device = "auto",
    json: options.Json = False,
) -> None:
    """Draw the frontier: vary one control, and read off the perplexity at the entropy of real text.

    Everything else, NFE and seeds included, stays fixed. A stopped sweep goes on with the first point that is missing.

    Example:
      convergeflow sweep stories-small --control scg --values 1,2,4,8 --nfe 64 --out out/scg
      convergeflow sweep --control refine --values 1,2,4,8 --by schedule=A,C --num 256 --out out/refine
    """
    from convergeflow import zoo
    from convergeflow.evaluation.assess import assessor_for
    from convergeflow.evaluation.protocol import protocol_named
    from convergeflow.evaluation.reference import find_reference
    from convergeflow.results.cost import check_request
    from convergeflow.results.draw import Measurer, origin
    from convergeflow.results.record import render
    from convergeflow.results.store import Store
    from convergeflow.studies import sweep as study

    chosen = protocol_named(protocol)
    name = model or zoo.DEFAULT_MODEL
    loaded = zoo.load_model(name, device=device)
    own = parse_knobs(knobs)
    points = study.plan(loaded, control, values, by, lambda changes: _arguments(loaded, sampling, own, changes))
    length = length or loaded.config.length
    check_request(loaded, num, length, batch or 1)
    real = corpus or zoo.trained_on(name, length)
    reference = find_reference(real, loaded.tokenizer, num, length, note, trained_on=loaded.trained_on, force=force)
    assessor = assessor_for(reference, scorer, device=device, say=note)
    seeds = range(seed, seed + num)
    measurer = Measurer(Store(out, note=note), assessor, chosen, seeds, length, batch, command_line())
    note(f"{len(points)} points of {num} samples each; after each of them the time that is left is told")
    with progress("sweeping", len(points) * num) as bar:
        frontier = study.sweep(
            measurer, loaded, points, about=origin(name, loaded), control=control, advance=bar.advance
        ).describe()
    note(f"wrote frontier.png, .svg, .csv, .json and report.html in {out}")
    print_json(frontier) if json else print(printable(render(frontier)))


def _arguments(
    loaded: LanguageModel, sampling: SamplingOptions, knobs: Mapping[str, Any], changes: Mapping[str, Any]
) -> dict[str, Any]:
    """What `model.sample` gets with some controls changed, wherever each of them lives."""
    own = loaded.controls
    ours = {field.name for field in fields(SamplingOptions)}
    named = {control.replace("-", "_"): value for control, value in changes.items()}
    for control in named:
        if control not in own and control not in ours:
            raise unknown_name("control", control, {*own, "nfe"} if loaded.as_flow() is None else {*own, *ours})
        if control in knobs or control in sampling.given():
            option = "set" if control in knobs else control
            raise UserError(f"{control} varies in this sweep, so `{option}` has no effect on it: leave that out")
    knobs = {**knobs, **{control: value for control, value in named.items() if control in own}}
    sampling = replace(sampling, **{control: value for control, value in named.items() if control not in own})
    return sample_arguments(loaded, sampling, knobs)
