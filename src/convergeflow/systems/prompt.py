"""Known text for samples, a prompt or a text with gaps, as tokens that the sampler holds fixed, and gaps marked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from convergeflow.data.tokenizer import Tokenizer
from convergeflow.errors import UserError
from convergeflow.sampling.wrappers import Clamp

GAP = "___"


def known_text(
    tokenizer: Tokenizer | None, prompt: str | None, infill: str | None, gap: int, longest: int = 1 << 20
) -> Clamp | None:
    """The tokens of a prompt, or of a text in which every GAP stands for `gap` unknown tokens; None without either."""
    if prompt is None and infill is None:
        return None
    if prompt is not None and infill is not None:
        raise UserError("give `prompt` or `infill`, not both")
    if tokenizer is None:
        raise UserError("`prompt` and `infill` need a tokenizer, and this checkpoint has none")
    if gap < 1:
        raise UserError(f"`gap` must be at least 1, not {gap}")
    if infill is not None and gap * infill.count(GAP) > longest:
        raise UserError(
            f"{infill.count(GAP)} x {gap} unknown tokens are more than the {longest} that this model can make"
        )
    _check_gaps(prompt, infill, tokenizer)
    tokens: list[int] = []
    known: list[bool] = []
    for number, piece in enumerate([prompt or ""] if infill is None else infill.split(GAP)):
        if number:
            tokens += [0] * gap
            known += [False] * gap
        tokenizer.check_known(piece)
        found = tokenizer.encode(piece.strip() if tokenizer.kind == "word" else piece)
        tokens += found
        known += [True] * len(found)
    if not any(known):
        raise UserError("`prompt` or `infill` has no word: leave it out for a free sample, or write what is known")
    return Clamp(torch.tensor(tokens), torch.tensor(known))


def _check_gaps(prompt: str | None, infill: str | None, tokenizer: Tokenizer) -> None:
    """Refuse gaps where none can be, and others than are meant."""
    if infill is not None and GAP not in infill:
        raise UserError(f"`infill` has no gap: write {GAP} where text is to be filled in")
    if infill is not None and f"{GAP}_" in infill:
        raise UserError(f"a gap is written {GAP}, with three underscores: `infill` has more in a row")
    if prompt is not None and GAP in prompt and tokenizer.kind == "word":
        raise UserError(f"{GAP} stands for a gap: a text with gaps is given as `infill`, not as `prompt`")


def followed_by_unknown(clamp: Clamp, length: int) -> Clamp:
    """The same, with unknown tokens behind the text up to `length`."""
    missing = length - len(clamp.tokens)
    if missing < 0:
        raise UserError(f"the known text has {len(clamp.tokens)} tokens, more than `length` {length}")
    return Clamp(*(torch.cat([part, part.new_zeros(missing)]) for part in (clamp.tokens, clamp.known)))


Span = tuple[int, int]
"""The first token of a gap, and the one behind its last."""


def gaps_of(clamp: Clamp) -> tuple[Span, ...]:
    """Where a text with gaps has its gaps."""
    spans: list[Span] = []
    for place in (~clamp.known).nonzero().flatten().tolist():
        if spans and spans[-1][1] == place:
            spans[-1] = (spans[-1][0], place + 1)
        else:
            spans.append((place, place + 1))
    return tuple(spans)


def place_of(tokenizer: Tokenizer, ids: Sequence[int], number: int, text: str) -> int:
    """Where the token of a number begins in the text of ids: a text grows token by token."""
    before = tokenizer.decode(ids[:number])
    pairs = enumerate(zip(before, text, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(before), len(text)))


def marked(tokenizer: Tokenizer, ids: Sequence[int], gaps: Iterable[Span]) -> str:
    """The text of a sample, with what fills the gaps in [brackets]."""
    text, done, parts = tokenizer.decode(ids), 0, []
    for span in gaps:
        first, last = (place_of(tokenizer, ids, edge, text) for edge in span)
        filling = text[first:last]
        space = filling[: len(filling) - len(filling.lstrip())]
        parts += [text[done:first], space, f"[{filling[len(space) :]}]"]
        done = last
    return "".join([*parts, text[done:]])
