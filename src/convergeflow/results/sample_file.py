"""Files of samples: one JSON object per line with seed, ids, text and how it was made.

Samples are made in fixed micro-batches of the seed list, so that neither a restart nor the number of processes changes
a batch's shape, and with it a single bit. A batch is appended and forced to the disk at once; what a kill tore off is
cut away, and the run goes on with the first seed that is missing. One command at a time writes a file; several
processes of it write parts beside the file, which any number of processes, or one, can finish and join.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import Field, StrictInt, StrictStr
from typing_extensions import TypedDict

from convergeflow import files
from convergeflow.errors import UserError
from convergeflow.sampling.integration import batches
from convergeflow.sampling.settings import Settings
from convergeflow.systems.protocol import LanguageModel, Samples

DEFAULTS = {name: value for name, value in asdict(Settings()).items() if name not in Settings().describe()}
"""Settings that a line leaves out where they change nothing."""

TokenId = Annotated[StrictInt, Field(ge=0, lt=1 << 32)]


class SampleLine(TypedDict):
    """What is read of a line; it may hold more."""

    ids: Annotated[list[TokenId], Field(min_length=1)]
    seed: NotRequired[StrictInt]
    text: NotRequired[StrictStr | None]
    nfe: NotRequired[Annotated[StrictInt, Field(ge=0)]]
    model: NotRequired[StrictStr]
    settings: NotRequired[dict[str, Any]]


class OwnLine(TypedDict):
    """A line that this package wrote."""

    ids: Annotated[list[TokenId], Field(min_length=1)]
    seed: StrictInt
    model: StrictStr
    settings: dict[str, Any]


def lines_of(samples: Samples, model: str) -> list[dict[str, Any]]:
    """One JSON object per sample."""
    calls = samples.extras.get("calls")
    return [
        {
            "seed": seed,
            "ids": samples.ids[i].tolist(),
            "text": None if samples.texts is None else samples.texts[i],
            **({} if samples.marked is None else {"marked": samples.marked[i]}),
            "nfe": samples.nfe if calls is None else int(calls[i]),
            "model": model,
            "settings": samples.settings,
        }
        for i, seed in enumerate(samples.seeds)
    ]


def read_samples(path: str | Path) -> list[dict[str, Any]]:
    """All samples of a file; a line that is not one, or a seed that comes twice, is refused by number."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} does not exist: give a JSONL file of samples, as `convergeflow generate` writes")
    found: list[dict[str, Any]] = []
    seeds: dict[int, int] = {}
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                value = files.parse_json(line, SampleLine)
            except UserError as wrong:
                raise UserError(f"{path}, line {number}: not a sample (a JSON object with `ids`): it {wrong}") from None
            if (seed := value.get("seed")) is not None and seeds.setdefault(seed, number) != number:
                raise UserError(
                    f"{path}, line {number}: seed {seed} is in line {seeds[seed]} too; every sample counts once"
                )
            found.append(value)
    if not found:
        raise UserError(f"{path} holds no samples")
    return found


def whole_lines(path: Path, *, cut: bool = False) -> list[dict[str, Any]]:
    """The whole lines of a file that may end in a torn one, which is cut off if asked; a foreign file is refused."""
    files.check_writable(path)
    if not path.is_file():
        return []
    data = path.read_bytes()
    opening = b'{"seed"'
    if data[: len(opening)] != opening[: len(data)]:
        raise UserError(f"{path} is not a sample file: give another `out`, it would be overwritten")
    whole: list[dict[str, Any]] = []
    kept = 0
    for line in data.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        try:
            whole.append(files.parse_json(line, OwnLine))
        except UserError as wrong:
            # A kill tears the end of a file, never a line in front of others: this was somebody's hand, or the disk.
            raise UserError(
                f"{path}, line {len(whole) + 1} {wrong}: mend or delete it, or give another `out`"
            ) from None
        kept += len(line)
    if cut and kept < len(data):
        os.truncate(path, kept)
    return whole


def append(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Add lines and force them to the disk."""
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    handle = files.open_to_append(path)
    with open(handle, "ab") as file:
        file.write(text.encode(errors="backslashreplace"))
        file.flush()
        os.fsync(file.fileno())


def collect(
    path: Path,
    seeds: Sequence[int],
    size: int,
    make: Callable[[Sequence[int]], Samples],
    model: str,
    *,
    asked: Mapping[str, Any] | None = None,
    rank: int = 0,
    world: int = 1,
    on_batch: Callable[[int], None] = lambda done: None,
) -> int:
    """Fill a file with the samples of `seeds` in micro-batches of `size`; returns how many were made now.

    `asked` are settings that the samples already there must have. Process `rank` of `world` makes every world-th batch
    into a part file of its own; see `merge`. What other processes left in their parts, or one process in the file, is
    not made again.
    """
    alone = world == 1 and not part_files(path)
    part = path if alone else part_file(path, rank)
    present = found(path, seeds, model, asked, cut=part)
    if not part.exists():
        append(part, [])
        files.sync(part.parent)
    made = 0
    for index, where in enumerate(batches(len(seeds), size)):
        if index % world != rank:
            continue
        group = list(seeds[where])
        missing = [seed for seed in group if seed not in present]
        if missing:
            lines = lines_of(make(group), model)
            first = next(iter(present.values()), None)
            if first is not None and (before := _how(first)) != (now := _how(lines[0])):
                name = next(name for name in before | now if before.get(name) != now.get(name))
                how = f"({name} {before.get(name)})"
                raise UserError(f"{part} was made with other settings {how}: give those, a new `out`, or delete it")
            append(part, [line for line in lines if line["seed"] not in present])
            made += len(missing)
        on_batch(len(group))
    if world == 1 and not alone:
        merge(path, seeds)
    return made


def asked_of(model: LanguageModel, options: Mapping[str, Any], length: int) -> dict[str, Any]:
    """What tells samples of these arguments of `model.sample` from others of the same model, as settings say it."""
    settings = options.get("settings")
    own = {name: value for name, value in {**model.controls, **options}.items() if name not in ("settings", "clamp")}
    return {**({} if settings is None else asdict(settings)), **own, "length": length}


def found(
    path: Path, seeds: Sequence[int], model: str, asked: Mapping[str, Any] | None, *, cut: Path | None = None
) -> dict[int, dict[str, Any]]:
    """The samples of a file and its parts by their seeds; a file of something else is refused. `cut` is mended."""
    present: dict[int, dict[str, Any]] = {}
    for file in (path, *part_files(path)):
        own: set[int] = set()
        for line in whole_lines(file, cut=file == cut):
            _check_fits(file, line, seeds, model, asked or {})
            if line["seed"] in own:
                raise UserError(f"{file} holds seed {line['seed']} twice: give a new `out` or delete it")
            own.add(line["seed"])
            present[line["seed"]] = line
    return present


def _check_fits(
    file: Path, line: Mapping[str, Any], seeds: Sequence[int], model: str, asked: Mapping[str, Any]
) -> None:
    """Refuse a file that holds a sample of something else than is asked for now."""
    if line["seed"] not in seeds or line["model"] != model:
        raise UserError(f"{file} holds other samples (another model or other seeds): give a new `out` or delete it")
    settings = {**DEFAULTS, **line["settings"]}
    wanted = json.loads(json.dumps(dict(asked), default=str))
    if differing := [name for name, value in wanted.items() if name in settings and settings[name] != value]:
        raise UserError(f"{file} was made with other settings ({differing[0]}): give a new `out` or delete it")


def _how(line: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a line as a file has them."""
    how: dict[str, Any] = json.loads(json.dumps(line["settings"], default=str))
    return how


def part_file(path: Path, rank: int) -> Path:
    """The file of one process."""
    return path.with_name(f"{path.name}.part{rank}")


def part_files(path: Path) -> list[Path]:
    """The part files that are there, of however many processes."""
    found = path.parent.glob(f"{glob.escape(path.name)}.part*")
    return sorted(file for file in found if file.name.removeprefix(f"{path.name}.part").isdigit())


def merge(path: Path, seeds: Sequence[int]) -> None:
    """Join the file and the part files of all processes in the order of the seeds, and remove the parts."""
    parts = part_files(path)
    lines = {line["seed"]: line for file in (path, *parts) for line in whole_lines(file)}
    missing = [seed for seed in seeds if seed not in lines]
    if missing:
        raise UserError(f"{len(missing)} samples are missing from the part files of {path}: run the command again")
    with files.replacing(path) as draft:
        append(draft, [lines[seed] for seed in seeds])
    for part in parts:
        part.unlink(missing_ok=True)
