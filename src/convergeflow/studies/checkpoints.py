"""A table of finished models: import what is missing, sample each at its own settings, score all in one way.

The table is a YAML file (`table1.yaml` beside this one is the paper's). Samples are drawn in pieces of a few dozen
seeds, each a file of its own, so that processes share the work without speaking to each other and a stopped table goes
on where it was. How a checkpoint is fetched is the caller's business (`Fetch`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from convergeflow import zoo
from convergeflow.errors import UserError, unknown_name
from convergeflow.evaluation.assess import Assessor, SampleSet
from convergeflow.evaluation.reference import Reference
from convergeflow.evaluation.scorers import Advance, silent
from convergeflow.files import read_yaml
from convergeflow.results import record, sample_file
from convergeflow.results.draw import Measurer, draw, origin
from convergeflow.results.store import digest
from convergeflow.sampling.plan import preset_for
from convergeflow.systems.generation import calls_of
from convergeflow.systems.protocol import LanguageModel

PIECE = 32
"""Samples in one file; the pieces do not depend on the number of processes."""
TRIAL_CALLS = 3
SHIPPED = Path(__file__).parent


@dataclass(frozen=True)
class PublishedResult:
    """What a paper says of a model."""

    gen_ppl: float
    entropy: float | None = None
    nfe: int | None = None
    where: str = ""


@dataclass(frozen=True)
class Entry:
    """One model of the table."""

    name: str
    source: str | None
    """A file, a folder or a hub name; None where the weights cannot be had by a name and the user has to say."""
    project: str | None = None
    """Whose importer reads it; None for a checkpoint of this package."""
    how: Mapping[str, Any] = field(default_factory=dict)
    """What the importer is told besides: revision, weights, teacher, encoder, length, tokenizer."""
    points: Sequence[Mapping[str, Any]] = ({"preset": "published"},)
    """Settings; each may begin with a `preset` of the model and change some of its values."""
    claim: PublishedResult | None = None
    """Of the first point."""
    remark: str = ""


@dataclass(frozen=True)
class CheckpointTable:
    """The models and how they are measured."""

    title: str
    entries: Sequence[Entry]
    corpus: str | None = None
    scorer: str = ""
    protocol: str = "ours-1"
    num: int = 128
    length: int = 1024


HOW = ("revision", "weights", "teacher", "encoder", "length", "tokenizer")


def read_table(path: str | Path) -> CheckpointTable:
    """From a YAML file, or the name of one that ships with the package; paths in it are relative to it."""
    file = Path(path)
    if not file.is_file() and (SHIPPED / f"{file.name.removesuffix('.yaml')}.yaml").is_file() and file.parent == Path():
        file = SHIPPED / f"{file.name.removesuffix('.yaml')}.yaml"
    if not file.is_file():
        raise UserError(f"there is no table {path}: give a YAML file (see docs/peers.md), or table1")
    values = read_yaml(file)
    if not isinstance(values, dict) or not isinstance(values.get("systems"), dict) or not values["systems"]:
        raise UserError(f"{file} names no `systems`")
    values = dict(values)
    entries = [_entry(str(name), given, file.parent) for name, given in values.pop("systems").items()]
    known = {"title", "corpus", "scorer", "protocol", "num", "length"}
    for name in values:
        if name not in known:
            raise unknown_name(f"key of {file}", str(name), [*known, "systems"])
    if values.get("corpus") is not None:
        values["corpus"] = _located(str(values["corpus"]), file.parent)
    if values.get("scorer"):
        values["scorer"] = _located(str(values["scorer"]), file.parent)
    table = CheckpointTable(**{"title": file.stem, **values}, entries=entries)
    if not (isinstance(table.num, int) and table.num > 1 and isinstance(table.length, int) and table.length > 0):
        raise UserError(f"{file}: `num` must be a whole number above 1 and `length` one above 0")
    return table


def _entry(name: str, given: Any, folder: Path) -> Entry:
    if not isinstance(given, dict):
        raise UserError(f"the system {name} needs a `source`")
    given = dict(given)
    for key in given:
        if key not in (known := ("source", "import", "points", "claim", "remark", *HOW)):
            raise unknown_name(f"key of the system {name}", str(key), known)
    source = given.get("source")
    how = {key: given[key] for key in HOW if given.get(key) is not None}
    for key in ("teacher", "encoder", "tokenizer"):
        if key in how:
            how[key] = _located(str(how[key]), folder)
    points = [{"preset": point} if isinstance(point, str) else point for point in given.get("points", ["published"])]
    if not points or not all(isinstance(point, dict) for point in points):
        raise UserError(f"the `points` of {name} must be names of presets or settings")
    try:
        claim = PublishedResult(**given["claim"]) if given.get("claim") else None
    except TypeError:
        raise UserError(f"the `claim` of {name} has gen_ppl, entropy, nfe and where") from None
    return Entry(
        name,
        None if source is None else _located(str(source), folder),
        given.get("import"),
        how,
        points,
        claim,
        str(given.get("remark", "")),
    )


def _located(name: str, folder: Path) -> str:
    """A path relative to the table's folder where there is one; other names are left as they are."""
    return str((folder / name).resolve()) if (folder / name).exists() and name else name


Fetch = Callable[[Entry, Path], None]
"""Makes the checkpoint folder of an entry."""


@dataclass(frozen=True)
class Cost:
    """What an entry will take."""

    name: str
    parameters: int
    calls: int
    """Network calls of all its samples."""
    seconds: float
    """To draw what is missing, in one process."""


@dataclass(frozen=True)
class SampleFile:
    """Some samples of a model under one setting, and where they go."""

    entry: Entry
    options: Mapping[str, Any]
    seeds: Sequence[int]
    file: Path

    def finished(self) -> bool:
        """Whether all of its samples are there."""
        return len({line["seed"] for line in sample_file.whole_lines(self.file)} & set(self.seeds)) == len(self.seeds)


@dataclass
class CheckpointStudy:
    """The table in the folder of the measurer's store."""

    table: CheckpointTable
    measurer: Measurer
    fetch: Fetch
    device: str = "auto"
    advance: Advance = field(default=silent)

    @property
    def entries(self) -> list[Entry]:
        """Those whose weights can be had."""
        return [entry for entry in self.table.entries if entry.source is not None]

    def folder(self, entry: Entry) -> Path:
        """The checkpoint folder of an entry, fetched now if it is not there."""
        if entry.project is None:
            return zoo.locate(str(entry.source))
        asked = {"source": entry.source, "import": entry.project, **entry.how}
        folder = self.measurer.store.model_folder(f"{entry.name}-{digest(asked)[:8]}")
        if not (folder / "config.json").is_file():
            self.measurer.store.note(f"{entry.name}: importing {entry.source}")
            self.fetch(entry, folder)
        return folder

    def model(self, entry: Entry) -> LanguageModel:
        """An entry's model, ready to sample."""
        return zoo.load_model(self.folder(entry), device=self.device)

    # -- before anything runs ------------------------------------------------------------------------------------------

    def costs(self) -> list[Cost]:
        """Calls and time of each entry, from two trial samples; samples that are there cost nothing."""
        found = []
        for entry in self.entries:
            model = self.model(entry)
            calls = seconds = 0.0
            for piece in self.pieces(entry, model):
                if not piece.finished():
                    calls += len(piece.seeds) * self._calls(model, piece.options)
            if calls:
                began = time.perf_counter()
                drawn = model.sample(2, self.table.length, seeds=[0, 1], **self._trial(model))
                seconds = (time.perf_counter() - began) / (2 * drawn.nfe) * calls
            parameters = sum(parameter.numel() for parameter in model.parameters())
            found.append(Cost(entry.name, parameters, int(calls), seconds))
        return found

    def _calls(self, model: LanguageModel, options: Mapping[str, Any]) -> int:
        nfe = options["settings"].nfe if "settings" in options else options.get("nfe", 64)
        return calls_of(model, int(nfe), self.table.length)

    def _trial(self, model: LanguageModel) -> dict[str, Any]:
        flow = model.as_flow()
        return {"nfe": TRIAL_CALLS} if flow is None else {"settings": preset_for("standard", flow.schedule, nfe=4)}

    # -- sampling ------------------------------------------------------------------------------------------------------

    def options(self, entry: Entry, model: LanguageModel, point: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of `model.sample` for a point."""
        changes = dict(point)
        name = changes.pop("preset", None)
        flow = model.as_flow()
        if flow is not None:
            nfe = changes.pop("nfe", None)
            if changes:
                raise UserError(f"{entry.name}: a flow's points have `preset` and `nfe`, not {', '.join(changes)}")
            return {"settings": preset_for(name or "standard", flow.schedule, nfe=nfe)}
        presets = getattr(model, "presets", {})
        if name is not None and name not in presets:
            raise unknown_name(f"preset of {entry.name}", name, presets)
        chosen = {**presets.get(name, {}), **changes}
        for control in chosen:
            if control not in ("nfe", *model.controls):
                raise unknown_name(f"setting of {entry.name}", control, ["nfe", *model.controls])
        return chosen

    def pieces(self, entry: Entry, model: LanguageModel) -> Iterator[SampleFile]:
        """All pieces of an entry, point by point."""
        weights = zoo.weights_hash(self.folder(entry))
        for point in entry.points:
            options = self.options(entry, model, point)
            key = {"weights": weights, "options": _described(options), "length": self.table.length}
            for first in range(0, self.table.num, PIECE):
                seeds = range(first, min(first + PIECE, self.table.num))
                name = f"{entry.name}-{digest(key)[:10]}-{first}-{len(seeds)}.jsonl"
                yield SampleFile(entry, options, seeds, self.measurer.store.folder / "samples" / name)

    def draw(self, rank: int = 0, world: int = 1) -> None:
        """Draw the pieces of one process out of `world`; what is there is not made again."""
        index = 0
        for entry in self.entries:
            model = self.model(entry)
            about = origin(self.folder(entry), model)
            for piece in self.pieces(entry, model):
                index += 1
                if index % world != rank or piece.finished():
                    continue
                piece.file.parent.mkdir(parents=True, exist_ok=True)
                draw(
                    model,
                    piece.options,
                    about=about,
                    seeds=list(piece.seeds),
                    length=self.table.length,
                    keep=piece.file,
                    advance=self.advance,
                )

    # -- scoring -------------------------------------------------------------------------------------------------------

    def rows(self) -> Iterator[tuple[Entry, dict[str, Any]]]:
        """One record per point, each with its words (`point`) and its `file`."""
        for entry in self.entries:
            model = self.model(entry)
            about = origin(self.folder(entry), model)
            pieces = list(self.pieces(entry, model))
            for point in entry.points:
                options = self.options(entry, model, point)
                files = [piece.file for piece in pieces if piece.options == options]
                yield entry, {"point": shown(point), **self._record(entry, model, about, options, files)}

    def _record(
        self,
        entry: Entry,
        model: LanguageModel,
        about: Mapping[str, Any],
        options: Mapping[str, Any],
        files: list[Path],
    ) -> dict[str, Any]:
        """Scored now, if the record is not there yet."""
        key = {
            **self.measurer.key(),
            "entry": entry.name,
            "weights": about["weights"],
            "options": _described(options),
            "length": self.table.length,
        }
        name = f"{entry.name}-{digest(key)[:10]}"

        def make() -> record.Record:
            lines = [line for file in files for line in sample_file.read_samples(file)]
            samples = replace(SampleSet.from_lines(lines, model.tokenizer), model=dict(about))
            measured = self.assessor(model).assess(samples, self.measurer.protocol)
            parameters = sum(parameter.numel() for parameter in model.parameters())
            return record.make(measured, command=self.measurer.command, parameters=parameters)

        found = self.measurer.store.once(name, key, make, lambda made: f"{entry.name}, {_described(options)}: scored")
        return {**found, "file": f"records/{name}.json"}

    def assessor(self, model: LanguageModel) -> Assessor:
        """The scorer with the real text; statistics of token ids only where the ids are the same tokens."""
        assessor = self.measurer.assessor
        reference = assessor.reference
        if reference is None:
            return assessor
        size = max(reference.vocabulary, int(model.config.vocabulary))
        here: Reference = replace(reference, vocabulary=size)
        if not same_tokens(model, reference):
            here = replace(here, statistics=None, training=None, law=None)
        return Assessor(assessor.scorer, here)


def same_tokens(model: LanguageModel, reference: Reference) -> bool:
    """Whether a model's ids mean what the reference's ids mean."""
    ours, theirs = model.tokenizer, reference.tokenizer
    return ours is not None and theirs is not None and ours.sha256 == theirs.sha256


def _described(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.describe() if name == "settings" else value for name, value in options.items()}


def shown(point: Mapping[str, Any]) -> str:
    """A point in words."""
    rest = [f"{name} {value}" for name, value in point.items() if name != "preset"]
    return ", ".join([*([str(point["preset"])] if "preset" in point else []), *rest]) or "default"


def ratio_to_claim(found: Mapping[str, Any], claim: PublishedResult | None) -> float | None:
    """Measured Gen. PPL over the claimed one."""
    if claim is None or found["gen_ppl"] is None or not math.isfinite(claim.gen_ppl):
        return None
    return float(found["gen_ppl"]) / claim.gen_ppl
