"""`convergeflow inspect`: what a model or a record is."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from convergeflow.cli import options
from convergeflow.cli.console import print_json
from convergeflow.markup import printable


def inspect(
    what: Annotated[
        str,
        typer.Argument(metavar="WHAT", help="A shipped model, a checkpoint or run folder, or a record (JSON file)."),
    ],
    plot: Annotated[Path | None, typer.Option(help="Draw the learning curve of a training run to this PNG.")] = None,
    json: options.Json = False,
) -> None:
    """Show size, schedule, table health and origin of a model, or render a record.

    Example:
      convergeflow inspect stories-small
      convergeflow inspect out/record.json
      convergeflow inspect runs/stories --plot curve.png
    """
    if plot is not None:
        from convergeflow.training.curve import draw_curve

        options.check_files(plot)
        draw_curve(Path(what), plot)
    if Path(what).is_file():
        _inspect_file(Path(what), json)
        return
    report = model_report(what)
    if json:
        print_json(report)
        return
    for key, value in report.items():
        shown = ", ".join(f"{k} {_short(v)}" for k, v in value.items()) if isinstance(value, dict) else _short(value)
        print(printable(f"{key.replace('_', ' '):<28}{shown}"))


def _inspect_file(path: Path, as_json: bool) -> None:
    from convergeflow.errors import UserError
    from convergeflow.files import read_json
    from convergeflow.results.record import render

    try:
        record = read_json(path)
    except UserError:
        raise UserError(f"{path} is not a JSON record; to look at a model give its folder") from None
    print_json(record) if as_json else print(printable(render(record)))


def model_report(name: str) -> dict[str, Any]:
    """Facts about a model, as JSON values."""
    from convergeflow import zoo

    folder = zoo.locate(name)
    model = zoo.load_model(name, device="cpu")
    config = model.config
    total = sum(parameter.numel() for parameter in model.parameters())
    report: dict[str, Any] = {
        "model": name,
        "method": model.method,
        "weights": f"{zoo.weights_hash(folder)} (SHA-256 of model.safetensors, shortened)",
        "parameters": total,
        "vocabulary": config.vocabulary,
        "size": f"{config.depth} layers x {config.width}, {config.heads} heads, length {config.length}",
        "tokenizer": "none, ids only" if model.tokenizer is None else f"{model.tokenizer.kind}, {model.tokenizer.size}",
    }
    report["parameters_without_table"] = model.num_parameters_without_table()
    if (flow := model.as_flow()) is not None:
        from convergeflow.evaluation.health import health

        report["predictor"] = flow.network.predictor
        report["schedule"] = flow.schedule.describe()
        report["table_health"] = asdict(health(flow.network.embedding.rows()))
    if presets := getattr(model, "presets", None):
        report["presets"] = ", ".join(presets)
    card = folder / "card.md"
    report["card"] = str(card) if card.is_file() else "none"
    return report


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
