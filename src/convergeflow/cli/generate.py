"""`convergeflow generate`: text from a model, with every control of the paper."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convergeflow.cli import options
from convergeflow.cli.console import note, print_json, progress, watched
from convergeflow.cli.sampling_options import SamplingOptions, parse_knobs, sample_arguments, takes_sampling_options
from convergeflow.errors import UserError
from convergeflow.files import check_writable, write_text
from convergeflow.markup import printable

if TYPE_CHECKING:
    from torch import Tensor

    from convergeflow.results.trace import Trace
    from convergeflow.sampling.plan import Plan
    from convergeflow.sampling.settings import Settings
    from convergeflow.systems.prompt import Span
    from convergeflow.systems.protocol import LanguageModel, Samples

GAP = "___"
EXAMPLE = f"Once there was a {GAP} girl named {GAP}."
MOST_NOISE = 1e3
"""Starting noise beyond this overflows on its way."""


@dataclass(frozen=True)
class _Job:
    """What is to be generated."""

    loaded: LanguageModel
    name: str
    """The model and everything else that decides its samples, apart from settings and seeds."""
    arguments: dict[str, Any]
    seeds: range
    length: int
    size: int
    """Samples per network call."""
    start: Tensor | None
    """Starting noise in place of the seeds'."""
    gaps: tuple[Span, ...] = ()
    """The places of a text with gaps that are to be filled."""

    @property
    def asked(self) -> dict[str, Any]:
        """The settings by which samples of this job are told from others in a file."""
        from convergeflow.results.sample_file import asked_of

        return asked_of(self.loaded, self.arguments, self.length)

    @cached_property
    def plans(self) -> list[Plan]:
        """The plan of every block, or of the whole sequence; none for a method without settings."""
        flow, settings = self.loaded.as_flow(), self.arguments.get("settings")
        if flow is None or settings is None:
            return []
        pieces = flow.pieces(settings, self.length, self.arguments.get("clamp"))
        return [piece.settings.plan(flow.schedule) for piece in pieces]

    def make(self, group: Sequence[int], **more: Any) -> Samples:
        """The samples of some of the seeds."""
        if self.start is not None:
            first = self.seeds.start
            more["noise"] = self.start[group[0] - first : group[-1] - first + 1]
        from convergeflow.systems.generation import with_marks

        seeds = list(group)
        made = self.loaded.sample(len(seeds), self.length, seeds=seeds, batch=self.size, **self.arguments, **more)
        return with_marks(self.loaded, made, self.gaps)

    def in_words(self, model: str) -> str:
        from convergeflow.systems.generation import calls_of

        settings, num = self.arguments.get("settings"), len(self.seeds)
        if settings is None or not self.plans:
            own = "".join(f", {name} {value}" for name, value in self.arguments.items() if name not in ("nfe", "clamp"))
            calls = calls_of(self.loaded, self.arguments["nfe"], self.length)
            return f"{model} ({self.loaded.method}): {num} samples, NFE {calls}{own}"
        size = settings.block or self.loaded.config.block_length
        blocks = "" if size is None else f"{len(self.plans)} blocks of {size} x "
        return f"{model}: {num} samples, NFE {settings.nfe} = {blocks}{_in_words(self.plans[0], settings)}"


def _in_words(plan: Plan, settings: Settings) -> str:
    """Steps, refinements and strengths of settings under a plan, on one line."""
    controls, refinements = settings.controls, plan.allocation.refinements
    parts = [f"{len(plan)} steps x (K_i + 1), K_i {min(refinements)} to {max(refinements)}"]
    if controls.conditions and settings.self_condition == "recursive":
        parts.append(f"w_scg {controls.scg:.4g} nominal, {min(plan.w_scg):.2f} to {max(plan.w_scg):.2f} effective")
    if controls.ug:
        parts.append(f"w_ug {controls.ug:.4g} nominal, {min(plan.w_ug):.3f} to {max(plan.w_ug):.3f} effective")
    if settings.solver != "euler":
        parts.append(f"solver {settings.solver}")
    for name, value in (("temperature", settings.temperature), ("base temperature", settings.base_temperature)):
        if value != 1:
            parts.append(f"{name} {value:g}")
    return "; ".join(parts)


@takes_sampling_options
def generate(
    sampling: SamplingOptions,
    model: Annotated[str, typer.Option("--model", "-m", help=options.MODEL)] = "stories-small",
    num: Annotated[int, typer.Option("--num", "-n", min=1, help="How many samples.")] = 4,
    length: options.Length = None,
    seed: options.Seed = 0,
    batch: options.Batch = None,
    prompt: Annotated[
        str | None, typer.Option(help="Text that every sample starts with (a heuristic: see docs/sampling.md).")
    ] = None,
    infill: Annotated[str | None, typer.Option(help=f'Text with gaps to fill, as in "{EXAMPLE}"')] = None,
    gap: Annotated[int | None, typer.Option(help=f"Tokens per {GAP} of --infill. [default: 4]")] = None,
    knobs: options.Knobs = None,
    noise: Annotated[
        Path | None,
        typer.Option(help="Start from the noise in this .npy file (samples x length x width), not from seeds."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write samples to this JSONL file; a stopped run goes on.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Folder for the trajectory: trace.npz, .csv and .png.")] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Write the run as one HTML file that plays from disk, as in out.html.")
    ] = None,
    logits: Annotated[Path | None, typer.Option(help="Write the final logits to this .npy file.")] = None,
    live: Annotated[bool, typer.Option("--live/--no-live", help="Watch the text form (only in a terminal).")] = True,
    precision: options.Precision = None,
    weights: options.Weights = "ema",
    device: options.Device = "auto",
    json: options.Json = False,
) -> None:
    """Generate text with a trained model.

    Samples come from consecutive seeds; a sample depends on its seed alone. NFE counts every network call.

    Example:
      convergeflow generate
      convergeflow generate --num 8 --nfe 128 --refine 4 --scg 2
      convergeflow generate --preset headline --trace out/trace
      convergeflow generate --num 2 --nfe 128 --grid closing --replay out.html
      convergeflow generate --prompt "Once there was a"
      convergeflow generate --infill "Once there was a ___ girl named ___." --gap 1
    """
    from convergeflow.results.cost import check_request
    from convergeflow.systems.generation import outlined

    _check_places(out, logits, replay, trace)
    gap = _gap(gap, infill)
    rank, world, wait = _processes()
    streams = out is not None and trace is None and replay is None and logits is None and not json
    if world > 1 and not streams:
        raise UserError(
            "several processes stream to one file: give `out`, without `trace`, `replay`, `logits` and `json`"
        )
    loaded, name = _load(model, weights, device, precision, with_logits=logits is not None)
    start = None
    if noise is not None:
        start, mark = _read_noise(noise)
        num, length, name = start.shape[0], int(start.shape[1]), f"{name}+noise:{mark}"
    outline = outlined(loaded, prompt, infill, gap, length)
    length, known = outline.length, outline.arguments
    arguments = sample_arguments(loaded, sampling, parse_knobs(knobs), length)
    if "settings" not in arguments and (noise or logits or trace):
        raise UserError(f"`noise`, `logits` and `trace` are for flows with settings, not {loaded.method}")
    size = batch or min(num, loaded.batch_size(length))
    check_request(loaded, num, length, size, out if streams else None)
    name += _mark(known.get("clamp"))
    job = _Job(loaded, name, {**arguments, **known}, range(seed, seed + num), length, size, start, outline.gaps)
    if rank == 0:
        note(job.in_words(model) + _own_preset(job, sampling))
    if out is not None and streams:
        _stream(job, out, rank, world, wait)
    else:
        _show(job, out, trace, replay, logits, live=live and not json, as_json=json)


def _gap(given: int | None, infill: str | None) -> int:
    """Tokens per gap; 4 unless it is said."""
    if given is not None and infill is None:
        raise UserError("`gap` has no effect without `infill`")
    return 4 if given is None else given


def _check_places(out: Path | None, logits: Path | None, replay: Path | None, trace: Path | None) -> None:
    """Refuse, before any work is done, to write where nothing can be written."""
    options.check_files(out, logits)
    for name, path, ending in (("replay", replay, ".html"), ("logits", logits, ".npy")):
        if path is not None and path.is_file() and path.suffix.lower() != ending:
            raise UserError(f"`{name}` would overwrite {path}: give a new name, or one that ends in {ending}")
    if replay is not None:  # its folder is made, as that of `trace` is
        check_writable(replay)
        options.check_room(replay.parent)
    if trace is not None:
        if trace.exists() and not trace.is_dir():
            raise UserError(f"`trace` {trace} is a file: give the name of a folder")
        options.check_room(trace)


def _own_preset(job: _Job, sampling: SamplingOptions) -> str:
    """Says so if the settings are the model's own choice."""
    own = getattr(job.loaded.config, "preset", None)
    return f"; preset {own}, the model's own" if own and sampling.preset is None and "settings" in job.arguments else ""


def _load(
    model: str, weights: str, device: str, precision: str | None, *, with_logits: bool
) -> tuple[LanguageModel, str]:
    """A model, and a name that tells it from others."""
    from convergeflow import zoo

    average = weights == "ema"
    loaded = zoo.load_model(model, average=average, device=device)
    name = f"{model}@{zoo.weights_hash(zoo.locate(model, average=average))}" + ("" if average else "+raw")
    if precision is None and with_logits and loaded.precision.state.itemsize == 8:
        loaded.double()  # who asks for logits compares them, and strong guidance amplifies rounding
    if loaded.precision.rounded is not None:
        name += "+published"
    return loaded, f"{name}+float64" if loaded.precision.trunk.itemsize == 8 else name


def _mark(clamp: Any) -> str:
    """What tells samples with these known tokens from samples with others."""
    if clamp is None:
        return ""
    import hashlib

    known = repr((clamp.tokens.tolist(), clamp.known.tolist()))
    return f"+known:{hashlib.sha256(known.encode()).hexdigest()[:8]}"


def _stream(job: _Job, out: Path, rank: int, world: int, wait: Any) -> None:
    """Into a file, batch by batch; several processes share the work."""
    from convergeflow.files import only_writer
    from convergeflow.results import sample_file

    began = time.perf_counter()
    with ExitStack() as stack:
        if rank == 0:
            stack.enter_context(only_writer(out, str(out)))
        wait()  # nobody writes before the first process holds the file
        bar = stack.enter_context(progress("generating", len(job.seeds)))
        made = sample_file.collect(
            out, job.seeds, job.size, job.make, job.name, asked=job.asked, rank=rank, world=world, on_batch=bar.advance
        )
        wait()
        if rank == 0 and world > 1:
            sample_file.merge(out, job.seeds)
    if rank == 0:
        seconds = time.perf_counter() - began
        note(f"{out}: {len(job.seeds)} samples ({made} made by this process, {seconds:.1f} s)")


def _show(
    job: _Job,
    out: Path | None,
    trace: Path | None,
    replay: Path | None,
    logits: Path | None,
    *,
    live: bool,
    as_json: bool,
) -> None:
    """On the screen, with what else was asked for."""
    from convergeflow import files
    from convergeflow.results import sample_file
    from convergeflow.results.trace import Trace

    if out is not None:
        sample_file.found(out, job.seeds, job.name, job.asked)  # refused before the work, not after it
    recorder = None if trace is None and replay is None else Trace()
    began = time.perf_counter()
    with ExitStack() as stack:
        more = _observed(job, recorder, stack, live)
        samples = job.make(job.seeds, **more, **({"want_logits": True} if logits is not None else {}))
    seconds = time.perf_counter() - began
    if recorder is not None and trace is not None:
        note(f"trace: {recorder.save(trace)}")
    if recorder is not None and replay is not None:
        _write_replay(job, recorder, samples, replay)
    if logits is not None:
        import numpy as np

        # Into an open file: given a name, numpy may add an ending of its own to it.
        with files.replacing(logits) as draft, open(draft, "wb") as target:
            np.save(target, samples.extras["logits"].numpy())
    if out is not None:
        with files.only_writer(out, str(out)):
            sample_file.collect(out, job.seeds, len(job.seeds), lambda group: samples, job.name, asked=job.asked)
        note(f"{out}: {len(job.seeds)} samples")
    agreements = _agreements(samples)
    if as_json:
        lines = sample_file.lines_of(samples, job.name)
        print_json({"samples": lines, "nfe": samples.nfe, "agreement": agreements, "seconds": round(seconds, 3)})
        return
    for i, ids in enumerate(samples.ids.tolist()):
        texts = samples.marked or samples.texts
        text = " ".join(map(str, ids)) if texts is None else printable(texts[i])
        sys.stdout.write(f"--- seed {samples.seeds[i]}\n{text}\n")
    calls, settings = f"{samples.nfe} network calls each", job.arguments.get("settings")
    if settings is not None and settings.freeze is not None:
        share = 1 - float(samples.extras["calls"].double().mean()) / settings.nfe
        calls = f"up to {calls}, {share:.0%} of the calls saved"
    closing = f"{len(job.seeds)} x {job.length} tokens in {seconds:.1f} s, {calls}"
    if agreements:
        closing += "; token rules agree: " + ", ".join(f"{pair} {share:.2%}" for pair, share in agreements.items())
    note(closing)


def _write_replay(job: _Job, recorder: Trace, samples: Samples, path: Path) -> None:
    from convergeflow.results.frames import recording
    from convergeflow.serving.replay import replay

    clamp = job.arguments.get("clamp")
    known = [] if clamp is None else clamp.known.nonzero().flatten().tolist()
    about = job.in_words(job.name.split("@")[0])
    made = recording(recorder.frames, samples, job.loaded.tokenizer, known, model=job.name, about=about)
    write_text(path, replay(made, job.name.split("@")[0]))
    note(f"replay: {path} ({path.stat().st_size / 1024:.0f} KB), open it in a browser")


def _observed(job: _Job, recorder: Trace | None, stack: ExitStack, live: bool) -> dict[str, Any]:
    """Who watches the flow: the trace, and somebody in front of a terminal."""
    observers: list[Any] = [] if recorder is None else [recorder]
    if job.plans and watched():
        if live:
            from rich.console import Console

            from convergeflow.cli.live import LiveText

            observers.append(stack.enter_context(LiveText(job.loaded.tokenizer, Console(stderr=True))))
        else:
            steps = sum(len(plan) for plan in job.plans) * -(-len(job.seeds) // job.size)
            bar = stack.enter_context(progress("generating", steps))
            observers.append(lambda step: bar.advance(1, calls=step.calls))
    if not observers:
        return {}
    from convergeflow.cli.live import both

    return {"observe": both(*observers)}


def _agreements(samples: Samples) -> dict[str, float]:
    from convergeflow.sampling.decoding import Decoded
    from convergeflow.sampling.settings import RULES

    found = {rule: samples.extras[f"ids_{rule}"] for rule in RULES if f"ids_{rule}" in samples.extras}
    return Decoded(found).agreements()


def _read_noise(path: Path) -> tuple[Any, str]:
    """Starting noise [samples, length, width] and a mark that tells it from other noise."""
    import hashlib

    import torch

    from convergeflow.cli.arrays import read_array

    array = read_array(path)
    if array.ndim != 3 or 0 in array.shape:
        raise UserError(f"{path} must have three axes (samples x length x width), not shape {array.shape}")
    if abs(array).max() > MOST_NOISE:
        raise UserError(f"{path} holds values beyond {MOST_NOISE:g}: starting noise has a standard deviation of 1")
    return torch.from_numpy(array), hashlib.sha256(array.tobytes()).hexdigest()[:8]


def _processes() -> tuple[int, int, Any]:
    """Rank, number of processes and a barrier, as set up by `accelerate launch`."""
    from convergeflow.cli.processes import number_of_processes

    if number_of_processes() == 1:
        return 0, 1, lambda: None
    from accelerate import PartialState

    from convergeflow.device import choose_device
    from convergeflow.studies.reproduce.team import TIMEOUT

    # Shares of a run that goes on are uneven, and who is done waits for the others.
    state = PartialState(cpu=choose_device("auto").device.type == "cpu", timeout=TIMEOUT)
    return state.process_index, state.num_processes, state.wait_for_everyone
