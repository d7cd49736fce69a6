"""The gaming guard: samplers that write nothing worth reading, scored like everybody else.

Gen. PPL rewards text that the scorer finds likely, and unigram entropy looks at one sample at a time. A sampler that
draws words from the unigram law, one that repeats a sentence, and one that always says the same text show what each
number can and cannot see. The report says of each why it does not win; the reasons are computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from convergeflow.randomness import derive_seed
from convergeflow.results import figures
from convergeflow.sampling.settings import Settings
from convergeflow.studies.reproduce import engine, judges
from convergeflow.studies.reproduce.bench import Bench
from convergeflow.studies.reproduce.registry import Experiment
from convergeflow.studies.reproduce.result import ExperimentResult, Record
from convergeflow.studies.reproduce.verdict import Judgement, decide


def text(bench: Bench, settings: Settings, point: dict[str, Any], label: str) -> Record:
    """The kind of point that the description names: a text that no model wrote."""
    return bench.text(point["text"], lambda: TEXTS[point["text"]](bench), label=label)


def _real(bench: Bench) -> np.ndarray[Any, Any]:
    assert bench.reference.real is not None
    return bench.reference.real


def _draw_unigram(bench: Bench) -> np.ndarray[Any, Any]:
    """Words drawn independently with their frequencies in real text."""
    reference = bench.reference
    assert reference.statistics is not None
    counts = np.bincount(reference.statistics.ravel(), minlength=reference.vocabulary)
    rng = np.random.default_rng(derive_seed(0, "unigram sampler"))
    size = (bench.scale.num_samples, bench.scale.length)
    return rng.choice(reference.vocabulary, size=size, p=counts / counts.sum())


def _repeat_sentence(bench: Bench) -> np.ndarray[Any, Any]:
    """The opening of a real text, over and over; each sample has its own."""
    length = bench.scale.length
    span = max(4, length // 8)
    return np.tile(_real(bench)[: bench.scale.num_samples, :span], (1, -(-length // span)))[:, :length]


def _one_text(bench: Bench) -> np.ndarray[Any, Any]:
    """The real text that the scorer likes best, as every sample."""
    best = int(np.argmin(bench.read(_real(bench)).scored.nll))
    return np.repeat(_real(bench)[best : best + 1], bench.scale.num_samples, axis=0)


TEXTS = {
    "real": _real,
    "unigram sampler": _draw_unigram,
    "repeated sentence": _repeat_sentence,
    "one text for all": _one_text,
}


def measure(experiment: Experiment, bench: Bench) -> tuple[list[Record], dict[str, Any]]:
    records, values = engine.measure(experiment, bench)
    return records, {**values, "reasons": [_faults(record, values["real"]) for record in records[1:]]}


def _faults(record: Record, real: dict[str, Any]) -> dict[str, Any]:
    """Why a sampler does or does not win, from its numbers."""
    values, faults = record["values"], []
    if values["gen_ppl"] > 1.02 * real["gen_ppl"]:
        faults.append(f"Gen. PPL {values['gen_ppl'] / real['gen_ppl']:.3g} times that of real text")
    if values["entropy"] < real["entropy"] - max(0.02, 2 * (values["entropy_se"] or 0.0)):
        faults.append(f"entropy {real['entropy'] - values['entropy']:.2f} nats below real text")
    if values["distinct"] < 0.98 * real["distinct"]:
        faults.append(f"only {values['distinct']:.1%} of its texts are different")
    if values.get("valid") is not None and values["valid"] < 0.98:
        faults.append(f"{values['valid']:.1%} valid texts")
    return {"sampler": record["curve"], "faults": "; ".join(faults) or "nothing to object to by these numbers"}


def one_text(result: ExperimentResult) -> Judgement:
    real, other = result.values_of(curve="real text"), result.values_of(curve="one text for all")
    passes = other["gen_ppl"] <= real["gen_ppl"]
    caught = other["distinct"] <= 0.02 or other["distinct"] * other["n"] <= 1.0
    return Judgement(
        decide(passes and caught and real["distinct"] > 0.9, resolved=True),
        f"one text for all has Gen. PPL {other['gen_ppl']:.3g} (real text {real['gen_ppl']:.3g}) at entropy "
        f"{other['entropy']:.3f} (real {real['entropy']:.3f}) and passes both; the share of different texts, "
        f"{other['distinct']:.3f} against {real['distinct']:.3f}, catches it",
    )


def ours(result: ExperimentResult, left: str, right: str, what: str) -> Judgement:
    judgement = judges.curve_below(result, left, right, "gen_ppl", what)
    distinct = result.values_of(curve=left)["distinct"]
    return Judgement(judgement.verdict, f"{judgement.evidence}; different texts: {distinct:.3f}")


def draw(result: ExperimentResult) -> Figure:
    figure, axes = figures.panels(2, width=5.2)
    for record, colour, marker in zip(result.records, figures.COLOURS, "*osD^v", strict=False):
        values = record["values"]
        look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 9, "linestyle": ""}
        for panel, number in zip(axes, ("entropy", "distinct"), strict=True):
            panel.plot([values[number]], [values["gen_ppl"]], label=record["curve"], **look)
    for panel in axes:
        figures.logarithmic(panel)
    axes[1].set_xlim(-0.06, 1.06)
    figures.label_axes(axes[0], "unigram entropy (nats)", "Gen. PPL", "What the two usual numbers see")
    figures.label_axes(axes[1], "share of different texts", "Gen. PPL", "What they do not see")
    axes[0].legend(loc="best", fontsize=8)
    return figure
