"""The network of the paper: state, noise level and earlier prediction in, log f out (Sec. 3.1).

    h = trunk(x_t + W [x_t ; c], gamma),    log f(j) = <h, W_j> + b_j

`head.py` makes weights and data prediction of log f. Everything but the trunk's matrix products is float32: near the
data the kernel term reaches tens of nats and bfloat16 would round it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from convergeflow.device import onto
from convergeflow.errors import unknown_name
from convergeflow.flow.path import spread
from convergeflow.flow.schedule import Coefficients, plain_for_width
from convergeflow.model.backbone import Backbone, SelfConditionedInput, TrunkShape
from convergeflow.model.embedding import TokenTable
from convergeflow.model.fused import Weighted, no_autocast
from convergeflow.model.head import HEADS, LogF, context_free
from convergeflow.model.views import WHOLE, Behind, Reading, View


@dataclass(frozen=True)
class Shape(TrunkShape):
    """The size of a network and the kind of its head."""

    predictor: str = "weighted"

    def __post_init__(self) -> None:
        if self.predictor not in HEADS:
            raise unknown_name("predictor", self.predictor, HEADS)
        super().__post_init__()


class FlowNetwork(nn.Module):
    """log f_theta(x_t, t, c) with its token table."""

    log_unigram: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.predictor = shape.predictor
        self.embedding = TokenTable(shape.vocabulary, shape.width)
        self.condition_input = SelfConditionedInput(shape.width)
        self.backbone = Backbone(shape)
        self.head = HEADS[shape.predictor](shape.width, shape.vocabulary)
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
        h = self.backbone(h, onto(at.gamma, x.device), view)
        with no_autocast(x):
            return self.read(h, x, at, table, view)

    def inputs(self, x: Tensor, at: Coefficients, condition: Tensor | None, table: Tensor, view: View) -> Tensor:
        """What the trunk reads: the state, with the earlier prediction mixed in."""
        return self.condition_input(x, condition)

    def read(self, h: Tensor, x: Tensor, at: Coefficients, table: Tensor, view: View) -> LogF:
        """The answer that the trunk's output holds."""
        return self.head.read(view.leave(h), table)

    def remember(self, words: Tensor, table: Tensor) -> Behind:
        """The view of a block behind clean words, given as their rows of the table [B, P, d]: computed once."""
        level, reading = plain_for_width(words.shape[-1], *words.shape[:2]), Reading()
        self(spread(level.alpha, words) * words, level, words, reading, table)
        return Behind(reading.notes)

    @torch.no_grad()
    def without_context(self, x: Tensor, at: Coefficients, table: Tensor, targets: Tensor | None = None) -> Weighted:
        """The best prediction that looks at its own position alone: unigram prior times Gaussian kernel."""
        return context_free(self.log_unigram, x, table).weigh(x, at, targets=targets)
