"""All metrics of a set of samples that need no scorer, each beside its value for real text.

One table of names: what a metric is called here is what records, reports and frontiers call it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convergeflow.evaluation.divergence import jensen_shannon
from convergeflow.evaluation.diversity import pairwise_overlap, repetition, training_overlap
from convergeflow.evaluation.entropy import unigram_entropy
from convergeflow.evaluation.estimate import Estimate
from convergeflow.evaluation.exact import ExactScores, exact_scores
from convergeflow.evaluation.reference import Reference

Blocks = NDArray[np.integer]


@dataclass(frozen=True)
class Metric:
    """A name, what it measures (with unit), and how it is computed from blocks and the reference."""

    name: str
    about: str
    compute: Callable[[Blocks, Reference], Estimate | None]


def _entropy(ids: Blocks, reference: Reference) -> Estimate:
    return unigram_entropy(list(ids))


def _repetition(n: int) -> Callable[[Blocks, Reference], Estimate | None]:
    return lambda ids, reference: repetition(ids, n, reference.vocabulary) if ids.shape[1] >= n else None


def _pairwise(n: int) -> Callable[[Blocks, Reference], Estimate | None]:
    return lambda ids, reference: pairwise_overlap(ids, n, reference.vocabulary) if ids.shape[1] >= n else None


def _training(n: int) -> Callable[[Blocks, Reference], Estimate | None]:
    def compute(ids: Blocks, reference: Reference) -> Estimate | None:
        if reference.training is None or ids.shape[1] < n or reference.training.shape[1] < n:
            return None
        return training_overlap(ids, reference.training, n, reference.vocabulary)

    return compute


def _distance(n: int) -> Callable[[Blocks, Reference], Estimate | None]:
    def compute(ids: Blocks, reference: Reference) -> Estimate | None:
        if reference.statistics is None or ids.shape[1] < n:
            return None
        return jensen_shannon(ids, reference.statistics, n, reference.vocabulary)

    return compute


METRICS = (
    Metric("entropy", "unigram entropy of a sample (nats)", _entropy),
    Metric("repetition_4", "4-grams of a sample that it said before (share)", _repetition(4)),
    Metric("pairwise_overlap_4", "4-grams that two samples share (Jaccard)", _pairwise(4)),
    Metric("training_overlap_8", "8-grams of a sample that occur in the training text (share)", _training(8)),
    Metric("js_1", "distance of word shares to held-out text (0 to 0.833)", _distance(1)),
    Metric("js_2", "distance of 2-gram shares to held-out text (0 to 0.833)", _distance(2)),
    Metric("js_4", "distance of 4-gram shares to held-out text (0 to 0.833)", _distance(4)),
)

EXACT_ABOUT = {
    "valid": "samples that the law of the stories can write (share)",
    "valid_stories": "valid stories (share)",
    "valid_sentences": "valid sentences (share)",
    "facts_kept": "later mentions that agree with the first (share)",
    "stories_with_facts_kept": "stories whose mentions all agree (share)",
    "clean_nll": "exact NLL of the valid samples (nats per token)",
    "smoothed_nll": "NLL of all samples under the smoothed law (nats per token)",
    "clean_excess": "exact NLL of valid samples above the data's entropy (nats per token)",
    "smoothed_excess": "smoothed NLL above the data's entropy (nats per token)",
    "slot_kl": "KL of the choices to their exact probabilities (nats per choice)",
}


def about(name: str) -> str:
    """One line on a metric."""
    for metric in METRICS:
        if metric.name == name:
            return metric.about
    return EXACT_ABOUT.get(name, name)


def measure(ids: Blocks, reference: Reference) -> dict[str, dict[str, Any]]:
    """Every metric that applies: name -> value, se, n, and real, real_se, real_n for held-out text."""
    table: dict[str, dict[str, Any]] = {}
    for metric in METRICS:
        here = metric.compute(ids, reference)
        if here is not None:
            table[metric.name] = beside(here, _real(metric, reference))
    return table


@lru_cache(maxsize=256)
def _real(metric: Metric, reference: Reference) -> Estimate | None:
    """A metric of the real text: the same for every point of a frontier, so it is computed once."""
    return None if reference.real is None else metric.compute(reference.real, reference)


@lru_cache(maxsize=16)
def _real_exact(reference: Reference) -> ExactScores | None:
    return None if reference.real is None else exact_scores(reference.real, reference.law)


def measure_exact(ids: Blocks, reference: Reference) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The exact scores of stories in the same form, and what does not fit a table (slots, entropy, eps)."""
    here = exact_scores(ids, reference.law)
    real = _real_exact(reference)
    table = {
        name: beside(estimate, None if real is None else real.metrics[name]) for name, estimate in here.metrics.items()
    }
    return table, {"entropy_per_token": here.entropy, "slots": here.slots}


def beside(here: Estimate, real: Estimate | None) -> dict[str, Any]:
    """A metric with its value for real text."""
    row = here.describe()
    if real is not None:
        row |= {f"real{'' if key == 'value' else '_' + key}": value for key, value in real.describe().items()}
    return row
