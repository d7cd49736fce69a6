"""How a number is made: draw the samples of a model, assess them, keep the record. Every study goes this way.

Samples are drawn in micro-batches of the seeds. A point is keyed by what it depends on and never made twice.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from convergeflow import files, zoo
from convergeflow.data.tokenizer import Tokenizer, stories_tokenizer
from convergeflow.device import FULL
from convergeflow.errors import UserError
from convergeflow.evaluation.assess import Assessor, SampleSet
from convergeflow.evaluation.protocol import Protocol
from convergeflow.evaluation.scorers import Advance, silent
from convergeflow.results import record, sample_file
from convergeflow.results.cost import check_request
from convergeflow.results.store import Store, digest
from convergeflow.sampling.integration import batches
from convergeflow.systems.protocol import LanguageModel, Samples


def origin(name: str | Path, model: LanguageModel, *, average: bool = True) -> dict[str, Any]:
    """Where samples come from: the name that a model was loaded by, the hash of its weights, its method."""
    weights = zoo.weights_hash(zoo.locate(name, average=average)) + ("" if average else "+raw")
    return {"name": str(name), "weights": weights, "method": model.method}


def draw(
    model: LanguageModel,
    options: Mapping[str, Any],
    *,
    about: Mapping[str, Any],
    seeds: Sequence[int],
    length: int | None = None,
    batch: int | None = None,
    keep: Path | None = None,
    advance: Advance = silent,
) -> SampleSet:
    """One sample per seed; `options` are arguments of `model.sample`, `about` is the model's `origin`.

    `advance` hears of every batch. With `keep` the samples go to that file, and those that it holds already are not
    made again.
    """
    length = length or int(model.config.length)
    size = batch or min(len(seeds), model.batch_size(length))
    check_request(model, len(seeds), length, size)

    def make(group: Sequence[int]) -> Samples:
        return model.sample(len(group), length, seeds=list(group), batch=size, **options)

    if keep is not None:
        asked = sample_file.asked_of(model, options, length)
        name = f"{about['name']}@{about['weights']}"
        with files.only_writer(keep, str(keep)):
            sample_file.collect(keep, seeds, size, make, name, asked=asked, on_batch=advance)
        return replace(SampleSet.from_lines(sample_file.read_samples(keep), model.tokenizer), model=dict(about))
    parts = []
    for where in batches(len(seeds), size):
        parts.append(SampleSet.of(make(seeds[where]), about, model.tokenizer))
        advance(len(parts[-1].ids))
    return SampleSet.joined(parts)


def read_drawn(path: Path, num: int | None = None, model: str | None = None) -> SampleSet:
    """The first `num` samples of a file, with the tokenizer of `model`, or of the model that the file names."""
    lines = sample_file.read_samples(path)
    if num is not None and num > len(lines):
        raise UserError(f"{path} holds {len(lines)} samples, fewer than `num` {num}")
    lines = lines[:num]
    tokenizer = None
    try:
        folder = zoo.locate(model or str(lines[0].get("model", "")).partition("@")[0])
        tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").is_file() else None
    except UserError:
        if model is not None:
            raise
    if tokenizer is None:
        # The words of the stories decode to exactly the text that stands beside them, or they are not stories.
        ours = stories_tokenizer()
        if all(max(line["ids"]) < ours.size and ours.decode(line["ids"]) == line.get("text") for line in lines[:8]):
            tokenizer = ours
    return SampleSet.from_lines(lines, tokenizer)


@dataclass(frozen=True)
class Measurer:
    """Draws, assesses and keeps the points of one study: all with the same seeds, protocol and scorer."""

    store: Store
    assessor: Assessor
    protocol: Protocol
    seeds: Sequence[int]
    length: int | None = None
    batch: int | None = None
    command: str | None = None

    def key(self) -> dict[str, Any]:
        """What every point of the study depends on."""
        reference = self.assessor.reference
        return {
            "num": len(self.seeds),
            "scorer": self.assessor.scorer.describe(),
            "protocol": self.protocol.id,
            "corpus": None if reference is None else reference.fingerprint,
        }

    def point(
        self,
        name: str,
        model: LanguageModel,
        options: Mapping[str, Any],
        *,
        about: Mapping[str, Any],
        key: Mapping[str, Any],
        label: str,
        advance: Advance = silent,
    ) -> tuple[record.Record, str]:
        """The record of a model under `options`, and its file in the store; `key` is added to the study's own."""
        chosen = {option: value.describe() if option == "settings" else value for option, value in options.items()}
        whole = {**self.key(), **key, "weights": about["weights"], "options": chosen}
        if model.precision != FULL:  # what a CPU computes in needs no mention: records of older versions have none
            whole["precision"] = model.precision.described()
        name = f"{name}-{digest(whole)[:10]}"

        def make() -> record.Record:
            self.assessor.check(model, [self.protocol])
            began = time.perf_counter()
            drawn = draw(
                model, options, about=about, seeds=self.seeds, length=self.length, batch=self.batch, advance=advance
            )
            speed = drawn.ids.size / (time.perf_counter() - began)
            measured = self.assessor.assess(drawn, self.protocol)
            return record.make(measured, command=self.command, tokens_per_second=speed, **key)

        def say(found: record.Record) -> str:
            gen_ppl = "inf" if found["gen_ppl"] is None else f"{found['gen_ppl']:.4g}"
            return f"{label} (Gen. PPL {gen_ppl}, entropy {found['entropy']:.3f}, NFE {found['nfe']})"

        if self.store.find(name, whole) is not None:
            advance(len(self.seeds))
        return self.store.once(name, whole, make, say), f"records/{name}.json"
