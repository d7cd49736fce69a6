"""Measure speed and memory on this machine, against a plain transcription of the paper in the same process.

Example:
  convergeflow bench head --size small
  convergeflow bench sample --size paper --json
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import typer

from convergeflow.cli.console import note, print_json, print_table
from convergeflow.errors import UserError

app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]})

SizeOption = typer.Option("small", "--size", help="small: seconds to a minute; paper: 12 x 768, V = 50257, minutes.")
RepeatsOption = typer.Option(None, "--repeats", min=1, help="Counted rounds; the median is reported.")
ThreadsOption = typer.Option(None, "--threads", min=1, help="Threads; all cores by default.")
ScalingOption = typer.Option(False, "--scaling", help="Also along length, vocabulary, batch and threads (small size).")
OutOption = typer.Option(None, "--out", help="Folder for a record: WHAT-SIZE.json and .png.")
JsonOption = typer.Option(False, "--json", help="Print the record as JSON.")
SizeName = Literal["small", "paper"]


@app.callback(invoke_without_command=True)
def everything(context: typer.Context) -> None:
    """Measure speed and memory; without a part: head, sample and train at small size."""
    if context.invoked_subcommand is None:
        for part in (head, sample, train):
            part(size="small", repeats=None, threads=None, scaling=False, out=None, as_json=False)


@app.command()
def head(
    size: SizeName = SizeOption,
    repeats: int | None = RepeatsOption,
    threads: int | None = ThreadsOption,
    scaling: bool = ScalingOption,
    out: Path | None = OutOption,
    as_json: bool = JsonOption,
) -> None:
    """The vocabulary head: fused against plain with float64 and with float32 logits, forward and backward.

    Example:
      convergeflow bench head --size paper --json
    """
    _prepare(threads)
    from convergeflow.benchmarks import head as contest
    from convergeflow.benchmarks import scaling as axes

    record = contest.run(contest.SHAPES[size], repeats or (5 if size == "small" else 3))
    _deliver("head", size, record, axes.head_points if scaling else None, out, as_json)


@app.command()
def sample(
    size: SizeName = SizeOption,
    repeats: int | None = RepeatsOption,
    threads: int | None = ThreadsOption,
    scaling: bool = ScalingOption,
    out: Path | None = OutOption,
    as_json: bool = JsonOption,
) -> None:
    """Sampling in the headline's shape: nine network calls at each of two grid points.

    Example:
      convergeflow bench sample --size small --json
    """
    _prepare(threads)
    from convergeflow.benchmarks import sample as contest
    from convergeflow.benchmarks import scaling as axes
    from convergeflow.benchmarks.models import SIZES

    record = contest.run(SIZES[size], repeats or (3 if size == "small" else 1))
    _deliver("sample", size, record, axes.sample_points if scaling else None, out, as_json)


@app.command()
def train(
    size: SizeName = SizeOption,
    repeats: int | None = RepeatsOption,
    threads: int | None = ThreadsOption,
    scaling: bool = ScalingOption,
    out: Path | None = OutOption,
    as_json: bool = JsonOption,
) -> None:
    """A training step: loss, gradients, AdamW and the average of the weights.

    Example:
      convergeflow bench train --size small --json
    """
    _prepare(threads)
    from convergeflow.benchmarks import scaling as axes
    from convergeflow.benchmarks import train as contest
    from convergeflow.benchmarks.models import SIZES

    record = contest.run(SIZES[size], repeats or (5 if size == "small" else 2))
    _deliver("train", size, record, axes.train_points if scaling else None, out, as_json)


def _prepare(threads: int | None) -> None:
    import torch

    cores = os.cpu_count() or 1
    if threads is not None and threads > cores:
        raise UserError(f"--threads {threads} is more than the {cores} cores of this machine")
    torch.set_num_threads(threads or cores)


def _deliver(
    what: str,
    size: str,
    record: dict[str, Any],
    scaling: Callable[[], list[dict[str, Any]]] | None,
    out: Path | None,
    as_json: bool,
) -> None:
    record = {"what": what, "name": size, **record}
    if scaling is not None:
        record["scaling"] = scaling()
    if out is not None:
        from convergeflow.benchmarks.picture import draw

        out.mkdir(parents=True, exist_ok=True)
        file = out / f"{what}-{size}.json"
        file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        draw(record, file.with_suffix(".png"))
        note(f"wrote {file} and {file.with_suffix('.png').name}")
    if as_json:
        print_json(record)
        return
    rows = [(name, value) for name, value in _flat(record).items() if not isinstance(value, list)]
    print_table(["what", size], [(name, _shown(value)) for name, value in rows])
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


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
