"""`convergeflow list`: what there is to name on the command line."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from convergeflow.cli.console import print_json


def list_(
    kind: Annotated[
        str | None,
        typer.Argument(help="models, methods, corpora, scorers, runs, presets, grids, solvers or experiments."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Name the models, methods, corpora, scorers, training presets, sampling presets and experiments.

    Example:
      convergeflow list
      convergeflow list presets
    """
    from convergeflow.errors import unknown_name

    names = catalogue()
    if kind is not None and kind not in names:
        raise unknown_name("kind", kind, names)
    chosen = names if kind is None else {kind: names[kind]}
    if json:
        print_json(chosen)
        return
    for title, entries in chosen.items():
        print(f"{title}:")
        width = max((len(name) for name in entries), default=0)
        for name, meaning in entries.items():
            print(f"  {name.ljust(width)}  {meaning}".rstrip())


def catalogue() -> dict[str, dict[str, str]]:
    """Kind -> name -> meaning."""
    from convergeflow import zoo
    from convergeflow.data.prepare import CORPORA
    from convergeflow.flow.grid import GRID_NAMES
    from convergeflow.flow.solver import SOLVER_NAMES
    from convergeflow.sampling.settings import PRESETS
    from convergeflow.studies.reproduce.registry import experiments
    from convergeflow.systems import SUMMARIES
    from convergeflow.training.recipes import recipes

    return {
        "models": {name: _first_line(zoo.shipped_folder() / name / "card.md") for name in zoo.shipped_models()},
        "methods": dict(SUMMARIES),
        "corpora": dict(CORPORA),
        "scorers": {
            "exact": "the law of the stories itself",
            "smollm2": "SmolLM2-135M, offline after `convergeflow fetch smollm2`",
            "NAME": "any causal language model by folder or hub name (gpt2-large is the paper's)",
        },
        "runs": {name: "training recipe: convergeflow train " + name for name in recipes()},
        "presets": {name: _setting(settings) for name, settings in PRESETS.items()},
        "grids": dict.fromkeys(GRID_NAMES, ""),
        "solvers": dict.fromkeys(SOLVER_NAMES, ""),
        "experiments": {name: experiment.question for name, experiment in experiments().items()},
    }


def _first_line(path: Any) -> str:
    if not path.is_file():
        return ""
    return next((line.lstrip("# ").strip() for line in path.read_text(encoding="utf-8").splitlines() if line), "")


def _setting(settings: Any) -> str:
    controls = settings.controls
    if settings.self_condition != "recursive":
        text = f"self-condition {settings.self_condition}, grid {settings.grid}"
        text += f", solver {settings.solver}, NFE {settings.nfe}"
        if settings.block is not None:
            text += f", base temperature {settings.base_temperature:g}"
            text += f", for models of blocks: {settings.block} token a block"
        return text
    text = f"configuration {controls.scg_schedule}, K {controls.refine}, w_scg {controls.scg:g}"
    if settings.temperature != 1:
        text += f", temperature {settings.temperature:g}"
    return f"{text}, w_ug {controls.ug:g}, NFE {settings.nfe} (nominal, at the paper's width)"
