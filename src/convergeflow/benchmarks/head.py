"""The vocabulary head alone: fused against plain, forward and forward + backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from convergeflow.benchmarks import measure
from convergeflow.model import fused


@dataclass(frozen=True)
class HeadSize:
    """Positions, width and vocabulary."""

    rows: int
    width: int
    vocabulary: int


SHAPES = {"small": HeadSize(2048, 256, 8192), "paper": HeadSize(1024, 768, 50257)}


class Case:
    """The operands of a head and the ways to run it."""

    def __init__(self, shape: HeadSize) -> None:
        rng = torch.Generator().manual_seed(0)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=rng)

        self.shape = shape
        self.h = normal(shape.rows, shape.width)
        self.weight = normal(shape.vocabulary, shape.width) * shape.width**-0.5
        self.bias = normal(shape.vocabulary) * 0.1
        self.table = functional.normalize(normal(shape.vocabulary, shape.width), dim=-1) * shape.width**0.5
        # Noise levels across the whole schedule, from nearly uniform weights to nearly one-hot ones.
        tokens = torch.randint(shape.vocabulary, (shape.rows,), generator=rng)
        gamma = torch.linspace(2.6, 12.0, shape.rows, dtype=torch.float64)
        alpha, sigma = torch.sigmoid(-gamma).sqrt(), torch.sigmoid(gamma).sqrt()
        self.x = alpha[:, None].float() * self.table[tokens] + sigma[:, None].float() * normal(shape.rows, shape.width)
        self.kernel = alpha / sigma**2
        self.pull = normal(shape.rows, shape.width)

    def fused(self) -> Tensor:
        return fused.weigh(self.h, self.weight, self.bias, self.x, self.kernel, self.table).mu

    def plain_float64(self) -> Tensor:
        return self._plain(self.kernel)

    def plain_float32(self) -> Tensor:
        return self._plain(self.kernel.float())

    @torch.no_grad()
    def error(self, mu: Tensor, rows: int = 64) -> float:
        """Against float64 throughout, on the first rows: the plain float64 logits are products of float32."""
        h, weight, bias, x, kernel, table = (
            part.double()
            for part in (self.h[:rows], self.weight, self.bias, self.x[:rows], self.kernel[:rows], self.table)
        )
        logits = functional.linear(h, weight, bias) + kernel[:, None] * (x @ table.T)
        return _relative(mu[:rows].double(), logits.softmax(-1) @ table)

    def _plain(self, kernel: Tensor) -> Tensor:
        logits = functional.linear(self.h, self.weight, self.bias) + kernel[:, None] * (self.x @ self.table.T)
        return functional.softmax(logits.float(), dim=-1) @ self.table

    def learn(self, forward: Callable[[], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients for h, weight and bias, as in training with a frozen table."""
        leaves = (self.h, self.weight, self.bias)
        for leaf in leaves:
            leaf.requires_grad_()
        try:
            with torch.enable_grad():
                return torch.autograd.grad(forward(), leaves, self.pull)  # type: ignore[return-value]
        finally:
            for leaf in leaves:
                leaf.requires_grad_(False)

    def named(self) -> dict[str, Callable[[], Any]]:
        """Every contestant by name."""
        return {
            "plain_float64": self.plain_float64,
            "plain_float32": self.plain_float32,
            "fused": self.fused,
            "train_plain": lambda: self.learn(self.plain_float32),
            "train_fused": lambda: self.learn(self.fused),
        }


@torch.no_grad()
def run(shape: HeadSize, repeats: int = 5) -> dict[str, Any]:
    """Times, memory and accuracy of one shape."""
    case = Case(shape)
    cases = case.named()
    time, processor = measure.alternate({**cases, measure.GEMM: measure.gemm_case()}, repeats)
    extra = {name: measure.in_fresh_process("head", shape=vars(shape), contestant=name)["extra_mb"] for name in cases}
    peak, processor_peak = measure.gemm_rate(time[measure.GEMM]), measure.gemm_rate(processor[measure.GEMM])
    flops = measure.head_flops(shape.rows, shape.width, shape.vocabulary)
    # Beyond the gradient of the weights, which both must return.
    beyond = {name: extra[name] - case.weight.numel() * 4 / 2**20 for name in ("train_fused", "train_plain")}
    gradients = zip(case.learn(case.fused), case.learn(case.plain_float32), strict=True)
    return {
        "shape": vars(shape),
        "speedup_vs_plain_float64": time["plain_float64"] / time["fused"],
        "speedup_vs_plain_float32": time["plain_float32"] / time["fused"],
        "extra_mb": extra["fused"],
        "plain_extra_mb": extra["plain_float32"],
        "plain_float64_extra_mb": extra["plain_float64"],
        "gemm_peak_fraction": measure.fraction_of_peak(flops, time, "fused"),
        "processor_gemm_peak_fraction": measure.fraction_of_peak(flops, processor, "fused"),
        # No head that does these products can be faster than this: what the plain one takes over a bare GEMM.
        "roofline_vs_plain_float64": processor["plain_float64"] * processor_peak / flops,
        "roofline_vs_plain_float32": processor["plain_float32"] * processor_peak / flops,
        "gemm_gflops": peak / 1e9,
        "value_error": case.error(case.fused()),
        "plain_value_error": case.error(case.plain_float64()),
        "train_speedup_vs_plain": time["train_plain"] / time["train_fused"],
        "train_extra_mb": beyond["train_fused"],
        "plain_train_extra_mb": beyond["train_plain"],
        "train_gemm_peak_fraction": measure.fraction_of_peak(training_flops(shape), time, "train_fused"),
        "gradient_error": max(_relative(*pair) for pair in gradients),
        "seconds": time,
        "processor_seconds": processor,
        "repeats": repeats,
        "machine": measure.machine(),
    }


def training_flops(shape: HeadSize) -> float:
    """Forward 3, backward 3, and 2 more for every tile that is made again instead of kept."""
    kept = min(1.0, fused.kept_bytes(shape.rows, shape.vocabulary) / (4 * shape.rows * shape.vocabulary))
    return (6 + 2 * (1 - kept)) * measure.head_flops(shape.rows, shape.width, shape.vocabulary, products=1)


def _relative(found: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())


@torch.no_grad()
def memory(shape: dict[str, int], contestant: str) -> dict[str, float]:
    """Memory that one run needs beyond its operands (called in a fresh process)."""
    tiny = Case(HeadSize(8, shape["width"], 64))
    tiny.named()[contestant]()  # loads libraries and starts threads
    case = Case(HeadSize(**shape))
    with measure.PeakMemory() as watch:
        case.named()[contestant]()
    return {"extra_mb": watch.extra}
