"""The pictures of docs/explanation, computed with `convergeflow.paper` on toys that fit into a plane.

python tools/pictures.py
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor

from convergeflow import paper

OUT = Path(__file__).resolve().parents[1] / "docs" / "images"
COLOURS = ["#1b6ca8", "#c8553d", "#3c8d5a", "#8e6bbf", "#b8860b"]


def triangle() -> Tensor:
    """Three tokens in the plane, with norm sqrt(d)."""
    angles = torch.tensor([90.0, 210.0, 330.0]).deg2rad()
    return math.sqrt(2) * torch.stack([angles.cos(), angles.sin()], dim=1)


def plane() -> None:
    """Flows of one position with three tokens: the weighted predictor, and the one of Proposition 2."""
    E, prior = triangle(), torch.tensor([0.5, 0.3, 0.2])
    gammas = torch.linspace(7, -9, 161)
    x = torch.randn(60, 1, 2, generator=torch.Generator().manual_seed(3))
    none = torch.zeros(len(gammas))

    def log_f(x: Tensor, gamma: Tensor, c: Tensor) -> Tensor:
        return prior.log().expand(len(x), 1, 3)

    ours = paper.sample(log_f, E, x, gammas, none.long(), none, none)
    ends = [torch.stack([*ours.states, ours.x])[:, :, 0]]
    states = [x]
    for now, then in pairwise(gammas):
        level = now.expand(len(x))
        alpha, sigma = paper.coefficients(level)
        states.append(paper.step(states[-1], states[-1] / (alpha + sigma), level, then.expand(len(x))))
    ends.append(torch.stack(states)[:, :, 0])
    figure, axes = plt.subplots(1, 2, figsize=(8.6, 4.4), sharex=True, sharey=True)
    titles = ["weighted mean of embeddings", "an unconstrained predictor (Proposition 2)"]
    for axis, path, title in zip(axes, ends, titles, strict=True):
        nearest = torch.cdist(path[-1], E).argmin(-1)
        for row in range(path.shape[1]):
            colour = COLOURS[int(nearest[row])] if axis is axes[0] else "#777777"
            axis.plot(*path[:, row].T, color=colour, linewidth=0.8, alpha=0.6)
            axis.plot(*path[-1, row], "o", color=colour, markersize=3)
        axis.plot(*E.T, "*", color="black", markersize=15)
        for number, (across, up) in enumerate(E.tolist()):
            axis.annotate(f"token {number + 1}", (across, up), xytext=(10, 6), textcoords="offset points", fontsize=9)
        axis.set(title=title, aspect="equal", xticks=[], yticks=[], xlim=(-2.6, 2.9), ylim=(-2.5, 2.6))
    figure.tight_layout()
    figure.savefig(OUT / "plane.png", dpi=110)


def weights() -> None:
    """Context and kernel at one position under three noise levels, and their product."""
    words = ["dog", "cat", "fox", "hat", "kite"]
    f = torch.tensor([0.42, 0.30, 0.22, 0.04, 0.02])
    draw = torch.Generator().manual_seed(4)
    E = torch.nn.functional.normalize(torch.randn(len(words), 32, generator=draw), dim=-1) * math.sqrt(32)
    z = torch.randn(1, 1, 32, generator=draw)
    true = 2  # the position holds "fox", which the context thinks third
    figure, axes = plt.subplots(3, 3, figsize=(8.6, 5.2), sharex=True, sharey=True)
    zeros = torch.zeros(1, 1, 32)
    for column, gamma in enumerate([6.0, 3.4, 1.2]):
        level = torch.tensor([gamma])
        x = paper.path(E[true].view(1, 1, -1), z, level)
        kernel = paper.weights(lambda x, gamma, c: torch.zeros(1, 1, len(words)), E, x, level, zeros)[0, 0]
        w = paper.weights(lambda x, gamma, c: f.log().view(1, 1, -1), E, x, level, zeros)[0, 0]
        rows = [(f, "what the context says, f"), (kernel, "what the position says"), (w, "the weights, their product")]
        for axis, (values, label) in zip(axes[:, column], rows, strict=True):
            axis.bar(words, values, color=[COLOURS[1] if n == true else COLOURS[0] for n in range(len(words))])
            axis.set_ylim(0, 1.05)
            axis.spines[["top", "right"]].set_visible(False)
            if column == 0:
                axis.set_ylabel(label.replace(", ", ",\n"), fontsize=9)
        axes[0, column].set_title(f"{['much', 'some', 'little'][column]} noise (log-SNR {-gamma:.1f})", fontsize=10)
    figure.tight_layout()
    figure.savefig(OUT / "weights.png", dpi=110)


if __name__ == "__main__":
    plane()
    weights()
