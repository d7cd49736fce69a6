"""The network of the paper: state, noise level and earlier prediction in, log f out (Sec. 3.1).

    h = trunk(x_t + W [x_t ; c], gamma),    log f(j) = <h, W_j> + b_j

`head.py` makes weights and data prediction of log f. The `direct` predictor, the unconstrained regressor of the paper's
control experiment, has a head of the table's width and no weights. Everything but the trunk's matrix products is
float32: near the data the kernel term reaches tens of nats and bfloat16 would round it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from convergeflow.errors import UserError, unknown_name
from convergeflow.flow.path import spread
from convergeflow.flow.schedule import Coefficients, plain_for_width
from convergeflow.model.backbone import Backbone, SelfConditionedInput
from convergeflow.model.embedding import TokenTable
from convergeflow.model.fused import Weighted, no_autocast
from convergeflow.model.head import DirectPrediction, KernelLogF, LogF, context_free
from convergeflow.model.views import WHOLE, Behind, Reading, View

PREDICTORS = ("weighted", "direct")


@dataclass(frozen=True)
class TrunkShape:
    """The size of a trunk with its vocabulary; the defaults are the paper's."""

    vocabulary: int = 50257
    width: int = 768
    depth: int = 12
    heads: int = 12
    condition_width: int = 128
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads) != 0:
            raise UserError(f"width {self.width} must be a multiple of 2 x heads (2 x {self.heads}) for the rotations")


@dataclass(frozen=True)
class Shape(TrunkShape):
    """The size of a network and the kind of its head."""

    predictor: str = "weighted"

    def __post_init__(self) -> None:
        if self.predictor not in PREDICTORS:
            raise unknown_name("predictor", self.predictor, PREDICTORS)
        super().__post_init__()


class FlowNetwork(nn.Module):
    """log f_theta(x_t, t, c) with its token table."""

    log_unigram: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.predictor = shape.predictor
        self.embedding = TokenTable(shape.vocabulary, shape.width)
        self.condition_input = SelfConditionedInput(shape.width)
        self.backbone = Backbone(
            width=shape.width,
            depth=shape.depth,
            heads=shape.heads,
            condition_width=shape.condition_width,
            dropout=shape.dropout,
        )
        # Zero-initialised: a fresh model predicts by the Gaussian kernel alone (cross-entropy log V in pure noise).
        self.head = nn.Linear(shape.width, shape.vocabulary if shape.predictor == "weighted" else shape.width)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.register_buffer("log_unigram", torch.zeros(shape.vocabulary))
        """log frequencies of the training text (zeros mean unknown): the prior of the context-free predictor."""

    def forward(
        self,
        x_t: Tensor,
        at: Coefficients,
        condition: Tensor | None = None,
        view: View = WHOLE,
        table: Tensor | None = None,
    ) -> LogF:
        """What the network says about a state [B, L, d]; `table` is the normalised table if the caller has it."""
        table = self.embedding.rows() if table is None else table
        x, at, condition = view.enter(x_t.to(table.dtype), at, condition)
        with no_autocast(x):
            h = self.inputs(x, at, condition, table, view)
        h = self.backbone(h, at.gamma.to(x.device), view)
        with no_autocast(x):
            return self.read(h, x, at, table, view)

    def inputs(self, x: Tensor, at: Coefficients, condition: Tensor | None, table: Tensor, view: View) -> Tensor:
        """What the trunk reads: the state, with the earlier prediction mixed in."""
        return self.condition_input(x, condition)

    def read(self, h: Tensor, x: Tensor, at: Coefficients, table: Tensor, view: View) -> LogF:
        """The answer that the trunk's output holds."""
        if self.predictor == "direct":
            return DirectPrediction(self.head(view.leave(h).to(table.dtype)))
        return KernelLogF(view.leave(h), self.head.weight, self.head.bias, table)

    def remember(self, words: Tensor, table: Tensor) -> Behind:
        """The view of a block behind clean words, given as their rows of the table [B, P, d]: computed once."""
        level, reading = plain_for_width(words.shape[-1], *words.shape[:2]), Reading()
        self(spread(level.alpha, words) * words, level, words, reading, table)
        return Behind(reading.memory, reading.notes)

    @torch.no_grad()
    def without_context(self, x: Tensor, at: Coefficients, table: Tensor, targets: Tensor | None = None) -> Weighted:
        """The best prediction that looks at its own position alone: unigram prior times Gaussian kernel."""
        return context_free(self.log_unigram, x, table).weigh(x, at, targets=targets)
