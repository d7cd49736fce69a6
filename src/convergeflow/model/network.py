"""The whole network: state, noise level and earlier prediction in, data prediction out (paper Sec. 3.1).

`weighted` is the paper's predictor, a barycentre of the token table; `direct` is the unconstrained regressor of its
control experiment. Everything but the trunk's matrix products is float32: near the data the kernel term reaches tens
of nats and bfloat16 would round it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from convergeflow.errors import UserError, unknown_name
from convergeflow.flow.path import spread
from convergeflow.flow.schedule import Coefficients, plain_for_width
from convergeflow.model.backbone import Backbone, EvidencePooling, Neighbours, SelfConditionedInput
from convergeflow.model.embedding import TokenTable
from convergeflow.model.head import Weighted, kernel_scores, logits, weigh

PREDICTORS = ("weighted", "direct")


class FlowNetwork(nn.Module):
    """mu_theta(x_t, t, c) with its token table."""

    def __init__(
        self,
        *,
        vocabulary: int,
        width: int,
        depth: int,
        heads: int,
        condition_width: int = 128,
        dropout: float = 0.1,
        predictor: str = "weighted",
        gate_init: float = 0.0,
        context_free_input: bool = False,
        neighbours: int = 0,
        head_init: float = 0.0,
        pool_evidence: bool = False,
    ) -> None:
        super().__init__()
        if predictor not in PREDICTORS:
            raise unknown_name("predictor", predictor, PREDICTORS)
        if width % (2 * heads) != 0:
            raise UserError(
                f"width {width} must be a multiple of 2 x heads (2 x {heads}) for rotary attention"
            )
        self.predictor = predictor
        self.embedding = TokenTable(vocabulary, width)
        self.condition_input = SelfConditionedInput(width)
        self.backbone = Backbone(
            width=width,
            depth=depth,
            heads=heads,
            condition_width=condition_width,
            dropout=dropout,
            gate_init=gate_init,
        )
        # Zero-initialised: a fresh model predicts by the Gaussian kernel alone (cross-entropy log V in pure noise).
        self.head = nn.Linear(width, vocabulary if predictor == "weighted" else width)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        # Options of the small-scale recipe, not of the paper. The prediction at hand is one more input, so that
        # attention can compare denoised words from the first step on, without first learning the table by heart; the
        # state then enters times alpha, for in pure noise it says nothing and yet is as long as a word.
        self.context_free = nn.Linear(width, width, bias=False) if context_free_input else None
        if self.context_free is not None:
            nn.init.eye_(self.context_free.weight)
        # A word is copied from an earlier mention in two steps, "what is asked for here" and "where was it said";
        # `neighbours` answers the first before any attention has formed, and attention learns the second. A head that
        # starts along the table (`head_init`) turns an attended word into its logit from the first step on.
        self.neighbours = Neighbours(width, neighbours) if neighbours else None
        # And what no head over single positions can say where noise leaves none of them readable: that several hold the
        # same word, whose evidence then adds.
        self.pooling = EvidencePooling(width) if pool_evidence and predictor == "weighted" else None
        if head_init and predictor == "weighted":
            with torch.no_grad():
                self.head.weight.copy_(head_init * self.embedding.rows())
        self.register_buffer("log_unigram", torch.zeros(vocabulary))
        """log frequencies of the training text (zeros: unknown, uniform): the prior of the context-free predictor."""

    log_unigram: Tensor

    def hidden(
        self,
        x: Tensor,
        at: Coefficients,
        condition: Tensor | None,
        table: Tensor,
        *,
        paired: Tensor | None = None,
        context: int = 0,
    ) -> Tensor:
        """The trunk's output, [B, L, width]; x in the network's format."""
        with torch.autocast(x.device.type, enabled=False):
            h = self.condition_input(x if self.context_free is None else spread(at.alpha, x) * x, condition)
            if self.context_free is not None:
                h = h + self.context_free(self._prediction_at_hand(x, at, condition, table))
            if self.neighbours is not None:
                h = h + self.neighbours(h, paired)
        return self.backbone(h, at.gamma.to(x.device), paired=paired, context=context)

    def forward(
        self,
        x_t: Tensor,
        at: Coefficients,
        condition: Tensor | None = None,
        *,
        table: Tensor | None = None,
        targets: Tensor | None = None,
        details: bool = False,
        scores: Tensor | None = None,
        positions: Tensor | None = None,
        paired: Tensor | None = None,
        context: int = 0,
        temperature: float = 1.0,
    ) -> Weighted:
        """mu and, on request, what its weights say.

        `table` is the normalised table where the caller has it, `scores` the shared kernel scores of this state.
        `details` adds token and top weight; `targets` the cross-entropy. With `positions` (a boolean mask [B, L]) the
        head runs on those alone and the record's tensors are flat over them. `paired`: x_t is a clean copy of each
        sequence followed by a noisy one in blocks with these starts (`backbone.pair_mask`); `context`: the first
        positions are clean, the others one block after them. The weights are softmax(logits / `temperature`).
        """
        table = self.embedding.rows() if table is None else table
        x = x_t.to(table.dtype)
        h = self.hidden(x, at, condition, table, paired=paired, context=context)
        if self.predictor == "direct":
            if targets is not None:
                raise UserError(
                    "the direct predictor has no weights, hence no cross-entropy: train it with mse"
                )
            with torch.autocast(x.device.type, enabled=False):
                mu = self.head(h.to(table.dtype))
            mu = mu if positions is None else mu[positions]
            return Weighted(mu, log_normaliser=mu.new_zeros(mu.shape[:-1]))
        if self.pooling is not None:
            x, scores = self._with_pooled_evidence(x, at, h, paired=paired, context=context), None
        kernel = spread(at.kernel, x)[..., 0]
        if positions is not None:
            kernel = kernel.expand(positions.shape)[positions]
            h, x = h[positions], x[positions]
            scores = None if scores is None else scores[positions]
            targets = None if targets is None else targets[positions]
        bias: Tensor = self.head.bias
        if temperature != 1.0:  # every term of the logits is linear in one of these
            h, bias, kernel = h / temperature, bias / temperature, kernel / temperature
        return weigh(
            h,
            self.head.weight,
            bias,
            x,
            kernel,
            table,
            targets=targets,
            token=details,
            top_weight=details,
            scores=scores,
        )

    def after_clean(
        self,
        clean: Tensor,
        x_t: Tensor,
        at: Coefficients,
        condition: Tensor | None = None,
        *,
        table: Tensor,
        starts: Tensor | None = None,
        positions: Tensor | None = None,
        targets: Tensor | None = None,
        **options: Any,
    ) -> Weighted:
        """The prediction at noisy positions x_t [B, L, d] that follow clean words, [B, P, d] rows of the table.

        With `starts` the words are those of the sequence itself, and each block sees the ones before it; without, all
        of them come before one block. `positions`, `targets` and `options` are those of `forward`, for x_t alone.
        """
        rows, length = x_t.shape[:2]
        x, levels, condition = _behind(clean, x_t, at, condition)
        noisy = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        noisy[:, -length:] = True if positions is None else positions
        found = self(
            x,
            levels,
            condition,
            table=table,
            positions=noisy,
            targets=None if targets is None else functional.pad(targets, (x.shape[1] - length, 0)),
            paired=starts,
            context=clean.shape[1] if starts is None else 0,
            **options,
        )
        return found if positions is not None else _unflattened(found, rows, length)

    def logits(
        self,
        x_t: Tensor,
        at: Coefficients,
        condition: Tensor | None = None,
        *,
        table: Tensor | None = None,
        clean: Tensor | None = None,
    ) -> Tensor:
        """log f + kernel, [B, L, V]: materialised, for small jobs and comparisons; `clean` words may come before."""
        if self.predictor == "direct":
            raise UserError(
                "the direct predictor has no token logits; decode it with --decode prediction or distance"
            )
        table = self.embedding.rows() if table is None else table
        context = 0 if clean is None else clean.shape[1]
        if clean is not None:
            found = _behind(clean, x_t, at, condition)
            return self._all_logits(*found, table, context)[:, context:]
        return self._all_logits(x_t, at, condition, table, 0)

    def _all_logits(
        self, x_t: Tensor, at: Coefficients, condition: Tensor | None, table: Tensor, context: int
    ) -> Tensor:
        x = x_t.to(table.dtype)
        h = self.hidden(x, at, condition, table, context=context)
        if self.pooling is not None:
            x = self._with_pooled_evidence(x, at, h, context=context)
        kernel = spread(at.kernel, x)[..., 0].expand(x.shape[:-1])
        return logits(h, self.head.weight, self.head.bias, x, kernel, table)

    def _with_pooled_evidence(
        self, x: Tensor, at: Coefficients, h: Tensor, *, paired: Tensor | None = None, context: int = 0
    ) -> Tensor:
        """A state whose kernel scores are those of x plus <y, e_j>, y the pooled evidence of other positions.

        Each of those counts with alpha x, which is its kernel times state in noise and stays bounded towards the data:
        log f stays Lipschitz, as the paper's theorem wants it.
        """
        assert self.pooling is not None
        with torch.autocast(x.device.type, enabled=False):
            pooled = self.pooling(h.to(x.dtype), spread(at.alpha, x) * x, paired=paired, context=context)
            return x + pooled / spread(at.kernel, x).clamp_min(1e-4)

    def context_free_prediction(
        self, x: Tensor, at: Coefficients, table: Tensor, targets: Tensor | None = None
    ) -> Weighted:
        """The best prediction that looks at its own position alone: unigram prior times Gaussian kernel."""
        return self._alone(x, spread(at.kernel, x)[..., 0], table, targets)

    @torch.no_grad()
    def _alone(self, x: Tensor, kernel: Tensor, table: Tensor, targets: Tensor | None = None) -> Weighted:
        nothing = x.new_zeros(*x.shape[:-1], 1)
        no_weight = x.new_zeros(table.shape[0], 1)
        return weigh(nothing, no_weight, self.log_unigram.to(x.dtype), x, kernel, table, targets=targets)

    def _prediction_at_hand(
        self, x: Tensor, at: Coefficients, condition: Tensor | None, table: Tensor
    ) -> Tensor:
        """The earlier prediction at positions that have one (none is all zeros), else the context-free one."""
        if condition is None:
            return self.context_free_prediction(x, at, table).mu
        hand, missing = condition.to(x.dtype), ~condition.any(-1)
        if not bool(missing.any()):
            return hand  # as in most passes of a sampler: spares a pass of the head
        kernel = spread(at.kernel, x)[..., 0].expand(missing.shape)[missing]
        return hand.masked_scatter(missing[..., None], self._alone(x[missing], kernel, table).mu)

    def scores(self, x_t: Tensor, table: Tensor) -> Tensor:
        """<x_t, e_j>: what all passes at one state share."""
        return kernel_scores(x_t.to(table.dtype), table)


def _behind(
    clean: Tensor, x_t: Tensor, at: Coefficients, condition: Tensor | None
) -> tuple[Tensor, Coefficients, Tensor]:
    """State, noise levels and condition of clean words and of what follows them, in one sequence."""
    rows, length, width = x_t.shape
    plain = plain_for_width(width, rows, clean.shape[1])
    if at.alpha.dim() == 1:
        at = at[:, None].wide(length)
    condition = torch.zeros_like(x_t) if condition is None else condition
    return (
        torch.cat([spread(plain.alpha, clean) * clean, x_t.to(clean.dtype)], 1),
        plain.followed_by(at),
        torch.cat([clean, condition.to(clean.dtype)], 1),  # what is known is its own prediction
    )


def _unflattened(found: Weighted, rows: int, length: int) -> Weighted:
    """A record over rows and positions from one that is flat over them."""
    present = {name: value for name, value in vars(found).items() if value is not None}
    return Weighted(**{name: value.unflatten(0, (rows, length)) for name, value in present.items()})
