"""Named, versioned protocols: what exactly "Gen. PPL" means in each project, and how ours differs.

A text of documents A and B of generated ids, as the scorer sees it (`|` = end of text, tokens in brackets are scored):

    ours-1             context |, then [A1] [A2] [|] [B1] [B2]      the start token makes the first token count
    convergeflow-2026  A1, then [A2] [|] [B1] [B2]                  the first token is context only
    langflow-2026      the same with the scorer in float16
    duo-2026           the same, but of several ends only the first is scored
    elf-2026           A1, then [A2] [|]                            nothing behind the first end; bfloat16

All decode to text and tokenise again with the scorer's own tokenizer, whatever vocabulary the samples have. A protocol
never changes once it has a number; a changed one gets the next.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from convergeflow.errors import UserError, unknown_name

PAPER_LENGTH = 1024


@dataclass(frozen=True)
class Protocol:
    """How samples are turned into one number. Two results compare only if these agree."""

    id: str
    about: str
    start_token: bool = False
    """Whether the scorer sees its start-of-text token first, so that the first token of the sample is scored."""
    ends: str = "all"
    """Ends of text that are scored: `all`, or the `first` only; `cut` drops what is behind the first as well."""
    truncate: int | None = PAPER_LENGTH
    """Tokens of the scorer after which a sample is cut; None means the scorer's context."""
    dtype: str = "float32"
    """Number format of the scorer."""
    entropy_on: str = "ids"
    """Whether unigram entropy is of the generated `ids` or of the `retokenised` text."""
    aggregate: str = "corpus"
    """`corpus`: exp of the mean NLL over all scored tokens of all samples; `sample`: mean of each sample's exp."""
    skip_empty: bool = False
    """Leave out samples without text; otherwise they simply have no scored tokens."""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("ends", self.ends, ("all", "first", "cut")),
            ("dtype", self.dtype, ("float32", "float16", "bfloat16", "float64")),
            ("entropy_on", self.entropy_on, ("ids", "retokenised")),
            ("aggregate", self.aggregate, ("corpus", "sample")),
        ):
            if value not in known:
                raise unknown_name(f"protocol {name}", value, known)

    def describe(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


PROTOCOLS = {
    protocol.id: protocol
    for protocol in (
        Protocol("ours-1", "every token scored, start token given, float32", start_token=True, truncate=None),
        Protocol(
            "convergeflow-2026",
            "first token unscored, every end of text scored; the published script may have run in float64 by accident, "
            "which with smollm2 moves the value by 2e-5 of itself",
        ),
        Protocol("langflow-2026", "as convergeflow-2026 with the scorer in float16", dtype="float16"),
        Protocol(
            "duo-2026",
            "second and later ends of text are not scored; the published script also drops the last partial batch, "
            "which is not repeated here",
            ends="first",
        ),
        Protocol(
            "elf-2026",
            "text behind the first end is dropped, empty samples skipped, entropy on the scorer's tokens, bfloat16",
            ends="cut",
            dtype="bfloat16",
            entropy_on="retokenised",
            skip_empty=True,
        ),
    )
}

DEFAULT_PROTOCOL = "ours-1"


def protocols_named(name: str) -> list[Protocol]:
    """One protocol, several separated by commas, or `all`."""
    if name == "all":
        return list(PROTOCOLS.values())
    chosen = [part.strip() for part in name.split(",") if part.strip()]
    if not chosen:
        raise UserError(f"name a protocol: {', '.join(PROTOCOLS)} or all")
    for part in chosen:
        if part not in PROTOCOLS:
            raise unknown_name("protocol", part, [*PROTOCOLS, "all"])
    return [PROTOCOLS[part] for part in chosen]


def protocol_named(name: str) -> Protocol:
    """One protocol, for what is measured under one alone."""
    chosen = protocols_named(name)
    if len(chosen) != 1:
        raise UserError("give one protocol; `convergeflow evaluate` compares several")
    return chosen[0]
