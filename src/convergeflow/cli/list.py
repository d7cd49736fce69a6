"""`convergeflow list`: what there is to name on the command line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from convergeflow.cli import options
from convergeflow.cli.console import print_json
from convergeflow.sampling.settings import PRESETS, Settings

KINDS = ("models", "methods", "corpora", "scorers", "recipes", "presets", "grids", "solvers", "guidance", "experiments")
SCORERS = {
    "exact": "the law of the stories itself",
    "smollm2": "SmolLM2-135M, offline after `convergeflow fetch smollm2`",
    "NAME": "any causal language model by folder or hub name (gpt2-large is the paper's)",
}

RECIPES = {
    "basic": "simple English, two hours of one core",
    "own-text": "what `convergeflow train FOLDER_OR_FILE` starts from",
    "owt": "the paper's run on OpenWebText, 34 hours of eight A100s (docs/paper-scale.md)",
    "owt-large": "a network of 24 layers of width 1024 on OpenWebText, from nothing",
    "sotu": "presidents' speeches, hours of two cores",
    "sotu-blocks": "presidents' speeches in blocks, hours of two cores",
    "stories": "the stories of the package, an hour of one core",
    "swift": "a student for 4 and 8 network calls, minutes of one core",
    "swift-again": "a further round for such a student, minutes of one core",
    "test": "passes through everything in seconds",
}
HOW_TO_SAMPLE = {
    "grids": {
        "midpoint": "t = (i + 0.5)/N, the paper's",
        "langflow": "N even times from end to end, as LangFlow's code takes them",
        "log-snr": "the midpoint grid's ends, even in log-SNR between them",
        "closing": "a midpoint grid, then a quarter of the steps on to where every word is decided",
        "early": "the midpoint grid pulled towards noise, for students and few calls",
        "theorem": "steps that shrink towards the end as Theorem 1 asks",
    },
    "solvers": {
        "euler": "first order, data form: the paper's",
        "euler-noise": "first order, noise form; the same without unconditional guidance",
        "multistep": "second order from the step before, no extra calls",
        "heun": "second order, two predictions a step",
        "kernel": "follows the exact kernel between calls, and on to the end",
    },
    "guidance": {
        "A": "constant strength",
        "B": "strength / (1 + sqrt(sigma/alpha)): weaker in the noise",
        "C": "strength / (1 + sigma/alpha): weakest in the noise",
    },
}
"""Meanings of the names of this package; those of other packages have none."""


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
    if kind == "methods":
        from convergeflow import systems

        return {name: systems.SUMMARIES.get(name, "") for name in systems.METHODS}
    if kind == "corpora":
        from convergeflow import data

        return {name: data.SUMMARIES.get(name, "") for name in data.CORPORA}
    if kind == "scorers":
        from convergeflow.plugins import Registry

        return SCORERS | dict.fromkeys(Registry[Any]("scorer", "scorers", {}), "")  # those of other packages
    if kind == "recipes":
        from convergeflow.training.recipes import read_recipe, recipes

        students = {name for name in recipes() if "distill" in read_recipe(name)}
        commands = {
            name: f"distill TEACHER --recipe {name}" if name in students else f"train {name}" for name in recipes()
        }
        return {name: f"{RECIPES[name]}: convergeflow {command}" for name, command in commands.items()}
    if kind == "presets":
        return {name: _setting(settings) for name, settings in PRESETS.items()}
    if kind == "experiments":
        from convergeflow.studies.reproduce.registry import experiments

        return {name: experiment.question for name, experiment in experiments().items()}
    from convergeflow import flow
    from convergeflow.flow import guidance

    known: dict[str, Iterable[str]] = {"grids": flow.GRIDS, "solvers": flow.SOLVERS, "guidance": guidance.GUIDANCE}
    return {name: HOW_TO_SAMPLE[kind].get(name, "") for name in known[kind]}


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
