"""What making samples will take, before it begins: a request that this machine cannot hold is refused with the sum."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil

from convergeflow.errors import UserError
from convergeflow.systems.generation import check_length
from convergeflow.systems.protocol import LanguageModel

LINE_BYTES = 600
"""A line of a sample file without its ids, at least."""


def check_request(model: LanguageModel, num: int, length: int, size: int, file: Path | None = None) -> None:
    """Refuse what needs more memory, or more space for its `file`, than there is; `size` samples share a call."""
    if num < 1 or length < 1:
        raise UserError("the number of samples and their length must be at least 1")
    check_length(model, length)
    vocabulary, width = int(model.config.vocabulary), int(model.config.width)
    size = min(size, num)
    held = size * length * (4 * vocabulary + 8 * 6 * width)
    kept = 0 if file is not None else num * length * 4 * 8
    there = psutil.virtual_memory().available
    if model.device.type == "cpu" and held + kept > there:
        fix = "lower `batch`" if held > kept else "lower `num`, or write to a file"
        raise UserError(
            f"{num:,} samples of {length:,} tokens, {size:,} at once, need about {amount(held + kept)} of memory, and "
            f"{amount(there)} are free: {fix}"
        )
    if file is not None:
        written = num * (LINE_BYTES + 4 * length)
        free = shutil.disk_usage(file.parent if file.parent.is_dir() else ".").free
        if written > free:
            raise UserError(
                f"{num:,} samples of {length:,} tokens need about {amount(written)} on the disk, and "
                f"{amount(free)} are free: lower `num`"
            )


def amount(number: float) -> str:
    """Bytes as people say them."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} PB"
