"""Random numbers that belong to a row, not to a batch.

Every sample and every training example draws from a generator of its own, seeded by name. Batch size, rank and order
of evaluation can therefore not change what a row sees, and a stopped run needs no generator state to go on exactly.

Few numbers decide (times, which rows are conditioned, which tokens are hidden): they are drawn on the CPU, so that the
host knows them without asking the device. Many numbers are only added up (noise, the clocks of categorical draws):
they are drawn where they are used. The noise that a sample starts from is drawn on the CPU: the same seed gives the
same start on every device.
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


def generator_on(device: torch.device, seed: int) -> torch.Generator:
    """A stream of its own on a device."""
    return torch.Generator(device).manual_seed(seed)


class RowDraws:
    """One independent stream of random numbers per row: decisions on the CPU, noise on `device`."""

    def __init__(self, seeds: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._generators = [torch.Generator().manual_seed(int(seed)) for seed in seeds]
        self._noise = self._generators
        if self.device.type != "cpu":
            self._noise = [generator_on(self.device, derive_seed(int(seed), "device")) for seed in seeds]

    def __len__(self) -> int:
        return len(self._generators)

    def uniform(self, *shape: int) -> Tensor:
        """Numbers in the open interval (0, 1), [rows, *shape], float64 on the CPU: for decisions of the host."""
        return _inside(
            torch.stack([torch.rand(shape, generator=each, dtype=torch.float64) for each in self._generators])
        )

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard Gaussian numbers, [rows, *shape], on the streams' device."""
        rows = [torch.randn(shape, generator=each, dtype=dtype, device=self.device) for each in self._noise]
        return torch.stack(rows)

    def log_exponential(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """log E with E ~ Exp(1), [rows, *shape], on the streams' device."""
        rows = [torch.rand(shape, generator=each, dtype=dtype, device=self.device) for each in self._noise]
        return _inside(torch.stack(rows)).log_().neg_().log_()

    def select(self, rows: Sequence[int] | Tensor) -> RowDraws:
        """The streams of some rows; they are shared with, not copied from, this object."""
        picked = RowDraws([])
        picked.device = self.device
        picked._generators = [self._generators[int(row)] for row in rows]
        picked._noise = [self._noise[int(row)] for row in rows]
        return picked


def _inside(uniform: Tensor) -> Tensor:
    """Away from 0 and 1, so that a logarithm is always finite."""
    return uniform.clamp_(torch.finfo(uniform.dtype).tiny, 1.0 - torch.finfo(uniform.dtype).eps / 2)
