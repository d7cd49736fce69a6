"""What the parts of `convergeflow import` share: where a model goes, its tokenizer, and what is said about it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convergeflow.cli.console import note, print_json
from convergeflow.errors import UserError
from convergeflow.files import replacing_folder
from convergeflow.markup import in_page

if TYPE_CHECKING:
    from convergeflow.systems.protocol import LanguageModel

Out = Annotated[Path, typer.Option("--out", help="The folder to make; it must not exist yet.")]
TokenizerName = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        help="`gpt2`, a folder with a tokenizer.json, or `none`; by default the one beside the weights, if any.",
    ),
]


def refuse_existing(out: Path) -> None:
    """An import makes a folder; it never writes into one."""
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


def write(model: LanguageModel, out: Path, source: str, origin: str, as_json: bool) -> None:
    """Write the folder in one step, so that a broken import leaves nothing behind, and say what was imported."""
    size = {name: getattr(model.config, name) for name in ("vocabulary", "width", "depth", "heads", "length")}
    in_words = "vocabulary {vocabulary}, width {width}, {depth} layers, {heads} heads, length {length}".format(**size)
    schedule = getattr(model.config, "schedule", None)
    timed = "" if schedule is None else f"; schedule {in_page(str(schedule))}"
    with replacing_folder(out) as draft:
        model.save_pretrained(draft)
        card = f"Imported from: {in_page(origin)}.\n\nIt has {in_words}{timed}. Not trained or evaluated here."
        (draft / "card.md").write_text(f"# {in_page(out.name)}\n\n{card}\n", encoding="utf-8")
    parameters, has_tokenizer = sum(p.numel() for p in model.parameters()), model.tokenizer is not None
    if as_json:
        record = {"source": source, "out": str(out), "method": model.method, **size, "schedule": schedule}
        print_json({**record, "parameters": parameters, "tokenizer": has_tokenizer})
    else:
        print(f"imported {source} to {out}: {parameters:,} parameters, {in_words}")
    if not has_tokenizer:
        note("no tokenizer came with it, so generation will give token ids; --tokenizer adds one")
