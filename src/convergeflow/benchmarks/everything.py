"""One run that says how fast this package is here: head, sampling and training, against the plain transcription.

On a CPU these are the contests of `head.py`, `sample.py` and `train.py`, against the yardstick as it stands. On an
accelerator the plain side runs in the published code's own formats (bfloat16 trunk, TF32 kernel, float64 logits), and
the clock waits for the device. The machine's own rates are measured in the same run; the roofline at these rates is
beside every figure, and the verdict says in a line each what was reached. The record is made to be sent to others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from convergeflow.benchmarks import head, measure, roofline, sample, train
from convergeflow.benchmarks.models import SIZES, Size
from convergeflow.benchmarks.published import PublishedModel, tf32
from convergeflow.device import choose_device, memory_of, name_of, peak_bytes, precision_of, wait_for
from convergeflow.model import fused

DEVICE_BATCH = 16
"""Sequences per pass of sampling on an accelerator, if its memory allows."""
DEVICE_TRAIN_BATCH = 12
BYTES_PER_SEQUENCE = {"sample": 4 << 30, "train": 3 << 30}
"""Of the paper's size, with all logits, as the plain side has them: batches are as large as it can take."""
GEMM_SIDE = 4096
POINTS = 2


def run(device_name: str, size_name: str, repeats: int = 3) -> dict[str, Any]:
    """Everything on one device."""
    device = choose_device(device_name).device
    size, shape = SIZES[size_name], head.SHAPES[size_name]
    if device.type == "cpu":
        chip = _cpu_chip()
        contests = {
            "head": head.run(shape, repeats),
            "sample": sample.run(size, repeats),
            "train": train.run(size, repeats),
        }
        setting = cpu_setting(size)
    else:
        chip = _device_chip(device)
        size = _fitted(size, device)
        shape = replace(shape, rows=size.sample_batch * size.length)
        contests = on_device(size, shape, device, repeats)
        setting = _setting(size)
    compared = compare(contests, setting, chip)
    return {
        "verdict": verdict(compared),
        "compared": compared,
        "device": name_of(device),
        "precision": precision_of(device).described(),
        "rates": {"name": chip.name, "gemm": _rates(chip), "memory_bytes_per_second": chip.memory},
        "contests": contests,
        "machine": measure.machine(),
    }


def cpu_setting(size: Size) -> roofline.Workload:
    """What the contests do on a CPU."""
    rows = size.train_batch * size.length
    kept = min(1.0, fused.kept_bytes(rows, size.vocabulary) / (4 * rows * size.vocabulary))
    return replace(_setting(size), kept=kept, half=False)


def _setting(size: Size) -> roofline.Workload:
    """What the contests do on a device."""
    return roofline.Workload(
        size,
        batch=size.sample_batch,
        calls_per_point=sample.CALLS_PER_POINT,
        train_batch=size.train_batch,
        sequences_per_update=size.train_batch,
        self_condition=size.self_condition,
    )


def compare(
    contests: Mapping[str, Mapping[str, Any]], setting: roofline.Workload, chip: roofline.Chip
) -> dict[str, dict[str, float]]:
    """Seconds of ours and of plain beside the roofline's, for each contest."""
    size = setting.size
    rows = {"sample": size.sample_batch * size.length, "train": size.train_batch * size.length}
    measured = {
        "head": (contests["head"]["seconds"], "fused", "plain_float64", contests["head"]["shape"]["rows"]),
        "sample": (contests["sample"]["seconds_per_call"], "shared", "plain", rows["sample"]),
        "train": (contests["train"]["seconds_per_step"], "ours", "plain", rows["train"]),
    }
    parts = {"head": roofline.head, "sample": roofline.sampling, "train": roofline.training}
    compared = {}
    for what, (seconds, ours, plain, count) in measured.items():
        bound = roofline.seconds(parts[what](setting), chip) * count
        compared[what] = {
            "seconds": seconds[ours],
            "plain_seconds": seconds[plain],
            "speedup": seconds[plain] / seconds[ours],
            "us_per_token": seconds[ours] / count * 1e6,
            "roofline_seconds": bound,
            "share_of_roofline": bound / seconds[ours],
        }
    return compared


def verdict(compared: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A line for each contest."""
    lines = []
    for what, found in compared.items():
        faster = "faster than" if found["speedup"] >= 1 else "SLOWER than"
        reached = found["share_of_roofline"]
        bound = "meets the roofline" if reached >= 0.8 else "below the roofline" if reached >= 0.5 else "FAR below it"
        lines.append(
            f"{what}: {found['us_per_token']:.3g} us per token, {found['speedup']:.2f}x of plain ({faster} it), "
            f"{reached:.0%} of the roofline's speed ({bound})"
        )
    return lines


def on_device(size: Size, shape: head.HeadSize, device: torch.device, repeats: int) -> dict[str, dict[str, Any]]:
    """The three contests with the plain side in the published code's formats."""
    return {
        "head": _device_head(shape, device, repeats),
        "sample": _device_sample(size, device, repeats),
        "train": _device_train(size, device, repeats),
    }


class PublishedCase(head.Case):
    """The operands of a head on a device, and the published way to run it: bfloat16, TF32 and float64 logits."""

    def __init__(self, shape: head.HeadSize, device: torch.device) -> None:
        super().__init__(shape)
        for name in ("h", "weight", "bias", "table", "x", "kernel", "pull"):
            setattr(self, name, getattr(self, name).to(device))

    def _plain(self, kernel: Tensor) -> Tensor:
        with torch.autocast(self.h.device.type, dtype=torch.bfloat16):
            base = functional.linear(self.h, self.weight, self.bias)
        with tf32():
            logits = base + kernel[:, None] * (self.x @ self.table.T)
            return functional.softmax(logits.float(), dim=-1) @ self.table


@torch.no_grad()
def _device_head(shape: head.HeadSize, device: torch.device, repeats: int) -> dict[str, Any]:
    case = PublishedCase(shape, device)
    taken, memory = _timed(case.named(), device, repeats)
    return {
        "shape": vars(shape),
        "seconds": taken,
        "peak_mb": memory,
        "value_error": case.error(case.fused()),
        "plain_value_error": case.error(case.plain_float64()),
    }


def _device_sample(size: Size, device: torch.device, repeats: int) -> dict[str, Any]:
    contest = sample.Contest(size, POINTS, PublishedModel, device)
    tokens: dict[str, Tensor] = {}
    cases = {name: _remembering(tokens, name, call) for name, call in contest.named().items()}
    taken, memory = _timed(cases, device, repeats)
    calls = sample.CALLS_PER_POINT * POINTS
    return {
        "size": vars(size),
        "calls": calls,
        "seconds_per_call": {name: value / calls for name, value in taken.items()},
        "ms_per_sequence_and_call": taken["shared"] / calls / size.sample_batch * 1e3,
        "peak_mb": memory,
        # Formats differ, so tokens of random weights may: this is no check.
        "token_agreement": {name: float((ids == tokens["plain"]).double().mean()) for name, ids in tokens.items()},
    }


def _device_train(size: Size, device: torch.device, repeats: int) -> dict[str, Any]:
    ours, rival = train.Ours(size, device=device), train.Plain(size, PublishedModel, device)
    losses: dict[str, Any] = {}
    cases = {"plain": _remembering(losses, "plain", rival.step), "ours": _remembering(losses, "ours", ours.step)}
    taken, memory = _timed(cases, device, repeats)
    return {
        "size": vars(size),
        "seconds_per_step": taken,
        "us_per_token": taken["ours"] / (size.train_batch * size.length) * 1e6,
        "peak_mb": memory,
        "loss": losses,
    }


def _remembering(kept: dict[str, Any], name: str, call: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        kept[name] = call()

    return run


def _timed(
    cases: Mapping[str, Callable[[], Any]], device: torch.device, repeats: int
) -> tuple[dict[str, float], dict[str, float | None]]:
    """Median seconds of each case with the device's work done, in turns; and the memory of one run of it, MB."""

    def waiting(call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            call()
            wait_for(device)

        return run

    memory = {}
    for name, call in cases.items():
        peak_bytes(device, reset=True)
        waiting(call)()
        peak = peak_bytes(device)
        memory[name] = None if peak is None else peak / 2**20
    taken = measure.alternate({name: waiting(call) for name, call in cases.items()}, repeats)
    return taken.wall, memory


def _fitted(size: Size, device: torch.device) -> Size:
    """The size with batches that the plain side, which holds all logits, can take; a smaller size keeps its own."""
    if size.vocabulary * size.length < SIZES["paper"].vocabulary * SIZES["paper"].length:
        return size
    free = memory_of(device).free
    return replace(
        size,
        sample_batch=max(1, min(DEVICE_BATCH, free // BYTES_PER_SEQUENCE["sample"])),
        train_batch=max(1, min(DEVICE_TRAIN_BATCH, free // BYTES_PER_SEQUENCE["train"])),
        self_condition=0.25,
    )


def _cpu_chip() -> roofline.Chip:
    taken = measure.alternate({measure.GEMM: measure.gemm_case()}, repeats=3)
    rate = measure.gemm_rate(taken.wall[measure.GEMM])
    return roofline.Chip("this CPU", rate, rate, rate, _copy_rate(torch.device("cpu"), 64 << 20))


def _device_chip(device: torch.device) -> roofline.Chip:
    """What this device does in the library's own products and copies; our kernels are set against the former."""
    rates = {}
    for name, dtype, precision in (
        ("bf16", torch.bfloat16, "highest"),
        ("tf32", torch.float32, "high"),
        ("float32", torch.float32, "highest"),
    ):
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        try:
            rates[name] = _gemm_rate(device, dtype)
        finally:
            torch.set_float32_matmul_precision(before)
    reached = roofline.REACHED
    return roofline.Chip(
        name_of(device),
        **rates,
        memory=_copy_rate(device, 512 << 20),
        written=reached["written"] / reached["library"],
        trunk=reached["trunk"] / reached["library"],
    )


def _gemm_rate(device: torch.device, dtype: torch.dtype) -> float:
    left, right = (torch.randn(GEMM_SIDE, GEMM_SIDE, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * GEMM_SIDE**3 / _seconds(lambda: left @ right, device)


def _copy_rate(device: torch.device, size: int) -> float:
    """Bytes read and written per second."""
    source = torch.zeros(size // 4, device=device)
    target = torch.empty_like(source)
    return 2.0 * size / _seconds(lambda: target.copy_(source), device)


def _seconds(call: Callable[[], Any], device: torch.device, rounds: int = 10) -> float:
    for _ in range(2):
        call()
    wait_for(device)
    start = time.perf_counter()
    for _ in range(rounds):
        call()
    wait_for(device)
    return (time.perf_counter() - start) / rounds


def _rates(chip: roofline.Chip) -> dict[str, float]:
    return {name: getattr(chip, name) / 1e12 for name in ("bf16", "tf32", "float32")}
