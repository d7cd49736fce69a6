"""Turn a checkpoint of another project into a folder that every command here can use.

Example:
  convergeflow import langflow ./langflow-owt --tokenizer gpt2 --out models/langflow-owt
  convergeflow import convergeflow 0175000.pt --weights raw --out models/paper
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from convergeflow.cli.console import note, print_json
from convergeflow.cli.options import Json
from convergeflow.errors import UserError
from convergeflow.files import replacing_folder
from convergeflow.markup import in_page

if TYPE_CHECKING:
    from convergeflow.systems.protocol import LanguageModel

app = typer.Typer(no_args_is_help=False, rich_markup_mode=None)


Out = Annotated[Path, typer.Option("--out", help="The folder to make; it must not exist yet.")]
TokenizerName = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        help="`gpt2`, a folder with a tokenizer.json, or `none`; by default the one beside the weights, if any.",
    ),
]


@app.command()
def langflow(
    source: Annotated[str, typer.Argument(help="A LangFlow checkpoint folder, or its hub name owner/name.")],
    out: Out,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub repository.")] = None,
    tokenizer: TokenizerName = None,
    json: Json = False,
) -> None:
    """Import a LangFlow checkpoint: config.json and model.safetensors.

    The noise schedule is read from the weights. Without a tokenizer the model generates token ids and no text.

    Example:
      convergeflow import langflow ./langflow-owt --tokenizer gpt2 --out models/langflow-owt
    """
    _refuse_existing(out)
    from convergeflow.interop.langflow import load_langflow

    model = load_langflow(source, revision=revision)
    beside = Path(source).expanduser()
    _give_tokenizer(model, str(beside) if tokenizer is None and (beside / "tokenizer.json").is_file() else tokenizer)
    _write(model, out, source, f"LangFlow checkpoint {source}", json)


@app.command()
def convergeflow(
    file: Annotated[Path, typer.Argument(help="A .pt file written by the paper's training code.")],
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
    _refuse_existing(out)
    from convergeflow.interop.published import load_published

    model = load_published(file, weights=weights, length=length)
    _give_tokenizer(model, tokenizer)
    _write(model, out, str(file), f"published ConvergeFlow checkpoint {file.name}, {weights} weights", json)


def _refuse_existing(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists already; choose another `out` or remove it")


def _give_tokenizer(model: LanguageModel, name: str | None) -> None:
    if name is None or name == "none":
        return
    from convergeflow.data.tokenizer import Tokenizer, gpt2_tokenizer

    tokenizer = gpt2_tokenizer() if name == "gpt2" else Tokenizer.load(name)
    if tokenizer.size != model.config.vocabulary:
        raise UserError(
            f"the tokenizer {name} has {tokenizer.size} tokens, the model {model.config.vocabulary}; "
            "give the one it was trained with, or `tokenizer` none"
        )
    model.tokenizer = tokenizer


def _write(model: LanguageModel, out: Path, source: str, origin: str, as_json: bool) -> None:
    """Write the folder in one step, so that a broken import leaves nothing behind, and say what was imported."""
    size = {name: getattr(model.config, name) for name in ("vocabulary", "width", "depth", "heads", "length")}
    in_words = "vocabulary {vocabulary}, width {width}, {depth} layers, {heads} heads, length {length}".format(**size)
    schedule = model.config.schedule
    with replacing_folder(out) as draft:
        model.save_pretrained(draft)
        card = f"Imported from: {in_page(origin)}.\n\nIt has {in_words}; schedule {in_page(str(schedule))}. "
        card = f"# {in_page(out.name)}\n\n{card}Not trained or evaluated here.\n"
        (draft / "card.md").write_text(card, encoding="utf-8")
    parameters, has_tokenizer = sum(p.numel() for p in model.parameters()), model.tokenizer is not None
    if as_json:
        record = {"source": source, "out": str(out), **size, "schedule": schedule}
        print_json({**record, "parameters": parameters, "tokenizer": has_tokenizer})
    else:
        print(f"imported {source} to {out}: {parameters:,} parameters, {in_words}")
    if not has_tokenizer:
        note("no tokenizer came with it, so generation will give token ids; --tokenizer adds one")
