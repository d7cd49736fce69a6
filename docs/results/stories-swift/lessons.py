"""Is it the teacher or the student that falls short? At every call of a student's walk: what both would write.

The words that the teacher's weights favour at the student's states, and those that the student favours, are scored by
the law of the corpus. Where both are equally good, the student has learned its lesson and the lesson is the limit; where
the teacher is better, the student is.

    python docs/results/stories-swift/lessons.py stories-swift                        # the recipe's teacher
    python docs/results/stories-swift/lessons.py runs/swift refine=3 scg=2.0 nfe=16   # another one
"""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor

from convergeflow.distillation.run import build_student, configuration
from convergeflow.evaluation.exact import exact_scores
from convergeflow.randomness import RowDraws
from convergeflow.zoo import load_model

WALKS = 128
FIRST_SEED = 900_000


def scored(ids: Tensor) -> str:
    found = exact_scores(ids.numpy()).metrics
    ppl, whole, kl = math.exp(found["smoothed_nll"].value), found["valid_stories"].value, found["slot_kl"].value
    return f"Gen. PPL {ppl:6.2f}, whole stories {whole:4.0%}, slot KL {kl:.2f}"


@torch.no_grad()
def main(name: str, *sampling: str) -> None:
    trained = load_model(name)
    config = configuration("stories-small", overrides=[f"distill.sampling.{word}" for word in sampling])
    student = build_student(config, trained.config.vocabulary)
    student.load_strictly(trained.state_dict(), name)
    student.eval()
    table = student.network.embedding.rows()
    for calls in (4, 8):
        student.calls = (calls,)
        seeds = range(FIRST_SEED, FIRST_SEED + WALKS)
        visits, _, shown, said = student._lesson(torch.zeros(WALKS, 64, dtype=torch.long), RowDraws(seeds))
        assert shown.weights is not None and said.cross_entropy is not None
        parts = (shown.weights, said.mu @ table.T, said.cross_entropy)
        for number, (weights, likes, surprise) in enumerate(zip(*(part.split(WALKS) for part in parts), strict=True)):
            entropy = torch.special.entr(weights).sum(-1)
            print(
                f"call {number + 1} of {calls}, t = {visits[number].span.begin:.3f}: "
                f"divergence {float(surprise.mean() - entropy.mean()):.3f} nats per token"
                f"\n  teacher  {scored(weights.argmax(-1))}\n  student  {scored(likes.argmax(-1))}",
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
