"""How training text becomes points of the path: `Whole` is the paper, the others are options of small recipes.

A corruption draws the noise level of every position and says what the network may look at. A loss sees only the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from convergeflow.flow.path import sample_path
from convergeflow.flow.schedule import Coefficients
from convergeflow.model.views import WHOLE, AfterWords, View
from convergeflow.randomness import RowDraws

STRATUM = (5**0.5 - 1) / 2
"""Times of a sequence's blocks differ by multiples of the golden ratio: each is uniform, together they are even."""
NOISY_END, CLEAN_END = 0.12, 0.95
"""Up to the first time a word is pure noise, from the second on it is plain (`EmptySlots`)."""


@dataclass(frozen=True)
class Noisy:
    """Sequences on the path: the state x_t [B, L, d], its noise levels [B] or [B, L], and the view of the network."""

    x_t: Tensor
    at: Coefficients
    view: View = WHOLE


Levels = Callable[[Tensor], Coefficients]
"""Times to noise levels: a schedule, or the present values of a learned one."""


class Corruption(Protocol):
    """x* [B, L, d] and times [B] in (0, 1), float64 on the CPU -> points of the path."""

    def __call__(self, x_star: Tensor, schedule: Levels, times: Tensor, draws: RowDraws) -> Noisy: ...


def _on_path(x_star: Tensor, at: Coefficients, draws: RowDraws) -> Tensor:
    noise = draws.normal(*x_star.shape[1:])
    return sample_path(x_star, noise.to(x_star.dtype), at)


class Whole:
    """One noise level for the whole sequence: the paper's."""

    def __call__(self, x_star: Tensor, schedule: Levels, times: Tensor, draws: RowDraws) -> Noisy:
        at = schedule(times)
        return Noisy(_on_path(x_star, at, draws), at)


@dataclass(frozen=True)
class PerPosition:
    """A share of the sequences has an independent noise level at every position."""

    share: float

    def __call__(self, x_star: Tensor, schedule: Levels, times: Tensor, draws: RowDraws) -> Noisy:
        independent = draws.uniform()[:, None] < self.share
        per_position = draws.uniform(x_star.shape[1])
        at = schedule(torch.where(independent, per_position, times[:, None]))
        return Noisy(_on_path(x_star, at, draws), at)


@dataclass(frozen=True)
class AfterClean:
    """Blocks of up to `longest` tokens, each on a path of its own after the clean words before it.

    A sequence is cut into blocks of one length, a power of two: a model that knows shorter blocks too can go on from a
    prompt of any length.
    """

    longest: int

    def __call__(self, x_star: Tensor, schedule: Levels, times: Tensor, draws: RowDraws) -> Noisy:
        starts = block_starts(draws.uniform(), self.longest, x_star.shape[1])
        at = schedule((times[:, None] + STRATUM * starts) % 1.0)
        return Noisy(_on_path(x_star, at, draws), at, AfterWords.plain(x_star, starts))


class EmptySlots:
    """Blocks of one token in all but pure noise after words that are plain: every word is asked for from its context.

    Copying a name from an earlier mention is learned from such pairs of plain word and empty slot within some thousand
    sequences. Under one noise level for all, either the mention is unreadable or the slot needs no help.
    """

    def __call__(self, x_star: Tensor, schedule: Levels, times: Tensor, draws: RowDraws) -> Noisy:
        length = x_star.shape[1]
        plain = CLEAN_END + (1 - CLEAN_END) * draws.uniform(length)
        at = schedule(torch.cat([plain, NOISY_END * draws.uniform(length)], dim=1))
        words, slots = _on_path(x_star.repeat(1, 2, 1), at, draws).chunk(2, 1)
        return Noisy(slots, at[:, length:], AfterWords(words, at[:, :length], torch.arange(length)))


def block_starts(u: Tensor, longest: int, length: int) -> Tensor:
    """The first position of each position's block, [B, length]; uniforms u [B] choose among 1, 2, 4, .. `longest`."""
    sizes = torch.tensor([size for power in range(longest.bit_length()) if (size := 2**power) <= longest])
    size = sizes[(u * len(sizes)).long().clamp(max=len(sizes) - 1)][:, None]
    return torch.arange(length) // size * size
