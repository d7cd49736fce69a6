"""One measured point: samples of a model under one setting, scored, and kept as a record with its samples.

Gen. PPL and unigram entropy have standard errors over samples; on stories the share of valid texts stands beside them.
The paper's nominal strengths are carried over to the model's own schedule so that the effective strengths at the last
grid point are equal; at the paper's schedule they stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from convergeflow.evaluation.assess import Assessor, ScorerView
from convergeflow.evaluation.estimate import finite, mean
from convergeflow.evaluation.exact import exact_scores
from convergeflow.evaluation.protocol import PROTOCOLS, Protocol
from convergeflow.evaluation.reference import Reference, corpus_reference, stories_reference
from convergeflow.evaluation.scorers import Texts, scorer_named
from convergeflow.flow.budget import allocate
from convergeflow.flow.guidance import Controls, rescaled
from convergeflow.flow.schedule import Schedule
from convergeflow.randomness import derive_seed
from convergeflow.results.claims import Taken
from convergeflow.results.draw import draw
from convergeflow.results.store import Arrays, Missing, Store
from convergeflow.sampling.plan import PAPER_SCHEDULE
from convergeflow.sampling.settings import Settings
from convergeflow.studies.reproduce import models
from convergeflow.studies.reproduce.models import KeptModel
from convergeflow.studies.reproduce.scale import ExperimentScale
from convergeflow.systems.convergeflow import ConvergeFlowModel

PAPER_PROTOCOL = "convergeflow-2026"
EXACT_PROTOCOL = "ours-1"


def carried_over(nfe: int, controls: Controls, schedule: Schedule) -> Settings:
    """The paper's setting for another schedule: equal effective strengths at the paper's last grid point."""
    last = float(allocate(nfe, controls, PAPER_SCHEDULE).grid[-1])
    carried = rescaled(controls, PAPER_SCHEDULE, schedule, end=last)
    # A refinement count below one would switch self-conditioning off, which no row of the paper does.
    return Settings(nfe=nfe, controls=replace(carried, refine=max(1, carried.refine)))


def seeds_of(num: int) -> list[int]:
    """The seeds of all points are the same: differences between settings are not differences between noises."""
    return [derive_seed(0, "reproduce", row) for row in range(num)]


class Bench:
    """Measures points of one scale in one store."""

    def __init__(self, store: Store, scale: ExperimentScale) -> None:
        self.store, self.scale = store, scale
        self._loaded: tuple[str, ConvergeFlowModel] | None = None

    @cached_property
    def model(self) -> KeptModel:
        """The model that most points sample."""
        return models.sampled_model(self.store, self.scale)

    @cached_property
    def start(self) -> KeptModel:
        """The CE-trained model that others start from."""
        return models.start_model(self.store, self.scale)

    @cached_property
    def assessor(self) -> Assessor:
        return Assessor(scorer_named(self.scale.scorer), self.reference)

    @property
    def protocol(self) -> Protocol:
        return PROTOCOLS[EXACT_PROTOCOL if self.scale.scorer == "exact" else PAPER_PROTOCOL]

    @cached_property
    def reference(self) -> Reference:
        """Real text of the samples' length."""
        if self.scale.corpus == "stories":
            return stories_reference(self.scale.num_samples, self.scale.length)
        return corpus_reference(models.corpus_for(self.store, self.scale), self.scale.num_samples, self.scale.length)

    def load(self, kept: KeptModel) -> ConvergeFlowModel:
        """The model, kept in memory until another one is asked for."""
        if self._loaded is None or self._loaded[0] != kept.weights:
            self._loaded = (kept.weights, kept.load())
        return self._loaded[1]

    def settings(self, nfe: int, controls: Controls) -> Settings:
        """The paper's setting for the model's schedule, at the scale's share of its guidance."""
        share = self.scale.strength
        controls = replace(controls, scg=share * controls.scg, ug=share * controls.ug)
        return carried_over(nfe, controls, self.load(self.model).schedule)

    def measure(
        self, settings: Settings, *, kept: KeptModel | None = None, label: str, rule: str = "weight"
    ) -> dict[str, Any]:
        """The record of a setting: scores of the samples under one token rule."""
        kept, num = kept or self.model, self.scale.num_samples
        key = {
            "nfe": settings.nfe,
            "rule": rule,
            "settings": replace(settings, decode="weight").describe(),
            "model": kept.weights,
            "n": num,
            "length": self.scale.length,
            "scorer": self.scale.scorer,
        }

        def compute() -> dict[str, Any]:
            ids, facts = self.samples(kept, settings, num)
            return {**self.score(ids[rule]), **facts}

        if not self.store.has("samples", key):
            if self.store.measuring:
                self.assessor.check(self.load(kept), [self.protocol])
            self.samples(kept, settings, num)  # not within the point, so that all processes share the parts

        record = self.store.point("samples", key, compute, label=label if rule == "weight" else f"{label}, {rule}")
        return {**record, "label": label}

    def samples(self, kept: KeptModel, settings: Settings, num: int) -> tuple[Arrays, dict[str, Any]]:
        """Ids under every token rule, [num, length] each; kept, so that a second rule costs nothing.

        A large number is made and kept in parts, which several processes share; `Taken` if others still work on some.
        """
        settings = replace(settings, decode="weight")
        key = {"settings": settings.describe(), "model": kept.weights, "length": self.scale.length}
        seeds, size = seeds_of(num), self.scale.part
        if num <= size:
            return self.store.arrays({**key, "n": num}, partial(self._draw, kept, settings, seeds))
        made, busy = [], None
        for first in range(0, num, size):
            here = seeds[first : first + size]
            try:
                draw_part = partial(self._draw, kept, settings, here)
                made.append(self.store.arrays({**key, "rows": [first, first + len(here)]}, draw_part))
            except Taken as elsewhere:
                busy = elsewhere
        if busy is not None:
            raise busy
        ids = {rule: np.concatenate([arrays[rule] for arrays, _ in made]) for rule in made[0][0]}
        return ids, {**made[0][1], "nfe_counted": max(facts["nfe_counted"] for _, facts in made)}

    def _draw(self, kept: KeptModel, settings: Settings, seeds: list[int]) -> tuple[Arrays, dict[str, Any]]:
        """Samples of some seeds under every token rule, and facts about their plan."""
        about = {"name": kept.name, "weights": kept.weights}
        drawn = draw(self.load(kept), {"settings": settings}, about=about, seeds=seeds, length=self.scale.length)
        ids = {
            name.removeprefix("ids_"): value.astype(np.int32)
            for name, value in drawn.extras.items()
            if name.startswith("ids_")
        }
        plan = drawn.settings["plan"]
        return ids, {
            "nfe_counted": max(drawn.calls),
            "steps": plan["num_steps"],
            "refinements": plan["refinements"],
            "last_scg": plan["effective_scg"][-1],
            "last_ug": plan["effective_ug"][-1],
        }

    def read(self, ids: np.ndarray[Any, Any]) -> ScorerView:
        """What the scorer says of texts under the protocol of the scale."""
        tokenizer = None if self.scale.scorer == "exact" else self.reference.tokenizer
        return self.assessor.read(Texts.from_ids(ids, tokenizer), self.protocol)

    def score(self, ids: np.ndarray[Any, Any]) -> dict[str, Any]:
        """Gen. PPL, entropy and what the corpus allows besides, as JSON values."""
        ids = np.asarray(ids, dtype=np.int64)
        reading = self.read(ids)
        # How many different texts there are: a sampler that repeats itself must not pass.
        found = {"distinct": mean(_first_occurrence(ids))}
        if self.scale.scorer == "exact":
            exact = exact_scores(ids).metrics
            found |= {name: exact[name] for name in ("valid", "valid_sentences", "facts_kept", "slot_kl")}
        values = {name: finite(estimate.value) for name, estimate in found.items()}
        errors = {f"{name}_se": finite(estimate.se) for name, estimate in found.items()}
        each = {"protocol": self.protocol.id, "per_sample": reading.per_sample()}
        return {**reading.headline(), **values, **errors, **each}

    def real_text(self) -> dict[str, Any]:
        """The record of real text, scored like samples."""
        return self.text("real", lambda: self.reference.real, label="real text")

    def text(self, name: str, ids: Callable[[], Any], label: str = "") -> dict[str, Any]:
        """The record of texts that no model wrote; `ids` is a function that makes them."""
        key = {"text": name, "n": self.scale.num_samples, "length": self.scale.length, "scorer": self.scale.scorer}
        if not self.store.measuring and self.scale.corpus != "stories":
            return self._text_on_record(key)
        key["corpus"] = self.reference.fingerprint
        return self.store.point("baselines", key, lambda: self.score(ids()), label=label or name)

    def _text_on_record(self, key: dict[str, Any]) -> dict[str, Any]:
        """Texts of the corpus that the folder's records are of: who only judges them need not have it."""
        for path in sorted((self.store.folder / "records" / "baselines").glob("*.json")):
            record = self.store.read(f"records/baselines/{path.name}")
            if record is not None and {**record["key"], "corpus": None} == {**key, "corpus": None}:
                return record
        raise Missing(f"{key['text']} text")


def _first_occurrence(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """1 for a sample that did not occur before it in the list, 0 for a repetition, [n]."""
    fresh = np.zeros(len(ids))
    fresh[np.unique(ids, axis=0, return_index=True)[1]] = 1.0
    return fresh
