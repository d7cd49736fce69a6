"""How the times move with length, vocabulary, batch and threads: one axis at a time around a small middle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from convergeflow.benchmarks import head, measure, sample, train
from convergeflow.benchmarks.models import SIZES

REPEATS = 3


def points(what: str) -> list[dict[str, Any]]:
    """Seconds of each contestant of a contest along every axis."""
    found = []
    present = torch.get_num_threads()
    try:
        for axis, value, size in _axes(what):
            torch.set_num_threads(value if axis == "threads" else present)
            with torch.set_grad_enabled(what == "train"):
                wall, processor = measure.alternate(_cases(what, size), REPEATS)
            found.append({"axis": axis, "value": value, "seconds": wall, "processor_seconds": processor})
    finally:
        torch.set_num_threads(present)
    return found


def _axes(what: str) -> Iterator[tuple[str, int, Any]]:
    """(axis, value on it, what is measured there)."""
    middle: Any = head.SHAPES["small"]
    vocabularies: tuple[int, ...] = (512, 2048, 8192, 50257)
    if what == "head":
        for rows in (128, 512, 2048, 8192):
            yield "length x batch", rows, replace(middle, rows=rows)
    else:
        batch = f"{what}_batch"
        middle, vocabularies = replace(SIZES["small"], **{batch: 4}), (512, 8192, 50257)
        for count in (1, 4, 16):
            yield "batch", count, replace(middle, **{batch: count})
        for length in (64, 256, 1024):
            yield "length", length, replace(middle, length=length, **{batch: 1})
    for vocabulary in vocabularies:
        yield "vocabulary", vocabulary, replace(middle, vocabulary=vocabulary)
    for power in range(torch.get_num_threads().bit_length()):
        yield "threads", 2**power, middle


def _cases(what: str, size: Any) -> dict[str, Callable[[], Any]]:
    if what == "head":
        named = head.Case(size).named()
        return {name: named[name] for name in ("plain_float64", "plain_float32", "fused")}
    if what == "sample":
        return dict(sample.Contest(size, points=1).named())
    return {"plain": train.Plain(size).step, "ours": train.Ours(size).step}
