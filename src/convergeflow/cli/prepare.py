"""`convergeflow prepare`: text to a packed corpus."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convergeflow.cli import options
from convergeflow.data import CORPORA
from convergeflow.errors import UserError

if TYPE_CHECKING:
    from convergeflow.data.corpus import Corpus

SHOWN = 20
"""Files that were passed over, named on the screen."""
ENOUGH = 50
"""Held-out sequences below which their numbers are too noisy to go by."""

FOR = {
    **dict.fromkeys(("seed", "blocks", "heldout_blocks"), ("stories",)),
    **dict.fromkeys(("dataset_config", "dataset_split"), ("a dataset of the hub",)),
    "text_field": ("files", "a dataset of the hub"),
    "heldout_share": ("files", "a dataset of the hub", "flat token files"),
    "documents": ("files", "a dataset of the hub", "a named corpus"),
}
"""Options that not every kind of source has, and the kinds that do."""


def prepare(
    context: typer.Context,
    source: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE",
            help="A corpus of `convergeflow list corpora`, hf:NAME@REVISION, files and folders, jsonl, parquet, or "
            "train.bin val.bin. [default: stories]",
        ),
    ] = None,
    out: Annotated[str | None, typer.Option(help="Folder to write; by default one in the cache.")] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="word, word-byte, bpe, byte, gpt2, or a folder with a tokenizer.json. "
            "[default: bpe for text, gpt2 for flat tokens]"
        ),
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(help="Tokens of a learned tokenizer. [default: 4096; sotu: 1024]")
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 64,
    seed: Annotated[int, typer.Option(help="Which stories are written.")] = 0,
    blocks: Annotated[int, typer.Option(help="Training sequences of stories.")] = 50_000,
    heldout_blocks: Annotated[int, typer.Option(help="Held-out sequences of stories.")] = 2_000,
    heldout_share: Annotated[float, typer.Option(help="Share of the text that is held out.")] = 0.05,
    text_field: Annotated[str, typer.Option(help="Field or column that holds the text.")] = "text",
    dataset_config: Annotated[str | None, typer.Option(help="Configuration of a hub dataset.")] = None,
    dataset_split: Annotated[str, typer.Option(help="Split of a hub dataset.")] = "train",
    documents: Annotated[int | None, typer.Option(help="Use this many documents at most.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that encode; one per core by default.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is in the folder.")] = False,
    json: options.Json = False,
) -> None:
    """Turn text into a corpus: a tokenizer, packed sequences, and a manifest with hashes and counts.

    A folder stands for every text file in it, whatever their names end in; what is not read is listed with the reason.
    A stopped run goes on where it was when the same command is given again; a finished one is not repeated. A dataset
    of the hub is read at one commit, which the manifest names; hf:FOLDER is a copy on this machine. Flat token files
    (uint16, as nanoGPT writes them) are used where they lie.

    Example:
      convergeflow prepare stories
      convergeflow prepare basic --vocabulary 4096 --length 64
      convergeflow prepare hf:Skylion007/openwebtext --tokenizer gpt2 --length 1024
      convergeflow prepare data/openwebtext/train.bin data/openwebtext/val.bin --tokenizer gpt2 --length 1024
      convergeflow prepare my-texts/ notes.jsonl --tokenizer bpe --vocabulary 4096 --out corpus/
    """
    given = dict(locals())  # all options but these are the settings of the same name
    del given["context"], given["source"], given["json"]
    import textwrap

    from convergeflow.cli import console
    from convergeflow.data.prepare import prepare as run

    names = source or ["stories"]
    kind = _kind(names)
    for name, kinds in FOR.items():
        if options.was_typed(context, name) and kind not in kinds:
            raise UserError(f"`{name}` has no effect on {kind}: it is for {', '.join(kinds)}; leave it out")
    with console.stages() as report:
        corpus = run(names, progress=report, **given)
    say_what_was_read(corpus)
    splits = corpus.manifest["splits"]
    if json:
        console.print_json({"folder": str(corpus.folder), "fingerprint": corpus.fingerprint, **corpus.manifest})
        return
    print(f"corpus       {corpus.folder}")
    print(f"training     {splits['train']['blocks']} sequences of {corpus.length} tokens")
    rule = textwrap.shorten(corpus.manifest["split"], 70, placeholder=" ...")
    print(f"held out     {splits['heldout']['blocks']} sequences: {rule}")
    print(f"vocabulary   {corpus.vocabulary} ({corpus.manifest['tokenizer']['kind']})")
    print(f"unigram      {corpus.unigram_entropy:.4f} nats")
    print(f"fingerprint  {corpus.fingerprint}")


def _kind(names: list[str]) -> str:
    """What is prepared, as `FOR` calls it."""
    from convergeflow.data.flat import find_flat

    if names == ["stories"]:
        return "stories"
    if len(names) == 1 and (Path(names[0]) / "manifest.json").is_file():
        return "a prepared corpus"
    if find_flat([Path(name) for name in names]):
        return "flat token files"
    if len(names) == 1 and (names[0] in CORPORA or names[0].startswith("hf:")):
        return "a named corpus" if names[0] in CORPORA else "a dataset of the hub"
    return "files"


def say_what_was_read(corpus: Corpus) -> None:
    """On stderr: how many files, what was passed over and why, and whether enough is held out."""
    from convergeflow.cli import console

    source = corpus.manifest.get("source", {})
    skipped = source.get("skipped", [])
    if skipped:
        console.note(f"read {len(source.get('files', []))} files, passed over {len(skipped)}:")
        for each in skipped[:SHOWN]:
            console.note(f"  {each['name']}: {each['reason']}")
        if len(skipped) > SHOWN:
            console.note(f"  and {len(skipped) - SHOWN} more: {corpus.folder / 'manifest.json'} lists them")
    held_out = corpus.manifest["splits"]["heldout"]["blocks"]
    if held_out < ENOUGH:
        more = "add text, or prepare with a larger --heldout-share or a smaller --length"
        more = "prepare with more --heldout-blocks" if source.get("kind") == "stories" else more
        console.warn(f"only {held_out} sequences are held out: numbers measured on them say little; {more}")
