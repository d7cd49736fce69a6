"""`convergeflow train`: a text or a recipe in, with a few changes, and a model folder out."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convergeflow.cli import console, options
from convergeflow.cli.prepare import say_what_was_read
from convergeflow.cli.processes import number_of_processes
from convergeflow.data import CORPORA
from convergeflow.errors import UserError, unknown_name
from convergeflow.training.recipes import read_recipe, recipes

if TYPE_CHECKING:
    from convergeflow.data.unprepared import Decision
    from convergeflow.training.automatic import RunPlan
    from convergeflow.training.config import Origins, RunConfig
    from convergeflow.training.estimate import RunCost
    from convergeflow.training.run import Build
    from convergeflow.training.trainer import TrainingEnd

DEFAULT_RECIPE = "stories"
MANIFEST = "manifest.json"
"""In the folder of a prepared corpus."""


def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT|RECIPE|KEY=VALUE",
            help="Your text (files, folders, a prepared corpus), or a recipe (`convergeflow list recipes`, a YAML "
            "file), or a recipe and a text; then changes: stages.ce.lr=1e-3.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run. [default: runs/NAME]")] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="End after so many minutes: some steps are tried, and all stages scaled to fit."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Training steps in all; every stage and its warm-up is scaled in proportion."),
    ] = None,
    resume: options.Resume = False,
    init_from: options.InitFrom = None,
    method: Annotated[str | None, typer.Option(help="What to train; the same as model.method=NAME.")] = None,
    dry_run: options.DryRun = False,
    device: options.TrainingDevice = None,
    json: options.Json = False,
) -> None:
    """Train a model on your text, or by a recipe; without either on the stories that come with the package.

    For a text everything is chosen: tokenizer, vocabulary, size, stages, held-out part. The command says what it chose
    and why; what you give as key=value is not changed. With a recipe and a text, the recipe is trained on that text.
    Ctrl-C saves and says how to go on; a killed run goes on bit for bit with --resume. Several processes: accelerate
    launch -m convergeflow train ...; on CPUs, where accelerate starts only one, torchrun --nproc-per-node 2 -m
    convergeflow train ...

    Example:
      convergeflow train my-texts/ --minutes 10
      convergeflow train my-texts/ --init-from sotu-small --minutes 10 --out runs/tuned
      convergeflow train stories --steps 500 --out runs/short
      convergeflow train basic corpus/ batch=16 --dry-run
      convergeflow train --out runs/short --resume
    """
    began = time.monotonic()
    named, sources, overrides = _sorted(words or ())
    options.add_change(overrides, "method", "model.method", method)
    options.add_change(overrides, "device", "device", device)
    _refuse_contradictions(minutes, steps, resume, dry_run)
    if steps is not None and resume and named is None:
        raise UserError("--steps plans a new run; to go on for longer change the last stage, as in stages.1.steps=900")
    recipe = named if named is not None or sources else DEFAULT_RECIPE
    folder = out or Path("runs") / _name(recipe, sources)
    start = None if init_from is None else _located(init_from)
    config: RunConfig | None = None
    planned: RunPlan | None = None
    if not resume or named is not None:  # resuming takes the run's own settings, unless a recipe is given again
        place = None if resume or dry_run else folder
        config, given, planned = _configured(recipe, sources, overrides, minutes, steps, start, began, place)
        if dry_run:
            _dry_run(config, given, planned, start, json)
            return
    end = float("inf") if minutes is None or planned is None else began + 60 * minutes - planned.closing_seconds()
    from convergeflow.training import run
    from convergeflow.training.interrupt import ending_at

    if config is None or resume:
        config = run.saved_config(folder, overrides, wanted=config)
    with ending_at(end):
        carry_out(config, folder, "train", json, resume=resume, planned=planned, init_from=start)


def _sorted(words: Sequence[str]) -> tuple[str | None, list[str], list[str]]:
    """Recipe, texts and changes of a command line."""
    recipe: str | None = None
    sources: list[str] = []
    overrides: list[str] = []
    for word in words:
        if recipe is None and (word in recipes() or word.endswith((".yaml", ".yml"))):
            recipe = word
            if Path(word).is_dir():
                console.note(f"{word} is taken as the recipe; for the folder write ./{word}")
        elif Path(word).exists() or word in CORPORA or word.startswith("hf:"):
            sources.append(word)
        elif "=" in word:
            overrides.append(word)
        elif "/" in word or Path(word).suffix:
            raise UserError(f"no such file or folder: {word}")
        elif recipe is not None:
            raise UserError(f"{word!r} is no text and not key=value: write a change as in batch=32")
        else:
            raise unknown_name("recipe or text", word, {*recipes(), *CORPORA})
    return recipe, sources, overrides


def _name(recipe: str | None, sources: Sequence[str]) -> str:
    """What a run is called if nobody says."""
    if recipe is not None:
        return Path(recipe).stem
    return re.sub(r"[^\w.-]+", "-", sources[0] if sources[0].startswith("hf:") else Path(sources[0]).resolve().stem)


def _refuse_contradictions(minutes: float | None, steps: int | None, resume: bool, dry_run: bool) -> None:
    if dry_run and resume:
        raise UserError("--dry-run and --resume cannot be combined")
    if minutes is not None and steps is not None:
        raise UserError("--minutes and --steps both say how long: give one of them")
    if minutes is not None and resume:
        raise UserError("--minutes plans a new run, and --resume goes on by the old plan: give one of them")
    if minutes is not None and not 0 < minutes < 1e6:
        raise UserError(f"--minutes must be above 0 and below 1,000,000, not {minutes:g}")
    if minutes is not None and number_of_processes() > 1:
        raise UserError("--minutes tries steps in one process: give a launch of several --steps instead")


def _located(name: str) -> Path:
    from convergeflow import zoo

    return zoo.locate(name)


def _configured(
    recipe: str | None,
    sources: Sequence[str],
    overrides: Sequence[str],
    minutes: float | None,
    steps: int | None,
    start: Path | None,
    began: float,
    place: Path | None,
) -> tuple[RunConfig, Origins, RunPlan | None]:
    """The configuration of a new run, where its values come from, and the plan where there was something to plan."""
    from convergeflow.training import config as configuration

    if recipe is not None and sources:
        overrides = [_in_place_of_its_own(sources), *overrides]
    if recipe is not None and minutes is None:
        # A configuration is checked before anything heavy is loaded.
        values, given = configuration.assembled(read_recipe(recipe), overrides, f"recipe {recipe}")
        config = configuration.from_dict(values)
        if steps is not None:
            config = configuration.scaled(config, steps)
            given = configuration.mark_scaled(config, given)
        return config, given, None
    from convergeflow.training import automatic, run

    if place is not None:
        run.refuse_other_files(place)  # before anything is prepared and tried
    with console.stages() as report:
        if recipe is not None:
            assert minutes is not None
            plan = automatic.plan_recipe(recipe, overrides, minutes=minutes, began=began, progress=report)
        else:
            how: dict[str, Any] = {"minutes": minutes, "steps": steps, "init_from": start, "began": began}
            plan = automatic.plan_for_text(sources, overrides, say=_say, progress=report, **how)
            say_what_was_read(plan.corpus)
    return plan.config, plan.given, plan


def _in_place_of_its_own(sources: Sequence[str]) -> str:
    """The change that gives a recipe another text."""
    from json import dumps

    single = sources[0] if len(sources) == 1 else None
    if single is not None and (single in CORPORA or single.startswith("hf:") or (Path(single) / MANIFEST).is_file()):
        return f"corpus.name={dumps(single)}"
    return f"corpus.paths={dumps(list(sources))}"


def _say(choice: Decision) -> None:
    console.note(f"{choice.what + ':':20}{choice.value} ({choice.why})")


def carry_out(
    config: RunConfig,
    out: Path,
    command: str,
    as_json: bool,
    *,
    resume: bool,
    planned: RunPlan | None = None,
    **how: Any,
) -> None:
    """A run with a progress bar, and what is said at its end; `how` as in `run.train`."""
    from convergeflow.training import run

    accelerator = run.make_accelerator(config)
    main = accelerator.is_main_process
    if main:
        processes = f"{accelerator.num_processes} process{'es' if accelerator.num_processes > 1 else ''}"
        source = config.corpus.name if planned is None else planned.corpus.name
        what = f"on {source}" if config.distill is None else f"from {config.distill.teacher}"
        console.note(f"{config.model.method} {what}: {config.total_steps} steps into {out}, {processes}")
    with console.progress(command, config.total_steps if main else None) as bar:

        def advance(amount: float = 1, stage: str | None = None, total: int | None = None, **fields: Any) -> None:
            bar.describe(None if stage is None else f"stage {stage}", total)
            bar.advance(amount, **fields)

        reporter = run.Reporter(advance=advance, note=console.note, warn=console.warn)
        outcome = run.train(config, out, resume=resume, reporter=reporter, accelerator=accelerator, **how)
    if main:
        _report(outcome, out, command, planned, as_json)
    if not outcome.usable:  # all processes of a run end alike
        raise typer.Exit(128 + outcome.signal_number)


def _report(outcome: TrainingEnd, out: Path, command: str, planned: RunPlan | None, as_json: bool) -> None:
    """How it ended and what to do next."""
    from convergeflow.training import run

    result: dict[str, Any] = {
        "finished": outcome.finished,
        "step": outcome.step,
        "checkpoint": str(outcome.checkpoint),
        "evaluation": outcome.evaluation,
    }
    if planned is not None:
        result["choices"] = [choice._asdict() for choice in planned.choices]
    go_on = console.hint(command, "--out", out, "--resume")
    if not outcome.finished:
        result["resume"] = go_on
    if outcome.usable:
        result["model"] = str(out / run.MODEL_FOLDER)
        line = f"trained {outcome.step} steps; generate from it with: " + console.hint(
            "generate", "--model", result["model"]
        )
        if not outcome.finished:
            console.note(f"the time is up before the plan was done; to make the rest of it: {go_on}")
        for word in ("evaluate", "sweep", "serve"):
            console.note(f"  {console.hint(word, out)}")
    else:
        line = f"stopped at step {outcome.step}, saved in {outcome.checkpoint}; go on with: {go_on}"
    console.print_json(result) if as_json else print(line)


def _dry_run(config: RunConfig, given: Origins, planned: RunPlan | None, start: Path | None, as_json: bool) -> None:
    from convergeflow.training import config as configuration
    from convergeflow.training.build import build_model

    choices = [] if planned is None else planned.choices
    foretell(config, configuration.origins(config, given), build_model, as_json, choices, start)


def foretell(
    config: RunConfig,
    table: list[tuple[str, Any, str]],
    build: Build,
    as_json: bool,
    choices: Sequence[Decision] = (),
    start: Path | None = None,
) -> None:
    """Print the configuration with its origins, and the size, memory and time of the run."""
    from convergeflow.training import run
    from convergeflow.training.build import open_corpus
    from convergeflow.training.estimate import check_memory, estimate

    check_memory(config)  # before a text of its length is written
    # A corpus of the package need not be here; the user's own is opened, so that what a run refuses is refused now.
    corpus = config.corpus
    own = corpus.paths or (Path(corpus.name) / MANIFEST).is_file()
    opened, vocabulary = None, None if own or start is not None else corpus.vocabulary
    if vocabulary is None:
        opened = open_corpus(config)
        vocabulary = opened.vocabulary
    model = build(config, vocabulary)
    if start is not None and opened is not None:
        run.start_from(start, model, opened, config, run.Reporter(note=console.note))
    cost = estimate(config, model, vocabulary)
    if as_json:
        told = {"config": config.to_dict(), "vocabulary": vocabulary, "estimate": asdict(cost)}
        console.print_json({**told, "choices": [choice._asdict() for choice in choices]})
        return
    console.print_table(["key", "value", "origin"], [[key, str(value), origin] for key, value, origin in table])
    print(f"""
vocabulary       {vocabulary:,}
parameters       {cost.parameters:,} ({cost.trained_parameters:,} trained in the first stage)
memory           {_bytes(cost.state_bytes)} for weights, gradients, optimizer and average
                 {_bytes(cost.activation_bytes)} for activations, measured and scaled to the batch
{_time(cost)}""")
    if cost.per_process:
        print("memory per process, counted (activations in float32; bfloat16 halves most of them)")
        for each in cost.per_process:
            share = f"{each.rows} sequences at once, activations {_bytes(each.activations)}"
            sharded = "" if each.world == 1 else f", FSDP2 {_bytes(each.fsdp)}"
            processes = "process  " if each.world == 1 else "processes"
            print(f"  {each.world:2} {processes}   DDP {_bytes(each.ddp)}{sharded}; {share}")


def _time(cost: RunCost) -> str:
    from convergeflow.results.store import readable

    if cost.seconds_per_step is None or cost.total_seconds is None:
        return "time per step    not tried: this machine has no accelerator; docs/paper-scale.md has the arithmetic"
    return (
        f"time per step    {cost.seconds_per_step:.3g} s ({cost.tokens_per_step:,} tokens), {cost.device}, 1 process\n"
        f"total            {readable(cost.total_seconds)} for {cost.steps:,} steps, without evaluation"
    )


def _bytes(number: int) -> str:
    return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"
