"""A corpus that every system must be able to learn by heart, and how it is taught.

Ten sentences stand in a circle and blocks are windows at any place, as in packed text: the trunk knows
relative positions only, so a system that starts from pure noise could not tell where a block that always
begins with a sentence begins.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from convergeflow.flow.grid import training_times
from convergeflow.randomness import RowDraws, derive_seed
from convergeflow.systems import METHODS
from convergeflow.training.config import StageConfig
from convergeflow.training.optimizer import Muon

SENTENCES = """
cats sleep
dogs dig
birds sing
foxes hide
bees hum
cows graze
frogs jump
ants march
owls hunt
boys play
""".strip().splitlines()

WORDS = [".", *sorted({word for sentence in SENTENCES for word in sentence.split()})]
CIRCLE = [WORDS.index(word) for sentence in SENTENCES for word in (*sentence.split(), ".")]
LENGTH = 6
TOKENS = torch.tensor([[CIRCLE[(start + i) % len(CIRCLE)] for i in range(LENGTH)] for start in range(len(CIRCLE))])
KNOWN = {tuple(row) for row in TOKENS.tolist()}


def fresh(name: str, **changes: Any) -> Any:
    """A tiny model of a method, for this vocabulary."""
    torch.manual_seed(0)
    cls = METHODS[name]
    shape = {"vocabulary": len(WORDS), "width": 32, "depth": 2, "heads": 2, "length": LENGTH, "condition_width": 32}
    return cls(cls.config_class(**{**shape, "dropout": 0.0, "gate_init": 1.0, **changes}))


def stage(objective: str, steps: int) -> StageConfig:
    return StageConfig(
        name=objective, objective=objective, steps=steps, lr=3e-3, learn_table=True, learn_schedule=objective == "ce"
    )


def teach(model: Any, stages: list[StageConfig], *, lr: float = 1e-2, matrix_lr: float = 0.03, copies: int = 3) -> Any:
    """Muon on the blocks' matrices and Adam on the rest, with a falling rate; every window `copies` times in a step."""
    tokens = TOKENS.repeat(copies, 1)
    step, batch = 0, len(tokens)
    for part in stages:
        model.enter_stage(part)
        model.train()
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        matrices = [p for n, p in named if "blocks" in n and p.ndim == 2 and "modulation" not in n]
        others = [p for _, p in named if not any(p is m for m in matrices)]
        optimizers = [
            torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.99), weight_decay=0.0, fused=True),
            Muon([{"params": matrices, "lr": matrix_lr}], momentum=0.95),
        ]
        for local in range(part.steps):
            scale = min(1.0, (local + 1) / 20) * min(1.0, 2 * (1 - local / part.steps))
            draws = RowDraws([derive_seed(0, step, row) for row in range(batch)])
            loss = model.loss(tokens, times=training_times(batch, seed=step), draws=draws).total
            loss.backward()
            torch.nn.utils.clip_grad_norm_([p for _, p in named], 1.0)
            for optimizer, peak in zip(optimizers, (lr, matrix_lr), strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = peak * scale
                optimizer.step()
                optimizer.zero_grad()
            step += 1
    return model.eval()


def share_known(ids: Tensor) -> float:
    """How many samples are a window of the circle, word by word."""
    return sum(tuple(row) in KNOWN for row in ids.tolist()) / len(ids)
