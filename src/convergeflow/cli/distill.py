"""`convergeflow distill`: a teacher in, a student that needs fewer network calls out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convergeflow.cli import options
from convergeflow.errors import UserError

if TYPE_CHECKING:
    from convergeflow.training.config import RunConfig


def distill(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEACHER|KEY=VALUE",
            help="A model (see `convergeflow list models`), then changes to the recipe: stages.0.steps=500.",
        ),
    ] = None,
    recipe: Annotated[str, typer.Option(help="The recipe, by name or as a YAML file.")] = "swift",
    out: Annotated[Path | None, typer.Option(help="Folder of the run. [default: runs/TEACHER-swift]")] = None,
    resume: options.Resume = False,
    init_from: options.InitFrom = None,
    dry_run: options.DryRun = False,
    device: options.TrainingDevice = None,
    json: options.Json = False,
) -> None:
    """Train a student that makes a teacher's long steps with one network call each.

    The student starts as a copy of the teacher, or with --init-from as another student, and learns from the teacher
    alone: guidance, refinement and several of its steps go into one call. A student can teach the next one. It is an
    ordinary model afterwards, with a preset of its own. The run is an ordinary training run: Ctrl-C saves, and --resume
    goes on bit for bit.

    Example:
      convergeflow distill stories-small --out runs/swift
      convergeflow distill runs/mine distill.calls=[4,8] stages.0.steps=500 --dry-run
      convergeflow distill --out runs/swift --resume
      convergeflow generate --model runs/swift --nfe 4
    """
    overrides = list(words or ())
    teacher = overrides.pop(0) if overrides and "=" not in overrides[0] else None
    options.add_change(overrides, "device", "device", device)
    if teacher is None and not resume:
        raise UserError("name the teacher first, as in: convergeflow distill stories-small")
    if dry_run and resume:
        raise UserError("--dry-run and --resume cannot be combined")

    from convergeflow import zoo
    from convergeflow.cli.train import carry_out, foretell
    from convergeflow.distillation.run import build_student, configuration
    from convergeflow.training import run

    config = None if teacher is None else configuration(teacher, recipe, overrides)
    start = None if init_from is None else zoo.locate(init_from)
    if dry_run and config is not None:
        foretell(config, _origins(config, recipe, overrides), build_student, json, start=start)
        return
    out = out or Path("runs") / f"{Path(teacher or '').name or 'teacher'}-swift"
    if config is None or resume:
        config = run.saved_config(out, overrides, wanted=config)
    if config.distill is None:
        raise UserError(f"{out} is a run of `convergeflow train`: go on with that command")
    carry_out(config, out, "distill", json, resume=resume, init_from=start, build=build_student)


def _origins(config: RunConfig, recipe: str, overrides: list[str]) -> list[tuple[str, Any, str]]:
    """(key, value, where the value comes from) of a configuration."""
    from convergeflow.training.recipes import leaves

    given = {text.partition("=")[0].strip() for text in overrides}

    def origin(key: str) -> str:
        if key in given:
            return "command line"
        of_teacher = key.startswith(("model.", "corpus.")) or key in ("distill.teacher", "distill.weights")
        return "the teacher" if of_teacher else f"recipe {recipe} or default"

    rows = [(".".join(path), value) for path, value in leaves(config.to_dict())]
    return [(key, value, origin(key)) for key, value in rows]
