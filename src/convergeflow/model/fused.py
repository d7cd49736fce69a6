"""How the vocabulary head is fast: weights, their mean and what is asked about them, never all logits at once.

    logits_j = <h, W_j> + b_j + kernel <x, e_j>,  w = softmax(logits),  mu = sum_j w_j e_j

`head.py` says what this means. It is attention over the vocabulary, so it runs in tiles (some rows x some tokens) with
a running maximum and sum. The backward pass makes the tiles again, or uses those kept from the forward pass as far as
a fixed budget of memory goes. Summaries of w come from the same pass. The tiles here are a CPU's; `accelerated.py` has
those of other devices, and `_way` chooses.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from convergeflow.device import memory_of, precision_of, reduces
from convergeflow.errors import UserError

CPU = torch.device("cpu")
CPU_TILE = 1024
"""Tokens per tile on a CPU: the tile and the operands of its products stay in the outer cache."""
CPU_CELLS = 1 << 20
"""Rows x tokens of one tile on a CPU (4 MB of float32)."""
DEVICE_TILE = 8192
"""Tokens per tile on an accelerator: large enough to fill it, small against its memory."""
DEVICE_CELLS = 1 << 25
KEEP_ALL_BYTES = 160 << 20
"""Up to this size all unnormalised weights are kept for the backward pass, which then makes nothing again."""
KEEP_SOME_BYTES = 80 << 20
"""How much of a larger set is kept: the rest is made again, and memory stays a fraction of the logits'."""
SHARED_SCORES_BYTES = 1 << 28
"""Kernel scores <x, e_j> are kept for the passes at a grid point up to this size, on a CPU."""

LARGEST_MASS = 1e17
"""Sum of the weights of a tile, relative to an earlier tile's peak, up to which no sum can overflow float32."""


@dataclass(frozen=True)
class Weighted:
    """The prediction mu and what was asked about its weights; shapes are those of the positions."""

    mu: Tensor
    """Weighted mean of the table's rows, [..., d]."""
    log_normaliser: Tensor
    """log sum_j exp(logits_j), nats."""
    token: Tensor | None = None
    """The token of largest weight; the lowest id among equals."""
    top_weight: Tensor | None = None
    """Its weight. Detached: a diagnostic."""
    entropy: Tensor | None = None
    """Entropy of w in nats. Detached: a diagnostic."""
    cross_entropy: Tensor | None = None
    """-log w at the target, nats."""

    def __getitem__(self, index: Any) -> Weighted:
        """The same for some rows."""
        return Weighted(*(None if value is None else value[index] for value in self._values()))  # type: ignore[arg-type]

    @classmethod
    def joined(cls, parts: Sequence[Weighted], dim: int = 0) -> Weighted:
        """Several predictions as one, along rows (0) or positions (1), with what all of them have."""
        if len(parts) == 1:
            return parts[0]
        columns = zip(*(part._values() for part in parts), strict=True)
        return cls(*(None if any(v is None for v in column) else torch.cat(column, dim) for column in columns))  # type: ignore[arg-type]

    def _values(self) -> list[Tensor | None]:
        return [getattr(self, each.name) for each in fields(self)]


@dataclass(frozen=True)
class Nearest:
    """The table row nearest to each position and its Euclidean distance."""

    token: Tensor
    distance: Tensor
    second_distance: Tensor | None = None


def weigh(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor | None,
    kernel: Tensor | None,
    table: Tensor,
    *,
    targets: Tensor | None = None,
    token: bool = False,
    top_weight: bool = False,
    entropy: bool = False,
    scores: Tensor | None = None,
    tile: int | None = None,
    keep: int | None = None,
) -> Weighted:
    """Weights of all tokens and their mean, differentiable in every tensor but `scores` and `targets`.

    h [..., d_h], weight [V, d_h], bias [V] or None; x [..., d] and kernel, broadcastable to the positions, or both
    None for base logits alone; table [V, d] with rows of equal norm.
    `scores` are the values `kernel_scores(x, table)` if the caller has them; gradients still reach x and table.
    `targets` [...] asks for the cross-entropy. The table's format decides the arithmetic (half precision counts
    as float32), whatever autocast says; `keep` bounds the bytes of weights held for the backward pass.
    """
    rounded = precision_of(table.device, table.dtype).rounded
    if rounded is not None and x is not None and kernel is not None:
        scores = _as_rounded(kernel_scores(x, table) if scores is None else scores, kernel, rounded)
    operands = _flatten(h, weight, bias, x, kernel, table, scores, targets)
    plan = Asked(token, top_weight, entropy, tile, keep)
    found = _run(operands, plan)
    mu, *rest = (None if part is None else part.reshape(*h.shape[:-1], *part.shape[1:]) for part in found)
    return Weighted(mu, *rest)  # type: ignore[arg-type]


def kernel_scores(x: Tensor, table: Tensor) -> Tensor:
    """The inner products <x, e_j>, [..., V]: the part of the logits that a sampling step's passes share."""
    dtype = arithmetic(table)
    x, table = x.to(dtype), table.to(dtype)
    with no_autocast(table), exact_products():
        if torch.is_grad_enabled() and (x.requires_grad or table.requires_grad):
            return x @ table.T
        out = _way(table).scores(x.reshape(-1, x.shape[-1]), table)
    return out.view(*x.shape[:-1], out.shape[1])


def _as_rounded(scores: Tensor, kernel: Tensor, dtype: torch.dtype) -> Tensor:
    """Scores whose product with the kernel is the rounded kernel term."""
    factor = kernel.detach().to(scores).expand(scores.shape[:-1])[..., None]
    return (factor * scores.detach()).to(dtype).to(scores) / factor.clamp_min(torch.finfo(scores.dtype).tiny)


def filled_in(present: Tensor, missing: Tensor, make: Callable[[Any], Tensor]) -> Tensor:
    """`present` [B, L, d], with what `make` gives for an index of rows at the positions [B, L] that are missing.

    Where looking costs nothing, a pass of the head is spared: on a CPU none is made if nothing is missing, as in most
    passes of a sampler, and under `reduced_products` one of the rows in question. float32 makes one of all rows, for
    the sums of a row may round otherwise among others.
    """
    if present.is_cpu and not bool(missing.any()):
        return present
    if not reduces(present.device):
        return torch.where(missing[..., None], make(...), present)
    rows = missing.any(-1).nonzero()[:, 0]
    return present.index_copy(0, rows, torch.where(missing[rows][..., None], make(rows), present[rows]))


def scores_room(device: torch.device) -> int:
    """How many bytes of kernel scores may be kept: a device with memory of its own says what it has to spare."""
    return SHARED_SCORES_BYTES if device.type == "cpu" else memory_of(device).spare


@torch.no_grad()
def nearest(
    x: Tensor, table: Tensor, *, scale: Tensor | None = None, second: bool = False, tile: int | None = None
) -> Nearest:
    """The row e_j with the smallest ||x - scale e_j|| for each position (`scale`: per position, or 1)."""
    dtype = arithmetic(table)
    if second and table.shape[0] < 2:
        raise UserError("the second nearest row needs a table of at least two rows")
    table = table.to(dtype)
    state = x.reshape(-1, x.shape[-1])
    flat = state.to(dtype)
    factor = (flat.new_ones(()) if scale is None else scale.to(dtype)).expand(x.shape[:-1]).reshape(-1, 1)
    half_norms = _squared_norms(table).mul_(0.5)
    count = 2 if second else 1
    found = torch.empty(flat.shape[0], count, dtype=torch.long, device=x.device)
    grid = _Grid(flat.shape[0], table.shape[0], tile, x.device)
    with no_autocast(table), exact_products():
        for rows in grid.row_blocks():
            best = flat.new_empty(rows.stop - rows.start, 0)
            where = found.new_empty(rows.stop - rows.start, 0)
            for tokens in grid.token_tiles():
                # ||x - s e||^2 = ||x||^2 - 2 s (<x, e> - s ||e||^2 / 2): the first term does not choose.
                closeness = flat[rows] @ table[tokens].T
                closeness.sub_(factor[rows] * half_norms[tokens]).mul_(factor[rows])
                value, index = closeness.topk(min(count, closeness.shape[1]), dim=1)
                best, order = torch.cat([best, value], 1).sort(dim=1, descending=True, stable=True)
                where = torch.cat([where, index.add_(tokens.start)], 1).gather(1, order)[:, :count]
                best = best[:, :count]
            found[rows] = where
    # Distances come from the difference, not from the expansion above, which cancels when x is close to a row.
    distances = [
        torch.linalg.vector_norm(state - factor * table[found[:, k]], dim=-1).reshape(x.shape[:-1])
        for k in range(count)
    ]
    return Nearest(found[:, 0].reshape(x.shape[:-1]), distances[0], distances[1] if second else None)


def kept_bytes(num: int, vocabulary: int, element_size: int = 4) -> int:
    """How many bytes of weights are held between the forward and the backward pass, where the caller does not say."""
    everything = num * _aligned(vocabulary) * element_size
    return everything if everything <= KEEP_ALL_BYTES else KEEP_SOME_BYTES


@contextmanager
def exact_products() -> Iterator[None]:
    """Full float32 products: the kernel term is tens of nats and reduced precision would move whole nats."""
    precision = torch.get_float32_matmul_precision()
    if precision == "highest" or reduces(CPU):
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


class Asked(NamedTuple):
    """What to return and how much memory to use."""

    token: bool
    top_weight: bool
    entropy: bool
    tile: int | None
    keep: int | None


class Operands(NamedTuple):
    """The operands with positions flattened to rows and in one number format."""

    h: Tensor
    weight: Tensor
    bias: Tensor | None
    x: Tensor | None
    kernel: Tensor | None
    table: Tensor
    scores: Tensor | None
    targets: Tensor | None


class Outputs(NamedTuple):
    mu: Tensor
    log_normaliser: Tensor
    token: Tensor | None
    top_weight: Tensor | None
    entropy: Tensor | None
    cross_entropy: Tensor | None


def _flatten(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor | None,
    kernel: Tensor | None,
    table: Tensor,
    scores: Tensor | None,
    targets: Tensor | None,
) -> Operands:
    dtype = arithmetic(table)
    positions = h.shape[:-1]

    def per_position(part: Tensor | None) -> Tensor | None:
        return None if part is None else part.to(dtype).expand(positions).reshape(-1)

    return Operands(
        h=h.to(dtype).reshape(-1, h.shape[-1]),
        weight=weight.to(dtype),
        bias=None if bias is None else bias.to(dtype),
        x=None if x is None else x.to(dtype).reshape(-1, x.shape[-1]),
        kernel=per_position(kernel),
        table=table.to(dtype),
        scores=None if scores is None else scores.detach().reshape(math.prod(positions), scores.shape[-1]),
        targets=None if targets is None else targets.expand(positions).reshape(-1),
    )


class Way(Protocol):
    """How the head is computed: on a CPU here, elsewhere by `accelerated.Accelerated`."""

    def forward(self, operands: Operands, plan: Asked, keep: bool) -> tuple[Outputs, Kept | None]:
        """What was asked for and, with `keep`, what the backward pass can use."""

    def backward(
        self, operands: Operands, plan: Asked, kept: Kept, outputs: Outputs, gradients: Outputs, needs: Operands
    ) -> list[Tensor | None]:
        """The gradients of the operands, in their order."""

    def scores(self, x: Tensor, table: Tensor) -> Tensor:
        """<x, e_j> of rows x [N, d], [N, V]."""


def _way(table: Tensor) -> Way:
    """The one place that chooses: cache-sized tiles on a CPU, elsewhere Triton or what stands in for it."""
    if table.device.type == "cpu":
        return _CpuTiles()
    from convergeflow.model.accelerated import accelerated

    return accelerated(table)


def _run(operands: Operands, plan: Asked) -> Outputs:
    if torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in operands):
        return Outputs(*_Weigh.apply(plan, *operands))
    with no_autocast(operands.table):
        return _way(operands.table).forward(operands, plan, keep=False)[0]


class _Weigh(torch.autograd.Function):
    """d logits_j = w_j (g . e_j - g . mu + g_normaliser + g_ce) - g_ce [j = target], then the chain rule."""

    @staticmethod
    def forward(ctx: Any, plan: Asked, *operands: Tensor | None) -> Outputs:
        parts = Operands(*operands)  # type: ignore[arg-type]
        ctx.plan, ctx.way = plan, _way(parts.table)
        with no_autocast(parts.table):
            outputs, ctx.kept = ctx.way.forward(parts, plan, keep=True)
        ctx.save_for_backward(outputs.mu, outputs.log_normaliser, *operands)
        details = (outputs.token, outputs.top_weight, outputs.entropy)
        ctx.mark_non_differentiable(*(part for part in details if part is not None))
        ctx.set_materialize_grads(False)
        return tuple(outputs)  # type: ignore[return-value]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        mu, log_normaliser, *operands = ctx.saved_tensors
        outputs = Outputs(mu, log_normaliser, None, None, None, None)
        parts, needs = Operands(*operands), Operands(*ctx.needs_input_grad[1:])
        with no_autocast(log_normaliser):
            given = ctx.way.backward(parts, ctx.plan, ctx.kept, outputs, Outputs(*gradients), needs)  # type: ignore[arg-type]
        return None, *given


class _CpuTiles:
    """The head in tiles that stay in a CPU's outer cache."""

    def forward(self, operands: Operands, plan: Asked, keep: bool) -> tuple[Outputs, Kept | None]:
        standard = kept_bytes(len(operands.h), len(operands.table), operands.h.element_size())
        kept = Kept(standard if plan.keep is None else plan.keep) if keep else None
        return _forward(operands, plan, kept), kept

    def backward(
        self, operands: Operands, plan: Asked, kept: Kept, outputs: Outputs, gradients: Outputs, needs: Operands
    ) -> list[Tensor | None]:
        return _Backward(operands, plan, kept, outputs, gradients).run(needs)

    def scores(self, x: Tensor, table: Tensor) -> Tensor:
        grid = _Grid(len(x), len(table), None, table.device)
        # Rows on cache lines, and tiles: one wide product with 50,257 columns runs at two thirds of the speed.
        out = aligned_empty(len(x), len(table), table)
        for rows in grid.row_blocks():
            for tokens in grid.token_tiles():
                torch.mm(x[rows], table[tokens].T, out=out[rows, tokens])
        return out


def _forward(operands: Operands, plan: Asked, kept: Kept | None) -> Outputs:
    """One pass over rows and vocabulary; tiles that fit are left in `kept` for the backward pass."""
    table, targets = operands.table, operands.targets
    num = operands.h.shape[0]
    grid = _Grid(num, table.shape[0], plan.tile, table.device)
    with torch.no_grad():
        tile_logits = _TileLogits(operands)
        mu = table.new_empty(num, table.shape[1])
        log_normaliser = table.new_empty(num)
        token = torch.empty(num, dtype=torch.long, device=table.device) if plan.token else None
        top_weight = table.new_empty(num) if plan.top_weight else None
        entropy = table.new_empty(num) if plan.entropy else None
        target_logit = None if targets is None else table.new_zeros(num)
        for rows in grid.row_blocks():
            running = _Running(plan)
            for tokens in grid.token_tiles():
                room = None if kept is None else kept.room(rows, tokens, table)
                shift = running.guess()
                out = grid.buffer(0, rows, tokens, table) if room is None else room
                tile = tile_logits.fill(out, rows, tokens, shift)
                if target_logit is not None and targets is not None:
                    place, inside = within(targets[rows], tokens)
                    found = tile.gather(1, place)[:, 0] + (0.0 if shift is None else shift)
                    target_logit[rows] += torch.where(inside, found, 0.0)
                if shift is None or not running.add_shifted(tile, tokens, mu[rows], table):
                    tile = tile if shift is None else tile_logits.fill(out, rows, tokens)
                    running.add(tile, tokens, mu[rows], table)
                if room is not None and kept is not None:
                    kept.tiles[rows.start, tokens.start] = (room, running.peak)
            running.close(rows, mu, log_normaliser, token, top_weight, entropy)
        surprise = None if target_logit is None else log_normaliser - target_logit
    return Outputs(mu, log_normaliser, token, top_weight, entropy, surprise)


class _Backward:
    """The backward pass: tile by tile the change of the logits, and what it adds to each operand's gradient."""

    def __init__(self, operands: Operands, plan: Asked, kept: Kept, outputs: Outputs, gradients: Outputs) -> None:
        self.operands, self.kept, self.log_normaliser = operands, kept, outputs.log_normaliser
        self.grid = _Grid(operands.h.shape[0], operands.table.shape[0], plan.tile, operands.table.device)
        self.tile_logits = _TileLogits(operands)
        self.g_mu: Tensor | None = gradients.mu  # None where nothing depends on it
        self.g_cross = gradients.cross_entropy
        self.offset = torch.zeros_like(outputs.log_normaliser)
        if self.g_mu is not None:
            self.offset -= (self.g_mu * outputs.mu).sum(1)
        for part in (gradients.log_normaliser, self.g_cross):
            if part is not None:
                self.offset += part

    def run(self, needs: Operands) -> list[Tensor | None]:
        """The gradients of the operands, in their order."""
        h, weight, bias, x, _, table, _, _ = self.operands
        d_h = torch.empty_like(h) if needs.h else None
        d_weight = torch.empty_like(weight) if needs.weight else None
        d_bias = torch.zeros_like(bias) if bias is not None and needs.bias else None
        d_scaled = torch.empty_like(x) if x is not None and (needs.x or needs.kernel) else None
        d_table = torch.zeros_like(table) if needs.table else None
        for rows in self.grid.row_blocks():
            for tokens in self.grid.token_tiles():
                change = self._change(rows, tokens, d_table)
                if d_h is not None:
                    d_h[rows].addmm_(change, weight[tokens], beta=float(tokens.start > 0))
                if d_weight is not None:
                    d_weight[tokens].addmm_(change.T, h[rows], beta=float(rows.start > 0))
                if d_bias is not None:
                    d_bias[tokens] += change.sum(0)
                if d_scaled is not None:
                    d_scaled[rows].addmm_(change, table[tokens], beta=float(tokens.start > 0))
                if d_table is not None and self.tile_logits.scaled is not None:
                    d_table[tokens].addmm_(change.T, self.tile_logits.scaled[rows])
        return [d_h, d_weight, d_bias, *self._unscaled(d_scaled, needs), d_table, None, None]

    def _unscaled(self, d_scaled: Tensor | None, needs: Operands) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of x and of the kernel from that of their product."""
        x, kernel = self.operands.x, self.operands.kernel
        if d_scaled is None or x is None or kernel is None:
            return None, None
        d_kernel = (d_scaled * x).sum(1) if needs.kernel else None
        return d_scaled.mul_(kernel[:, None]) if needs.x else None, d_kernel

    def _change(self, rows: slice, tokens: slice, d_table: Tensor | None) -> Tensor:
        """The gradient of a tile's logits; the part of the table's that comes from w is added to `d_table`."""
        table, targets = self.operands.table, self.operands.targets
        pull, lift = None if self.g_mu is None else self.g_mu[rows], self.offset[rows]
        held = self.kept.tiles.pop((rows.start, tokens.start), None)
        if held is None:
            out = self.grid.buffer(0, rows, tokens, table)
            share = _exponentiate(self.tile_logits.fill(out, rows, tokens, self.log_normaliser[rows]))
        else:
            # The kept tile is w up to a factor per row, which goes to the smaller operands.
            share, peak = held
            factor = (peak - self.log_normaliser[rows]).exp_()
            pull, lift = None if pull is None else pull * factor[:, None], lift * factor
        if pull is None:
            change = share.mul_(lift[:, None])
        else:
            if d_table is not None:
                d_table[tokens].addmm_(share.T, pull)
            change = torch.mm(pull, table[tokens].T, out=self.grid.buffer(1, rows, tokens, table))
            change.add_(lift[:, None]).mul_(share)
        if self.g_cross is not None and targets is not None:
            place, inside = within(targets[rows], tokens)
            change.scatter_add_(1, place, torch.where(inside, -self.g_cross[rows], 0.0)[:, None])
        return change


class _TileLogits:
    """Makes the logits of one tile in a given buffer; what all tiles share is made once."""

    def __init__(self, operands: Operands) -> None:
        self.operands = operands
        x, kernel = operands.x, operands.kernel
        self.scaled = None if x is None or kernel is None else x * kernel[:, None]

    def fill(self, out: Tensor, rows: slice, tokens: slice, shift: Tensor | None = None) -> Tensor:
        """The logits, less `shift` per row: what the products are added to, so that it costs no pass of its own."""
        h, weight, bias, _, kernel, table, scores, _ = self.operands
        if shift is None:
            if bias is None:
                torch.mm(h[rows], weight[tokens].T, out=out)
            else:
                torch.addmm(bias[tokens], h[rows], weight[tokens].T, out=out)
        elif bias is None:
            out.copy_(shift.neg()[:, None])
        else:
            torch.sub(bias[tokens], shift[:, None], out=out)
        # The kernel term is the large one and cancels the shift: the base logits are added to what is left.
        if scores is not None and kernel is not None:
            out.addcmul_(scores[rows, tokens], kernel[rows, None])
        elif self.scaled is not None:
            with exact_products():
                out.addmm_(self.scaled[rows], table[tokens].T)
        if shift is not None:
            out.addmm_(h[rows], weight[tokens].T)
        return out


class _Running:
    """The online softmax of a block of rows: everything is relative to the largest logit seen so far."""

    peak: Tensor
    total: Tensor
    best: Tensor
    surprise: Tensor
    """Sum of p log p for p = exp(logit - peak), at most 0."""

    def __init__(self, plan: Asked) -> None:
        self.plan = plan
        self.empty = True

    def guess(self) -> Tensor | None:
        """The peak so far, if the next tile may be measured against it before its own maximum is known.

        Any reference near the maximum will do for the sums, which spares a pass over the tile to find it and one over
        the mean to rescale it. The answers that name the maximum need it exactly.
        """
        exact = self.plan.token or self.plan.top_weight or self.plan.entropy
        return None if self.empty or exact else self.peak

    def add_shifted(self, tile: Tensor, tokens: slice, mean: Tensor, table: Tensor) -> bool:
        """Take in a tile of logit - peak, as `add` does; False, and nothing taken, if a weight came out too large."""
        mass = _exponentiate(tile).sum(1)
        if not float(mass.max()) < LARGEST_MASS:
            return False
        self.total += mass
        mean.addmm_(tile, table[tokens])
        return True

    def add(self, tile: Tensor, tokens: slice, mean: Tensor, table: Tensor) -> None:
        """Take in a tile of logits, leaving exp(logit - peak) in its place, and add its part to `mean`."""
        if self.plan.token:
            summit, index = tile.max(1)
            index += tokens.start
            self.best = index if self.empty else torch.where(summit > self.peak, index, self.best)
        else:
            summit = tile.amax(1)
        peak = summit if self.empty else torch.maximum(self.peak, summit)
        log_parts = tile - peak[:, None] if self.plan.entropy else None
        mass = _exponentiate(tile.sub_(peak[:, None])).sum(1)
        surprise = mass if log_parts is None else log_parts.mul_(tile).sum(1)
        if self.empty:
            self.total, self.surprise = mass, surprise
            torch.mm(tile, table[tokens], out=mean)
        else:
            drop = self.peak - peak
            factor = drop.exp()
            if self.plan.entropy:
                # Every p seen so far shrinks by the factor, and its logarithm by `drop`.
                self.surprise = self.surprise.add_(drop * self.total).mul_(factor).add_(surprise)
            self.total = self.total.mul_(factor).add_(mass)
            mean.mul_(factor[:, None]).addmm_(tile, table[tokens])
        self.peak, self.empty = peak, False

    def close(
        self,
        rows: slice,
        mu: Tensor,
        log_normaliser: Tensor,
        token: Tensor | None,
        top_weight: Tensor | None,
        entropy: Tensor | None,
    ) -> None:
        """Write the finished rows."""
        log_total = self.total.log()
        log_normaliser[rows] = self.peak + log_total
        mu[rows].div_(self.total[:, None])
        if token is not None:
            token[rows] = self.best
        if top_weight is not None:
            top_weight[rows] = self.total.reciprocal()
        if entropy is not None:
            entropy[rows] = log_total - self.surprise / self.total


@dataclass
class Kept:
    """Tiles of the forward pass by (first row, first token): exp(logits - peak), and the peak of each row.

    The backward pass takes them out and overwrites them; a second backward pass makes every tile again.
    """

    budget: int
    tiles: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def room(self, rows: slice, tokens: slice, like: Tensor) -> Tensor | None:
        """Memory for one more tile, or None when the budget is spent."""
        height, width = rows.stop - rows.start, tokens.stop - tokens.start
        size = height * _aligned(width) * like.element_size()
        if size > self.budget:
            return None
        self.budget -= size
        return aligned_empty(height, width, like)


class _Grid:
    """How rows x vocabulary are cut into tiles: one tile when everything is small."""

    def __init__(self, num: int, vocabulary: int, tile: int | None, device: torch.device) -> None:
        standard, cells = (CPU_TILE, CPU_CELLS) if device.type == "cpu" else (DEVICE_TILE, DEVICE_CELLS)
        self.num, self.vocabulary = num, vocabulary
        self.width = min(vocabulary, standard if tile is None else tile)
        self.height = max(1, min(num, cells // self.width))

    def row_blocks(self) -> list[slice]:
        return [slice(low, min(low + self.height, self.num)) for low in range(0, self.num, self.height)]

    def token_tiles(self) -> list[slice]:
        return [slice(low, min(low + self.width, self.vocabulary)) for low in range(0, self.vocabulary, self.width)]

    def buffer(self, which: int, rows: slice, tokens: slice, like: Tensor) -> Tensor:
        """Working memory for one tile."""
        height, width = rows.stop - rows.start, tokens.stop - tokens.start
        size = height * _aligned(width)
        # Fresh pages cost a CPU more than the arithmetic on them, so each thread holds on to its two buffers.
        held: Tensor | None = getattr(_workspace, f"tile{which}", None)
        if held is None or held.dtype != like.dtype or held.numel() < size:
            with torch.inference_mode(False):  # the next call may need it elsewhere
                held = like.new_empty(self.height * _aligned(self.width))
            setattr(_workspace, f"tile{which}", held)
        return held[:size].view(height, -1)[:, :width]


_workspace = threading.local()


def _squared_norms(table: Tensor) -> Tensor:
    # Not table.square().sum(-1), which would need a second table for a moment.
    return torch.linalg.vector_norm(table, dim=-1).square_()


def _aligned(width: int) -> int:
    """Columns to reserve per row: matrix products are up to 1.5 times faster when rows start on cache lines."""
    return -(-width // 16) * 16


def aligned_empty(height: int, width: int, like: Tensor) -> Tensor:
    return like.new_empty(height, _aligned(width))[:, :width]


def _exponentiate(tile: Tensor) -> Tensor:
    """exp in place, with a floor far below rounding: exp is slow where its result underflows."""
    floor = math.log(torch.finfo(tile.dtype).tiny) + 8
    return tile.clamp_(min=floor).exp_()


def within(targets: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
    """The column of each target in a tile, [rows, 1], and whether the target lies in the tile at all."""
    place = targets - tokens.start
    width = tokens.stop - tokens.start
    return place.clamp(0, width - 1)[:, None], (place >= 0) & (place < width)


def arithmetic(table: Tensor) -> torch.dtype:
    return torch.promote_types(table.dtype, torch.float32)


def no_autocast(like: Tensor) -> AbstractContextManager[Any]:
    # A tensor without data has no autocast to switch off.
    return nullcontext() if like.is_meta else torch.autocast(device_type=like.device.type, enabled=False)
