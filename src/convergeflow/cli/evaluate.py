"""`convergeflow evaluate`: samples of a model or a file, scored, with errors and real text beside every number."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convergeflow.cli.console import note, print_json, progress
from convergeflow.cli.sampling_options import SamplingOptions, parse_knobs, sample_arguments, takes_sampling_options
from convergeflow.errors import UserError

if TYPE_CHECKING:
    from convergeflow.evaluation.assessment import SampleSet

Scorer = Annotated[
    str,
    typer.Option(
        help="exact (stories), smollm2 (offline), gpt2-large, or a causal language model by folder or hub name. "
        "[default: exact on stories, else smollm2]"
    ),
]
Corpus = Annotated[
    str | None,
    typer.Option(help="Real text: stories, a prepared corpus by name or folder. [default: by the tokenizer]"),
]
Knobs = Annotated[
    list[str] | None,
    typer.Option("--set", help="A sampling control that only this method has, as in temperature=0.9; repeatable."),
]


@takes_sampling_options
def evaluate(
    sampling: SamplingOptions,
    model: Annotated[str | None, typer.Argument(help="A shipped model, a checkpoint folder or a training run.")] = None,
    samples: Annotated[
        Path | None, typer.Option(help="Score this file (from `convergeflow generate --out`) instead of sampling.")
    ] = None,
    num: Annotated[
        int | None, typer.Option("--num", "-n", min=2, help="How many samples. [default: 128, or all of the file]")
    ] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens per sample. [default: the model's own]")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the first sample; the others follow.")] = 0,
    knobs: Knobs = None,
    scorer: Scorer = "",
    protocol: Annotated[
        str, typer.Option(help="ours-1, convergeflow-2026, langflow-2026, duo-2026, elf-2026, several, or all.")
    ] = "ours-1",
    corpus: Corpus = None,
    bound: Annotated[
        int, typer.Option("--bound", min=0, help="Also bound the likelihood of the real text, with this many draws.")
    ] = 0,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples per network call. [default: what fits]")] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Keep the samples in this JSONL file; a stopped run goes on from it.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the record (JSON) here.")] = None,
    device: Annotated[str, typer.Option(help="auto, or the name of a device.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
) -> None:
    """Measure samples: Gen. PPL, entropy, diversity, overlap with the training text, distance to real text.

    Every number has a standard error over samples and the value for real text beside it. On stories the law of the
    data itself scores, exactly. The protocol says which tokens count; `all` shows what the choice changes.

    Example:
      convergeflow evaluate stories-small --num 256 --nfe 64
      convergeflow evaluate --samples out/samples.jsonl --scorer smollm2 --protocol all
      convergeflow evaluate runs/mine --preset headline --bound 32 --out out/record.json
    """
    from convergeflow.evaluation.assessment import Assessor, likelihood_of
    from convergeflow.evaluation.protocol import protocols_named
    from convergeflow.evaluation.record import render, write_record
    from convergeflow.evaluation.reference import find_reference
    from convergeflow.evaluation.scorers import scorer_named

    chosen = protocols_named(protocol)
    for path in (out, keep):
        if path is not None and not path.parent.exists():
            raise UserError(f"the folder {path.parent} does not exist: make it first")
    if samples is not None:
        unused = sorted(sampling.given()) + (["set"] if knobs else []) + (["keep"] if keep else [])
        if unused:
            raise UserError(f"--{unused[0].replace('_', '-')} has no effect on samples from a file; drop it")
        drawn, loaded = _read(samples, model, num), None
    else:
        from convergeflow import zoo

        name = model or zoo.DEFAULT_MODEL
        loaded = zoo.load_model(name, device=device)
        options = sample_arguments(loaded, sampling, parse_knobs(knobs), length or loaded.config.length)
        num = num or 128
        with progress("sampling", num) as bar:
            drawn = draw(
                loaded, name, options, num=num, length=length, seed=seed, batch=batch, keep=keep, advance=bar.advance
            )
    reference = find_reference(corpus, drawn.tokenizer, len(drawn.ids), drawn.ids.shape[1], note)
    if reference is None:
        note("no prepared corpus has this tokenizer: only Gen. PPL and entropy are measured (give --corpus for more)")
    judge = scorer or default_scorer(reference)
    if judge == "exact" and len(chosen) > 1:
        note("the exact scorer reads ids, so the protocols do not differ: only ours-1 is computed")
        chosen = protocols_named("ours-1")
    assessor = Assessor(scorer_named(judge, device=device, say=note), reference)
    command = "convergeflow " + shlex.join(sys.argv[1:])
    texts = len(drawn.ids) + (0 if reference is None or reference.real is None else len(reference.real))
    with progress(f"scoring with {judge}", texts * len(chosen)) as bar:
        records = [assessor.assess(drawn, each, command=command, progress=bar.advance) for each in chosen]
    if bound:
        if loaded is None:
            raise UserError("--bound needs the model itself: name it instead of --samples")
        if reference is None or reference.real is None:
            raise UserError("--bound needs real text: give --corpus")
        with progress("bounding the likelihood", len(reference.real)) as bar:
            likelihood = likelihood_of(loaded, reference, draws=bound, seed=seed, progress=bar.advance)
        for record in records:
            record["likelihood"] = likelihood
    result: dict[str, Any] = records[0] if len(records) == 1 else {"kind": "protocols", "records": records}
    if out is not None:
        write_record(out, result)
        note(f"record: {out}")
    print_json(result) if json else print(render(result))


def default_scorer(reference: Any) -> str:
    """The law where it is known, else the scorer that needs no network."""
    return "exact" if reference is not None and reference.law is not None else "smollm2"


def draw(
    loaded: Any,
    name: str,
    options: Mapping[str, Any],
    *,
    num: int,
    length: int | None,
    seed: int,
    batch: int | None,
    keep: Path | None = None,
    advance: Callable[[int], None] = lambda done: None,
) -> SampleSet:
    """Samples of a loaded model; `options` are those of `model.sample`, `advance` hears of every batch."""
    from dataclasses import replace

    from convergeflow import zoo
    from convergeflow.evaluation.assessment import SampleSet
    from convergeflow.results import sample_file
    from convergeflow.sampling.integration import default_batch

    length = length or loaded.config.length
    size = batch or min(num, default_batch(length, loaded.config.vocabulary))
    weights = zoo.weights_hash(zoo.locate(name))
    about = {"name": name, "weights": weights, "method": loaded.method}
    seeds = list(range(seed, seed + num))

    def make(group: Any) -> Any:
        return loaded.sample(len(group), length, seeds=list(group), batch=size, **options)

    if keep is not None:
        sample_file.collect(keep, seeds, size, make, f"{name}@{weights}", on_batch=advance)
        return replace(SampleSet.from_lines(sample_file.read_samples(keep), loaded.tokenizer), model=about)
    parts = []
    for first in range(0, num, size):
        parts.append(SampleSet.of(make(seeds[first : first + size]), about, loaded.tokenizer))
        advance(len(parts[-1].ids))
    return SampleSet.joined(parts)


def _read(path: Path, model: str | None, num: int | None) -> SampleSet:
    """The first `num` samples of a file, with the tokenizer of its model where that can be found."""
    from convergeflow import zoo
    from convergeflow.data.tokenizer import Tokenizer, stories_tokenizer
    from convergeflow.evaluation.assessment import SampleSet
    from convergeflow.results import sample_file

    lines = sample_file.read_samples(path)
    if num is not None and num > len(lines):
        raise UserError(f"{path} holds {len(lines)} samples, fewer than --num {num}")
    lines = lines[:num]
    named = model or str(lines[0].get("model", "")).partition("@")[0]
    tokenizer = None
    try:
        folder = zoo.locate(named)
        tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").is_file() else None
    except UserError:
        if model is not None:
            raise
    if tokenizer is None:
        # The words of the stories decode to exactly the text that stands beside them, or they are not stories.
        ours = stories_tokenizer()
        if all(max(line["ids"]) < ours.size and ours.decode(line["ids"]) == line.get("text") for line in lines[:8]):
            tokenizer = ours
    return SampleSet.from_lines(lines, tokenizer)
