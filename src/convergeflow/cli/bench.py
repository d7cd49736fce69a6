"""Measure speed and memory on this machine, against a plain transcription of the paper in the same process.

Example:
  convergeflow bench head --size small
  convergeflow bench sample --size paper --json
  convergeflow bench all --device cuda --size paper --out .
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any, Literal

import typer

from convergeflow.cli.console import note, print_json, print_table
from convergeflow.cli.options import Device, Json
from convergeflow.errors import UserError
from convergeflow.files import write_text

app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]})

SizeName = Literal["small", "paper"]
ROUNDS = {"head": {"small": 5, "paper": 3}, "sample": {"small": 3, "paper": 1}, "train": {"small": 5, "paper": 2}}
"""Counted rounds of each contest."""


@app.callback(invoke_without_command=True)
def everything(context: typer.Context) -> None:
    """Measure speed and memory; without a part: head, sample and train at small size."""
    if context.invoked_subcommand is None:
        for what in ROUNDS:
            _measure(what, "small")


def _measure(
    what: str,
    size: SizeName,
    repeats: int | None = None,
    threads: int | None = None,
    scaling: bool = False,
    out: Path | None = None,
    as_json: bool = False,
) -> None:
    """Run one contest and show its record."""
    _prepare(threads)
    from convergeflow.benchmarks import scaling as axes
    from convergeflow.benchmarks.models import SIZES

    contest = importlib.import_module(f"convergeflow.benchmarks.{what}")
    sizes = contest.SHAPES if what == "head" else SIZES
    record = contest.run(sizes[size], repeats or ROUNDS[what][size])
    if scaling:
        record["scaling"] = axes.points(what)
    _deliver(what, size, record, out, as_json)


def _contest(what: str, explanation: str) -> None:
    """Add a contest to the command; all of them have the same options."""

    def part(
        size: SizeName = typer.Option("small", help="small: seconds to a minute; paper: 12 x 768, V = 50257, minutes."),
        repeats: int | None = typer.Option(None, min=1, help="Counted rounds; the median is reported."),
        threads: int | None = typer.Option(None, min=1, help="Threads; all cores by default."),
        scaling: bool = typer.Option(
            False, "--scaling", help="Also vary length, vocabulary, batch and threads (small size)."
        ),
        out: Path | None = typer.Option(None, help="Folder for a record: WHAT-SIZE.json and .png."),
        as_json: Json = False,
    ) -> None:
        _measure(what, size, repeats, threads, scaling, out, as_json)

    part.__doc__ = f"{explanation}\n\nExample:\n  convergeflow bench {what} --size small --json"
    app.command(what)(part)


_contest("head", "Time the vocabulary head: fused against plain with float64 and float32 logits, forward and backward.")
_contest("sample", "Time sampling in the headline's shape: nine network calls at each of two grid points.")
_contest("train", "Time a training step: loss, gradients, AdamW and the average of the weights.")


@app.command()
def startup(
    repeats: int = typer.Option(5, min=1, help="Counted rounds; the median is reported."), as_json: Json = False
) -> None:
    """Compare the processor time of `list` and of `generate --num 1` with an import of torch.

    Example:
      convergeflow bench startup --json
    """
    from convergeflow.benchmarks import startup as contest

    _deliver("startup", "seconds", contest.run(repeats), None, as_json)


@app.command()
def prepare(
    megabytes: int = typer.Option(64, min=1, help="Text to encode."),
    workers: int | None = typer.Option(None, min=1, help="Processes that encode; one per core by default."),
    out: Path | None = typer.Option(None, help="Folder for a record: prepare-gpt2.json."),
    as_json: Json = False,
) -> None:
    """Time `prepare` from a table of text to a corpus in GPT-2's tokens, on one core and on all.

    Example:
      convergeflow bench prepare --megabytes 64 --json
    """
    from convergeflow.benchmarks import prepare as contest

    _deliver("prepare", "gpt2", contest.run(megabytes, workers), out, as_json, picture=False)


@app.command()
def score(
    scorer: str = typer.Option("smollm2", help="smollm2, a folder, or a model of the hub."),
    batch: int = typer.Option(8, min=1, help="Rows of 64 tokens in a pass."),
    repeats: int = typer.Option(3, min=1, help="Counted rounds; the median is reported."),
    out: Path | None = typer.Option(None, help="Folder for a record: score-NAME.json."),
    as_json: Json = False,
) -> None:
    """Time a scorer with both libraries of float32 products, in turns.

    Example:
      convergeflow bench score --json
    """
    from convergeflow.benchmarks import score as contest

    _deliver("score", Path(scorer).name, contest.run(scorer, batch, repeats), out, as_json, picture=False)


@app.command()
def serve(
    clients: str = typer.Option("8,32,128", help="Numbers of clients, separated by commas; one is always measured."),
    seconds: float = typer.Option(120.0, min=1, help="For how long each of them asks."),
    many: int = typer.Option(5000, min=0, help="Requests over which memory is watched; 0 leaves that out."),
    as_json: Json = False,
) -> None:
    """Put a server on this machine under load and compare every answer with `generate`.

    Example:
      convergeflow bench serve --clients 8,32 --seconds 30 --many 1000
    """
    from convergeflow.benchmarks import serve as contest

    try:
        counts = [int(part) for part in clients.split(",")]
    except ValueError:
        raise UserError(f"`clients` takes whole numbers separated by commas, not {clients!r}") from None
    record = contest.run(counts, seconds, many)
    if as_json:
        print_json(record)
        return
    print_table(list(record["load"][0]), record["load"])
    note(f"memory over {many} requests: {record['memory'].get('resident_mb')} MB")
    alone = {name: round(value, 2) for name, value in record["network_alone"].items() if name.startswith("speedup")}
    note(f"the network alone, rows per second over one row: {alone}")


@app.command("all")
def all_(
    device: Device = "auto",
    size: SizeName = typer.Option("small", help="small: a minute or two; paper: 12 x 768, V = 50257, minutes."),
    repeats: int = typer.Option(3, min=1, help="Counted rounds; the median is reported."),
    out: Path | None = typer.Option(None, help="Folder for the record: all-DEVICE-SIZE.json."),
    as_json: Json = False,
) -> None:
    """Measure head, sampling and training against the plain transcription, with roofline and verdict, in one run.

    On a GPU the plain side runs in the published code's own formats: bfloat16 trunk, TF32 kernel, float64 logits. The
    record is made to be sent: it says what the device is and what its own matrix products reach.

    Example:
      convergeflow bench all --device cuda --size paper --out .
    """
    _prepare(None)
    from convergeflow.benchmarks import everything

    record = everything.run(device, size, repeats)
    _deliver(f"all-{device}", size, record, out, as_json, picture=False)
    if not as_json:
        for line in record["verdict"]:
            print(line)


@app.command()
def roofline(
    out: Path | None = typer.Option(None, help="Folder for the record: roofline-paper.json."), as_json: Json = False
) -> None:
    """Predict the paper's size on GPUs from arithmetic: ours and the published code, part by part.

    Example:
      convergeflow bench roofline --json
    """
    from convergeflow.benchmarks import roofline as arithmetic

    _deliver("roofline", "paper", arithmetic.run(), out, as_json, picture=False)


def _prepare(threads: int | None) -> None:
    import torch

    cores = os.cpu_count() or 1
    if threads is not None and threads > cores:
        raise UserError(f"`threads` {threads} is more than the {cores} cores of this machine")
    torch.set_num_threads(threads or cores)


def _deliver(
    what: str, size: str, record: dict[str, Any], out: Path | None, as_json: bool, picture: bool = True
) -> None:
    record = {"what": what, "name": size, **record}
    if out is not None:
        file = out / f"{what}-{size}.json"
        write_text(file, json.dumps(record, indent=2) + "\n")
        if picture:
            from convergeflow.benchmarks.picture import draw

            draw(record, file.with_suffix(".png"))
        note(f"wrote {file}" + (f" and {file.with_suffix('.png').name}" if picture else ""))
    if as_json:
        print_json(record)
        return
    print_table(["what", size], [pair for pair in _flat(record).items() if not isinstance(pair[1], list)])
    for point in record.get("scaling", []):
        shown = "  ".join(f"{name} {value:.4g} s" for name, value in point["seconds"].items())
        print(f"{point['axis']} = {point['value']}: {shown}")


def _flat(record: dict[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{before}{name}.")
        else:
            found[before + name] = value
    return found
