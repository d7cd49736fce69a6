"""Files of samples: one JSON object per line with seed, ids, text and how it was made.

Samples are made in fixed micro-batches of the seed list, so that neither a restart nor the number of processes changes
a batch's shape, and with it a single bit. A batch is appended and forced to the disk at once; what a kill tore off is
cut away, and the run goes on with the first seed that is missing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from convergeflow import files
from convergeflow.errors import UserError
from convergeflow.sampling.integration import batches
from convergeflow.systems.protocol import Samples


def lines_of(samples: Samples, model: str) -> list[dict[str, Any]]:
    """One JSON object per sample."""
    calls = samples.extras.get("calls")
    return [
        {
            "seed": seed,
            "ids": samples.ids[i].tolist(),
            "text": None if samples.texts is None else samples.texts[i],
            "nfe": samples.nfe if calls is None else int(calls[i]),
            "model": model,
            "settings": samples.settings,
        }
        for i, seed in enumerate(samples.seeds)
    ]


def read_samples(path: str | Path) -> list[dict[str, Any]]:
    """All samples of a file; a line that is not one is refused by number."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} does not exist: give a JSONL file of samples, as `convergeflow generate` writes")
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            value = json.loads(line)
            ids = value["ids"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}, line {number}: not a sample (a JSON object with `ids`)") from None
        if not ids or not all(isinstance(token, int) and token >= 0 for token in ids):
            raise UserError(f"{path}, line {number}: `ids` must be a non-empty list of token ids")
        found.append(value)
    if not found:
        raise UserError(f"{path} holds no samples")
    return found


def cut_torn_end(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may end in a torn one, which is cut off."""
    if not path.is_file():
        return []
    data = path.read_bytes()
    opening = b'{"seed"'
    if data[: len(opening)] != opening[: len(data)]:
        raise UserError(f"{path} is not a sample file: give another `out`, it would be overwritten")
    whole, kept = [], 0
    for line in data.splitlines(keepends=True):
        try:
            value = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            value = None
        if not isinstance(value, dict) or "seed" not in value:
            break
        whole.append(value)
        kept += len(line)
    if kept < len(data):
        with open(path, "r+b") as file:
            file.truncate(kept)
    return whole


def append(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Add lines and force them to the disk."""
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    with open(path, "ab") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def collect(
    path: Path,
    seeds: Sequence[int],
    size: int,
    make: Callable[[Sequence[int]], Samples],
    model: str,
    *,
    rank: int = 0,
    world: int = 1,
    on_batch: Callable[[int], None] = lambda done: None,
) -> int:
    """Fill a file with the samples of `seeds` in micro-batches of `size`; returns how many were made now.

    Process `rank` of `world` makes every world-th batch into a part file of its own; see `merge`.
    """
    part = path if world == 1 else part_file(path, rank)
    present = cut_torn_end(part)
    done = {line["seed"] for line in present}
    foreign = done - set(seeds)
    if foreign or any(line["model"] != model for line in present):
        raise UserError(f"{part} holds other samples (another model or other seeds): give a new `out` or delete it")
    made = 0
    for index, where in enumerate(batches(len(seeds), size)):
        if index % world != rank:
            continue
        group = list(seeds[where])
        missing = [seed for seed in group if seed not in done]
        if missing:
            lines = lines_of(make(group), model)
            if present and _how(present[0]) != _how(lines[0]):
                raise UserError(f"{part} was made with other settings: give a new `out` or delete it")
            append(part, [line for line in lines if line["seed"] not in done])
            made += len(missing)
        on_batch(len(group))
    return made


def _how(line: dict[str, Any]) -> str:
    return json.dumps(line["settings"], sort_keys=True)


def part_file(path: Path, rank: int) -> Path:
    """The file of one process."""
    return path.with_name(f"{path.name}.part{rank}")


def merge(path: Path, seeds: Sequence[int], world: int) -> None:
    """Join the part files of all processes in the order of the seeds, and remove them."""
    parts = [part_file(path, rank) for rank in range(world)]
    found = {line["seed"]: line for part in parts for line in cut_torn_end(part)}
    missing = [seed for seed in seeds if seed not in found]
    if missing:
        raise UserError(f"{len(missing)} samples are missing from the part files of {path}: run the command again")
    with files.replacing(path) as draft:
        append(draft, [found[seed] for seed in seeds])
    for part in parts:
        part.unlink(missing_ok=True)
