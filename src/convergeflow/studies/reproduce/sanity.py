"""The gaming guard: samplers that write nothing worth reading, scored like everybody else.

Gen. PPL rewards text that the scorer finds likely, and unigram entropy looks at one sample at a time. A sampler that
draws words from the unigram law, one that repeats a sentence, and one that always says the same text show what each
number can and cannot see. The report says of each why it does not win; the reasons are computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from convergeflow.evaluation.protocol import PROTOCOLS
from convergeflow.evaluation.scorers import Texts
from convergeflow.flow.guidance import Controls
from convergeflow.randomness import derive_seed
from convergeflow.studies.reproduce import plotting
from convergeflow.studies.reproduce.bench import EXACT_PROTOCOL, PAPER_PROTOCOL, Bench
from convergeflow.studies.reproduce.result import ExperimentResult, Record, ReportTable
from convergeflow.studies.reproduce.verdict import Judgement, below, decide, lower, measured

REAL = "real text"
UNIGRAM, SENTENCE, ONE_TEXT = "unigram sampler", "repeated sentence", "one text for all"


def _draw_unigram(bench: Bench) -> np.ndarray[Any, Any]:
    """Words drawn independently with their frequencies in real text."""
    reference = bench.reference
    assert reference.statistics is not None
    counts = np.bincount(reference.statistics.ravel(), minlength=reference.vocabulary)
    rng = np.random.default_rng(derive_seed(0, "unigram sampler"))
    size = (bench.scale.num_samples, bench.scale.length)
    return rng.choice(reference.vocabulary, size=size, p=counts / counts.sum())


def _repeat_sentence(bench: Bench) -> np.ndarray[Any, Any]:
    """The opening of a real block, over and over; each sample has its own."""
    assert bench.reference.real is not None
    span = max(4, bench.scale.length // 8)
    openings = bench.reference.real[: bench.scale.num_samples, :span]
    repeats = -(-bench.scale.length // span)
    return np.tile(openings, (1, repeats))[:, : bench.scale.length]


def _one_text(bench: Bench) -> np.ndarray[Any, Any]:
    """The real block that the scorer likes best, as every sample."""
    assert bench.reference.real is not None
    exact = bench.scale.scorer == "exact"
    protocol = PROTOCOLS[EXACT_PROTOCOL if exact else PAPER_PROTOCOL]
    texts = Texts.from_ids(bench.reference.real, None if exact else bench.reference.tokenizer)
    best = int(np.argmin(bench.scorer.score(texts, protocol).nll))
    return np.repeat(bench.reference.real[best : best + 1], bench.scale.num_samples, axis=0)


def measure(bench: Bench) -> tuple[list[Record], dict[str, Any]]:
    records = [
        {**bench.real_text(), "name": REAL},
        {**bench.text(UNIGRAM, lambda: _draw_unigram(bench)), "name": UNIGRAM},
        {**bench.text(SENTENCE, lambda: _repeat_sentence(bench)), "name": SENTENCE},
        {**bench.text(ONE_TEXT, lambda: _one_text(bench)), "name": ONE_TEXT},
    ]
    for name, controls in (
        ("ConvergeFlow, standard", Controls()),
        ("ConvergeFlow, C K=100 w=40", Controls.configuration("C", refine=100, scg=40.0)),
    ):
        settings = bench.settings(64, controls)
        records.append({**bench.measure(settings, label=f"NFE 64, {name}"), "name": name})
    return records, {}


def _values(result: ExperimentResult, name: str) -> dict[str, Any]:
    return result.values_of(name=name)


def unigram(result: ExperimentResult) -> Judgement:
    real, other = _values(result, REAL), _values(result, UNIGRAM)
    return below(
        measured(real, "gen_ppl"), measured(other, "gen_ppl"), what="Gen. PPL of real text against the unigram sampler"
    )


def sentence(result: ExperimentResult) -> Judgement:
    real, other = _values(result, REAL), _values(result, SENTENCE)
    return lower(
        measured(other, "entropy"),
        measured(real, "entropy"),
        what="entropy of the repeated sentence against real text, nats",
    )


def one_text(result: ExperimentResult) -> Judgement:
    real, other = _values(result, REAL), _values(result, ONE_TEXT)
    passes = other["gen_ppl"] <= real["gen_ppl"]
    caught = other["distinct"] <= 0.02 or other["distinct"] * other["n"] <= 1.0
    return Judgement(
        decide(passes and caught and real["distinct"] > 0.9, resolved=True),
        f"one text for all has Gen. PPL {other['gen_ppl']:.3g} (real text {real['gen_ppl']:.3g}) at entropy "
        f"{other['entropy']:.3f} (real {real['entropy']:.3f}) and passes both; the share of different texts, "
        f"{other['distinct']:.3f} against {real['distinct']:.3f}, catches it",
    )


def ours(result: ExperimentResult) -> Judgement:
    ours, junk = _values(result, "ConvergeFlow, standard"), _values(result, UNIGRAM)
    judgement = below(
        measured(ours, "gen_ppl"),
        measured(junk, "gen_ppl"),
        what="Gen. PPL of ConvergeFlow against the unigram sampler",
    )
    return Judgement(judgement.verdict, f"{judgement.evidence}; different texts: {ours['distinct']:.3f}")


def reasons(result: ExperimentResult) -> list[tuple[str, str]]:
    """Why each sampler does or does not win, from its numbers."""
    real = _values(result, REAL)
    found = []
    for record in result.records:
        name, values = record["name"], record["values"]
        if name == REAL:
            continue
        faults = []
        if values["gen_ppl"] > 1.02 * real["gen_ppl"]:
            faults.append(f"Gen. PPL {values['gen_ppl'] / real['gen_ppl']:.3g} times that of real text")
        if values["entropy"] < real["entropy"] - max(0.02, 2 * (values["entropy_se"] or 0.0)):
            faults.append(f"entropy {real['entropy'] - values['entropy']:.2f} nats below real text")
        if values["distinct"] < 0.98 * real["distinct"]:
            faults.append(f"only {values['distinct']:.1%} of its texts are different")
        if values.get("valid") is not None and values["valid"] < 0.98:
            faults.append(f"{values['valid']:.1%} valid texts")
        found.append((name, "; ".join(faults) or "nothing to object to by these numbers"))
    return found


def draw(result: ExperimentResult) -> Figure:
    figure, axes = plotting.panels(2, width=5.2)
    for index, record in enumerate(result.records):
        values = record["values"]
        colour, marker = plotting.COLOURS[index], "*osD^v"[index]
        for panel, number in ((axes[0], "entropy"), (axes[1], "distinct")):
            panel.plot(
                [values[number]],
                [values["gen_ppl"]],
                marker=marker,
                color=colour,
                linestyle="",
                markersize=9,
                label=record["name"],
            )
    for panel in axes:
        panel.set_yscale("log")
        plotting.plain_logarithm(panel)
    axes[1].set_xlim(-0.06, 1.06)
    plotting.label_axes(axes[0], "unigram entropy (nats)", "Gen. PPL", "What the two usual numbers see")
    plotting.label_axes(axes[1], "share of different texts", "Gen. PPL", "What they do not see")
    axes[0].legend(loc="best", fontsize=8)
    return figure


def tabulate(result: ExperimentResult) -> list[ReportTable]:
    columns = ("sampler", "PPL", "±", "H", "±", "different texts", "valid", "slot KL")
    rows = [
        (
            r["name"],
            r["values"]["gen_ppl"],
            r["values"]["gen_ppl_se"],
            r["values"]["entropy"],
            r["values"]["entropy_se"],
            r["values"]["distinct"],
            r["values"].get("valid"),
            r["values"].get("slot_kl"),
        )
        for r in result.records
    ]
    return [
        ReportTable("Samplers that must not win", columns, rows),
        ReportTable("Why they do not", ("sampler", "what its numbers say against it"), list(reasons(result))),
    ]
