"""`convergeflow evaluate`: samples of a model or a file, scored, with errors and real text beside every number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convergeflow.cli import options
from convergeflow.cli.console import command_line, note, print_json, progress, stages
from convergeflow.cli.sampling_options import SamplingOptions, parse_knobs, sample_arguments, takes_sampling_options
from convergeflow.errors import UserError
from convergeflow.markup import printable

if TYPE_CHECKING:
    from convergeflow.data.provenance import TrainedOn
    from convergeflow.data.tokenizer import Tokenizer
    from convergeflow.evaluation.reference import Reference
    from convergeflow.systems.protocol import LanguageModel


@takes_sampling_options
def evaluate(
    sampling: SamplingOptions,
    model: options.ModelArgument = None,
    samples: Annotated[
        Path | None, typer.Option(help="Score this file (from `convergeflow generate --out`) instead of sampling.")
    ] = None,
    num: Annotated[
        int | None, typer.Option("--num", "-n", min=2, help="How many samples. [default: 128, or all of the file]")
    ] = None,
    length: options.Length = None,
    seed: options.Seed = 0,
    knobs: options.Knobs = None,
    scorer: options.Scorer = "",
    protocol: Annotated[
        str, typer.Option(help="ours-1, convergeflow-2026, langflow-2026, duo-2026, elf-2026, several, or all.")
    ] = "ours-1",
    corpus: options.Corpus = None,
    force: options.Force = False,
    bound: Annotated[
        int, typer.Option("--bound", min=0, help="Also bound the likelihood of the real text, with this many draws.")
    ] = 0,
    overlap: Annotated[
        bool, typer.Option("--overlap/--no-overlap", help="Look for the samples' 8-grams in the training text.")
    ] = True,
    batch: options.Batch = None,
    keep: Annotated[
        Path | None, typer.Option(help="Keep the samples in this JSONL file; a stopped run goes on from it.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the record (JSON) here.")] = None,
    precision: options.Precision = None,
    weights: options.Weights = "ema",
    device: options.Device = "auto",
    json: options.Json = False,
) -> None:
    """Measure how likely, how varied and how close to real text samples are.

    The numbers are generative perplexity (Gen. PPL), entropy, diversity, overlap with the training text and distance to
    real text. Each has a standard error over samples and the value for real text beside it. On stories the law of the
    data itself scores, exactly. The protocol says which tokens count; `all` shows what the choice changes.

    Example:
      convergeflow evaluate stories-small --num 256 --nfe 64
      convergeflow evaluate --samples out/samples.jsonl --scorer smollm2 --protocol all
      convergeflow evaluate runs/mine --preset headline --bound 32 --out out/record.json
    """
    from convergeflow import files, zoo
    from convergeflow.evaluation.assess import assessor_for, likelihood_of
    from convergeflow.evaluation.protocol import PROTOCOLS, protocols_named
    from convergeflow.results import draw as room
    from convergeflow.results.cost import check_request
    from convergeflow.results.record import make, render

    chosen = protocols_named(protocol)
    options.check_files(out, keep)
    options.check_draws(bound)
    loaded: LanguageModel | None = None
    if samples is not None:
        made = {"length": length, "batch": batch, "seed": seed, "set": knobs, "keep": keep, "weights": weights != "ema"}
        _refuse_unused(sampling, made, bound)
        drawn = room.read_drawn(samples, num, model)
        reference = _reference(corpus, drawn.tokenizer, drawn.ids.shape, overlap, None, force)
    else:
        name, seeds = model or zoo.DEFAULT_MODEL, range(seed, seed + (num or 128))
        loaded = zoo.load_model(name, average=weights == "ema", device=device)
        tokens = length or loaded.config.length
        check_request(loaded, len(seeds), tokens, batch or 1)
        settings = sample_arguments(loaded, sampling, parse_knobs(knobs), tokens)
        about = room.origin(name, loaded, average=weights == "ema")
        real, size = corpus or zoo.trained_on(name, tokens), (len(seeds), tokens)
        reference = _reference(real, loaded.tokenizer, size, overlap, loaded.trained_on, force)
    assessor = assessor_for(reference, scorer, device=device, say=note)
    if assessor.scorer.name == "exact" and len(chosen) > 1:
        note("the exact scorer reads ids, so the protocols do not differ: only ours-1 is computed")
        chosen = [PROTOCOLS["ours-1"]]
    likelihood: dict[str, Any] = {}
    if loaded is not None:
        assessor.check(loaded, chosen)
        if bound:
            with progress("bounding the likelihood", assessor.num_real) as bar:
                found = likelihood_of(loaded, reference, draws=bound, seed=seed, progress=bar.advance)
            likelihood = {"likelihood": found}
        note(f"{len(seeds)} samples of {tokens} tokens are drawn, then scored beside real text")
        with progress("sampling", len(seeds)) as bar:
            drawn = room.draw(
                loaded, settings, about=about, seeds=seeds, length=length, batch=batch, keep=keep, advance=bar.advance
            )
    texts = len(drawn.ids) + assessor.num_real
    with progress(f"scoring with {assessor.scorer.name}", texts * len(chosen)) as bar:
        measured = [{**assessor.assess(drawn, each, progress=bar.advance), **likelihood} for each in chosen]
    records = [make(each, command=command_line()) for each in measured]
    result: dict[str, Any] = records[0] if len(records) == 1 else {"kind": "protocols", "records": records}
    if out is not None:
        files.write_json(out, result)
        note(f"record: {out}")
    print_json(result) if json else print(printable(render(result)))


def _reference(
    corpus: str | None,
    tokenizer: Tokenizer | None,
    size: tuple[int, int],
    overlap: bool,
    trained_on: TrainedOn | None,
    force: bool,
) -> Reference | None:
    """The real text for samples of `size` (n, length), with an index of the training text if `overlap` is wanted."""
    from convergeflow.evaluation.reference import find_reference

    found = find_reference(corpus, tokenizer, *size, note, trained_on=trained_on, force=force)
    if found is None:
        note("no prepared corpus has this tokenizer: only Gen. PPL and entropy are measured (give --corpus for more)")
        return None
    return _indexed(found) if overlap else replace(found, training=None)


def _indexed(reference: Reference) -> Reference:
    """With an index of the training text, built now where a large text has none."""
    from convergeflow.evaluation.overlap import NgramIndex

    index = reference.training
    if isinstance(index, NgramIndex) and not index.is_built:
        size = 8e-9 * index.num_words
        note(f"the training text is indexed once for the overlap ({size:.1f} GB beside it; --no-overlap leaves it out)")
        with stages() as report:
            index.build(lambda done: report("indexing 8-grams", done, index.num_ngrams))
    return reference


def _refuse_unused(sampling: SamplingOptions, made: dict[str, Any], bound: int) -> None:
    """Samples from a file are made already: options that make samples would have no effect."""
    if bound:
        raise UserError("--bound needs the model itself: name it instead of --samples")
    unused = sorted(sampling.given()) + [name for name, value in made.items() if value]
    if unused:
        raise UserError(f"--{unused[0].replace('_', '-')} has no effect on samples from a file; drop it")
