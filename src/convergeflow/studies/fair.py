"""A comparison with the same care for every system: extras, a choice of learning rate, and a second training seed.

What made small flows learn is offered to every system that can have it: the words before each position as inputs, and
the start values of gates and head. Each system's learning rate is chosen from several on a short pilot, by its own
held-out loss; with one rate there is no pilot. The two flows and the autoregressive model are trained from two seeds,
and the distance between the two is the error of training in the table. docs/results/comparison-stories/rules.md says
all this as rules, which were fixed before the first record, and docs/results/rules-basic-comparison.md what is
otherwise on simple English.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from convergeflow import zoo
from convergeflow.errors import UserError
from convergeflow.evaluation.assess import likelihood_of
from convergeflow.evaluation.estimate import finite
from convergeflow.randomness import RowDraws, derive_seed
from convergeflow.results.record import Record
from convergeflow.studies.study import Study, SystemCost, SystemResult
from convergeflow.studies.systems import CONTROLLED, Setting, controls_swept, frontier, on_budget, run_config, shown
from convergeflow.systems import OURS
from convergeflow.systems.rival import RivalConfig
from convergeflow.training.config import RunConfig, from_dict

RATES = (1.0, 1 / 3, 3.0)
"""Multiples of the recipe's learning rates that a pilot chooses from."""
PILOT_SHARE = 1 / 8
"""Of the budget of training steps."""
SEEDED = ("ar", OURS, "langflow")
"""Systems that are trained from two seeds."""
ORDER = ("ar", OURS, "langflow", CONTROLLED, "mdlm", "sedd-uniform", "duo", "sedd-absorb", "elf", "plaid", "flm")
"""What a stopped comparison should have first: those of the headline, then the discrete ones, then the rest."""
AR_POINTS = tuple({"temperature": value} for value in (1.0, 0.85, 0.7)) + tuple(
    {"nucleus": value} for value in (0.95, 0.9, 0.8)
)
ELF_POINTS = tuple({"guidance": 3.0, "churn": value} for value in (1.5, 0.0, 0.5, 3.0)) + tuple(
    {"guidance": value, "churn": 1.5} for value in (1.0, 5.0)
)
POINTS: dict[str, Sequence[dict[str, float]]] = {"ar": AR_POINTS, "elf": ELF_POINTS}
"""Where these two are read instead of along one control; six points each, like all others."""
PILOT_BLOCKS, PILOT_DRAWS = 64, 4
"""Held-out sequences, and draws of each, that a pilot is judged by."""


def method_of(name: str) -> str:
    """The method of a system or of a training run: `ar@1` is the second seed of `ar`."""
    return name.partition("@")[0]


def with_seeds(systems: Sequence[str], seeds: int = 2) -> list[str]:
    """The systems in the order of their use, and behind them the further seeds."""
    ordered = sorted(systems, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
    return [*ordered, *(f"{name}@{seed}" for seed in range(1, seeds) for name in SEEDED if name in ordered)]


def fair_config(base: RunConfig, method: str, *, rate: float = 1.0, seed: int = 0) -> RunConfig:
    """A method on the budget of `base` with the recipe's extras, as far as it can have them, and another rate."""
    config = run_config(base, method)
    values, extras = config.to_dict(), base.model.system
    if isinstance(config.model.system, RivalConfig):
        values["model"] |= {
            "words_before": int(getattr(extras, "neighbours", 0)),
            "head_start": float(getattr(extras, "head_init", 0.0)),
        }
    if method == "sedd-uniform":
        values["model"]["log_level"] = True
    for stage in values["stages"]:
        for name in ("lr", "matrix_lr", "table_lr", "schedule_lr"):
            stage[name] = None if stage[name] is None else rate * stage[name]
    return from_dict({**values, "seed": base.seed + seed})


@dataclass
class FairStudy(Study):
    """A comparison under these rules, in the folder of the measurer's store."""

    rates: tuple[float, ...] = RATES
    enclosing: bool = False
    """Read a system no further than to the settings that enclose the data's entropy."""

    def trained_as(self, system: str) -> str:
        method, at, seed = system.partition("@")
        return super().trained_as(method) + at + seed

    def config(self, run: str) -> RunConfig:
        method, _, seed = run.partition("@")
        return fair_config(self.base, method, rate=self.rate(method) or 1.0, seed=int(seed or 0))

    def settings(self, system: str, model: Any, nfe: int) -> list[Setting]:
        own = POINTS.get(method_of(system))
        if own is None:
            return frontier(method_of(system), model, nfe)
        return [Setting(shown(knobs), {"nfe": nfe, **knobs}) for knobs in own]

    def swept(self, system: str) -> list[Any]:
        own = POINTS.get(method_of(system))
        swept = controls_swept(method_of(system)) if own is None else [dict(knobs) for knobs in own]
        return [*swept, "until they enclose the data's entropy"] if self.enclosing else swept

    def enough(self, records: Sequence[Record]) -> bool:
        if not self.enclosing:
            return False
        entropies = [record["entropy"] for record in records if record["gen_ppl"] is not None]
        wanted = records[0]["real"]["entropy"]
        return bool(entropies) and min(entropies) <= wanted <= max(entropies)

    # -- the choice of a rate ------------------------------------------------------------------------------------------

    @property
    def pilot_steps(self) -> int:
        return max(len(self.base.stages), round(PILOT_SHARE * self.base.total_steps))

    def pilot_config(self, method: str, rate: float) -> RunConfig:
        """The whole recipe in a few steps."""
        return fair_config(on_budget(self.base, self.pilot_steps), method, rate=rate)

    def _pilot_key(self, method: str, rate: float) -> dict[str, Any]:
        return {"run": {**self.pilot_config(method, rate).to_dict(), "device": "any"}, "blocks": PILOT_BLOCKS}

    def pilots(self, method: str) -> dict[float, float | None]:
        """Held-out loss of the pilots that are finished, by rate; None for one that left the finite numbers."""
        found = {
            rate: self.store.find(f"pilot-{method}-{rate:.2f}", self._pilot_key(method, rate)) for rate in self.rates
        }
        return {rate: record["loss"] for rate, record in found.items() if record is not None}

    def rate(self, method: str) -> float | None:
        """The rate with the lowest held-out loss, or the only one; None before all pilots are finished."""
        if len(self.rates) == 1:
            return self.rates[0]
        found = {rate: loss for rate, loss in self.pilots(method).items() if loss is not None}
        if len(self.pilots(method)) < len(self.rates) or not found:
            return None
        return min(found, key=lambda rate: found[rate])

    def run_pilots(self, method: str) -> None:
        """Train with each of the rates for a few steps, unless that is done or there is nothing to choose."""
        for rate in self.rates if len(self.rates) > 1 else ():
            name = f"pilot-{method}-{rate:.2f}"

            def make(rate: float = rate, name: str = name) -> dict[str, Any]:
                folder = self.finish_run(name, self.pilot_config(method, rate))
                loss, by = heldout_loss(zoo.load_model(folder, device=self.device), self)
                return {"kind": "pilot", "method": method, "rate": rate, "loss": loss, "by": by}

            self.store.once(
                name, self._pilot_key(method, rate), make, lambda made: f"{method}, pilot at {made['rate']:.2g}"
            )

    # -- running -------------------------------------------------------------------------------------------------------

    def costs(self) -> list[SystemCost]:
        """As for any comparison, with the pilots that are missing."""
        found = []
        for cost in super().costs():
            method, at, _ = self.trained_as(cost.system).partition("@")
            shared = at or cost.system == CONTROLLED or len(self.rates) == 1
            missing = 0 if shared else len(self.rates) - len(self.pilots(method))
            pilot = missing * self.pilot_steps * self._trial(cost.system).seconds_per_step if missing else 0.0
            found.append(SystemCost(cost.system, cost.parameters, cost.training + pilot, cost.sampling))
        return found

    def _measured(self, system: str) -> list[SystemResult]:
        self.run_pilots(method_of(self.trained_as(system)))
        return super()._measured(system)


def heldout_loss(model: Any, study: Study) -> tuple[float | None, str]:
    """What a pilot is judged by: the bound on the likelihood of held-out text, or the training loss where none is."""
    # Not the text that samples are held against at the end.
    reference = study.reference
    assert reference.statistics is not None
    texts = replace(reference, real=reference.statistics[:PILOT_BLOCKS])
    try:
        found = likelihood_of(model, texts, draws=PILOT_DRAWS)
        return finite(found["nats_per_token"]), str(found["kind"])
    except UserError:  # the method has no bound
        tokens = torch.from_numpy(np.asarray(texts.real, dtype=np.int64)).to(model.device)
        losses = model.monitor(tokens, draws=RowDraws([derive_seed(0, "pilot", row) for row in range(len(tokens))]))
        named = [number for name, number in losses.items() if name.startswith("loss@")]
        return finite(sum(named) / len(named)), "mean held-out loss at fixed times"
