"""Train or load every system, sample along its frontier, score, and keep each piece as a file.

A stopped comparison goes on: a finished model is loaded, a half-trained one is resumed, and a point whose record
lies in the folder with the same key is not made again. A system whose results are complete needs its weights no more,
so that records alone can be kept. One system is in memory at a time.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convergeflow import zoo
from convergeflow.errors import ConvergeFlowError, UserError
from convergeflow.evaluation.assessment import Assessor, SampleSet, likelihood_of
from convergeflow.evaluation.protocol import Protocol
from convergeflow.evaluation.record import read_record, write_record
from convergeflow.sampling.integration import default_batch
from convergeflow.studies.systems import Setting, controls_swept, frontier, run_config, trained_as
from convergeflow.training import checkpoint, run
from convergeflow.training.build import build_model
from convergeflow.training.config import RunConfig
from convergeflow.training.estimate import estimate

TRIAL_SAMPLES, TRIAL_CALLS = 4, 4


@dataclass(frozen=True)
class Cost:
    """What a system will take, in seconds."""

    system: str
    parameters: int
    training: float
    sampling: float


@dataclass(frozen=True)
class Result:
    """One system at one budget of network calls."""

    system: str
    nfe: int
    points: list[tuple[str, dict[str, Any], str]]
    """(setting, record, file); the first is the system's own default."""
    facts: dict[str, Any]
    """Parameters, training time, sampling speed, likelihood."""


@dataclass
class Study:
    """A comparison in a folder."""

    base: RunConfig
    out: Path
    systems: list[str]
    budgets: list[int]
    num: int
    assessor: Assessor
    protocol: Protocol
    bound_draws: int = 8
    device: str = "auto"
    note: Callable[[str], None] = field(default=lambda message: None)
    advance: Callable[..., None] = field(default=lambda *amount, **fields: None)
    command: str | None = None

    # -- before anything runs ------------------------------------------------------------------------------------------

    def costs(self) -> list[Cost]:
        """Time of each system from a few trial steps and trial samples; finished training costs nothing."""
        found = []
        trials: dict[str, tuple[int, float, Any]] = {}
        for system in self.systems:
            method = trained_as(system)
            if method not in trials:
                config = run_config(self.base, method)
                model = build_model(config, self._vocabulary())
                trial = estimate(config, model, self._vocabulary())
                done = self._finished(method) or all(self._complete(name) for name in self._trained_alike(method))
                left = 0.0 if done else trial.total_seconds
                trials[method] = (trial.parameters, left, model.eval())
                training = left
            else:
                training = 0.0  # shares another system's run
            parameters, _, model = trials[method]
            sampling = 0.0 if self._complete(system) else self._sampling_time(system, model)
            found.append(Cost(system, parameters, training, sampling))
        return found

    def _trained_alike(self, method: str) -> list[str]:
        return [system for system in self.systems if trained_as(system) == method]

    def _sampling_time(self, system: str, model: Any) -> float:
        length = self.base.corpus.length
        begin = time.perf_counter()
        drawn = model.sample(TRIAL_SAMPLES, length, seeds=range(TRIAL_SAMPLES), nfe=TRIAL_CALLS)
        per_call = (time.perf_counter() - begin) / TRIAL_SAMPLES / drawn.nfe
        calls = sum(
            (length if system == "ar" else nfe) * len(frontier(system, model, nfe)) for nfe in self._budgets(system)
        )
        return per_call * calls * self.num

    def _vocabulary(self) -> int:
        reference = self.assessor.reference
        if reference is None:
            raise UserError("a comparison needs a corpus")
        return reference.vocabulary

    def _budgets(self, system: str) -> list[int]:
        """The autoregressive model takes one call per token, whatever the budget."""
        return [self.base.corpus.length] if system == "ar" else self.budgets

    # -- running -------------------------------------------------------------------------------------------------------

    def run(self) -> Iterator[Result]:
        """Results one by one, in the order of the systems."""
        (self.out / "records").mkdir(parents=True, exist_ok=True)
        for system in self.systems:
            if self._complete(system):
                yield from (self._read(system, nfe) for nfe in self._budgets(system))
                continue
            folder = self.trained(trained_as(system))
            model = zoo.load_model(folder, device=self.device)
            facts = self._facts(system, model, folder)
            for nfe in self._budgets(system):
                points = [self._point(system, model, folder, nfe, setting) for setting in frontier(system, model, nfe)]
                speed = points[0][1]["tokens_per_second"]
                result = Result(system, nfe, points, {**facts, "tokens_per_second": speed})
                self._write(result)
                yield result

    def _result_path(self, system: str, nfe: int) -> Path:
        return self.out / "records" / f"{system}-nfe{nfe}.json"

    def _result_key(self, system: str) -> dict[str, Any]:
        """What decides a system's results: a finished result answers for it without its weights."""
        reference = self.assessor.reference
        key = {
            "run": {**run_config(self.base, trained_as(system)).to_dict(), "device": "any"},
            "num": self.num,
            "settings": controls_swept(system),
            "scorer": self.assessor.scorer.describe(),
            "protocol": self.protocol.id,
            "draws": self.bound_draws,
            "corpus": None if reference is None else reference.fingerprint,
        }
        return dict(json.loads(json.dumps(key)))

    def _complete(self, system: str) -> bool:
        key = self._result_key(system)
        for nfe in self._budgets(system):
            path = self._result_path(system, nfe)
            if not path.is_file():
                return False
            kept = checkpoint.read_json(path)
            if kept.get("key") != key or not all((self.out / file).is_file() for _, file in kept["points"]):
                return False
        return True

    def _read(self, system: str, nfe: int) -> Result:
        kept = checkpoint.read_json(self._result_path(system, nfe))
        points = [(label, read_record(self.out / file), file) for label, file in kept["points"]]
        self.advance(len(points))
        return Result(system, nfe, points, kept["facts"])

    def _write(self, result: Result) -> None:
        points = [[label, file] for label, _, file in result.points]
        value = {"key": self._result_key(result.system), "points": points, "facts": result.facts}
        write_record(self._result_path(result.system, result.nfe), value)

    def _finished(self, method: str) -> bool:
        return (self.out / "runs" / method / run.MODEL_FOLDER / "config.json").is_file()

    def trained(self, method: str) -> Path:
        """The model folder of a method, trained now if it is not there."""
        folder = self.out / "runs" / method
        config = run_config(self.base, method)
        if self._finished(method):
            before = run.saved_config(folder)
            if before.to_dict() != config.to_dict():
                raise UserError(f"{folder} was trained with another configuration; choose another --out")
            return folder / run.MODEL_FOLDER
        self.note(f"{method}: training for {config.total_steps} steps")
        reporter = run.Reporter(note=lambda message: None, warn=self.note)
        outcome = run.train(config, folder, resume=(folder / run.RUN_FILE).is_file(), reporter=reporter)
        if not outcome.finished:
            raise ConvergeFlowError(f"stopped at step {outcome.step} of {method}; the same command goes on from there")
        return folder / run.MODEL_FOLDER

    def _facts(self, system: str, model: Any, folder: Path) -> dict[str, Any]:
        path = self.out / "records" / f"{system}-facts.json"
        key = {"weights": zoo.weights_hash(folder), "draws": self.bound_draws}
        if path.is_file() and (kept := checkpoint.read_json(path)).get("key") == key:
            return dict(kept)
        likelihood = None
        reference = self.assessor.reference
        if self.bound_draws and reference is not None:
            try:
                likelihood = likelihood_of(model, reference, draws=self.bound_draws)
            except UserError:  # the method has none
                likelihood = None
        facts = {
            "key": key,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "parameters_without_table": int(model.num_parameters_without_table()),
            "training_seconds": training_seconds(self.out / "runs" / trained_as(system)),
            "likelihood": likelihood,
        }
        write_record(path, facts)
        return facts

    def _point(
        self, system: str, model: Any, folder: Path, nfe: int, setting: Setting
    ) -> tuple[str, dict[str, Any], str]:
        reference = self.assessor.reference
        options = dict(setting.options)
        settings = options.get("settings")
        shown = {**options, "settings": settings.describe()} if settings is not None else options
        key = json.loads(
            json.dumps(
                {
                    "system": system,
                    "weights": zoo.weights_hash(folder),
                    "num": self.num,
                    "options": shown,
                    "scorer": self.assessor.scorer.describe(),
                    "protocol": self.protocol.id,
                    "corpus": None if reference is None else reference.fingerprint,
                }
            )
        )
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:10]
        path = self.out / "records" / f"{system}-nfe{nfe}-{digest}.json"
        if path.is_file() and (kept := read_record(path)).get("key") == key:
            self.advance(1)
            return setting.label, kept, f"records/{path.name}"
        begin = time.perf_counter()
        drawn = self._draw(model, folder, options)
        seconds = time.perf_counter() - begin
        extra = {"key": key, "tokens_per_second": drawn.ids.size / seconds, "system": system}
        record = self.assessor.assess(drawn, self.protocol, command=self.command, extra=extra)
        write_record(path, record)
        gen_ppl = "inf" if record["gen_ppl"] is None else f"{record['gen_ppl']:.4g}"
        self.note(
            f"{system}, NFE {record['nfe']}, {setting.label}: Gen. PPL {gen_ppl}, entropy {record['entropy']:.3f}"
        )
        self.advance(1)
        return setting.label, record, f"records/{path.name}"

    def _draw(self, model: Any, folder: Path, options: dict[str, Any]) -> SampleSet:
        length = self.base.corpus.length
        size = min(self.num, default_batch(length, model.config.vocabulary))
        about = {"name": str(folder), "weights": zoo.weights_hash(folder), "method": model.method}
        parts = []
        for first in range(0, self.num, size):
            seeds = range(first, min(first + size, self.num))
            drawn = model.sample(len(seeds), length, seeds=list(seeds), batch=size, **options)
            parts.append(SampleSet.of(drawn, about, model.tokenizer))
        return SampleSet.joined(parts)


def training_seconds(folder: Path) -> float | None:
    """The time spent in training steps, from the run's clocks; a resumed run counts all its parts."""
    path = folder / "timing.jsonl"
    if not path.is_file():
        return None
    total, last = 0.0, 0
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "seconds" in record and "step" in record:
            steps = record["step"] - last if record["step"] > last else 1
            total += record["seconds"] * steps
            last = record["step"]
    return total
