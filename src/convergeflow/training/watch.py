"""Looking at a model while it trains: fixed held-out numbers and sample text, both functions of the seed alone.

Number formats are those of the finished model on this device, whatever training computes in. Every process computes all
of it, since a sharded model can only be called by all of them together.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from convergeflow.data.corpus import Corpus
from convergeflow.randomness import RowDraws, derive_seed
from convergeflow.training.config import RunConfig
from convergeflow.training.sharding import Doorway

MONITOR_ROWS = 32
"""Held-out sequences per call while evaluating."""
NUM_SAMPLE_TEXTS = 4
BOUND_DRAWS = 4
"""Noise levels for each held-out sequence in the likelihood bound."""
BOUND, BOUND_ERROR, CONTEXT_FREE = "bound", "bound_error", "context_free"
"""Nats per token of the held-out text: at most this many for the model, and what knowing word frequencies leaves."""


def read_tokens(split: Any, rows: Any) -> Tensor:
    """Sequences of a corpus as token ids on the CPU, [rows, length]."""
    return torch.from_numpy(np.asarray(split[rows], dtype=np.int64))


@torch.no_grad()
def evaluate(doorway: Doorway, corpus: Corpus, config: RunConfig, accelerator: Accelerator) -> dict[str, float]:
    """The model's own monitor on the first held-out sequences, each with noise of its own that never changes.

    With it goes the likelihood bound of a model that has one, and what the best predictor without context needs.
    """
    count = min(config.evaluate_blocks, len(corpus.heldout))
    sums: dict[str, float] = {}
    variance = 0.0
    for first in range(0, count, MONITOR_ROWS):
        rows = np.arange(first, min(first + MONITOR_ROWS, count))
        draws = RowDraws([derive_seed(config.seed, "monitor", int(row)) for row in rows], accelerator.device)
        tokens = read_tokens(corpus.heldout, rows)
        numbers = dict(doorway("monitor", tokens.to(accelerator.device), draws=draws))
        if doorway.model.bound_kind is not None:
            found = doorway("bound", tokens, draws=draws, repeats=BOUND_DRAWS)
            numbers[BOUND] = found.nats_per_token
            variance += (found.standard_error * len(rows) / count) ** 2
            numbers[CONTEXT_FREE] = context_free(corpus, tokens)
        for name, value in numbers.items():
            sums[name] = sums.get(name, 0.0) + float(value) * len(rows) / count
    if BOUND in sums and math.isfinite(variance):  # one sequence alone has no error to tell
        sums[BOUND_ERROR] = variance**0.5
    return sums


def context_free(corpus: Corpus, tokens: Tensor) -> float:
    """Nats per token under the word frequencies of the training text, each count raised by a half.

    It is also the flow's own bound if its predictor looks at single positions alone: the posterior of unigram prior and
    Gaussian kernel is exact for text of independent words, and for the exact posterior the bound is tight.
    """
    counts = torch.from_numpy(corpus.unigram * corpus.train.size) + 0.5
    return float((counts.sum().log() - counts.log())[tokens].mean())


def in_words(evaluation: dict[str, float]) -> str:
    """What an evaluation says, on one line; the journal has all of its numbers."""
    if BOUND not in evaluation:
        return "held out: " + "  ".join(f"{name} {value:.4g}" for name, value in evaluation.items())
    bound, alone = evaluation[BOUND], evaluation[CONTEXT_FREE]
    error = f" \u00b1 {evaluation[BOUND_ERROR]:.2f}" if BOUND_ERROR in evaluation else ""
    return (
        f"held-out perplexity at most {math.exp(min(bound, 99)):.4g} ({math.exp(alone):.4g} without context: a gain of "
        f"{alone - bound:+.2f}{error} nats per token)"
    )


@torch.no_grad()
def sample_texts(doorway: Doorway, corpus: Corpus, config: RunConfig, accelerator: Accelerator) -> list[str]:
    """A few texts from fixed seeds."""
    seeds = [derive_seed(config.seed, "sample", number) for number in range(NUM_SAMPLE_TEXTS)]
    samples = doorway("sample", len(seeds), corpus.length, seeds=seeds, nfe=config.sample_nfe)
    return [corpus.tokenizer.decode(ids) for ids in samples.ids.tolist()]
