"""Random numbers that belong to a row, not to a batch.

Every sample and every training example draws from a generator of its own, seeded by name. Batch size, rank and order
of evaluation can therefore not change what a row sees, and a stopped run needs no generator state to go on exactly.
Numbers are drawn on the CPU: the same seed gives the same noise on every device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def derive_seed(seed: int, *keys: int | str) -> int:
    """A 63-bit seed for the stream named by `keys`; different names give unrelated streams."""
    # repr keeps 1 and "1" apart, and the separator keeps ("ab", "c") and ("a", "bc") apart.
    text = "\x1f".join(repr(key) for key in (int(seed), *keys))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class RowDraws:
    """One independent stream of random numbers per row."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._generators = [torch.Generator().manual_seed(int(seed)) for seed in seeds]

    def __len__(self) -> int:
        return len(self._generators)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
        """Standard Gaussian numbers, [rows, *shape]."""
        rows = [torch.randn(shape, generator=generator, dtype=dtype) for generator in self._generators]
        return torch.stack(rows).to(device)

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> Tensor:
        """Uniform numbers in the open interval (0, 1), [rows, *shape]: a logarithm of them is always finite."""
        rows = [torch.rand(shape, generator=generator, dtype=torch.float64) for generator in self._generators]
        smallest = torch.finfo(dtype).tiny
        largest = 1.0 - torch.finfo(dtype).eps / 2
        return torch.stack(rows).clamp_(smallest, largest).to(device=device, dtype=dtype)

    def select(self, rows: Sequence[int] | Tensor) -> RowDraws:
        """The streams of some rows; they are shared with, not copied from, this object."""
        picked = RowDraws([])
        picked._generators = [self._generators[int(row)] for row in rows]
        return picked
