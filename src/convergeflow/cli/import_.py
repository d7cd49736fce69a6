"""Turn a checkpoint of another project into a folder that every command here can use.

Example:
  convergeflow import langflow ./langflow-owt --tokenizer gpt2 --out models/langflow-owt
  convergeflow import convergeflow 0175000.pt --weights raw --out models/paper
  convergeflow import duo s-sahoo/duo --tokenizer gpt2 --out models/duo
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convergeflow.cli.console import note, print_json
from convergeflow.errors import UserError
from convergeflow.files import replacing_folder

if TYPE_CHECKING:
    from convergeflow.systems.protocol import LanguageModel

app = typer.Typer(no_args_is_help=False, rich_markup_mode=None)


class Weights(StrEnum):
    """Which of the two sets of weights in a published file to take."""

    ema = "ema"
    raw = "raw"


Out = Annotated[Path, typer.Option("--out", help="The folder to make; it must not exist yet.")]
TokenizerName = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        help="`gpt2`, a folder with a tokenizer.json, or `none`; by default the one beside the weights, if any.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print what was imported as JSON.")]


@app.command()
def langflow(
    source: Annotated[str, typer.Argument(help="A LangFlow checkpoint folder, or its hub name owner/name.")],
    out: Out,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub repository.")] = None,
    tokenizer: TokenizerName = None,
    as_json: AsJson = False,
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
    give_tokenizer(model, str(beside) if tokenizer is None and (beside / "tokenizer.json").is_file() else tokenizer)
    _write(model, out, f"LangFlow checkpoint {source}")
    _report(model, source, out, as_json)


@app.command()
def convergeflow(
    file: Annotated[Path, typer.Argument(help="A .pt file written by the paper's training code.")],
    out: Out,
    weights: Annotated[
        Weights, typer.Option(help="The moving average, or the raw weights (which the paper's script evaluates).")
    ] = Weights.ema,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens per sequence; by default that of the training run.")
    ] = None,
    tokenizer: TokenizerName = None,
    as_json: AsJson = False,
) -> None:
    """Import a checkpoint of the paper's published code: a torch file with "model" and "ema".

    Only tensors are read from it, never code.

    Example:
      convergeflow import convergeflow 0175000.pt --weights raw --out models/paper
    """
    _refuse_existing(out)
    from convergeflow.interop.published import load_published

    model = load_published(file, weights=weights.value, length=length)
    give_tokenizer(model, tokenizer)
    _write(model, out, f"published ConvergeFlow checkpoint {file.name}, {weights.value} weights")
    _report(model, str(file), out, as_json)


Source = Annotated[str, typer.Argument(help="A hub folder, a file, a run's folder, or a hub name owner/name.")]
WhichWeights = Annotated[Weights, typer.Option("--weights", help="The moving average or the raw weights.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub repository.")]
Length = Annotated[int | None, typer.Option(min=1, help="Tokens per text; by default what the settings beside say.")]


def _peer(peer: str, source: str, out: Path, as_json: bool, tokenizer: str | None, **wanted: Any) -> None:
    """What the commands for other projects' models share."""
    _refuse_existing(out)
    from convergeflow.interop.peers import Wanted, load_peer

    wanted["weights"] = wanted["weights"].value
    found = load_peer(source, Wanted(peer, **wanted))
    give_tokenizer(found.model, tokenizer, slack=1)
    _write(found.model, out, f"{peer} checkpoint {source} ({found.layout}), {wanted['weights']} weights")
    for remark in found.remarks:
        note(remark)
    _report(found.model, source, out, as_json)


@app.command()
def mdlm(
    source: Source,
    out: Out,
    weights: WhichWeights = Weights.ema,
    revision: Revision = None,
    length: Length = None,
    tokenizer: TokenizerName = None,
    as_json: AsJson = False,
) -> None:
    """Import MDLM: a hub folder, or a Lightning file of the MDLM or Duo repository.

    Names and shapes are checked one by one; nothing in a file is run.

    Example:
      convergeflow import mdlm kuleshov-group/mdlm-owt --tokenizer gpt2 --out models/mdlm
    """
    _peer("mdlm", source, out, as_json, tokenizer, weights=weights, revision=revision, length=length)


@app.command()
def duo(
    source: Source,
    out: Out,
    weights: WhichWeights = Weights.ema,
    revision: Revision = None,
    length: Length = None,
    tokenizer: TokenizerName = None,
    as_json: AsJson = False,
) -> None:
    """Import Duo, or its distilled student: a hub folder or a Lightning file.

    Example:
      convergeflow import duo s-sahoo/duo --tokenizer gpt2 --out models/duo
    """
    _peer("duo", source, out, as_json, tokenizer, weights=weights, revision=revision, length=length)


@app.command()
def sedd(
    source: Source,
    out: Out,
    weights: WhichWeights = Weights.ema,
    revision: Revision = None,
    length: Length = None,
    tokenizer: TokenizerName = None,
    as_json: AsJson = False,
) -> None:
    """Import SEDD: a hub folder, a run's folder, or a Lightning file of the MDLM or Duo repository.

    The settings beside the weights say whether it is the absorbing or the uniform one.

    Example:
      convergeflow import sedd louaaron/sedd-small --tokenizer gpt2 --out models/sedd
    """
    _peer("sedd", source, out, as_json, tokenizer, weights=weights, revision=revision, length=length)


@app.command()
def ar(
    source: Source,
    out: Out,
    weights: WhichWeights = Weights.ema,
    revision: Revision = None,
    length: Length = None,
    tokenizer: TokenizerName = None,
    as_json: AsJson = False,
) -> None:
    """Import the autoregressive baseline: a Lightning file of the MDLM or Duo repository.

    Example:
      convergeflow import ar ar.ckpt --tokenizer gpt2 --out models/ar
    """
    _peer("ar", source, out, as_json, tokenizer, weights=weights, revision=revision, length=length)


@app.command()
def flm(
    source: Source,
    out: Out,
    weights: WhichWeights = Weights.ema,
    revision: Revision = None,
    length: Length = None,
    tokenizer: TokenizerName = None,
    as_json: AsJson = False,
) -> None:
    """Import FLM: a Lightning file.

    Example:
      convergeflow import flm flm.ckpt --tokenizer gpt2 --out models/flm
    """
    _peer("flm", source, out, as_json, tokenizer, weights=weights, revision=revision, length=length)


@app.command()
def fmlm(
    source: Source,
    out: Out,
    teacher: Annotated[
        str | None, typer.Option(help="The FLM checkpoint that a first-stage flow map was distilled from.")
    ] = None,
    weights: WhichWeights = Weights.ema,
    revision: Revision = None,
    length: Length = None,
    tokenizer: TokenizerName = None,
    as_json: AsJson = False,
) -> None:
    """Import a flow map distilled from FLM: a Lightning file.

    A map of the first stage corrects its teacher and needs it; one of the second stage stands alone.

    Example:
      convergeflow import fmlm stage1.ckpt --teacher flm.ckpt --out models/fmlm-1
      convergeflow import fmlm stage2.ckpt --out models/fmlm-2
    """
    choices = {"weights": weights, "revision": revision, "length": length, "teacher": teacher}
    _peer("fmlm", source, out, as_json, tokenizer, **choices)


@app.command()
def elf(
    source: Source,
    out: Out,
    encoder: Annotated[
        str | None, typer.Option(help="The T5 encoder: a folder or a hub name. [default: google-t5/t5-small]")
    ] = None,
    weights: WhichWeights = Weights.ema,
    revision: Revision = None,
    length: Length = None,
    tokenizer: TokenizerName = None,
    as_json: AsJson = False,
) -> None:
    """Import ELF: a torch file checkpoint_N, or the folder checkpoint_N of its JAX branch.

    The encoder is only needed to continue prompts; its name is written down, and it is loaded when it is used.

    Example:
      convergeflow import elf embedded-language-flows/ELF-B-owt-torch --out models/elf
    """
    choices = {"weights": weights, "revision": revision, "length": length, "encoder": encoder}
    _peer("elf", source, out, as_json, tokenizer, **choices)


@app.command()
def plaid(
    source: Source,
    out: Out,
    weights: WhichWeights = Weights.ema,
    revision: Revision = None,
    length: Length = None,
    tokenizer: TokenizerName = None,
    as_json: AsJson = False,
) -> None:
    """Import Plaid: the folder with its four .pt files.

    Example:
      convergeflow import plaid plaid1b_weights --out models/plaid
    """
    _peer("plaid", source, out, as_json, tokenizer, weights=weights, revision=revision, length=length)


def _refuse_existing(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists already; choose another `out` or remove it")


def give_tokenizer(model: LanguageModel, name: str | None, slack: int = 0) -> None:
    """`slack`: how many tokens a model may have more than its tokenizer, as for padding."""
    if name is None or name == "none":
        return
    from convergeflow.data.tokenizer import Tokenizer, gpt2_tokenizer

    tokenizer = gpt2_tokenizer() if name == "gpt2" else Tokenizer.load(name)
    if not 0 <= model.config.vocabulary - tokenizer.size <= slack:
        raise UserError(
            f"the tokenizer {name} has {tokenizer.size} tokens, the model {model.config.vocabulary}; "
            "give the one it was trained with, or `tokenizer` none"
        )
    model.tokenizer = tokenizer


def _write(model: LanguageModel, out: Path, origin: str) -> None:
    """Write the folder in one step, so that a broken import leaves nothing behind."""
    settings = model.config
    with replacing_folder(out) as draft:
        model.save_pretrained(draft)
        (draft / "card.md").write_text(
            f"# {out.name}\n\nImported from: {origin}.\n\n"
            f"Vocabulary {settings.vocabulary}, width {settings.width}, {settings.depth} layers, "
            f"{settings.heads} heads, length {settings.length}{_schedule(settings)}. "
            "Not trained or evaluated here.\n",
            encoding="utf-8",
        )


def _schedule(settings: Any) -> str:
    schedule = getattr(settings, "schedule", None)
    return "" if schedule is None else f"; schedule {schedule}"


def _report(model: LanguageModel, source: str, out: Path, as_json: bool) -> None:
    settings = model.config
    record: dict[str, Any] = {
        "source": source,
        "out": str(out),
        "method": model.method,
        "vocabulary": settings.vocabulary,
        "width": settings.width,
        "depth": settings.depth,
        "heads": settings.heads,
        "length": settings.length,
        "schedule": getattr(settings, "schedule", None),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokenizer": (out / "tokenizer.json").is_file(),
    }
    if as_json:
        print_json(record)
    else:
        print(
            f"imported {source} to {out}: {record['parameters']:,} parameters, vocabulary {record['vocabulary']}, "
            f"width {record['width']}, {record['depth']} layers, {record['heads']} heads, length {record['length']}"
        )
    if not record["tokenizer"]:
        note("no tokenizer came with it, so generation will give token ids; --tokenizer adds one")
