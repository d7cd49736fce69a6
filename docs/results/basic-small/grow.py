"""A checkpoint carried over to a larger vocabulary and to the recipe's table, for training to go on there.

Words of the old vocabulary keep their rows of the head; a new word gets the mean of the known words that stand in the
same places. With `contexts` the rows of the table turn towards such words too (`convergeflow.data.contexts`), and the
trunk's input maps are composed with the linear map that leads best from the new rows back to the old ones.

    python docs/results/basic-small/grow.py docs/results/basic-small/milestone runs/grown contexts
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from convergeflow.data.contexts import context_vectors, mixed
from convergeflow.training import checkpoint
from convergeflow.training.build import build_model, open_corpus
from convergeflow.training.config import resolve
from convergeflow.zoo import load_model

NEIGHBOURS = 8
"""Known words whose rows a new word's are the mean of."""


@torch.no_grad()
def main(source: str, target: str, table: str = "random") -> None:
    old, config = load_model(source), resolve("basic")
    corpus = open_corpus(config)
    new = build_model(config, corpus.vocabulary)
    new.set_unigram(torch.from_numpy(corpus.unigram * corpus.train.size))
    text = np.asarray(corpus.train).reshape(-1)
    counts = np.bincount(text, minlength=corpus.vocabulary)

    place = {token: index for index, token in enumerate(old.tokenizer.tokens())}
    found = np.array([place.get(token, -1) for token in corpus.tokenizer.tokens()])
    known = found >= 0
    weights = dict(old.named_parameters())
    for name, parameter in new.named_parameters():
        if parameter.shape == weights[name].shape:
            parameter.copy_(weights[name])

    # Rows of the table: those of known words, and the fresh random ones of new words, at the same length.
    rows = new.network.embedding.rows().numpy().copy()
    rows[known] = old.network.embedding.rows()[found[known]].numpy()
    vectors = context_vectors(text, *rows.shape)
    heard = np.flatnonzero(known & (counts >= 5))
    like = vectors[~known] @ vectors[heard].T
    nearest = heard[np.argsort(-like, axis=1)[:, :NEIGHBOURS]]
    head, bias = new.network.head.weight, new.network.head.bias
    head[known], bias[known] = old.network.head.weight[found[known]], old.network.head.bias[found[known]]
    head[~known], bias[~known] = head[nearest].mean(1), bias[nearest].mean(1)
    # The head's own part of a word's frequency: a new word is rarer than those it resembles.
    shift = new.network.log_unigram[~known] - new.network.log_unigram[nearest].mean(1)
    bias[~known] += shift

    if table == "contexts":
        turned = mixed(rows, text)
        share = np.sqrt(counts / counts.sum())[:, None]
        gram = (turned * share).T @ (turned * share)
        gram += 1e-3 * np.trace(gram) / len(gram) * np.eye(len(gram))
        back = torch.from_numpy(np.linalg.solve(gram, (turned * share).T @ (rows * share)).T).float()
        fit = turned @ back.numpy().T
        lost = ((fit - rows) ** 2 * share**2).sum() / (rows**2 * share**2).sum()
        print(f"the input maps lose {lost:.0%} of the old rows (words weighed by the root of their frequency)")
        width = len(back)
        mix, eye = new.network.condition_input.weight, torch.eye(width)
        mix[:, :width] = (eye + mix[:, :width]) @ back - eye
        mix[:, width:] = mix[:, width:] @ back
        new.network.context_free.weight.copy_(new.network.context_free.weight @ back)
        rows = turned
    new.network.embedding.weight.copy_(torch.from_numpy(rows))
    new.tokenizer = corpus.tokenizer
    checkpoint.write_folder(Path(target), lambda folder: new.save_pretrained(folder))
    print(f"{known.sum()} of {len(known)} tokens were known; written to {target}")


if __name__ == "__main__":
    main(*sys.argv[1:])
