"""Turn a checkpoint of another project into a folder that every command here can use.

Example:
  convergeflow import langflow ./langflow-owt --tokenizer gpt2 --out models/langflow-owt
  convergeflow import convergeflow 0175000.pt --weights raw --out models/paper
  convergeflow import duo s-sahoo/duo --tokenizer gpt2 --out models/duo
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from convergeflow.cli import import_peers
from convergeflow.cli.imported import Out, TokenizerName, give_tokenizer, refuse_existing, write
from convergeflow.cli.options import Json

app = typer.Typer(no_args_is_help=False, rich_markup_mode=None)


@app.command()
def langflow(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A LangFlow checkpoint folder, or its hub name owner/name.")
    ],
    out: Out,
    revision: import_peers.Revision = None,
    tokenizer: TokenizerName = None,
    json: Json = False,
) -> None:
    """Import a LangFlow checkpoint: config.json and model.safetensors.

    The noise schedule is read from the weights. Without a tokenizer the model generates token ids and no text.

    Example:
      convergeflow import langflow ./langflow-owt --tokenizer gpt2 --out models/langflow-owt
    """
    refuse_existing(out)
    from convergeflow.interop.langflow import load_langflow

    model = load_langflow(source, revision=revision)
    beside = Path(source).expanduser()
    give_tokenizer(model, str(beside) if tokenizer is None and (beside / "tokenizer.json").is_file() else tokenizer)
    write(model, out, source, f"LangFlow checkpoint {source}", json)


@app.command()
def convergeflow(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .pt file written by the paper's training code.")],
    out: Out,
    weights: Annotated[
        Literal["ema", "raw"],
        typer.Option(help="The moving average, or the raw weights (which the paper's script evaluates)."),
    ] = "ema",
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens per sequence. [default: as in the training run]")
    ] = None,
    tokenizer: TokenizerName = None,
    json: Json = False,
) -> None:
    """Import a checkpoint of the paper's published code: a torch file with "model" and "ema".

    Only tensors are read from it, never code.

    Example:
      convergeflow import convergeflow 0175000.pt --weights raw --out models/paper
    """
    refuse_existing(out)
    from convergeflow.interop.published import load_published

    model = load_published(file, weights=weights, length=length)
    give_tokenizer(model, tokenizer)
    write(model, out, str(file), f"published ConvergeFlow checkpoint {file.name}, {weights} weights", json)


for _command in import_peers.COMMANDS:
    app.command()(_command)
