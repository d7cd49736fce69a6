"""`convergeflow blind`: texts of several systems, and real ones, in a list that does not say whose they are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from convergeflow.cli.console import command_line, note
from convergeflow.errors import UserError


def blind(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE", help="Sample files of `generate --out`, one per system; LABEL=FILE names it."),
    ],
    real: Annotated[
        str | None, typer.Option(help="Add held-out text of this recipe's corpus, for example stories or sotu.")
    ] = None,
    num: Annotated[int, typer.Option("--num", "-n", min=1, help="Texts per source: the first of each file.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the order.")] = 0,
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "A blind look",
    out: Annotated[Path, typer.Option(help="Folder for blind.md and key.md.")] = Path("out/blind"),
) -> None:
    """Mix the texts of several systems for a reader who must not know which system wrote which.

    Writes blind.md, the numbered texts, and key.md, which says where each comes from. Nothing is selected: the first
    texts of every file are taken, in an order that depends on --seed alone.

    Example:
      convergeflow generate --num 20 --preset config-b --out ours.jsonl
      convergeflow blind ours=ours.jsonl ar=ar.jsonl --real stories --out out/blind
    """
    from convergeflow import files as writer
    from convergeflow.studies import blind as study

    sources: dict[str, list[study.Text]] = {}
    facts: dict[str, str] = {}
    for given in files:
        label, equals, path = given.partition("=")
        if not equals or Path(given).exists():  # a folder may be called lr=0.1
            label, path = Path(given).stem, given
        if not label:
            raise UserError(f"{given} has no label: write LABEL=FILE, or the file alone")
        if label in sources or label == "real":
            raise UserError(f"the label {label!r} is taken: name the files apart, as in first={path}")
        sources[label], facts[label] = study.generated(path)
    if real is not None:
        sources["real"], facts["real"] = study.real(real, num)
    entries = study.shuffled(sources, num, seed)
    facts["command"] = command_line()
    writer.write_text(out / "blind.md", study.page(entries, title))
    writer.write_text(out / "key.md", study.key_page(entries, title, facts))
    note(f"wrote {len(entries)} texts to {out / 'blind.md'} and their sources to {out / 'key.md'}")
