"""`convergeflow generate`: text from a model, with every control of the paper."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convergeflow.cli.console import note, print_json, progress, watched
from convergeflow.cli.sampling_options import SamplingOptions, parse_knobs, sample_arguments, takes_sampling_options

if TYPE_CHECKING:
    from convergeflow.sampling.wrappers import Clamp

GAP = "___"


@takes_sampling_options
def generate(
    sampling: SamplingOptions,
    model: Annotated[
        str, typer.Option("--model", "-m", help="A shipped model, a checkpoint folder or a training run.")
    ] = "stories-small",
    num: Annotated[int, typer.Option("--num", "-n", help="How many samples.")] = 4,
    length: Annotated[int | None, typer.Option(help="Tokens per sample. [default: the model's own]")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the first sample; the others follow.")] = 0,
    batch: Annotated[int | None, typer.Option(help="Samples per network call. [default: what fits]")] = None,
    prompt: Annotated[str | None, typer.Option(help="Text every sample starts with (a heuristic: see docs).")] = None,
    infill: Annotated[str | None, typer.Option(help=f'Text with gaps to fill, as in "Once {GAP} the {GAP}".')] = None,
    gap: Annotated[int, typer.Option(help=f"Tokens per {GAP} of --infill.")] = 4,
    knobs: Annotated[
        list[str] | None,
        typer.Option("--set", help="A control that only this method has, as in temperature=0.9; repeatable."),
    ] = None,
    noise: Annotated[
        Path | None, typer.Option(help="Starting noise, a .npy of samples x length x width, instead of the seeds'.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write JSONL here; goes on where a stopped run left off.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Folder for the trajectory: trace.npz, .csv and .png.")] = None,
    logits: Annotated[Path | None, typer.Option(help="Write the final logits to this .npy file.")] = None,
    live: Annotated[
        bool, typer.Option("--live/--no-live", help="Watch the text crystallise (only in a terminal).")
    ] = True,
    precision: Annotated[
        str | None,
        typer.Option(help="Format of the network: float32 or float64. [default: float32, with --logits float64]"),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object with all samples.")] = False,
) -> None:
    """Generate text.

    Samples come from consecutive seeds; a sample depends on its seed alone. NFE counts every network call.

    Example:
      convergeflow generate
      convergeflow generate --num 8 --nfe 128 --refine 4 --scg 2
      convergeflow generate --preset headline --trace out/trace
      convergeflow generate --prompt "Once there was a"
    """
    import numpy as np
    import torch

    from convergeflow import zoo
    from convergeflow.device import state_dtype_of
    from convergeflow.errors import UserError
    from convergeflow.results import sample_file
    from convergeflow.sampling.integration import default_batch
    from convergeflow.sampling.observation import LiveText, Trace, both

    for option, value in (("--num", num), ("--length", length), ("--batch", batch)):
        if value is not None and value < 1:
            raise UserError(f"{option} must be at least 1, not {value}")
    if precision not in (None, "float32", "float64"):
        raise UserError(f"--precision must be float32 or float64, not {precision!r}")
    for path in (out, logits):
        if path is not None and not path.parent.exists():
            raise UserError(f"the folder {path.parent} does not exist: make it first")
    rank, world, wait = _processes()
    if world > 1 and (out is None or trace is not None or logits is not None or json):
        raise UserError("several processes stream to one file: give --out, without --trace, --logits and --json")
    loaded = zoo.load_model(model, device=device)
    arguments = sample_arguments(loaded, sampling, parse_knobs(knobs))
    settings = arguments.get("settings")
    name = f"{model}@{zoo.weights_hash(zoo.locate(model))}"
    if settings is None and (noise or logits or trace or precision):
        raise UserError(f"--noise, --logits, --trace and --precision are for flows of ours, not for {loaded.method}")
    if precision is None and logits is not None and state_dtype_of(loaded.device) == torch.float64:
        precision = "float64"  # who asks for logits compares them, and strong guidance amplifies rounding
    if precision == "float64":
        loaded, name = loaded.double(), f"{name}+float64"
    start = None
    if noise is not None:
        start, mark = _read_noise(noise)
        num, length, name = start.shape[0], int(start.shape[1]), f"{name}+noise:{mark}"
    clamp = _clamp(loaded, prompt, infill, gap)
    if clamp is not None:
        length = length or max(loaded.config.length, clamp.tokens.shape[-1])
        clamp = _stretch(clamp, length)
        arguments["clamp"] = clamp
    length = length or loaded.config.length
    flow = loaded.as_flow()
    if flow is not None and settings is not None and sampling.nfe is None:
        arguments["settings"] = settings = flow.with_enough_calls(settings, length)
    seeds = range(seed, seed + num)
    size = batch or min(num, default_batch(length, loaded.config.vocabulary))
    if rank == 0:
        note(_describe(loaded, model, num, length, arguments))
    began = time.perf_counter()

    def make(group: Any, **more: Any) -> Any:
        if start is not None:
            more["noise"] = start[group[0] - seed : group[-1] - seed + 1]
        return loaded.sample(len(group), length, seeds=list(group), batch=size, **arguments, **more)

    if out is not None and trace is None and logits is None and not json:
        with progress("generating", num) as bar:
            made = sample_file.collect(out, seeds, size, make, name, rank=rank, world=world, on_batch=bar.advance)
        wait()
        if rank == 0:
            if world > 1:
                sample_file.merge(out, seeds, world)
            note(f"{out}: {num} samples ({made} made by this process, {time.perf_counter() - began:.1f} s)")
        return

    recorder = Trace() if trace is not None else None
    more: dict[str, Any] = {"want_logits": True} if logits is not None else {}
    with ExitStack() as stack:
        observers: list[Any] = [] if recorder is None else [recorder]
        if flow is not None and settings is not None and watched():
            if live and not json:
                from rich.console import Console

                observers.append(stack.enter_context(LiveText(loaded.tokenizer, Console(stderr=True))))
            else:
                flows = flow.pieces(settings, length, clamp)
                steps = sum(piece.settings.plan(flow.schedule).allocation.num_steps for piece in flows)
                total = steps * -(-num // size)
                bar = stack.enter_context(progress("generating", total))
                observers.append(lambda step: bar.advance(1, calls=step.calls))
        if observers:
            more["observe"] = both(*observers)
        samples = make(seeds, **more)
    seconds = time.perf_counter() - began
    if recorder is not None and trace is not None:
        note(f"trace: {recorder.save(trace)}")
    if logits is not None:
        np.save(logits, samples.extras["logits"].numpy())
    if out is not None:
        sample_file.collect(out, seeds, num, lambda group: samples, name)
        note(f"{out}: {num} samples")
    agreements = _agreements(samples)
    if json:
        lines = sample_file.lines_of(samples, name)
        print_json({"samples": lines, "nfe": samples.nfe, "agreement": agreements, "seconds": round(seconds, 3)})
        return
    for i, ids in enumerate(samples.ids.tolist()):
        text = " ".join(map(str, ids)) if samples.texts is None else samples.texts[i]
        sys.stdout.write(f"--- seed {samples.seeds[i]}\n{text}\n")
    calls = f"{samples.nfe} network calls each"
    if settings is not None and settings.freeze is not None:
        share = 1 - float(samples.extras["calls"].double().mean()) / settings.nfe
        calls = f"up to {calls}, {share:.0%} of the calls saved"
    closing = f"{num} x {length} tokens in {seconds:.1f} s, {calls}"
    if agreements:
        closing += "; token rules agree: " + ", ".join(f"{pair} {share:.2%}" for pair, share in agreements.items())
    note(closing)


def _read_noise(path: Path) -> tuple[Any, str]:
    """Starting noise [samples, length, width] and a mark that tells it from other noise."""
    import hashlib

    import torch

    from convergeflow.cli.arrays import read_array
    from convergeflow.errors import UserError

    array = read_array(path)
    if array.ndim != 3 or 0 in array.shape:
        raise UserError(f"{path} must have three axes (samples x length x width), not shape {array.shape}")
    return torch.from_numpy(array), hashlib.sha256(array.tobytes()).hexdigest()[:8]


def _processes() -> tuple[int, int, Any]:
    """Rank, number of processes and a barrier, as set up by `accelerate launch`."""
    import os

    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0, 1, lambda: None
    from accelerate import PartialState

    state = PartialState(cpu=not _has_accelerator())
    return state.process_index, state.num_processes, state.wait_for_everyone


def _has_accelerator() -> bool:
    from convergeflow.device import choose_device

    return choose_device("auto").device.type != "cpu"


def _describe(loaded: Any, model: str, num: int, length: int, arguments: dict[str, Any]) -> str:
    settings = arguments.get("settings")
    if settings is None:
        own = ", ".join(f"{name} {value}" for name, value in arguments.items() if name not in ("nfe", "clamp"))
        return f"{model} ({loaded.method}): {num} samples, NFE {arguments['nfe']}" + (f", {own}" if own else "")
    flows = loaded.pieces(settings, length, arguments.get("clamp"))
    shown = flows[0].settings.plan(loaded.schedule).describe()
    controls = settings.controls
    refinements = shown["refinements"]
    size = settings.block or loaded.config.block_length
    blocks = "" if size is None else f"{len(flows)} blocks of {size} x "
    text = (
        f"{model}: {num} samples, NFE {settings.nfe} = {blocks}{shown['num_steps']} steps x (K_i + 1), "
        f"K_i {min(refinements)} to {max(refinements)}"
    )
    if controls.conditions and settings.self_condition == "recursive":
        effective = shown["effective_scg"]
        text += f"; w_scg {controls.scg:.4g} nominal, {min(effective):.2f} to {max(effective):.2f} effective"
    if controls.ug:
        effective = shown["effective_ug"]
        text += f"; w_ug {controls.ug:.4g} nominal, {min(effective):.3f} to {max(effective):.3f} effective"
    if settings.solver != "euler":
        text += f"; solver {settings.solver}"
    for name, value in (("temperature", settings.temperature), ("base temperature", settings.base_temperature)):
        if value != 1:
            text += f"; {name} {value:g}"
    return text


def _agreements(samples: Any) -> dict[str, float]:
    from convergeflow.sampling.decoding import RULES, Decoded

    found = {rule: samples.extras[f"ids_{rule}"] for rule in RULES if f"ids_{rule}" in samples.extras}
    return Decoded(found).agreements()


def _clamp(loaded: Any, prompt: str | None, infill: str | None, gap: int) -> Clamp | None:
    """Known tokens from a prompt or a text with gaps."""
    import torch

    from convergeflow.errors import UserError
    from convergeflow.sampling.wrappers import Clamp

    if prompt is None and infill is None:
        return None
    if prompt is not None and infill is not None:
        raise UserError("give --prompt or --infill, not both")
    if loaded.tokenizer is None:
        raise UserError("--prompt and --infill need a tokenizer, and this checkpoint has none")
    if gap < 1:
        raise UserError(f"--gap must be at least 1, not {gap}")
    if infill is not None and GAP not in infill:
        raise UserError(f"--infill has no gap: write {GAP} where text is to be filled in")
    tokens: list[int] = []
    known: list[bool] = []
    for i, piece in enumerate((prompt or infill or "").split(GAP) if infill is not None else [prompt or ""]):
        if i:
            tokens += [0] * gap
            known += [False] * gap
        found = loaded.tokenizer.encode(piece.strip() if loaded.tokenizer.kind == "word" else piece)
        tokens += found
        known += [True] * len(found)
    if not any(known):
        raise UserError("the prompt has no tokens")
    return Clamp(torch.tensor(tokens), torch.tensor(known))


def _stretch(clamp: Clamp, length: int) -> Clamp:
    import torch

    from convergeflow.errors import UserError
    from convergeflow.sampling.wrappers import Clamp

    missing = length - len(clamp.tokens)
    if missing < 0:
        raise UserError(f"the known text has {len(clamp.tokens)} tokens, more than --length {length}")
    return Clamp(
        torch.cat([clamp.tokens, torch.zeros(missing, dtype=torch.long)]),
        torch.cat([clamp.known, torch.zeros(missing, dtype=torch.bool)]),
    )
