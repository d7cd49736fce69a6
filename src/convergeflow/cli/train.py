"""`convergeflow train`: a recipe and a few changes in, a model folder out."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convergeflow.cli import console, options
from convergeflow.errors import UserError

if TYPE_CHECKING:
    from convergeflow.training.config import RunConfig
    from convergeflow.training.estimate import RunCost
    from convergeflow.training.run import Build

DEFAULT_RECIPE = "stories"


def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE|KEY=VALUE",
            help="A recipe (see `convergeflow list recipes`) or a YAML file, then changes to it: stages.0.steps=500.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run. [default: runs/RECIPE]")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest whole checkpoint in --out.")] = False,
    init_from: Annotated[Path | None, typer.Option(help="Start from the weights of this checkpoint folder.")] = None,
    method: Annotated[str | None, typer.Option(help="What to train; the same as model.method=NAME.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print configuration, size, memory and time; train nothing.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="Where to train; the same as device=NAME.")] = None,
    json: options.Json = False,
) -> None:
    """Train a model, by default on the stories that come with the package.

    The corpus is prepared on the way. Ctrl-C saves and says how to go on; a killed run goes on bit for bit with
    --resume. Several processes: accelerate launch -m convergeflow train ...; on CPUs, where accelerate starts only one,
    torchrun --nproc-per-node 2 -m convergeflow train ...

    Example:
      convergeflow train stories
      convergeflow train stories stages.ce.steps=500 batch=32 --out runs/short
      convergeflow train stories --dry-run
      convergeflow train --out runs/short --resume
    """
    overrides = list(words or ())
    named = bool(overrides) and "=" not in overrides[0]
    recipe = overrides.pop(0) if named else DEFAULT_RECIPE
    if method is not None:
        overrides.append(f"model.method={method}")
    if device is not None:
        overrides.append(f"device={device}")
    folder = out or Path("runs") / Path(recipe).stem
    if dry_run:
        if resume:
            raise UserError("--dry-run and --resume cannot be combined")
        _dry_run(recipe, overrides, json)
        return
    # Resuming takes the run's own settings, unless the whole command is given again.
    chosen = None if resume and not named else recipe
    _train(chosen, overrides, folder, resume=resume, init_from=init_from, as_json=json)


def _train(
    recipe: str | None, overrides: list[str], out: Path, *, resume: bool, init_from: Path | None, as_json: bool
) -> None:
    from convergeflow.training import config as configuration

    # The configuration is checked before anything heavy is loaded.
    config = None if recipe is None else configuration.resolve(recipe, overrides)

    from convergeflow.training import run

    if config is None or resume:
        config = run.saved_config(out, overrides, wanted=config)
    carry_out(config, out, "train", as_json, resume=resume, init_from=init_from)


def carry_out(config: RunConfig, out: Path, command: str, as_json: bool, *, resume: bool, **how: Any) -> None:
    """A run with a progress bar, and what is said at its end; `how` as in `run.train`."""
    from convergeflow.training import run

    accelerator = run.make_accelerator(config)
    main = accelerator.is_main_process
    if main:
        processes = f"{accelerator.num_processes} process{'es' if accelerator.num_processes > 1 else ''}"
        source = config.corpus.name if config.distill is None else f"from {config.distill.teacher}"
        what = f"{config.model.method} {'on ' if config.distill is None else ''}{source}"
        console.note(f"{what}: {config.total_steps} steps into {out}, {processes}")
    with console.progress(command, config.total_steps if main else None) as bar:
        reporter = run.Reporter(advance=bar.advance, note=console.note, warn=console.warn)
        outcome = run.train(config, out, resume=resume, reporter=reporter, accelerator=accelerator, **how)
    if not main:
        if not outcome.finished:  # all processes of a run end alike
            raise typer.Exit(128 + outcome.signal_number)
        return
    result: dict[str, Any] = {
        "finished": outcome.finished,
        "step": outcome.step,
        "checkpoint": str(outcome.checkpoint),
        "evaluation": outcome.evaluation,
    }
    go_on = console.hint(command, "--out", out, "--resume")
    if outcome.finished:
        result["model"] = str(out / run.MODEL_FOLDER)
        line = f"trained {outcome.step} steps; generate from it with: " + console.hint(
            "generate", "--model", result["model"]
        )
    else:
        result["resume"] = go_on
        line = f"stopped at step {outcome.step}, saved in {outcome.checkpoint}; go on with: {go_on}"
    if as_json:
        console.print_json(result)
    else:
        print(line)
    if not outcome.finished:
        raise typer.Exit(128 + outcome.signal_number)


def _dry_run(recipe: str, overrides: list[str], as_json: bool) -> None:
    from convergeflow.training import config as configuration

    config = configuration.resolve(recipe, overrides)
    table = configuration.origins(recipe, overrides)

    from convergeflow.training.build import build_model

    foretell(config, table, build_model, as_json)


def foretell(config: RunConfig, table: list[tuple[str, Any, str]], build: Build, as_json: bool) -> None:
    """Print the configuration with its origins, and the size, memory and time of the run."""
    from convergeflow.training.build import open_corpus
    from convergeflow.training.estimate import estimate

    # Known from the configuration, or by preparing the corpus.
    vocabulary = config.corpus.vocabulary or open_corpus(config).vocabulary
    cost = estimate(config, build(config, vocabulary), vocabulary)
    if as_json:
        console.print_json({"config": config.to_dict(), "vocabulary": vocabulary, "estimate": asdict(cost)})
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
