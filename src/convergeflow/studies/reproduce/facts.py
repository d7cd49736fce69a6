"""Does a model carry facts from mention to mention, and at which noise? (Not in the paper.)

A story names its hero, thing or animal several times, and samples fail mostly there. On held-out stories that are made
noisy, each mention of a repeated fact is read within its kind (which thing, given that it is a thing) by three readers:

- alone: the best reading of a position by itself, its kernel score and the word's frequency;
- pooled: the best reading of all mentions together, whose kernel scores add;
- the model, self-conditioned once.

A model that ignores other mentions lies on the first curve, one that finds them all on the second.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from convergeflow.data.program import END_TOKEN
from convergeflow.data.stories import stories_law
from convergeflow.evaluation.estimate import Estimate
from convergeflow.flow.path import sample_path
from convergeflow.model.fused import kernel_scores
from convergeflow.randomness import RowDraws
from convergeflow.sampling.settings import Settings
from convergeflow.studies.reproduce import models
from convergeflow.studies.reproduce.bench import Bench, seeds_of
from convergeflow.studies.reproduce.result import ExperimentResult, Record
from convergeflow.studies.reproduce.verdict import Judgement, below, not_measured
from convergeflow.systems.convergeflow import ConvergeFlowModel

KINDS = ("name", "thing", "colour", "animal", "place", "feeling")
READERS = ("alone", "model", "pooled")
MIDDLE = 4.0
"""The noise level of the verdicts: a single mention is read right two times in five there."""


@cache
def _words(kind: str) -> tuple[int, ...]:
    """The ids of all words of a kind."""
    law = stories_law()
    return tuple(law.word_id[word] for words in law.groups[kind] for word in words)


def repeated(tokens: Tensor) -> list[tuple[int, list[int], str]]:
    """(row, positions, kind) of every fact that a story mentions at least twice."""
    end = stories_law().word_id[END_TOKEN]
    found = []
    for row, ids in enumerate(tokens.tolist()):
        ends = [position for position, token in enumerate(ids) if token == end]
        for begin, stop in zip([0, *(e + 1 for e in ends)], [*ends, len(ids)], strict=True):
            for kind in KINDS:
                positions = [p for p in range(begin, stop) if ids[p] in _words(kind)]
                if len(positions) > 1:
                    found.append((row, positions, kind))
    return found


def mentions(bench: Bench, settings: Settings, point: dict[str, Any], label: str) -> Record:
    """The kind of point that the description names: what each reader makes of the mentions at one noise level."""
    scale, level = bench.scale, point["gamma"]
    corpus = models.corpus_for(bench.store, scale)
    key = {"model": bench.model.weights, "n": scale.num_samples, "corpus": corpus.fingerprint, "gamma": level}

    def compute() -> dict[str, Any]:
        tokens = torch.from_numpy(np.asarray(corpus.heldout[: scale.num_samples]).astype(np.int64))
        return _read(bench.load(bench.model), tokens, corpus.unigram, level)

    return bench.store.point("facts", key, compute, label=label)


@torch.no_grad()
def _read(model: ConvergeFlowModel, tokens: Tensor, unigram: Any, level: float) -> dict[str, Any]:
    """Share of mentions that each reader names, with an error over facts; of the model also by kind."""
    model.eval()
    network = model.network
    table = network.embedding.rows()
    at = model.schedule.at_gamma(torch.full((len(tokens),), level, dtype=torch.float64))
    noise = RowDraws(seeds_of(len(tokens))).normal(tokens.shape[1], table.shape[1])
    x = sample_path(table[tokens], noise, at).to(table.dtype)
    scores = float(at.kernel[0]) * kernel_scores(x, table)
    prior = torch.from_numpy(np.log(np.asarray(unigram, dtype=np.float64) + 1e-12)).to(scores)
    first = network(x, at, table=table).weigh(x, at).mu
    logits = network(x, at, first, table=table).logits(x, at)
    right: dict[str, list[tuple[str, float, int]]] = {reader: [] for reader in READERS}
    for row, positions, kind in repeated(tokens):
        words, true = torch.tensor(_words(kind)), tokens[row, positions]
        own = scores[row, positions][:, words]
        named = {
            "alone": words[(own + prior[words]).argmax(-1)],
            "pooled": words[(own.sum(0) + prior[words]).argmax(-1)].expand(len(positions)),
            "model": words[logits[row, positions][:, words].argmax(-1)],
        }
        for reader, guess in named.items():
            right[reader].append((kind, float((guess == true).sum()), len(positions)))
    values: dict[str, Any] = {"facts": len(right["model"]), "n": len(tokens)}
    for reader, counts in right.items():
        share, error = _share(counts)
        values |= {reader: share, f"{reader}_se": error}
    for kind in KINDS:
        share, error = _share([count for count in right["model"] if count[0] == kind])
        values |= {f"model_{kind}": share, f"model_{kind}_se": error}
    return values


def _share(counts: list[tuple[str, float, int]]) -> tuple[float | None, float | None]:
    """Right mentions over all, and its standard error over facts (mentions of one fact are not independent)."""
    if len(counts) < 2:
        return None, None
    right = np.array([count[1] for count in counts])
    mentions = np.array([count[2] for count in counts], dtype=np.float64)
    share = right.sum() / mentions.sum()
    residual = right - share * mentions
    return float(share), float(np.sqrt((residual**2).sum()) / mentions.sum())


def reads_more(result: ExperimentResult, weak: str, allowance: float, what: str) -> Judgement:
    """The model names more mentions than a weaker reader less an allowance."""
    values = next((record["values"] for record in result.records if record["gamma"] == MIDDLE), None)
    if values is None or values[weak] is None or values["model"] is None:
        return not_measured("no fact is mentioned twice in these texts (only stories say which words are facts)")
    small = Estimate(values[weak] - allowance, values[f"{weak}_se"], values["facts"])
    large = Estimate(values["model"], values["model_se"], values["facts"])
    return below(small, large, what=f"{what} at gamma = {MIDDLE:g}")
