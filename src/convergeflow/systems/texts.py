"""The likelihood bound of texts as people have them: of any length, one by one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from convergeflow.errors import UserError
from convergeflow.randomness import RowDraws, derive_seed
from convergeflow.systems.protocol import Bound

if TYPE_CHECKING:
    from convergeflow.systems.protocol import LanguageModel


def checked_ids(ids: Tensor, vocabulary: int) -> Tensor:
    """Token ids of a model with such a vocabulary."""
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise UserError(f"token ids are whole numbers, not {str(ids.dtype).removeprefix('torch.')}")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise UserError(f"token ids of this model are 0 to {vocabulary - 1}, not {int(ids.min())} to {int(ids.max())}")
    return ids.long()


def bound_of_texts(model: LanguageModel, texts: Sequence[str], seed: int, **how: Any) -> Bound:
    """The bound of texts as they stand: no end of text is added. Their nats are sums over their tokens."""
    if model.tokenizer is None:
        raise UserError("a bound of texts needs a tokenizer, and this checkpoint has none: give token ids [n, L]")
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise UserError("a bound is of texts, or of token ids as a tensor or an array [n, L]")
    if not texts:
        raise UserError("a bound needs at least one text")
    for text in texts:
        model.tokenizer.check_known(text)
    rows = model.tokenizer.encode_batch(texts)
    return bound_of_rows(model, rows, [derive_seed(seed, "text", number) for number in range(len(rows))], **how)


def bound_of_rows(model: LanguageModel, rows: Sequence[Sequence[int]], seeds: Sequence[int], **how: Any) -> Bound:
    """The bound of token rows of any lengths, each with the noise of its own seed.

    A row beyond the model's length is cut into pieces. Pieces of one length share network calls.
    """
    pieces: dict[int, list[tuple[int, int, Sequence[int]]]] = defaultdict(list)
    size = int(model.config.length)
    for number, row in enumerate(rows):
        if not len(row):
            raise UserError(f"text {number + 1} is empty: it has no bound")
        for first in range(0, len(row), size):
            piece = row[first : first + size]
            pieces[len(piece)].append((number, derive_seed(seeds[number], "piece", first), piece))
    nats = [0.0] * len(rows)
    found = None
    for group in pieces.values():
        draws = RowDraws([seed for _, seed, _ in group])
        found = model.bound_of_ids(torch.tensor([piece for *_, piece in group]), draws=draws, **how)
        for (number, *_), value in zip(group, found.nats, strict=True):
            nats[number] += value
    assert found is not None
    counts = torch.tensor([len(row) for row in rows], dtype=torch.float64)
    total = int(counts.sum())
    mean = sum(nats) / total
    off = torch.tensor(nats, dtype=torch.float64) - mean * counts
    error = float((off.square().sum() * len(rows) / max(1, len(rows) - 1)).sqrt() / total)
    return Bound(mean, error if len(rows) > 1 else float("nan"), found.draws, found.kind, total, tuple(nats))
