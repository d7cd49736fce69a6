"""The plain transcription in the formats of the published code on a GPU, for contests there.

bfloat16 trunk and base logits, TF32 products with the table, float64 logits in sampling; `plain.py` has the method. It
makes its constants on the default device, so everything here runs inside `torch.device(...)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from convergeflow.benchmarks.plain import PlainModel


class PublishedModel(PlainModel):
    """The plain network under autocast, with its products with the table outside of it."""

    def logits(self, x: Tensor, gamma: Tensor, condition: Tensor | None, training: bool = False) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            hidden = self._trunk(x, gamma, condition, training)
            base = functional.linear(hidden, self.weights["head.weight"], self.weights["head.bias"])
        kernel = torch.exp((functional.softplus(-gamma) - gamma) / 2)
        with tf32():
            return base + kernel[:, None, None] * (x @ self.table().T)

    def mean(self, logits: Tensor) -> Tensor:
        with tf32():
            return super().mean(logits)


@contextmanager
def tf32() -> Iterator[None]:
    """float32 products on tensor cores, with ten bits of their operands, where the device can."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
