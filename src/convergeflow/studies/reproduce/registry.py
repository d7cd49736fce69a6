"""What an experiment is, and the list of all of them.

An experiment asks one question, measures points into a store, draws them beside the paper's numbers, and judges the
paper's claims by what it measured. Its description is data, in `experiments/NAME.yaml`: question, costs, claims, and
(unless a module of its own measures) points, figure and tables, which `engine.py` carries out. The same description
holds at three scales; a scale only changes sizes. Nothing heavy is imported before an experiment runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from convergeflow.errors import UserError, unknown_name
from convergeflow.studies.reproduce.result import ExperimentResult, ReportTable
from convergeflow.studies.reproduce.scale import SCALES, ExperimentScale, read_data, scale_by_name

if TYPE_CHECKING:
    from convergeflow.results.store import Store
    from convergeflow.studies.reproduce.verdict import Judgement

THEORY = ("proposition1", "theorem1", "counterexample", "proposition3")
TRAINING = ("convergence", "objectives")
SAMPLING = ("shortcut", "controls", "combination", "unconditional", "token-rules", "configurations", "grids")
BEYOND_THE_PAPER = ("solvers", "calls", "freezing", "facts")
SYSTEMS = ("systems", "sanity")
NAMES = (*THEORY, *TRAINING, *SAMPLING, *BEYOND_THE_PAPER, *SYSTEMS)
"""All experiments, theory first."""

PAPER_NEEDS = "OpenWebText, the paper's checkpoint and GPT-2 Large"
LANGUAGE_NEEDS = "a trained model: the one of this scale learns for seconds, its text is not language yet"


class PlannedCost(NamedTuple):
    """What a scale costs: points, and seconds measured on two CPU cores (for `paper`: `cost.py`, on one A100)."""

    points: int
    seconds: float


@dataclass(frozen=True)
class Claim:
    """A statement of the paper that a result can support or contradict."""

    name: str
    statement: str
    reference: str
    judge: str
    """A function of `judges.py`, or of the experiment's own module."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    scales: tuple[str, ...] = SCALES
    """Scales that can test it at all."""
    needs: str = ""
    """What other scales lack."""

    @classmethod
    def read(cls, data: dict[str, Any]) -> Claim:
        judge, scales = data.pop("judge"), tuple(data.pop("scales", SCALES))
        ((name, arguments),) = judge.items() if isinstance(judge, dict) else ((judge, {}),)
        data.setdefault("needs", PAPER_NEEDS if scales == ("paper",) else LANGUAGE_NEEDS)
        return cls(judge=name, arguments=arguments, scales=scales, **data)


@dataclass(frozen=True)
class Experiment:
    """One table, figure or statement of the paper."""

    name: str
    reference: str
    question: str
    claims: tuple[Claim, ...]
    cost: Mapping[str, PlannedCost]
    module: str | None = None
    """The module of this folder with what the description does not say: kinds of points, judges, `measure`, `draw`."""
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Per scale, the fields of it that are different here."""
    points: Sequence[Mapping[str, Any]] = ()
    figure: Mapping[str, Any] = field(default_factory=dict)
    tables: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def read(cls, name: str) -> Experiment:
        """From its description."""
        data = read_data(f"experiments/{name}.yaml")
        defaults: dict[str, Any] = {key: data.pop(key) for key in ("scales", "needs") if key in data}
        data["claims"] = tuple(Claim.read({**defaults, **claim}) for claim in data["claims"])
        data["cost"] = {scale: PlannedCost(*cost) for scale, cost in data["cost"].items()}
        return cls(name=name, **data)

    def own(self, name: str) -> Any:
        """A function of the experiment's own module; None if it has none of that name."""
        if self.module is None:
            return None
        return getattr(import_module(f"convergeflow.studies.reproduce.{self.module}"), name, None)

    def run(self, store: Store, scale: ExperimentScale) -> ExperimentResult:
        """Measure what is not measured yet."""
        from convergeflow.results.store import Missing
        from convergeflow.studies.reproduce import engine
        from convergeflow.studies.reproduce.bench import Bench

        changes = self.changes.get(scale.name, {})
        measure = self.own("measure") or engine.measure
        try:
            records, values = measure(self, Bench(store, replace(scale, **changes)))
        except UserError as error:
            # What only this experiment asks for may not be on this machine: its claims stay open, the report goes on.
            if not changes:
                raise
            records, values = [], {"missing": str(error)}
        except Missing:
            records, values = [], {"missing": f"records of this experiment are not in {store.folder}"}
        store.pace.finish()
        # Through JSON, so that a verdict never rests on anything that is not in the records.
        records, values = json.loads(json.dumps([records, values], allow_nan=False))
        return ExperimentResult(self.name, scale.name, records, values)

    def judge(self, result: ExperimentResult) -> dict[str, Judgement]:
        """A verdict per claim; on a scale that cannot test the claim the numbers are still shown."""
        from convergeflow.studies.reproduce import judges
        from convergeflow.studies.reproduce.verdict import Judgement, Verdict, not_measured

        if "missing" in result.values:
            return {claim.name: not_measured(result.values["missing"]) for claim in self.claims}
        scale = scale_by_name(result.scale).like
        found = {}
        for claim in self.claims:
            function = self.own(claim.judge) or getattr(judges, claim.judge)
            judgement = function(result, **claim.arguments)
            if scale not in claim.scales:
                lacks = Verdict.OTHER_CORPUS if claim.scales == ("paper",) else Verdict.NOT_MEASURED
                judgement = Judgement(lacks, f"needs {claim.needs} ({judgement.evidence})", judgement.paper)
            elif scale == "paper" and judgement.verdict == Verdict.OTHER_CORPUS:
                # The paper's own corpus: there is no other one to ask for, and what is not there is not reproduced.
                judgement = Judgement(Verdict.NOT_REPRODUCED, judgement.evidence, judgement.paper)
            found[claim.name] = judgement
        return found

    def draw(self, result: ExperimentResult, folder: Path) -> list[Path]:
        """The figure as files, PNG first; none where nothing was measured."""
        if not result.records:
            return []
        # matplotlib is slow to import, and listing needs none of it.
        from convergeflow.results import figures
        from convergeflow.studies.reproduce import drawing

        with figures.style():
            own = self.own("draw")
            figure = drawing.draw(self.figure, result) if own is None else own(result)
            return figures.save(figure, folder, self.name)

    def tabulate(self, result: ExperimentResult) -> list[ReportTable]:
        """The tables of the report; none where nothing was measured."""
        from convergeflow.studies.reproduce import engine

        if not result.records:
            return []
        tables = [engine.tabulate(table, result) for table in self.tables]
        return [table for table in tables if table.rows]

    def describe(self) -> dict[str, Any]:
        """For lists of the experiments."""
        return {
            "name": self.name,
            "reference": self.reference,
            "question": self.question,
            "claims": [claim.statement for claim in self.claims],
            "cost": {scale: cost._asdict() for scale, cost in self.cost.items()},
        }


@cache
def experiments() -> dict[str, Experiment]:
    """All experiments by name, theory first."""
    return {name: Experiment.read(name) for name in NAMES}


def experiments_of(scale: ExperimentScale, *names: str) -> list[Experiment]:
    """The experiments of a scale: some by name, each once, or `all`."""
    known = scale.experiments or NAMES
    if "all" in names:
        return [experiments()[each] for each in known]
    found = {name: experiment_by_name(name) for name in names}
    for name in found:
        if name not in known:
            raise UserError(f"{name} is no experiment of the scale {scale.name}; it has {', '.join(known)}")
    return list(found.values())


def experiment_by_name(name: str) -> Experiment:
    if name not in NAMES:
        raise unknown_name("experiment", name, NAMES)
    return experiments()[name]
