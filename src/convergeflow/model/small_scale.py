"""What the paper's network does not have, and small models on small corpora cannot do without.

At the paper's size the network learns all of this by itself. Within minutes on a laptop it does not, so recipes may
switch on: the prediction without context as one more input, the neighbours' inputs, evidence of other mentions of a
word, and start values that let attention and head learn from the first step on. With all of them off,
`SmallScaleNetwork` is `FlowNetwork`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from convergeflow.device import onto
from convergeflow.flow.path import spread
from convergeflow.flow.schedule import Coefficients
from convergeflow.model.backbone import Backbone, Layer, rotate
from convergeflow.model.fused import filled_in
from convergeflow.model.head import LogF
from convergeflow.model.network import FlowNetwork, Shape
from convergeflow.model.views import View, pair_mask


@dataclass(frozen=True)
class Extras:
    """Which of the options are on; these defaults are the paper's network."""

    gate_init: float = 0.0
    """Start value of the residual gates; an opened gate lets attention learn sooner."""
    head_init: float = 0.0
    """Start the head at this multiple of the token table: it turns an attended word into its logit at once."""
    context_free_input: bool = False
    """Read alpha x_t and the present prediction: the earlier one, else the posterior mean under the unigram prior."""
    neighbours: int = 0
    """Mix the inputs of this many preceding positions into each position's."""
    pool_evidence: bool = False
    """Let a position add the evidence of other positions that hold the same word."""


class SmallScaleNetwork(FlowNetwork):
    """The paper's network with the options of `Extras`."""

    def __init__(self, shape: Shape, extras: Extras) -> None:
        super().__init__(shape)
        weighted = shape.predictor == "weighted"
        # Attention can compare denoised words from the first step on, without first learning the table by heart. The
        # state then enters times alpha, for in pure noise it says nothing and yet is as long as a word.
        self.context_free = None
        if extras.context_free_input:
            self.context_free = nn.Linear(shape.width, shape.width, bias=False)
            nn.init.eye_(self.context_free.weight)
        # A word is copied from an earlier mention in two steps, "what is asked for here" and "where was it said":
        # `neighbours` answers the first before any attention has formed, and attention learns the second.
        self.neighbours = Neighbours(shape.width, extras.neighbours) if extras.neighbours else None
        # No head over single positions can say that several of them hold the same word, whose evidence then adds.
        self.pooling = EvidencePooling(shape.width) if extras.pool_evidence and weighted else None
        open_gates(self.backbone, extras.gate_init)
        if extras.head_init and weighted:
            with torch.no_grad():
                self.head.weight.copy_(extras.head_init * self.embedding.rows())

    def inputs(self, x: Tensor, at: Coefficients, condition: Tensor | None, table: Tensor, view: View) -> Tensor:
        if self.context_free is None:
            h = super().inputs(x, at, condition, table, view)
        else:
            h = self.condition_input(spread(at.alpha, x) * x, condition)
            h = h + self.context_free(self._present_prediction(x, at, condition, table))
        return h if self.neighbours is None else h + self.neighbours(h, view)

    def read(self, h: Tensor, x: Tensor, at: Coefficients, table: Tensor, view: View) -> LogF:
        if self.pooling is None:
            return super().read(h, x, at, table, view)
        # Each position counts with alpha x, which is its kernel times state in noise and stays bounded towards the
        # data: log f stays Lipschitz, as the paper's theorem asks.
        evidence = self.pooling(h.to(x.dtype), spread(at.alpha, x) * x, view)
        return self.head.read(view.leave(h), table, view.leave(evidence))

    def _present_prediction(self, x: Tensor, at: Coefficients, condition: Tensor | None, table: Tensor) -> Tensor:
        """The earlier prediction at positions that have one (zeros mean none), else the context-free one."""
        if condition is None:
            return self.without_context(x, at, table).mu
        present, missing = condition.to(x.dtype), ~condition.any(-1)
        return filled_in(present, missing, lambda rows: self.without_context(x[rows], at[rows], table).mu)


@torch.no_grad()
def open_gates(backbone: Backbone, start: float) -> None:
    """Set the start value of the residual gates; 0 is LangFlow's."""
    for layer in backbone.modules():
        if isinstance(layer, Layer):  # the order is shift, scale, gate of attention, then of the MLP
            layer.modulation.bias.view(6, -1)[[2, 5]] = start


class Neighbours(nn.Module):
    """The inputs of the few positions before each one, mixed linearly: a convolution that looks back."""

    def __init__(self, width: int, reach: int) -> None:
        super().__init__()
        self.reach = reach
        self.mix = nn.Linear(reach * width, width, bias=False)

    def forward(self, x_BLD: Tensor, view: View) -> Tensor:
        """A block behind clean words has those for neighbours; so has the noisy one of two copies."""
        view.note("inputs", x_BLD[:, max(0, x_BLD.shape[1] - self.reach) :])
        if (words := view.noted("inputs")) is not None:
            return self._mixed(torch.cat([*words, x_BLD], 1))[:, words[0].shape[1] :]
        if view.starts is None:
            return self._mixed(x_BLD)
        clean, noisy = (self._back(half) for half in x_BLD.chunk(2, 1))
        place, starts = torch.arange(view.starts.shape[-1], device=x_BLD.device), onto(view.starts, x_BLD.device)
        own = [
            torch.where((place - step >= starts)[..., None], within, before)
            for step, (within, before) in enumerate(zip(noisy, clean, strict=True), 1)
        ]
        return self.mix(torch.cat([torch.cat(clean, -1), torch.cat(own, -1)], 1))

    def _mixed(self, x_BLD: Tensor) -> Tensor:
        return self.mix(torch.cat(self._back(x_BLD), dim=-1))

    def _back(self, x_BLD: Tensor) -> list[Tensor]:
        """What stands 1, 2, .. positions before each; nearest first, so that a longer reach only appends columns."""
        padded = functional.pad(x_BLD, (0, 0, self.reach, 0))
        length = x_BLD.shape[1]
        return [padded[:, self.reach - step : self.reach - step + length] for step in range(1, self.reach + 1)]


class EvidencePooling(nn.Module):
    """Which positions hold the same word, and the sum of their evidence: y_p = sum_q a_pq v_q, a in (0, 1).

    Observations of one word add: if positions p and q hold the same word, its posterior has the kernel scores of both.
    So a_pq is a probability of its own (a sigmoid, no softmax), and a position's own state stays out of its sum.
    """

    START = -5.0
    """Of the logits: nothing is pooled at the beginning."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.offset = nn.Parameter(torch.tensor([self.START]))

    def forward(self, h_BLD: Tensor, values_BLD: Tensor, view: View) -> Tensor:
        view.note("evidence", h_BLD, values_BLD)
        count = 0
        if (words := view.noted("evidence")) is not None:
            count = words[0].shape[1]
            h_BLD, values_BLD = torch.cat([words[0], h_BLD], 1), torch.cat([words[1], values_BLD], 1)
        q, k = (rotate(each(h_BLD).unflatten(1, (view.copies, -1))).flatten(1, 2) for each in (self.query, self.key))
        same = torch.sigmoid(q @ k.mT / h_BLD.shape[-1] ** 0.5 + self.offset)
        hidden = torch.eye(h_BLD.shape[1], dtype=torch.bool, device=h_BLD.device)
        if view.starts is not None:
            hidden = hidden | ~pair_mask(onto(view.starts, h_BLD.device))
        pooled = same.masked_fill(hidden, 0.0).to(values_BLD.dtype) @ values_BLD
        return pooled[:, count:]
