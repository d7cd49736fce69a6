"""The parts of `convergeflow import` for the published models of other projects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from convergeflow.cli.console import note
from convergeflow.cli.imported import Out, TokenizerName, give_tokenizer, refuse_existing, write
from convergeflow.cli.options import Json, unfolded

Source = Annotated[
    str, typer.Argument(metavar="SOURCE", help="A hub folder, a file, a run's folder, or a hub name owner/name.")
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub repository.")]


@dataclass(frozen=True)
class PeerOptions:
    """What every project's command has."""

    weights: Annotated[Literal["ema", "raw"], typer.Option(help="The moving average, or the raw ones.")] = "ema"
    revision: Revision = None
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens per text. [default: as the file's settings say]")
    ] = None
    tokenizer: TokenizerName = None
    json: Json = False


def _import(peer: str, source: str, out: Path, asked: PeerOptions, **own: Any) -> None:
    refuse_existing(out)
    from convergeflow.interop.peers import Wanted, load_peer

    found = load_peer(source, Wanted(peer, asked.weights, revision=asked.revision, length=asked.length, **own))
    give_tokenizer(found.model, asked.tokenizer, slack=1)
    for remark in found.remarks:
        note(remark)
    about = f"{peer} checkpoint {source} ({found.layout}), {asked.weights} weights"
    write(found.model, out, source, about, asked.json)


EXPLAINED = {
    "mdlm": """Import MDLM: a hub folder, or a Lightning file of the MDLM or Duo repository.

    Names and shapes are checked one by one; nothing in a file is run.

    Example:
      convergeflow import mdlm kuleshov-group/mdlm-owt --tokenizer gpt2 --out models/mdlm
    """,
    "duo": """Import Duo, or its distilled student: a hub folder or a Lightning file.

    Example:
      convergeflow import duo s-sahoo/duo --tokenizer gpt2 --out models/duo
    """,
    "sedd": """Import SEDD: a hub folder, a run's folder, or a Lightning file of the MDLM or Duo repository.

    The settings beside the weights say whether it is the absorbing or the uniform one.

    Example:
      convergeflow import sedd louaaron/sedd-small --tokenizer gpt2 --out models/sedd
    """,
    "ar": """Import the autoregressive baseline: a Lightning file of the MDLM or Duo repository.

    Example:
      convergeflow import ar ar.ckpt --tokenizer gpt2 --out models/ar
    """,
    "flm": """Import FLM: a Lightning file.

    Example:
      convergeflow import flm flm.ckpt --tokenizer gpt2 --out models/flm
    """,
    "plaid": """Import Plaid: the folder with its four .pt files.

    Example:
      convergeflow import plaid plaid1b_weights --out models/plaid
    """,
}
"""Help of the commands that have no option of their own."""


def _command(peer: str) -> Callable[..., None]:
    @unfolded("asked", PeerOptions)
    def command(source: Source, out: Out, asked: PeerOptions) -> None:
        _import(peer, source, out, asked)

    command.__name__, command.__doc__ = peer, EXPLAINED[peer]
    return command


@unfolded("asked", PeerOptions)
def fmlm(
    source: Source,
    out: Out,
    asked: PeerOptions,
    teacher: Annotated[
        str | None, typer.Option(help="The FLM checkpoint that a first-stage flow map was distilled from.")
    ] = None,
) -> None:
    """Import a flow map distilled from FLM: a Lightning file.

    A map of the first stage corrects its teacher and needs it; one of the second stage stands alone.

    Example:
      convergeflow import fmlm stage1.ckpt --teacher flm.ckpt --out models/fmlm-1
      convergeflow import fmlm stage2.ckpt --out models/fmlm-2
    """
    _import("fmlm", source, out, asked, teacher=teacher)


@unfolded("asked", PeerOptions)
def elf(
    source: Source,
    out: Out,
    asked: PeerOptions,
    encoder: Annotated[
        str | None, typer.Option(help="The T5 encoder: a folder or a hub name. [default: google-t5/t5-small]")
    ] = None,
) -> None:
    """Import ELF: a torch file checkpoint_N, or the folder checkpoint_N of its JAX branch.

    The encoder is only needed to continue prompts; its name is written down, and it is loaded when it is used.

    Example:
      convergeflow import elf embedded-language-flows/ELF-B-owt-torch --out models/elf
    """
    _import("elf", source, out, asked, encoder=encoder)


COMMANDS = [*map(_command, ("mdlm", "duo", "sedd", "ar", "flm")), fmlm, elf, _command("plaid")]
