"""How the ratios move with length, vocabulary, batch and threads: one axis at a time around a small middle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from convergeflow.benchmarks import head, measure, sample, train
from convergeflow.benchmarks.models import SIZES, Size


def head_points(middle: head.Shape = head.SHAPES["small"], repeats: int = 3) -> list[dict[str, Any]]:
    """The head, forward, along rows (length x batch), vocabulary and threads."""
    points = []
    for axis, value, shape, threads in _head_axes(middle):
        with _threads(threads):
            case = head.Case(shape)
            contestants = {name: case.named()[name] for name in ("plain_float64", "plain_float32", "fused")}
            with torch.no_grad():
                points.append(_point(axis, value, contestants, repeats))
    return points


def _head_axes(middle: head.Shape) -> Iterator[tuple[str, int, head.Shape, int]]:
    present = torch.get_num_threads()
    for rows in (128, 512, 2048, 8192):
        yield "length x batch", rows, replace(middle, rows=rows), present
    for vocabulary in (512, 2048, 8192, 50257):
        yield "vocabulary", vocabulary, replace(middle, vocabulary=vocabulary), present
    for threads in _thread_counts(present):
        yield "threads", threads, middle, threads


def sample_points(middle: Size = SIZES["small"], repeats: int = 3) -> list[dict[str, Any]]:
    """Sampling, one grid point, along batch, length, vocabulary and threads."""
    points = []
    for axis, value, size, threads in _model_axes(middle, "sample_batch"):
        with _threads(threads):
            contest = sample.Contest(size, points=1)
            points.append(_point(axis, value, contest.named(), repeats))
    return points


def train_points(middle: Size = SIZES["small"], repeats: int = 3) -> list[dict[str, Any]]:
    """Training steps along batch, length, vocabulary and threads."""
    points = []
    for axis, value, size, threads in _model_axes(middle, "train_batch"):
        with _threads(threads):
            cases = {"plain": train.Plain(size).step, "ours": train.Ours(size).step}
            points.append(_point(axis, value, cases, repeats))
    return points


def _model_axes(middle: Size, batch: str) -> Iterator[tuple[str, int, Size, int]]:
    present = torch.get_num_threads()
    middle = middle.changed(**{batch: 4})
    for count in (1, 4, 16):
        yield "batch", count, middle.changed(**{batch: count}), present
    for length in (64, 256, 1024):
        yield "length", length, middle.changed(length=length, **{batch: 1}), present
    for vocabulary in (512, 8192, 50257):
        yield "vocabulary", vocabulary, middle.changed(vocabulary=vocabulary), present
    for threads in _thread_counts(present):
        yield "threads", threads, middle, threads


def _thread_counts(most: int) -> list[int]:
    counts = [1]
    while counts[-1] * 2 <= most:
        counts.append(counts[-1] * 2)
    return counts


def _point(axis: str, value: int, cases: dict[str, Any], repeats: int) -> dict[str, Any]:
    times = measure.alternate(cases, repeats)
    return {"axis": axis, "value": value, "seconds": times.wall, "processor_seconds": times.processor}


class _threads:
    """A number of threads for a while."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __enter__(self) -> None:
        self.before = torch.get_num_threads()
        torch.set_num_threads(self.count)

    def __exit__(self, *failure: object) -> None:
        torch.set_num_threads(self.before)
