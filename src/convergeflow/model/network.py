"""The whole network: state, noise level and earlier prediction in, data prediction out (paper Sec. 3.1).

`weighted` is the paper's predictor, a barycentre of the token table; `direct` is the unconstrained regressor of its
control experiment. Everything but the trunk's matrix products is float32: near the data the kernel term reaches tens
of nats and bfloat16 would round it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from convergeflow.errors import UserError, unknown_name
from convergeflow.flow.path import spread
from convergeflow.flow.schedule import Coefficients, plain_for_width
from convergeflow.model.backbone import Backbone, EvidencePooling, Memory, Neighbours, SelfConditionedInput
from convergeflow.model.embedding import TokenTable
from convergeflow.model.head import Weighted, kernel_scores, logits, weigh

PREDICTORS = ("weighted", "direct")


@dataclass(frozen=True)
class CleanWords:
    """What a network keeps of clean words for the block that follows them (`FlowNetwork.remember`)."""

    inputs: Tensor
    """The trunk's inputs at the last of them, as many as `neighbours` reaches back."""
    past: Memory
    evidence: tuple[Tensor, Tensor] | None
    """What `pool_evidence` reads of them: hidden states and values."""

    def rows(self, index: Tensor) -> CleanWords:
        """The same for some sequences of the batch."""
        evidence = None if self.evidence is None else (self.evidence[0][index], self.evidence[1][index])
        return CleanWords(self.inputs[index], [(k[index], v[index]) for k, v in self.past], evidence)


@dataclass(frozen=True)
class BaseLogits:
    """log f at a state, as the network gave it; the kernel of this state or of any other makes weights of it.

    log f(j) = <h, W_j> + b_j + <evidence, e_j>, all of it over `base_temperature`; the weights are softmax((log f +
    kernel <x, e_j>) / temperature).
    """

    head: nn.Linear
    h: Tensor
    evidence: Tensor | None
    """Of other positions that hold the same word (`pool_evidence`)."""
    table: Tensor
    temperature: float = 1.0
    base_temperature: float = 1.0

    def weigh(
        self,
        x_t: Tensor,
        at: Coefficients,
        *,
        targets: Tensor | None = None,
        details: bool = False,
        scores: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Weighted:
        """The weights at a state and their mean; see `FlowNetwork.forward` for what may be asked."""
        h, bias, x, kernel = self._terms(x_t, at)
        if self.evidence is not None:
            scores = None
        if positions is not None:
            h, x, kernel = h[positions], x[positions], kernel[positions]
            scores = None if scores is None else scores[positions]
            targets = None if targets is None else targets[positions]
        return weigh(
            h, self.head.weight, bias, x, kernel, self.table,
            targets=targets, token=details, top_weight=details, scores=scores,
        )  # fmt: skip

    def logits(self, x_t: Tensor, at: Coefficients) -> Tensor:
        """What the weights are the softmax of, [B, L, V]: materialised, for small jobs and comparisons."""
        h, bias, x, kernel = self._terms(x_t, at)
        return logits(h, self.head.weight, bias, x, kernel, self.table)

    def _terms(self, x_t: Tensor, at: Coefficients) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Operands of the head; a temperature goes into those in which its logits are linear."""
        x = x_t.to(self.table.dtype)
        kernel = spread(at.kernel, x)
        if self.evidence is not None:
            x = x + self.evidence / (self.base_temperature * kernel.clamp_min(1e-4))
        base = self.temperature * self.base_temperature
        h, bias = (self.h, self.head.bias) if base == 1.0 else (self.h / base, self.head.bias / base)
        kernel = kernel[..., 0] if self.temperature == 1.0 else kernel[..., 0] / self.temperature
        return h, bias, x, kernel.expand(x.shape[:-1])


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
        after: CleanWords | None = None,
    ) -> Tensor:
        """The trunk's output, [B, L, width]; x in the network's format."""
        h = self._inputs(x, at, condition, table)
        if self.neighbours is not None:
            with torch.autocast(x.device.type, enabled=False):
                h = h + self.neighbours(h, paired, None if after is None else after.inputs)
        return self.backbone(h, at.gamma.to(x.device), paired=paired, past=None if after is None else after.past)

    def _inputs(self, x: Tensor, at: Coefficients, condition: Tensor | None, table: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            h = self.condition_input(x if self.context_free is None else spread(at.alpha, x) * x, condition)
            if self.context_free is not None:
                h = h + self.context_free(self._prediction_at_hand(x, at, condition, table))
        return h

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
        after: CleanWords | None = None,
    ) -> Weighted:
        """mu and, on request, what its weights say.

        `table` is the normalised table where the caller has it, `scores` the shared kernel scores of this state.
        `details` adds token and top weight; `targets` the cross-entropy. With `positions` (a boolean mask [B, L]) the
        head runs on those alone and the record's tensors are flat over them. `paired`: x_t is a clean copy of each
        sequence followed by a noisy one in blocks with these starts (`backbone.pair_mask`); `after`: x_t is a block
        that follows clean words.
        """
        table = self.embedding.rows() if table is None else table
        x = x_t.to(table.dtype)
        h = self.hidden(x, at, condition, table, paired=paired, after=after)
        if self.predictor == "direct":
            if targets is not None:
                raise UserError(
                    "the direct predictor has no weights, hence no cross-entropy: train it with mse"
                )
            with torch.autocast(x.device.type, enabled=False):
                mu = self.head(h.to(table.dtype))
            mu = mu if positions is None else mu[positions]
            return Weighted(mu, log_normaliser=mu.new_zeros(mu.shape[:-1]))
        base = BaseLogits(self.head, h, self._evidence(x, at, h, paired=paired, after=after), table)
        return base.weigh(x, at, targets=targets, details=details, scores=scores, positions=positions)

    def base(
        self,
        x_t: Tensor,
        at: Coefficients,
        condition: Tensor | None = None,
        *,
        table: Tensor | None = None,
        after: CleanWords | None = None,
        temperature: float = 1.0,
        base_temperature: float = 1.0,
    ) -> BaseLogits:
        """log f at this state: one pass of the trunk, after which weights at any state cost the head alone."""
        if self.predictor == "direct":
            raise UserError(
                "the direct predictor has no token logits: decode it with --decode prediction or distance, without a "
                "temperature, and not with --solver kernel"
            )
        table = self.embedding.rows() if table is None else table
        x = x_t.to(table.dtype)
        h = self.hidden(x, at, condition, table, after=after)
        evidence = self._evidence(x, at, h, after=after)
        return BaseLogits(self.head, h, evidence, table, temperature, base_temperature)

    def logits(
        self,
        x_t: Tensor,
        at: Coefficients,
        condition: Tensor | None = None,
        *,
        table: Tensor | None = None,
        after: CleanWords | None = None,
    ) -> Tensor:
        """log f + kernel, [B, L, V]: materialised, for small jobs and comparisons."""
        return self.base(x_t, at, condition, table=table, after=after).logits(x_t, at)

    def paired(
        self,
        clean: Tensor,
        x_t: Tensor,
        at: Coefficients,
        condition: Tensor | None = None,
        *,
        table: Tensor,
        starts: Tensor,
        targets: Tensor | None = None,
    ) -> Weighted:
        """The prediction of every block of x_t [B, L, d] after the clean words before it, in one pass.

        `clean` [B, L, d] are the sequence's own rows of the table, `starts` [B, L] the first position of each block.
        """
        rows, length, width = x_t.shape
        plain = plain_for_width(width, rows, length)
        if at.alpha.dim() == 1:
            at = at[:, None].wide(length)
        condition = torch.zeros_like(x_t) if condition is None else condition
        noisy = torch.ones(rows, 2 * length, dtype=torch.bool, device=x_t.device)
        noisy[:, :length] = False
        found = self(
            torch.cat([spread(plain.alpha, clean) * clean, x_t.to(clean.dtype)], 1),
            plain.followed_by(at),
            torch.cat([clean, condition.to(clean.dtype)], 1),  # what is known is its own prediction
            table=table,
            positions=noisy,
            targets=None if targets is None else targets.repeat(1, 2),
            paired=starts,
        )
        present = {name: value for name, value in vars(found).items() if value is not None}
        return Weighted(**{name: value.unflatten(0, (rows, length)) for name, value in present.items()})

    def remember(self, clean: Tensor, table: Tensor) -> CleanWords:
        """What a block sees of the clean words [B, P, d] before it: computed once, whatever follows."""
        plain = plain_for_width(clean.shape[-1], *clean.shape[:2])
        x, past = spread(plain.alpha, clean) * clean, Memory()
        inputs = self._inputs(x, plain, clean, table)
        with torch.autocast(x.device.type, enabled=False):
            h = inputs if self.neighbours is None else inputs + self.neighbours(inputs)
        h = self.backbone(h, plain.gamma.to(x.device), keep=past)
        values = spread(plain.alpha, x) * x
        evidence = None if self.pooling is None else (h.to(x.dtype), values)
        reach = 0 if self.neighbours is None else min(self.neighbours.reach, inputs.shape[1])
        return CleanWords(inputs[:, inputs.shape[1] - reach :], past, evidence)

    def _evidence(
        self,
        x: Tensor,
        at: Coefficients,
        h: Tensor,
        *,
        paired: Tensor | None = None,
        after: CleanWords | None = None,
    ) -> Tensor | None:
        """y, for which <y, e_j> is the evidence of other positions for token j; none without `pool_evidence`.

        Each of those counts with alpha x, which is its kernel times state in noise and stays bounded towards the data:
        log f stays Lipschitz, as the paper's theorem wants it.
        """
        if self.pooling is None:
            return None
        with torch.autocast(x.device.type, enabled=False):
            past = None if after is None else after.evidence
            pooled: Tensor = self.pooling(h.to(x.dtype), spread(at.alpha, x) * x, paired=paired, past=past)
        return pooled

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
