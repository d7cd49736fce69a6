"""What a position may look at: the whole sequence (the paper's only view), or a block behind clean words.

A view is handed to the network with the state. The paper's network needs none; the others serve models of blocks, and
recipes that teach attention to copy. In training a clean copy of every sequence stands before its noisy one, so that
all blocks are predicted in one pass (`AfterWords`). In sampling the words before a block are read once (`Reading`),
and every pass at the block looks back at what was kept of them (`Behind`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from convergeflow.device import matching, onto
from convergeflow.flow.path import spread
from convergeflow.flow.schedule import Coefficients, plain_for_width

Notes = dict[str, tuple[Tensor, ...]]
"""What parts of the network keep of clean words, by name. Clean words see nothing that follows, so it stays true."""
Input = tuple[Tensor, Coefficients, Tensor | None]
"""State, noise level and condition."""


class View:
    """Every position sees every other."""

    copies = 1
    """How many copies of the sequence stand end to end, each with positions from 0."""
    starts: Tensor | None = None
    """The first position of the block that each position belongs to, [.., L], where two copies stand end to end."""

    def enter(self, x: Tensor, at: Coefficients, condition: Tensor | None) -> Input:
        """State, noise level and condition with what the view shows besides."""
        return x, at, condition

    def leave(self, h: Tensor) -> Tensor:
        """The part of the network's output that was asked for."""
        return h

    def rows(self, index: Tensor) -> View:
        """The same for some sequences of the batch."""
        return self

    def mask(self, length: int, device: torch.device) -> Tensor | None:
        """Who may look at whom, [.., length, length]; None if everybody may."""
        return None

    def note(self, name: str, *tensors: Tensor) -> None:
        """Keep something of the words that are read, for blocks behind them."""

    def noted(self, name: str) -> tuple[Tensor, ...] | None:
        """What was kept of the words before."""
        return None


WHOLE = View()


@dataclass(frozen=True)
class AfterWords(View):
    """Every block of the state after the words before it, all blocks in one pass."""

    words: Tensor
    """The clean copy, as the network reads it, [B, L, d]."""
    level: Coefficients
    """Its noise levels, [B, L]."""
    starts: Tensor
    condition: Tensor | None = None
    """The prediction of the clean copy."""
    copies = 2

    @classmethod
    def plain(cls, clean: Tensor, starts: Tensor) -> AfterWords:
        """After words that are known: their rows of the table `clean` [B, L, d] are their own prediction."""
        level = plain_for_width(clean.shape[-1], *clean.shape[:2])
        return cls(spread(level.alpha, clean) * clean, level, starts, clean)

    def enter(self, x: Tensor, at: Coefficients, condition: Tensor | None) -> Input:
        if at.alpha.dim() == 1:
            at = at.wide(x.shape[1])
        if self.condition is not None:
            known = self.condition.to(x.dtype)
            condition = torch.cat([known, torch.zeros_like(known) if condition is None else condition.to(x.dtype)], 1)
        level = Coefficients(matching(self.level.alpha, at.alpha), matching(self.level.sigma, at.sigma))
        return torch.cat([self.words.to(x.dtype), x], 1), Coefficients.joined([level, at], -1), condition

    def leave(self, h: Tensor) -> Tensor:
        return h[:, h.shape[1] // 2 :]

    def mask(self, length: int, device: torch.device) -> Tensor | None:
        return pair_mask(onto(self.starts, device))

    def rows(self, index: Tensor) -> AfterWords:
        starts = self.starts if self.starts.dim() == 1 else self.starts[index]
        here = onto(index, self.words.device)
        condition = None if self.condition is None else self.condition[here]
        return AfterWords(self.words[here], self.level[index], starts, condition)


@dataclass(frozen=True)
class Reading(View):
    """Clean words, each of which sees those up to itself; what a block behind them needs is put here."""

    notes: Notes = field(default_factory=dict)

    def mask(self, length: int, device: torch.device) -> Tensor | None:
        return torch.ones(length, length, dtype=torch.bool, device=device).tril()

    def note(self, name: str, *tensors: Tensor) -> None:
        self.notes[name] = tensors


@dataclass(frozen=True)
class Behind(View):
    """A block behind words that were read before."""

    notes: Notes

    def noted(self, name: str) -> tuple[Tensor, ...] | None:
        return self.notes[name]

    def rows(self, index: Tensor) -> Behind:
        count = len(next(iter(self.notes.values()))[0])
        if torch.equal(index, torch.arange(count, device=index.device)):
            return self  # a copy of the notes costs more than the question
        return Behind({name: tuple(tensor[index] for tensor in kept) for name, kept in self.notes.items()})


def pair_mask(starts: Tensor) -> Tensor:
    """Who may look at whom when a clean copy of a sequence is followed by a noisy one, [.., 2L, 2L].

    `starts` [.., L] is the first position of the block that each position belongs to. A clean position sees the clean
    ones up to itself; a noisy one sees the noisy ones of its block and the clean ones before it. So every block of one
    pass is predicted from the clean words before it (block diffusion's training pass).
    """
    place = torch.arange(starts.shape[-1], device=starts.device)
    up_to_itself = (place[:, None] >= place).expand(*starts.shape, -1)
    before, beside = place < starts[..., None], starts[..., None] == starts[..., None, :]
    clean = torch.cat([up_to_itself, torch.zeros_like(up_to_itself)], -1)
    return torch.cat([clean, torch.cat([before, beside], -1)], -2)
