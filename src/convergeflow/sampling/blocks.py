"""Sampling block after block: each block is a flow of its own behind the tokens that are already there.

Not the paper's, whose flow carries the whole sequence at once; a model with a `block_length` is trained for it. Every
block is a trajectory with all its controls and ends at token embeddings as any other does; its tokens are plain words
for the blocks after it. A prompt is exact conditioning here, and text may go on beyond the length of training: a block
then sees the last words only. All blocks share the budget of network calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from convergeflow.errors import UserError
from convergeflow.sampling.events import End, Flow, Read
from convergeflow.sampling.settings import Settings
from convergeflow.sampling.wrappers import Clamp, Wrapped


@dataclass(frozen=True)
class Piece:
    """One flow of a sample: positions start to end."""

    start: int
    end: int
    settings: Settings
    """With its share of the network calls, not counting the one that reads the tokens before it."""


def pieces(settings: Settings, length: int, longest: int | None, known: int = 0) -> list[Piece]:
    """The flows that make a sample after `known` first tokens; all of them together spend `settings.nfe` calls exactly.

    One call reads the tokens before a block. What the number of blocks does not divide goes to the first blocks, whose
    words all the others follow. `longest` is the longest block that the model has learned, or None if its flow carries
    the whole sequence.
    """
    if longest is None:
        if settings.block is not None:
            raise UserError("`block` is for models of blocks (sotu-small): this model's flow has all tokens at once")
        return [Piece(0, length, settings)]
    block_length = settings.block or longest
    if block_length > longest:
        raise UserError(f"`block` {block_length}: this model has learned blocks of up to {longest} tokens")
    if known >= length:
        raise UserError(f"all {length} tokens are known: raise `length` to go on from them")
    starts = range(known, length, block_length)
    reading = len(starts) - (known == 0)
    if settings.nfe < (least := fewest_calls(length, block_length, known)):
        raise UserError(
            f"{len(starts)} blocks of {block_length} tokens need at least one network call each and {reading} to read "
            f"what is before them: raise `nfe` to {least}, or `block` if it is below {longest}"
        )
    every, first = divmod(settings.nfe - reading, len(starts))
    return [
        Piece(start, min(start + block_length, length), replace(settings, nfe=every + (number < first)))
        for number, start in enumerate(starts)
    ]


def fewest_calls(length: int, block_length: int, known: int = 0) -> int:
    """One call for each block after `known` first tokens, and one to read what is before it, if anything is."""
    count = len(range(known, length, block_length))
    return 2 * count - (known == 0)


def block_after_block(
    flow: Callable[[Settings, Tensor, Wrapped, Clamp | None], Flow],
    pieces: Sequence[Piece],
    noise: Tensor,
    predictor: Wrapped,
    clamp: Clamp | None,
    window: int,
) -> Flow:
    """A trajectory through all pieces; a block sees at most `window` tokens, its own included."""
    given = torch.empty(len(noise), 0, dtype=torch.long, device=noise.device)
    if clamp is not None:
        given = clamp.tokens[:, : pieces[0].start]
    ends: list[End] = []
    for number, piece in enumerate(pieces):
        span, behind = slice(piece.start, piece.end), predictor
        if piece.start > 0:
            words = torch.cat([given, *(end.decoded.by(piece.settings.decode) for end in ends)], 1)
            behind = yield Read(predictor, words[:, max(0, piece.end - window) :], number)
        known = None if clamp is None or not bool(clamp.known[:, span].any()) else clamp[:, span]
        end = yield from flow(piece.settings, noise[:, span], behind, known)
        ends.append(end if known is None else replace(end, decoded=end.decoded.changed(known.put)))
    whole = End.joined(ends, 1)
    return replace(whole, decoded=whole.decoded.changed(lambda found: torch.cat([given, found], 1)))
