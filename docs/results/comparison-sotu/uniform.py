"""Where the loss of SEDD uniform lies along its noise, for the best predictor without context, on the speeches.

    python docs/results/comparison-sotu/uniform.py

Trains nothing. The scores are exact for words that are drawn one by one from the unigram law, so the mean over times is
the bound that a model reaches which has learned how often words occur and nothing else.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from convergeflow.randomness import RowDraws
from convergeflow.studies.systems import run_config
from convergeflow.training.build import build_model, open_corpus
from convergeflow.training.config import resolve

BINS, REPEATS, ROWS = 10, 3, 64


def main() -> None:
    config = run_config(resolve("sotu", ["model.width=128", "model.heads=4"]), "sedd-uniform")
    corpus = open_corpus(config)
    model = build_model(config, corpus.vocabulary).eval()
    shares, K = torch.as_tensor(corpus.unigram), corpus.vocabulary

    def log_scores(x: Tensor, sigma: Tensor) -> Tensor:
        noisy = (-sigma).exp()[:, None] * shares - torch.expm1(-sigma)[:, None] / K
        logs = noisy.log()[:, None].expand(*x.shape, K)
        return (logs - logs.gather(-1, x[..., None])).float()

    model.log_scores = log_scores  # type: ignore[method-assign, assignment]
    tokens = torch.as_tensor(np.asarray(corpus.heldout[:ROWS]).astype(np.int64))
    torch.manual_seed(0)
    means = []
    for k in range(BINS):
        rows = []
        for repeat in range(REPEATS):
            times = (k + torch.rand(ROWS, dtype=torch.float64)) / BINS
            seeds = [(k * REPEATS + repeat) * ROWS + row for row in range(ROWS)]
            with torch.no_grad():
                rows.append(model.row_losses(tokens, times, RowDraws(seeds)))
        found = torch.cat(rows).double()
        means.append(float(found.mean()))
        sigma = float(model.sigma(torch.tensor((k + 0.5) / BINS, dtype=torch.float64)))
        print(f"time {k / BINS:.1f} to {(k + 1) / BINS:.1f}, sigma about {sigma:.2g}: {means[-1]:6.2f} nats per token")
    print(f"mean: {sum(means) / BINS:.2f} nats per token")


if __name__ == "__main__":
    main()
