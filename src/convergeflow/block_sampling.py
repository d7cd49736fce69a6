"""Sampling block after block: each block is a flow of its own after the tokens that are already there.

Not the paper's, whose flow carries the whole sequence at once; a model with a `block_length` is trained for it. Every
block is integrated by `sampling.integrate` with all its controls, its trajectory ends at token embeddings as any other
does, and its tokens are plain words for the blocks after it. A prompt is exact conditioning here, and text may go on
beyond the length of training: a block then sees the last words only. All blocks share the budget of network calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from convergeflow.decoding import Decoded
from convergeflow.errors import UserError
from convergeflow.model.head import Weighted
from convergeflow.records import Observer
from convergeflow.sampling import Clamp, Outcome, Predictor, integrate
from convergeflow.settings import Settings


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
    words all the others follow. `longest` is the longest block that the model has learned, or none if its flow carries
    the whole sequence.
    """
    if longest is None:
        if settings.block is not None:
            raise UserError("--block is for models of blocks (sotu-small): this one's flow has all tokens at once")
        return [Piece(0, length, settings)]
    block_length = settings.block or longest
    if block_length > longest:
        raise UserError(f"--block {block_length}: this model has learned blocks of up to {longest} tokens")
    if known >= length:
        raise UserError(f"all {length} tokens are known: raise --length to go on from them")
    starts = range(known, length, block_length)
    reading = len(starts) - (known == 0)
    if settings.nfe < (least := fewest_calls(length, block_length, known)):
        raise UserError(
            f"{len(starts)} blocks of {block_length} tokens need at least one network call each and {reading} to read "
            f"what is before them: raise --nfe to {least}, or --block if it is below {longest}"
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


def prompt_length(clamp: Clamp | None) -> int:
    """How many first tokens are known in every sample."""
    if clamp is None:
        return 0
    known = clamp.known.reshape(-1, clamp.known.shape[-1]).all(0)
    return int(known.long().cumprod(0).sum())


def integrate_blocks(
    predictor: Predictor,
    plan: Sequence[Piece],
    noise: Tensor,
    window: int,
    *,
    clamp: Clamp | None = None,
    observe: Observer | None = None,
    want_logits: bool = False,
) -> list[Outcome]:
    """The outcome of every piece, from noise [B, L, d]; a block sees at most `window` tokens, its own included."""
    tokens = torch.full(noise.shape[:2], -1, dtype=torch.long, device=noise.device)
    if clamp is not None:
        tokens = torch.where(clamp.known, clamp.tokens, tokens).to(noise.device)
    outcomes: list[Outcome] = []
    for number, piece in enumerate(plan):
        span = slice(piece.start, piece.end)
        part = None
        if clamp is not None and bool(clamp.known[..., span].any()):
            part = Clamp(clamp.tokens[..., span], clamp.known[..., span])
        before = tokens[:, max(0, piece.end - window) : piece.start]
        outcome = integrate(
            predictor, piece.settings, noise[:, span], clamp=part, want_logits=want_logits, before=before,
            observe=None if observe is None else _numbered(observe, number, outcomes),
        )  # fmt: skip
        tokens[:, span] = outcome.decoded.by(piece.settings.decode)
        outcomes.append(outcome)
    return outcomes


def _numbered(observe: Observer, number: int, done: Sequence[Outcome]) -> Observer:
    """An observer of one block, which is told which block it is and the calls of those before it."""
    calls = sum(int(outcome.calls.max()) for outcome in done)
    return lambda step: observe(replace(step, block=number, calls=calls + step.calls))


def joined(outcomes: Sequence[Outcome], clamp: Clamp | None) -> Outcome:
    """The end of whole samples from the ends of their pieces; known first tokens are put back in front."""
    first, known = outcomes[0], prompt_length(clamp)
    rules = {
        rule: torch.cat([outcome.decoded.tokens[rule] for outcome in outcomes], 1) for rule in first.decoded.tokens
    }
    if clamp is not None and known:
        given = clamp.tokens[..., :known].to(first.x.device).expand(len(first.x), known)
        rules = {rule: torch.cat([given, tokens], 1) for rule, tokens in rules.items()}
    final = {
        field.name: torch.cat([getattr(outcome.final, field.name) for outcome in outcomes], 1)
        for field in fields(Weighted)
        if getattr(first.final, field.name) is not None
    }
    logits = [outcome.logits for outcome in outcomes if outcome.logits is not None]
    return Outcome(
        Decoded(rules),
        torch.stack([outcome.calls for outcome in outcomes]).sum(0),
        torch.cat([outcome.x for outcome in outcomes], 1),
        Weighted(**final),
        torch.cat(logits, 1) if logits else None,
        first.plan,
    )
