"""`convergeflow list`: what there is to name on the command line."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from convergeflow.cli import options
from convergeflow.cli.console import print_json
from convergeflow.plugins import Registry
from convergeflow.sampling.settings import PRESETS, Settings

KINDS = ("models", "methods", "corpora", "scorers", "recipes", "presets", "grids", "solvers", "guidance", "experiments")
SCORERS = {
    "exact": "the law of the stories itself",
    "smollm2": "SmolLM2-135M, offline after `convergeflow fetch smollm2`",
    "NAME": "any causal language model by folder or hub name (gpt2-large is the paper's)",
}


def list_(
    kind: Annotated[str | None, typer.Argument(metavar="KIND", help=f"{', '.join(KINDS[:-1])} or {KINDS[-1]}.")] = None,
    json: options.Json = False,
) -> None:
    """Name the models, methods, corpora, scorers, recipes, presets, grids, solvers, guidance schedules and experiments.

    Example:
      convergeflow list
      convergeflow list presets
    """
    from convergeflow.errors import unknown_name

    if kind is not None and kind not in KINDS:
        raise unknown_name("kind", kind, KINDS)
    chosen = {each: _catalogue(each) for each in (KINDS if kind is None else [kind])}
    if json:
        print_json(chosen)
        return
    for title, entries in chosen.items():
        print(f"{title}:")
        width = max((len(name) for name in entries), default=0)
        for name, meaning in entries.items():
            print(f"  {name.ljust(width)}  {meaning}".rstrip())


def _catalogue(kind: str) -> dict[str, str]:
    """Name -> meaning. Names are found without importing what they name: this command must answer at once."""
    if kind == "models":
        from convergeflow import zoo

        return {name: _first_line(zoo.shipped_folder() / name / "card.md") for name in zoo.shipped_models()}
    if kind == "scorers":
        return SCORERS | Registry[Any]("scorer", "scorers", {}).meanings()  # those of other packages
    if kind == "recipes":
        from convergeflow.training.recipes import meaning_of, read_recipe, recipes

        students = {name for name in recipes() if "distill" in read_recipe(name)}
        commands = {
            name: f"distill TEACHER --recipe {name}" if name in students else f"train {name}" for name in recipes()
        }
        return {name: f"{meaning_of(name)}: convergeflow {command}" for name, command in commands.items()}
    if kind == "presets":
        return {name: _setting(settings) for name, settings in PRESETS.items()}
    if kind == "experiments":
        from convergeflow.studies.reproduce.registry import experiments

        return {name: experiment.question for name, experiment in experiments().items()}
    from convergeflow import data, flow, systems
    from convergeflow.flow import guidance

    registries: dict[str, Registry[Any]] = {
        "methods": systems.METHODS,
        "corpora": data.CORPORA,
        "grids": flow.GRIDS,
        "solvers": flow.SOLVERS,
        "guidance": guidance.GUIDANCE,
    }
    return registries[kind].meanings()


def _first_line(path: Any) -> str:
    return next((line.lstrip("# ").strip() for line in path.read_text(encoding="utf-8").splitlines() if line), "")


def _setting(settings: Settings) -> str:
    """What differs from the standard sampler, by the names of the options."""
    controls, standard = settings.controls, vars(Settings())
    parts = [f"NFE {settings.nfe}"]
    if settings.self_condition == "recursive":
        strengths = f"schedule {controls.scg_schedule}, refine {controls.refine}, scg {controls.scg:g}"
        parts.append(f"{strengths} (nominal, at the paper's width)")
    changed = [name for name, value in vars(settings).items() if value != standard[name]]
    parts += [f"{name.replace('_', '-')} {vars(settings)[name]}" for name in changed if name not in ("controls", "nfe")]
    return ", ".join(parts)
