"""`convergeflow blind`: texts of several systems, and real ones, in a list that does not say whose they are."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from convergeflow.cli.console import note
from convergeflow.errors import UserError


def blind(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE", help="Sample files of `generate --out`, one per system; LABEL=FILE names it."),
    ],
    real: Annotated[
        str | None, typer.Option(help="Add held-out text of this training preset's corpus, as in stories or sotu.")
    ] = None,
    num: Annotated[int, typer.Option("--num", "-n", min=1, help="Texts per source: the first of each file.")] = 20,
    seed: Annotated[int, typer.Option(help="Of the order.")] = 0,
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "A blind look",
    out: Annotated[Path, typer.Option(help="Folder for blind.md and key.md.")] = Path("out/blind"),
) -> None:
    """Mix the texts of several systems for a reader who shall not know whose they are.

    Writes blind.md, the numbered texts, and key.md, which says where each comes from. Nothing is selected: the first
    texts of every file are taken, in an order that depends on --seed alone.

    Example:
      convergeflow generate --num 20 --preset config-b --out ours.jsonl
      convergeflow blind ours=ours.jsonl ar=ar.jsonl --real stories --out out/blind
    """
    from convergeflow.results.sample_file import read_samples
    from convergeflow.studies.blind import Text, key_page, page, shuffled

    sources: dict[str, list[Text]] = {}
    facts: dict[str, Any] = {}
    for given in files:
        label, equals, path = given.partition("=")
        label, path = (label, path) if equals else (Path(given).stem, given)
        if label in sources or label == "real":
            raise UserError(f"the label {label!r} is taken: name the files apart, as in first={path}")
        samples = read_samples(path)
        if any(not isinstance(sample.get("text"), str) for sample in samples):
            raise UserError(f"{path} has ids without text: its model had no tokenizer")
        sources[label] = [Text(sample["text"], f"seed {sample.get('seed')}") for sample in samples]
        facts[label] = f"{samples[0].get('model')}, NFE {samples[0].get('nfe')}"
    if real is not None:
        sources["real"] = _real(real, num)
        facts["real"] = f"held-out blocks of {Path(real).stem}"
    entries = shuffled(sources, num, seed)
    facts["command"] = "`convergeflow " + shlex.join(sys.argv[1:]) + "`"
    out.mkdir(parents=True, exist_ok=True)
    (out / "blind.md").write_text(page(entries, title), encoding="utf-8")
    (out / "key.md").write_text(key_page(entries, title, facts), encoding="utf-8")
    note(f"wrote {len(entries)} texts to {out / 'blind.md'} and their sources to {out / 'key.md'}")


def _real(preset: str, num: int) -> list[Any]:
    from convergeflow.evaluation.reference import corpus_reference
    from convergeflow.studies.blind import Text
    from convergeflow.training.build import open_corpus
    from convergeflow.training.config import resolve

    config = resolve(preset, [])
    reference = corpus_reference(open_corpus(config), num, config.corpus.length)
    if reference.tokenizer is None or reference.real is None:
        raise UserError(f"the corpus of {preset} has no tokenizer to write its text with")
    return [
        Text(reference.tokenizer.decode([int(token) for token in row]), f"block {index}")
        for index, row in enumerate(reference.real)
    ]
