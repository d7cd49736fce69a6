"""`convergeflow sweep`: Gen. PPL against entropy along one control, as figure, table and page."""

from __future__ import annotations

import hashlib
import json as js
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convergeflow.cli.console import note, print_json, progress
from convergeflow.cli.evaluate import Corpus, Knobs, Scorer, default_scorer, draw
from convergeflow.cli.sampling_options import SamplingOptions, parse_knobs, sample_arguments, takes_sampling_options
from convergeflow.errors import UserError, unknown_name

if TYPE_CHECKING:
    from convergeflow.systems.protocol import LanguageModel

WHOLE_NUMBERS = ("nfe", "refine", "freeze_patience")


@takes_sampling_options
def sweep(
    sampling: SamplingOptions,
    model: Annotated[str | None, typer.Argument(help="A shipped model, a checkpoint folder or a training run.")] = None,
    control: Annotated[
        str, typer.Option(help="What varies: scg, refine, ug, nfe, ... or a control of the method such as temperature.")
    ] = "scg",
    values: Annotated[str, typer.Option(help="Its values, separated by commas.")] = "1,1.5,2,3,4",
    by: Annotated[
        str | None, typer.Option(help="A second control, one curve per value, as in schedule=A,C or nfe=64,128.")
    ] = None,
    num: Annotated[int, typer.Option("--num", "-n", min=2, help="Samples per point.")] = 128,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens per sample. [default: the model's own]")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the first sample; all points use the same seeds.")] = 0,
    knobs: Knobs = None,
    scorer: Scorer = "",
    protocol: Annotated[str, typer.Option(help="One protocol; see `convergeflow evaluate --help`.")] = "ours-1",
    corpus: Corpus = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples per network call. [default: what fits]")] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for records, figure, table and page; finished points in it are not made again.")
    ] = Path("out/sweep"),
    device: Annotated[str, typer.Option(help="auto, or the name of a device.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print the frontier as JSON.")] = False,
) -> None:
    """Draw the frontier: vary one control, measure Gen. PPL and entropy, and read off Gen. PPL at the data's entropy.

    Everything else, NFE included, stays fixed. A stopped sweep goes on with the first point that is missing.

    Example:
      convergeflow sweep stories-small --control scg --values 1,2,4,8 --nfe 64 --out out/scg
      convergeflow sweep --control refine --values 1,2,4,8 --by schedule=A,C --num 256 --out out/refine
    """
    from convergeflow import zoo
    from convergeflow.evaluation.assessment import Assessor
    from convergeflow.evaluation.frontier import Frontier
    from convergeflow.evaluation.protocol import protocols_named
    from convergeflow.evaluation.record import render, write_record
    from convergeflow.evaluation.reference import find_reference
    from convergeflow.evaluation.report import frontier_figure, frontier_page, save_figure
    from convergeflow.evaluation.scorers import scorer_named

    chosen = protocols_named(protocol)
    if len(chosen) != 1:
        raise UserError("a sweep measures under one protocol; compare protocols with convergeflow evaluate")
    name = model or zoo.DEFAULT_MODEL
    loaded = zoo.load_model(name, device=device)
    settings = _plan(loaded, sampling, parse_knobs(knobs), control, values, by)
    length = length or loaded.config.length
    reference = find_reference(corpus, loaded.tokenizer, num, length, note)
    judge = scorer or default_scorer(reference)
    assessor = Assessor(scorer_named(judge, device=device, say=note), reference)
    (out / "records").mkdir(parents=True, exist_ok=True)
    command = "convergeflow " + shlex.join(sys.argv[1:])
    identity = {
        "weights": zoo.weights_hash(zoo.locate(name)),
        "length": length,
        "num": num,
        "seed": seed,
        "scorer": assessor.scorer.describe(),
        "protocol": chosen[0].id,
        "corpus": None if reference is None else reference.fingerprint,
    }
    curves: dict[str, list[tuple[Any, dict[str, Any], str | None]]] = {}
    pace: list[float] = []
    with progress("sweeping", len(settings) * num) as bar:
        for index, (label, value, options) in enumerate(settings):
            key = {**identity, "options": _described(options)}
            path = out / "records" / f"{_file_name(control, value, label)}-{_hash(key)}.json"
            record = _finished(path, key)
            if record is None:
                began = time.perf_counter()
                drawn = draw(loaded, name, options, num=num, length=length, seed=seed, batch=batch, advance=bar.advance)
                record = assessor.assess(drawn, chosen[0], command=command, extra={"key": key})
                write_record(path, record)
                pace.append(time.perf_counter() - began)
            else:
                bar.advance(num)
            curves.setdefault(label, []).append((value, record, f"records/{path.name}"))
            left = sum(pace) / len(pace) * (len(settings) - index - 1) if pace else 0.0
            note(
                f"[{index + 1}/{len(settings)}] {label}, {control} {value}: Gen. PPL {record['gen_ppl']:.4g}, "
                f"entropy {record['entropy']:.3f}, NFE {record['nfe']}"
                + (f"; about {_minutes(left)} left" if left else "")
            )
    frontier = Frontier.from_records(f"{name}: {control} at " + _fixed(curves), control, curves, command=command)
    described = frontier.describe()
    write_record(out / "frontier.json", described)
    frontier.write_csv(out / "frontier.csv")
    save_figure(frontier_figure(frontier), out, "frontier")
    metrics = [(label, value, record["metrics"]) for label, points in curves.items() for value, record, _ in points]
    (out / "report.html").write_text(frontier_page(frontier, metrics), encoding="utf-8")
    note(f"wrote frontier.png, .svg, .csv, .json and report.html in {out}")
    print_json(described) if json else print(render(described))


def _plan(
    loaded: LanguageModel,
    sampling: SamplingOptions,
    knobs: Mapping[str, Any],
    control: str,
    values: str,
    by: str | None,
) -> list[tuple[str, Any, dict[str, Any]]]:
    """(curve, value, arguments of `model.sample`) of every point; refuses impossible ones before anything runs."""
    second, _, texts = (by or "").partition("=")
    if by is not None and (not second or not texts):
        raise UserError(f"--by needs control=values, as in nfe=64,128, not {by!r}")
    outer = [(second, value) for value in _values(second, texts)] if by is not None else [(None, None)]
    points = []
    for name, outer_value in outer:
        for value in _values(control, values):
            changes = {control: value} if name is None else {name: outer_value, control: value}
            options, own = sampling, dict(knobs)
            for changed, to in changes.items():
                options, own = _with(loaded, options, own, changed, to)
            label = loaded.method if name is None else f"{name} {outer_value}"
            arguments = sample_arguments(loaded, options, own)
            if (flow := loaded.as_flow()) is not None and "settings" in arguments:
                for piece in flow.pieces(arguments["settings"], loaded.config.length):
                    piece.settings.plan(flow.schedule)
            points.append((label, value, arguments))
    return points


def _values(control: str, text: str) -> list[Any]:
    found: list[Any] = []
    for part in (piece.strip() for piece in text.split(",")):
        if not part:
            continue
        try:
            value = js.loads(part)
        except ValueError:
            value = part
        if control in WHOLE_NUMBERS and not isinstance(value, int):
            raise UserError(f"--{control} takes whole numbers, not {part!r}")
        found.append(value)
    if not found:
        raise UserError(f"no values for {control}: give them separated by commas")
    if len(set(map(str, found))) < len(found):
        raise UserError(f"the values of {control} must differ: {text}")
    return found


def _with(
    loaded: LanguageModel, sampling: SamplingOptions, knobs: dict[str, Any], control: str, value: Any
) -> tuple[SamplingOptions, dict[str, Any]]:
    """The options with one control changed, wherever it lives."""
    control = control.replace("-", "_")
    own = loaded.controls
    if control in own:
        return sampling, {**knobs, control: value}
    ours = {field.name for field in fields(SamplingOptions)}
    if control in ours:
        return replace(sampling, **{control: value}), knobs
    raise unknown_name("control", control, {*own, "nfe"} if loaded.as_flow() is None else {*own, *ours})


def _described(options: Mapping[str, Any]) -> dict[str, Any]:
    settings = options.get("settings")
    rest = {key: value for key, value in options.items() if key != "settings"}
    return rest if settings is None else {**rest, "settings": settings.describe()}


def _hash(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(js.dumps(key, sort_keys=True).encode()).hexdigest()[:10]


def _file_name(control: str, value: Any, label: str) -> str:
    text = f"{label}-{control}-{value}"
    return "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in text)[:60]


def _finished(path: Path, key: Mapping[str, Any]) -> dict[str, Any] | None:
    """The record of a point that an earlier run made; a file that is not whole counts as missing."""
    from convergeflow.evaluation.record import read_record

    if not path.is_file():
        return None
    try:
        record = read_record(path)
    except UserError:
        return None
    return record if record.get("key") == js.loads(js.dumps(key)) else None


def _fixed(curves: Mapping[str, list[tuple[Any, dict[str, Any], Any]]]) -> str:
    calls = sorted({record["nfe"] for points in curves.values() for _, record, _ in points})
    return "NFE " + (str(calls[0]) if len(calls) == 1 else f"{calls[0]} to {calls[-1]}")


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
