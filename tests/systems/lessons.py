"""How each rival is taught the ten sentences, and the check that it knows them by heart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from ten_sentences import LENGTH, TOKENS, WORDS, fresh, share_known, stage, teach

from convergeflow.training.config import StageConfig


@dataclass(frozen=True)
class Lesson:
    """How a system learns the ten sentences, and the budget it recites them with."""

    stages: tuple[StageConfig, ...]
    model: dict[str, Any] = field(default_factory=dict)
    rates: tuple[float, float] = (1e-2, 0.03)
    copies: int = 3
    nfe: int = 32


PARTS = (("plaid", "ar", "mdlm"), ("elf", "langflow"), ("sedd-uniform", "flm", "duo", "sedd-absorb"))
"""The rivals of test_by_heart.py, test_by_heart_2.py and test_by_heart_3.py: processes share the work by files."""

LESSONS = {
    "ar": Lesson((stage("ce", 300),)),
    "mdlm": Lesson((stage("ce", 300),), nfe=512),
    "sedd-absorb": Lesson((stage("ce", 600),), nfe=512),
    # From here on every word is there from the start and may be wrong: more sequences, more width, more calls.
    "sedd-uniform": Lesson((stage("ce", 400),), {"width": 64}, (5e-3, 0.02), copies=12, nfe=64),
    "duo": Lesson((stage("ce", 800),), {"width": 64}, (5e-3, 0.01), nfe=128),
    "flm": Lesson((stage("ce", 300),), {"width": 96, "depth": 3, "heads": 3}, copies=8, nfe=64),
    "plaid": Lesson((stage("ce", 400),), {"width": 64}, (5e-3, 0.02), copies=9),
    "elf": Lesson((stage("ce", 200), stage("mse", 500)), {"width": 64}, (5e-3, 0.02), copies=2),
    # With the options of the small-scale recipe; without them it was right in three samples of four at best.
    "langflow": Lesson(
        (
            stage("ce", 100).model_copy(update={"clean_context": 1.0}),
            stage("ce", 400).model_copy(update={"self_condition": 0.5, "position_noise": 0.3}),
        ),
        {"context_free_input": True, "neighbours": 2, "head_init": 0.02},
    ),
}


def check_by_heart(name: str) -> None:
    """Teach a fresh model and let it recite."""
    lesson = LESSONS[name]
    model = fresh(name, **lesson.model)
    model.set_unigram(torch.bincount(TOKENS.flatten(), minlength=len(WORDS)))
    lr, matrix_lr = lesson.rates
    teach(model, list(lesson.stages), lr=lr, matrix_lr=matrix_lr, copies=lesson.copies)
    controls = {} if name in ("langflow", "elf") else model.frontier[-1]
    ids = model.sample(64, LENGTH, seeds=range(64), nfe=lesson.nfe, **controls).ids
    assert share_known(ids) > 0.8
    assert len({tuple(row) for row in ids.tolist()}) > 10
