"""Looking at a model while it trains: fixed held-out numbers and sample text, both functions of the seed alone.

Every process computes all of it, since a sharded model can only be called by all of them together.
"""

from __future__ import annotations

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


def read_tokens(split: Any, rows: Any) -> Tensor:
    """Sequences of a corpus as token ids on the CPU, [rows, length]."""
    return torch.from_numpy(np.asarray(split[rows], dtype=np.int64))


@torch.no_grad()
def evaluate(doorway: Doorway, corpus: Corpus, config: RunConfig, accelerator: Accelerator) -> dict[str, float]:
    """The model's own monitor on the first held-out sequences, each with noise of its own that never changes."""
    count = min(config.evaluate_blocks, len(corpus.heldout))
    sums: dict[str, float] = {}
    for first in range(0, count, MONITOR_ROWS):
        rows = np.arange(first, min(first + MONITOR_ROWS, count))
        draws = RowDraws([derive_seed(config.seed, "monitor", int(row)) for row in rows], accelerator.device)
        with accelerator.autocast():
            numbers = doorway("monitor", read_tokens(corpus.heldout, rows).to(accelerator.device), draws=draws)
        for name, value in numbers.items():
            sums[name] = sums.get(name, 0.0) + float(value) * len(rows) / count
    return sums


@torch.no_grad()
def sample_texts(doorway: Doorway, corpus: Corpus, config: RunConfig, accelerator: Accelerator) -> list[str]:
    """A few texts from fixed seeds."""
    seeds = [derive_seed(config.seed, "sample", number) for number in range(NUM_SAMPLE_TEXTS)]
    with accelerator.autocast():
        samples = doorway("sample", len(seeds), corpus.length, seeds=seeds, nfe=config.sample_nfe)
    return [corpus.tokenizer.decode(ids) for ids in samples.ids.tolist()]
