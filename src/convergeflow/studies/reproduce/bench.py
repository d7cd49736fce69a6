"""One measured point: samples of a model under one setting, scored, and kept as a record with its samples.

Gen. PPL and unigram entropy have standard errors over samples; on stories the share of valid texts stands beside them.
The paper's nominal strengths are carried over to the model's own schedule so that the effective strengths at the last
grid point are equal; at the paper's schedule they stay what they are.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from convergeflow.data.tokenizer import Tokenizer
from convergeflow.evaluation.entropy import sample_entropies, unigram_entropy
from convergeflow.evaluation.estimate import Estimate, finite, mean
from convergeflow.evaluation.exact import exact_scores
from convergeflow.evaluation.generative import perplexity
from convergeflow.evaluation.protocol import PROTOCOLS
from convergeflow.evaluation.reference import Reference, corpus_reference, stories_reference
from convergeflow.evaluation.scorers import Scorer, Texts, scorer_named
from convergeflow.flow.budget import allocate
from convergeflow.flow.guidance import Controls, rescaled
from convergeflow.flow.schedule import Schedule
from convergeflow.randomness import derive_seed
from convergeflow.sampling.settings import PAPER_SCHEDULE, Settings
from convergeflow.studies.reproduce import models
from convergeflow.studies.reproduce.models import Kept
from convergeflow.studies.reproduce.scale import ExperimentScale
from convergeflow.studies.reproduce.workspace import Workspace
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
    """Measures points of one scale in one workspace."""

    def __init__(self, workspace: Workspace, scale: ExperimentScale) -> None:
        self.workspace, self.scale = workspace, scale
        self._loaded: tuple[str, ConvergeFlowModel] | None = None

    @cached_property
    def model(self) -> Kept:
        """The model that most points sample."""
        return models.sampled_model(self.workspace, self.scale)

    @cached_property
    def scorer(self) -> Scorer:
        return scorer_named(self.scale.scorer)

    @cached_property
    def reference(self) -> Reference:
        """Real text of the samples' length."""
        if self.scale.corpus == "stories":
            return stories_reference(self.scale.num_samples, self.scale.length)
        return corpus_reference(
            models.corpus_for(self.workspace, self.scale), self.scale.num_samples, self.scale.length
        )

    def load(self, kept: Kept) -> ConvergeFlowModel:
        """The model, kept in memory until another one is asked for."""
        if self._loaded is None or self._loaded[0] != kept.weights:
            self._loaded = (kept.weights, kept.load())
        return self._loaded[1]

    def settings(self, nfe: int, controls: Controls, kept: Kept | None = None) -> Settings:
        """The paper's setting for the model's schedule."""
        return carried_over(nfe, controls, self.load(kept or self.model).schedule)

    def measure(
        self, settings: Settings, *, kept: Kept | None = None, label: str, rule: str = "weight", num: int | None = None
    ) -> dict[str, Any]:
        """The record of a setting: scores of the samples under one token rule."""
        kept, num = kept or self.model, num or self.scale.num_samples
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

        record = self.workspace.point("samples", key, compute, label=label if rule == "weight" else f"{label}, {rule}")
        return {**record, "label": label}

    def samples(
        self, kept: Kept, settings: Settings, num: int
    ) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
        """Ids under every token rule, [num, length] each; kept, so that a second rule costs nothing."""
        settings = replace(settings, decode="weight")
        store = self.workspace.sample_store(
            {"settings": settings.describe(), "model": kept.weights, "n": num, "length": self.scale.length}
        )
        stored = store.read()
        if stored is None:
            model = self.load(kept)
            drawn = model.sample(num, self.scale.length, seeds=seeds_of(num), settings=settings)
            arrays = {
                name.removeprefix("ids_"): value.numpy().astype(np.int32)
                for name, value in drawn.extras.items()
                if name.startswith("ids_")
            }
            plan = drawn.settings["plan"]
            facts = {
                "nfe_counted": drawn.nfe,
                "steps": plan["num_steps"],
                "refinements": plan["refinements"],
                "last_scg": plan["effective_scg"][-1],
                "last_ug": plan["effective_ug"][-1],
            }
            store.write(arrays, facts)
            stored = (arrays, facts)
        return stored

    def score(self, ids: np.ndarray[Any, Any]) -> dict[str, Any]:
        """Gen. PPL, entropy and what the corpus allows besides, as JSON values."""
        ids = np.asarray(ids, dtype=np.int64)
        tokenizer: Tokenizer | None = self.reference.tokenizer
        exact = self.scale.scorer == "exact"
        protocol = PROTOCOLS[EXACT_PROTOCOL if exact else PAPER_PROTOCOL]
        scored = self.scorer.score(Texts.from_ids(ids, None if exact else tokenizer), protocol)
        values = {"gen_ppl": perplexity(scored, protocol.aggregate), "entropy": unigram_entropy(list(ids))}
        numbers = _flat(values)
        if exact:
            found = exact_scores(ids).metrics
            numbers |= _flat({name: found[name] for name in ("valid", "valid_sentences", "facts_kept", "slot_kl")})
        # How many different texts there are: a sampler that repeats itself must not pass.
        numbers |= _flat({"distinct": mean(_first_occurrence(ids))})
        each = {
            "nll": [round(float(value), 4) for value in scored.nll],
            "tokens": [int(value) for value in scored.tokens],
            "entropy": [round(float(value), 5) for value in sample_entropies(list(ids))],
        }
        return {**numbers, "n": len(ids), "protocol": protocol.id, "per_sample": each}

    def real_text(self) -> dict[str, Any]:
        """The record of real text, scored like samples."""
        key = {
            "text": "real",
            "n": self.scale.num_samples,
            "length": self.scale.length,
            "scorer": self.scale.scorer,
            "corpus": self.reference.fingerprint,
        }

        def compute() -> dict[str, Any]:
            assert self.reference.real is not None
            return self.score(self.reference.real)

        return self.workspace.point("baselines", key, compute, label="real text")

    def text(self, name: str, ids: Any) -> dict[str, Any]:
        """The record of texts that no model wrote; `ids` is a function that makes them."""
        key = {
            "text": name,
            "n": self.scale.num_samples,
            "length": self.scale.length,
            "scorer": self.scale.scorer,
            "corpus": self.reference.fingerprint,
        }
        return self.workspace.point("baselines", key, lambda: self.score(ids()), label=name)


def _first_occurrence(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """1 for a sample that did not occur before it in the list, 0 for a repetition, [n]."""
    seen: set[bytes] = set()
    fresh = []
    for row in ids:
        text = row.tobytes()
        fresh.append(float(text not in seen))
        seen.add(text)
    return np.array(fresh)


def _flat(values: dict[str, Estimate]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, estimate in values.items():
        flat[name], flat[f"{name}_se"] = finite(estimate.value), finite(estimate.se)
    return flat
