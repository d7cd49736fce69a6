"""Arithmetic in place of a GPU: how long the parts of a network call and of a training step take at a chip's rates.

A part is so many FLOPs in a format and so many bytes to and from memory; it takes the longer of the two times at the
rate that code of its kind reaches. What a kind reaches is an assumption, written below; a range of them is in every
prediction. The same arithmetic with this machine's own rates is held against its measured seconds
(`tests/benchmarks/test_roofline.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from convergeflow.benchmarks import measure
from convergeflow.benchmarks.models import SIZES, Size


@dataclass(frozen=True)
class Chip:
    """FLOP/s of matrix products by format, and bytes/s of memory; then the share of them that kinds of code reach."""

    name: str
    bf16: float
    tf32: float
    float32: float
    memory: float
    library: float = 1.0
    """Matrix products of the vendor's library, at these shapes."""
    written: float = 1.0
    """Our kernels: products with an epilogue that is only partly hidden behind them."""
    trunk: float = 1.0
    """Layers with everything between their products."""
    streaming: float = 1.0
    """Passes over memory."""

    def rate(self, format: str) -> float:
        """FLOP/s; tf32x3 is three products for one."""
        return self.tf32 / 3 if format == "tf32x3" else float(getattr(self, format))


REACHED = {"library": 0.7, "written": 0.6, "trunk": 0.5, "streaming": 0.8}
"""Assumed for a GPU: what is usually measured for bfloat16 products of this size, and a trunk at half of peak."""
CHIPS = {
    "A100": Chip("A100 40 GB", 312e12, 156e12, 19.5e12, 1.5e12, **REACHED),
    "H100": Chip("H100 SXM", 989e12, 494e12, 67e12, 3.35e12, **REACHED),
}


@dataclass(frozen=True)
class Part:
    """One piece of work, per token."""

    name: str
    flops: float = 0.0
    format: str = "float32"
    kind: str = "library"
    bytes: float = 0.0

    def seconds(self, chip: Chip) -> float:
        arithmetic = self.flops / (chip.rate(self.format) * getattr(chip, self.kind)) if self.flops else 0.0
        return max(arithmetic, self.bytes / (chip.memory * chip.streaming))

    def times(self, factor: float) -> Part:
        return replace(self, flops=self.flops * factor, bytes=self.bytes * factor)


@dataclass(frozen=True)
class Workload:
    """What is predicted: a size, sequences per pass, and how often a grid point's scores are used."""

    size: Size
    batch: int = 16
    calls_per_point: float = 64 / 7
    """The headline: 64 calls on 7 points."""
    train_batch: int = 12
    sequences_per_update: int = 60
    """480 on eight GPUs."""
    self_condition: float = 0.25
    kept: float = 1.0
    """The share of weights that stay for the backward pass; the rest is made again."""
    half: bool = True
    """Half-precision operands, and tiles in device memory; otherwise a CPU: float32, and tiles in its cache."""

    @property
    def product(self) -> float:
        """FLOPs of one product with the vocabulary."""
        return measure.head_flops(1, self.size.width, self.size.vocabulary, products=1)

    @property
    def trunk(self) -> float:
        return measure.trunk_flops(1, self.size.length, self.size.width, self.size.depth)

    @property
    def weights(self) -> float:
        """Trained parameters: trunk and head (the table is frozen)."""
        return self.size.depth * 12 * self.size.width**2 + self.size.vocabulary * self.size.width

    def cells(self, bytes_each: float) -> float:
        """Bytes per token of passes over rows x vocabulary; a CPU's tiles never leave its cache."""
        return bytes_each * self.size.vocabulary if self.half else 0.0

    def tables(self, bytes_each: float, batch: int) -> float:
        """Bytes per token of passes over a table as large as the head."""
        return bytes_each * self.size.vocabulary * self.size.width / (batch * self.size.length)


def sampling(setting: Workload) -> list[Part]:
    """A call of our network and head, with the kernel scores of a grid point shared by its calls."""
    half, product = setting.half, setting.product
    low, exact = ("bf16", "tf32x3") if half else ("float32", "float32")
    once = 1 / setting.calls_per_point
    return [
        Part("trunk", setting.trunk, low, "trunk"),
        # Reads the scores, writes the weights.
        Part("base logits and softmax", product, low, "written", setting.cells(4 + 2)),
        Part("parts whose peak rose", bytes=setting.cells(4 * _rescaled(setting, setting.batch))),
        Part("kernel scores, once per point", product, exact, "written", setting.cells(4)).times(once),
        Part("mean", product, low, "library", setting.cells(2)),
        Part("half-precision tables", bytes=setting.tables(2 * (4 + 2), setting.batch) if half else 0.0),
        # To float64, guided, and back to float32.
        Part("state", bytes=48.0 * setting.size.width),
    ]


def training(setting: Workload) -> list[Part]:
    """A token of a training step with a frozen table; weights are kept for the backward pass."""
    half, product, batch = setting.half, setting.product, setting.train_batch
    low, exact = ("bf16", "tf32x3") if half else ("float32", "float32")
    forward = [
        Part("trunk", setting.trunk, low, "trunk"),
        Part("kernel term", product, exact, "written"),
        Part("base logits and softmax", product, low, "written", setting.cells(2)),
        Part("parts whose peak rose", bytes=setting.cells(4 * _rescaled(setting, batch))),
        Part("mean", product, low, "library", setting.cells(2)),
        Part("half-precision tables", bytes=setting.tables(2 * (4 + 2), batch) if half else 0.0),
    ]
    updates = setting.weights / (setting.sequences_per_update * setting.size.length)
    return [
        *forward,
        *(replace(part.times(setting.self_condition), name=f"first pass: {part.name}") for part in forward),
        Part("trunk, backward", 2 * setting.trunk, low, "trunk"),
        Part("kernel term, made again", (1 - setting.kept) * product, exact, "written"),
        Part("base logits, made again", (1 - setting.kept) * product, low, "written"),
        Part("change of the logits", product, low, "written", setting.cells(2 + 2)),
        Part("gradients of h and W", 2 * product, low, "library", setting.cells(2 + 2)),
        Part("gradient of the bias", bytes=setting.cells(2)),
        Part("half-precision tables, backward", bytes=setting.tables(2 * (4 + 2), batch) if half else 0.0),
        # AdamW reads and writes weight and moments and reads the gradient; the average is read and written.
        Part("optimizer and average", bytes=(7 + 3) * 4 * updates),
        Part("noise, state and loss", bytes=10 * 4.0 * setting.size.width),
    ]


def published_sampling(setting: Workload) -> list[Part]:
    """The same call as the published code makes it: bfloat16 trunk, TF32 kernel and mean, float64 logits."""
    product = setting.product
    return [
        Part("trunk", setting.trunk, "bf16", "trunk"),
        Part("base logits", product, "bf16", "library", setting.cells(2)),
        Part("kernel", product, "tf32", "library", setting.cells(4)),
        Part("times the noise level, to float64", bytes=setting.cells(4 + 8)),
        Part("sum, float64", bytes=setting.cells(2 + 8 + 8)),
        Part("to float32", bytes=setting.cells(8 + 4)),
        Part("softmax", bytes=setting.cells(4 + 4 + 4)),
        Part("mean", product, "tf32", "library", setting.cells(4)),
        # Norm, division and scale, for the kernel and again for the mean.
        Part("normalised table, twice", bytes=setting.tables(2 * 5 * 4, setting.batch)),
        Part("state", bytes=48.0 * setting.size.width),
    ]


def published_training(setting: Workload) -> list[Part]:
    """A token of a training step as the published code makes it; all logits exist."""
    product, batch = setting.product, setting.train_batch
    forward = [
        Part("trunk", setting.trunk, "bf16", "trunk"),
        Part("base logits", product, "bf16", "library", setting.cells(2)),
        Part("kernel", product, "tf32", "library", setting.cells(4)),
        Part("times the noise level, sum", bytes=setting.cells(4 + 4 + 2 + 4 + 4)),
        Part("softmax", bytes=setting.cells(4 + 4 + 4)),
        Part("mean", product, "tf32", "library", setting.cells(4)),
        Part("normalised table, twice", bytes=setting.tables(2 * 5 * 4, batch)),
    ]
    updates = setting.weights / (setting.sequences_per_update * setting.size.length)
    return [
        *forward,
        *(replace(part.times(setting.self_condition), name=f"first pass: {part.name}") for part in forward),
        Part("trunk, backward", 2 * setting.trunk, "bf16", "trunk"),
        Part("gradient of the weights", product, "tf32", "library", setting.cells(4)),
        Part("softmax, backward", bytes=setting.cells(4 + 4 + 4)),
        Part("to bfloat16", bytes=setting.cells(4 + 2)),
        Part("gradients of h and W", 2 * product, "bf16", "library", setting.cells(2 + 2)),
        Part("gradient of the bias", bytes=setting.cells(2)),
        Part("optimizer and average", bytes=(7 + 3) * 4 * updates),
        Part("noise, state and loss", bytes=10 * 4.0 * setting.size.width),
    ]


def head(setting: Workload) -> list[Part]:
    """Our head alone, nothing shared."""
    parts = ("kernel term", "base logits and softmax", "parts whose peak rose", "mean", "half-precision tables")
    return [part for part in training(setting) if part.name in parts]


def _rescaled(setting: Workload, batch: int) -> float:
    """The share of cells that are scaled down once more: the first tile, and tiles in which a row's peak rises.

    The peak of a row lies in any of its tiles with the same probability, so it rises in the k-th with 1/k.
    """
    tokens = (256 << 20) // (2 * batch * setting.size.length) // 1024 * 1024
    tiles = -(-setting.size.vocabulary // max(1024, tokens))
    return sum(1 / k for k in range(1, tiles + 1)) / tiles


def seconds(parts: Iterable[Part], chip: Chip) -> float:
    """Per token."""
    return sum(part.seconds(chip) for part in parts)


GOALS = {"sampling_ms_per_sequence_and_call": 2.6, "training_us_per_token": 10.0}
"""On an A100 at the paper's size."""


def predict(chip: Chip, setting: Workload) -> dict[str, Any]:
    """Times of ours and of the published code, part by part, and how they move with what our kernels reach."""
    tokens = setting.size.length
    ours, theirs = sampling(setting), published_sampling(setting)
    learn, learn_theirs = training(setting), published_training(setting)
    return {
        "chip": chip.name,
        "assumed": {name: getattr(chip, name) for name in REACHED},
        "sampling_ms_per_sequence_and_call": seconds(ours, chip) * tokens * 1e3,
        "published_sampling_ms_per_sequence_and_call": seconds(theirs, chip) * tokens * 1e3,
        "training_us_per_token": seconds(learn, chip) * 1e6,
        "published_training_us_per_token": seconds(learn_theirs, chip) * 1e6,
        "if_our_kernels_reach": {
            str(share): {
                "sampling_ms_per_sequence_and_call": seconds(ours, replace(chip, written=share)) * tokens * 1e3,
                "training_us_per_token": seconds(learn, replace(chip, written=share)) * 1e6,
            }
            for share in (0.4, 0.5, 0.6, 0.7)
        },
        "us_per_token": {
            "sampling": _table(ours, chip),
            "published_sampling": _table(theirs, chip),
            "training": _table(learn, chip),
            "published_training": _table(learn_theirs, chip),
        },
    }


def _table(parts: Sequence[Part], chip: Chip) -> dict[str, float]:
    return {part.name: round(part.seconds(chip) * 1e6, 3) for part in parts if part.flops or part.bytes}


def run() -> dict[str, Any]:
    """The paper's size on the chips that we know, with the goals and whether the A100 meets them."""
    predictions = {name: predict(chip, Workload(SIZES["paper"])) for name, chip in CHIPS.items()}
    return {
        "goals": GOALS,
        "met": {name: predictions["A100"][name] <= bound for name, bound in GOALS.items()},
        "predictions": predictions,
    }
