"""Options that several commands have, each declared once. Sampling options are made from `Settings` instead."""

from __future__ import annotations

import inspect
import tempfile
import typing
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from convergeflow.errors import UserError
from convergeflow.files import check_writable

MOST_DRAWS = 10_000
"""Draws per text of a likelihood bound; its standard error over texts stops falling far below."""

MODEL = "A shipped model, a checkpoint folder or a training run."

ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL)]
Length = Annotated[int | None, typer.Option(min=1, help="Tokens per sample. [default: the model's own]")]
Seed = Annotated[int, typer.Option(help="Seed of the first sample; the others follow.")]
Batch = Annotated[int | None, typer.Option(min=1, help="Samples per network call. [default: what fits]")]
PerPoint = Annotated[int, typer.Option("--num", "-n", min=2, help="Samples per point.")]
Knobs = Annotated[
    list[str] | None,
    typer.Option("--set", help="A control that only this method has, as in temperature=0.9; may be repeated."),
]
Scorer = Annotated[
    str,
    typer.Option(
        help="exact (stories), smollm2 (offline), gpt2-large, or a causal language model by folder or hub name. "
        "[default: exact on stories, else smollm2]"
    ),
]
OneProtocol = Annotated[str, typer.Option(help="One protocol; see `convergeflow evaluate --help`.")]
Corpus = Annotated[
    str | None,
    typer.Option(
        help="Real text: stories, or a prepared corpus by name or folder. [default: what the model learned from, or a "
        "corpus with its tokenizer]"
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="Take real text even if its tokenizer or split contradicts the training set.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
TrainingDevice = Annotated[str | None, typer.Option(help="Where to train; the same as device=NAME.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the newest whole checkpoint in --out.")]
InitFrom = Annotated[str | None, typer.Option(help="Start from a model's weights: a shipped name, a folder or a run.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print configuration, size, memory and time; train nothing.")]


def _compute_in(context: typer.Context, name: str | None) -> str | None:
    if name is not None:
        from convergeflow.device import chosen_precision

        context.with_resource(chosen_precision(name))
    return name


Precision = Annotated[
    Literal["float32", "float64", "published"] | None,
    typer.Option(
        callback=_compute_in,
        help="float32 or float64 throughout, or published: the kernel term rounded to bfloat16 as in the paper's code. "
        "[default: what suits the device]",
    ),
]
Weights = Annotated[
    Literal["ema", "raw"],
    typer.Option(
        help="Of a training run: the moving average, or the raw weights (which the paper's script evaluates)."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def unfolded(parameter: str, kind: type[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the fields of a dataclass as options, in the place of its parameter that takes them as one."""
    hints = typing.get_type_hints(kind, include_extras=True)
    options = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields(kind)
    ]

    def of(function: Callable[..., Any]) -> Callable[..., Any]:
        own, own_hints = inspect.signature(function), typing.get_type_hints(function, include_extras=True)
        kept = [
            each.replace(annotation=own_hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for name, each in own.parameters.items()
            if name != parameter
        ]

        @wraps(function)
        def command(**given: Any) -> Any:
            picked = {option.name: given.pop(option.name) for option in options}
            return function(**{parameter: kind(**picked)}, **given)

        command.__signature__ = own.replace(parameters=kept + options)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in kept + options}
        return command

    return of


def was_typed(context: typer.Context, name: str) -> bool:
    """Whether an option was given, and is not there by default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def add_change(changes: list[str], option: str, key: str, value: str | None) -> None:
    """An option that says the same as KEY=VALUE among the changes; both at once are refused."""
    if value is None:
        return
    if any(change.partition("=")[0].strip() == key for change in changes):
        raise UserError(f"`{option}` and {key}= say the same: give one of them")
    changes.append(f"{key}={value}")


def check_files(*files: Path | None) -> None:
    """Refuse files in folders that do not exist, and what is no plain file, before any work is done."""
    for file in files:
        if file is None:
            continue
        if not file.parent.is_dir():
            raise UserError(f"the folder {file.parent} does not exist: make it first")
        check_writable(file)
        check_room(file.parent)


def check_room(folder: Path) -> None:
    """Refuse a folder, there or to be made, in which nothing can be written, before any work is done."""
    there = next((place for place in (folder, *folder.absolute().parents) if place.is_dir()), folder)
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as refusal:
        raise UserError(f"cannot write into {there} ({refusal.strerror or refusal}): choose another folder") from None


def check_draws(bound: int) -> None:
    """Refuse a number of draws that would never end."""
    if bound > MOST_DRAWS:
        raise UserError(f"`bound` must be at most {MOST_DRAWS:,} draws of every text, not {bound:,}")
