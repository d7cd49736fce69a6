"""Train or load every system, sample along its frontier, score, and keep each piece as a file.

A stopped comparison goes on: a finished model is loaded, a half-trained one is resumed, and a point whose record
lies in the folder with the same key is not made again. A system whose results are complete no longer needs its weights,
so the records alone can be kept. One system is in memory at a time. If the store has claims, several processes may
share the folder: each system is made by one of them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convergeflow import zoo
from convergeflow.errors import ConvergeFlowError, UserError
from convergeflow.evaluation.assess import likelihood_of
from convergeflow.evaluation.reference import Reference
from convergeflow.evaluation.scorers import Advance, Texts, silent
from convergeflow.files import parse_json
from convergeflow.results.draw import Measurer, origin
from convergeflow.results.record import Record
from convergeflow.results.store import Store, as_json
from convergeflow.studies.systems import Setting, controls_swept, frontier, run_config, trained_as
from convergeflow.systems.protocol import LanguageModel
from convergeflow.training import run
from convergeflow.training.build import build_model
from convergeflow.training.config import RunConfig, renewed
from convergeflow.training.estimate import estimate

TRIAL_SAMPLES, TRIAL_CALLS = 4, 4


@dataclass(frozen=True)
class SystemCost:
    """What a system will take, in seconds."""

    system: str
    parameters: int
    training: float
    sampling: float


@dataclass(frozen=True)
class Trial:
    """What a few steps and samples of a system took."""

    parameters: int
    seconds_per_step: float
    sampling: float
    """Seconds for all its points."""


@dataclass(frozen=True)
class SystemResult:
    """One system at one budget of network calls."""

    system: str
    nfe: int
    points: list[tuple[str, Record, str]]
    """(setting, record, file); the first is the system's own default."""
    facts: dict[str, Any]
    """Parameters, training time, sampling speed, likelihood."""


@dataclass
class Study:
    """A comparison in the folder of the measurer's store."""

    base: RunConfig
    systems: list[str]
    budgets: list[int]
    measurer: Measurer
    bound_draws: int = 8
    device: str = "auto"
    advance: Advance = field(default=silent)
    trials: dict[str, Trial] = field(default_factory=dict)
    """Of each system, once `costs` has tried it; studies that differ in the budget of training alone may share them."""

    @property
    def store(self) -> Store:
        return self.measurer.store

    @property
    def reference(self) -> Reference:
        reference = self.measurer.assessor.reference
        if reference is None:
            raise UserError("a comparison needs a corpus")
        return reference

    # -- what another kind of study may change -------------------------------------------------------------------------

    def trained_as(self, system: str) -> str:
        """The training run that a system uses, by name."""
        return trained_as(system)

    def config(self, run: str) -> RunConfig:
        """The configuration of a training run."""
        return run_config(self.base, run)

    def settings(self, system: str, model: Any, nfe: int) -> list[Setting]:
        """Where a system is read; the first is its own default."""
        return frontier(system, model, nfe)

    def swept(self, system: str) -> list[Any]:
        """The same as JSON values, known without the weights."""
        return controls_swept(system)

    def enough(self, records: Sequence[Record]) -> bool:
        """Whether a system needs no further settings after these points."""
        return False

    # -- before anything runs ------------------------------------------------------------------------------------------

    def costs(self) -> list[SystemCost]:
        """Time of each system from a few trial steps, samples, scores and bounds; what is finished costs nothing."""
        found, planned = [], set()
        for system in self.systems:
            kept = self._kept(system)
            if kept is not None:
                found.append(SystemCost(system, kept[0].facts["parameters"], 0.0, 0.0))
                continue
            run, trial, training = self.trained_as(system), self._trial(system), 0.0
            if run not in planned and not self._finished(run):  # several systems may share a run
                training = trial.seconds_per_step * self.base.total_steps
            planned.add(run)
            found.append(SystemCost(system, trial.parameters, training, trial.sampling))
        return found

    def _trial(self, system: str) -> Trial:
        """The trial of a system; a further seed costs what the first one does."""
        name = system.partition("@")[0]
        if name not in self.trials:
            config = self.config(self.trained_as(name))
            model: Any = build_model(config, self.reference.vocabulary)
            steps = estimate(config, model, self.reference.vocabulary)
            sampling = self._sampling_time(name, model.eval())
            self.trials[name] = Trial(steps.parameters, (steps.total_seconds or 0.0) / config.total_steps, sampling)
        return self.trials[name]

    def _sampling_time(self, system: str, model: LanguageModel) -> float:
        length = self.base.corpus.length
        begin = time.perf_counter()
        drawn = model.sample(TRIAL_SAMPLES, length, seeds=range(TRIAL_SAMPLES), nfe=TRIAL_CALLS)
        per_call = (time.perf_counter() - begin) / TRIAL_SAMPLES / drawn.nfe
        points = {nfe: len(self.settings(system, model, nfe)) for nfe in self._budgets(system)}
        num = len(self.measurer.seeds)
        scoring = self._scoring_time(drawn.ids.numpy()) * sum(points.values()) * num
        bounding = 0.0
        if self.bound_draws and model.bound_kind is not None and self.reference.real is not None:
            # About as many passes over the real text as there are draws; a pass costs what a call of the sampler costs.
            bounding = per_call * self.bound_draws * len(self.reference.real)
        return per_call * sum(nfe * count for nfe, count in points.items()) * num + scoring + bounding

    def _scoring_time(self, ids: Any) -> float:
        """Seconds to score one text, from the trial samples."""
        assessor = self.measurer.assessor
        tokenizer = None if assessor.scorer.name == "exact" else self.reference.tokenizer
        began = time.perf_counter()
        assessor.read(Texts.from_ids(ids, tokenizer), self.measurer.protocol)
        return (time.perf_counter() - began) / len(ids)

    def _budgets(self, system: str) -> list[int]:
        """The autoregressive model takes one call per token, whatever the budget."""
        return [self.base.corpus.length] if self.trained_as(system).partition("@")[0] == "ar" else self.budgets

    # -- running -------------------------------------------------------------------------------------------------------

    def results(self, system: str) -> list[SystemResult]:
        """The results of one system, made if they are not there; `Taken` if another process is at them."""
        kept = self._kept(system)
        if kept is None:
            with self.store.alone(f"system-{self.trained_as(system)}"):
                kept = self._kept(system)  # another process may have finished it just now
                if kept is None:
                    kept = self._measured(system)
        return kept

    def _measured(self, system: str) -> list[SystemResult]:
        results = []
        folder = self.trained(self.trained_as(system))
        model = zoo.load_model(folder, device=self.device)
        about = origin(folder, model)
        facts = self._facts(system, model, about["weights"])
        for nfe in self._budgets(system):
            points = []
            for setting in self.settings(system, model, nfe):
                record, file = self.measurer.point(
                    f"{system}-nfe{nfe}",
                    model,
                    setting.options,
                    about=about,
                    key={"system": system},
                    label=f"{system}, {setting.label}",
                    advance=self.advance,
                )
                points.append((setting.label, record, file))
                if self.enough([record for _, record, _ in points]):
                    break
            result = SystemResult(
                system, nfe, points, {**facts, "tokens_per_second": points[0][1]["tokens_per_second"]}
            )
            listed = [[label, file] for label, _, file in points]
            self.store.keep(f"{system}-nfe{nfe}", self._key(system), {"points": listed, "facts": result.facts})
            results.append(result)
        return results

    def _key(self, system: str) -> dict[str, Any]:
        """Everything that a system's results depend on; it is known without the weights."""
        return {
            **self.measurer.key(),
            "run": {**self.config(self.trained_as(system)).to_dict(), "device": "any"},
            "settings": self.swept(system),
            "draws": self.bound_draws,
        }

    def _kept(self, system: str) -> list[SystemResult] | None:
        """The results of a system if the records of all its points are there, which then stand without its weights."""
        results = []
        for nfe in self._budgets(system):
            kept = self.store.read(f"records/{system}-nfe{nfe}.json")
            try:
                if kept is None or {**kept["key"], "run": renewed(kept["key"]["run"])} != as_json(self._key(system)):
                    return None
                read = [(label, self.store.read(file), file) for label, file in kept["points"]]
            except (KeyError, TypeError, ValueError):  # somebody else's record, or a damaged one
                return None
            points = [(label, record, file) for label, record, file in read if record is not None]
            if len(points) < len(read):
                return None
            results.append(SystemResult(system, nfe, points, kept["facts"]))
        return results

    def _finished(self, method: str) -> bool:
        return (self.store.folder / "runs" / method / run.MODEL_FOLDER / "config.json").is_file()

    def trained(self, method: str) -> Path:
        """The model folder of a method, trained now if it is not there."""
        return self.finish_run(method, self.config(method))

    def finish_run(self, method: str, config: RunConfig) -> Path:
        """The model folder of a training run, which is begun or resumed unless it is finished."""
        folder = self.store.folder / "runs" / method
        if self._finished(method):
            if run.saved_config(folder).to_dict() != config.to_dict():
                raise UserError(f"{folder} was trained with another configuration; choose another `out`")
            return folder / run.MODEL_FOLDER
        self.store.note(f"{method}: training for {config.total_steps} steps")
        reporter = run.Reporter(note=lambda message: None, warn=self.store.note)
        outcome = run.train(config, folder, resume=(folder / run.RUN_FILE).is_file(), reporter=reporter)
        if not outcome.finished:
            raise ConvergeFlowError(f"stopped at step {outcome.step} of {method}; the same command goes on from there")
        return folder / run.MODEL_FOLDER

    def _facts(self, system: str, model: Any, weights: str) -> dict[str, Any]:
        def make() -> dict[str, Any]:
            likelihood = None
            if self.bound_draws:
                with contextlib.suppress(UserError):  # the method has none
                    likelihood = likelihood_of(model, self.reference, draws=self.bound_draws)
            return {
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "parameters_without_table": int(model.num_parameters_without_table()),
                "training_seconds": training_seconds(self.store.folder / "runs" / self.trained_as(system)),
                "likelihood": likelihood,
            }

        key = {"weights": weights, "draws": self.bound_draws}
        return self.store.once(f"{system}-facts", key, make, lambda facts: f"{system}, facts")


def training_seconds(folder: Path) -> float | None:
    """The time spent in training steps, from the run's clocks; a resumed run counts all its parts."""
    path = folder / "timing.jsonl"
    if not path.is_file():
        return None
    total, last = 0.0, 0
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = parse_json(line)
        except UserError:  # a kill may have torn it
            continue
        if "seconds" in record and "step" in record:
            steps = record["step"] - last if record["step"] > last else 1
            total += record["seconds"] * steps
            last = record["step"]
    return total
