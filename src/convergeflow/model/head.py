"""The vocabulary head: base logits plus Gaussian kernel -> weights w -> prediction mu, all logits never at once.

    logits_j = <h, W_j> + b_j + kernel <x, e_j> [- norm_term ||e_j||^2],  w = softmax(logits),  mu = sum_j w_j e_j

with kernel = alpha/sigma^2 and norm_term = alpha^2/(2 sigma^2). This is attention over the vocabulary, so it runs
in tiles (some rows x some tokens) with a running maximum and sum; the backward pass makes the tiles again, or uses
those kept from the forward pass as far as a fixed budget of memory goes. Summaries of w come from the same pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from convergeflow.errors import UserError

CPU_TILE = 1024
"""Tokens per tile on a CPU: the tile and the operands of its products stay in the outer cache."""
CPU_CELLS = 1 << 20
"""Rows x tokens of one tile on a CPU (4 MB of float32)."""
DEVICE_TILE = 8192
"""Tokens per tile on an accelerator: large enough to fill it, small against its memory."""
DEVICE_CELLS = 1 << 25
KEEP_BYTES = 160 << 20
"""Unnormalised weights that the backward pass may keep instead of making them again."""


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
    norm_term: Tensor | None = None,
    scores: Tensor | None = None,
    tile: int | None = None,
    keep: int = KEEP_BYTES,
) -> Weighted:
    """Weights of all tokens and their mean, differentiable in every tensor but `scores` and `targets`.

    h [..., d_h], weight [V, d_h], bias [V] or None; x [..., d] and kernel, broadcastable to the positions, or both
    None for base logits alone; table [V, d]; norm_term like kernel, needed when the table's rows differ in norm.
    `scores` are the values `kernel_scores(x, table)` if the caller has them; gradients still reach x and table.
    `targets` [...] asks for the cross-entropy. The table's format decides the arithmetic (half precision counts
    as float32), whatever autocast says; `keep` bounds the bytes held for the backward pass.
    """
    dtype = _arithmetic(table)
    positions = h.shape[:-1]
    flat = _Inputs(
        h=h.to(dtype).reshape(-1, h.shape[-1]),
        weight=weight.to(dtype),
        bias=None if bias is None else bias.to(dtype),
        x=None if x is None else x.to(dtype).reshape(-1, x.shape[-1]),
        kernel=None if kernel is None else kernel.to(dtype).expand(positions).reshape(-1),
        table=table.to(dtype),
        norm_term=None if norm_term is None else norm_term.to(dtype).expand(positions).reshape(-1),
        scores=None if scores is None else scores.detach().reshape(-1, table.shape[0]),
        targets=None if targets is None else targets.expand(positions).reshape(-1),
    )
    wanted = _Wanted(token=token, top_weight=top_weight, entropy=entropy, tile=tile, keep=keep)
    differentiable = flat.differentiable()
    if torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in differentiable):
        outputs = _Weigh.apply(wanted, flat.scores, flat.targets, *differentiable)
    else:
        outputs = _forward(flat, wanted, kept=None)
    mu, log_normaliser, tokens, top, spread, cross_entropy = outputs
    return Weighted(
        mu=mu.reshape(*positions, -1),
        log_normaliser=log_normaliser.reshape(positions),
        token=None if tokens is None else tokens.reshape(positions),
        top_weight=None if top is None else top.reshape(positions),
        entropy=None if spread is None else spread.reshape(positions),
        cross_entropy=None if cross_entropy is None else cross_entropy.reshape(positions),
    )


def logits(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor,
    kernel: Tensor,
    table: Tensor,
    norm_term: Tensor | None = None,
) -> Tensor:
    """The logits themselves, [..., V]: for tests and small jobs, by plain differentiable operations."""
    dtype = _arithmetic(table)
    with _no_autocast(table):
        base = h.to(dtype) @ weight.to(dtype).T
        if bias is not None:
            base = base + bias.to(dtype)
        with exact_products():
            similarity = x.to(dtype) @ table.to(dtype).T
        total = base + kernel.to(dtype).unsqueeze(-1) * similarity
        if norm_term is not None:
            total = total - norm_term.to(dtype).unsqueeze(-1) * table.to(dtype).square().sum(-1)
    return total


def kernel_scores(x: Tensor, table: Tensor) -> Tensor:
    """The inner products <x, e_j>, [..., V]: the part of the logits that a sampling step's passes share."""
    dtype = _arithmetic(table)
    with _no_autocast(table), exact_products():
        return x.to(dtype) @ table.to(dtype).T


@torch.no_grad()
def nearest(
    x: Tensor, table: Tensor, *, scale: Tensor | None = None, second: bool = False, tile: int | None = None
) -> Nearest:
    """The row e_j with the smallest ||x - scale e_j|| for each position (`scale`: per position, or 1)."""
    dtype = _arithmetic(table)
    if second and table.shape[0] < 2:
        raise UserError("the second nearest row needs a table of at least two rows")
    rows = table.to(dtype)
    flat = x.reshape(-1, x.shape[-1]).to(dtype)
    factor = flat.new_ones(()) if scale is None else scale.to(dtype)
    factor = factor.expand(x.shape[:-1]).reshape(-1)
    half_norms = rows.square().sum(-1).mul_(0.5)
    count = 2 if second else 1
    found = torch.empty(flat.shape[0], count, dtype=torch.long, device=x.device)
    row_step, tile_step = _tiling(flat.shape[0], rows.shape[0], tile, x.device)
    with _no_autocast(table), exact_products():
        for start in range(0, flat.shape[0], row_step):
            part, size = flat[start : start + row_step], factor[start : start + row_step, None]
            best: Tensor | None = None
            for low in range(0, rows.shape[0], tile_step):
                closeness = part @ rows[low : low + tile_step].T
                # ||x - s e||^2 = ||x||^2 - 2 s (<x, e> - s ||e||^2 / 2): the first term does not choose.
                closeness.sub_(size * half_norms[low : low + tile_step]).mul_(size)
                value, index = closeness.topk(min(count, closeness.shape[1]), dim=1)
                index += low
                if best is None:
                    best, where = value, index
                else:
                    best, order = torch.cat([best, value], 1).sort(dim=1, descending=True, stable=True)
                    best, where = best[:, :count], torch.cat([where, index], 1).gather(1, order)[:, :count]
            found[start : start + row_step] = where
    # Distances come from the difference, not from the expansion above, which cancels when x is close to a row.
    state = x.reshape(-1, x.shape[-1])
    distances = [
        torch.linalg.vector_norm(state - factor[:, None] * rows[found[:, k]], dim=-1).reshape(x.shape[:-1])
        for k in range(count)
    ]
    return Nearest(found[:, 0].reshape(x.shape[:-1]), distances[0], distances[1] if second else None)


@contextmanager
def exact_products() -> Iterator[None]:
    """Full float32 products: the kernel term is tens of nats and reduced precision would move whole nats."""
    precision = torch.get_float32_matmul_precision()
    if precision == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


@dataclass(frozen=True)
class _Inputs:
    """The operands with positions flattened to rows and in one number format."""

    h: Tensor
    weight: Tensor
    bias: Tensor | None
    x: Tensor | None
    kernel: Tensor | None
    table: Tensor
    norm_term: Tensor | None
    scores: Tensor | None = None
    targets: Tensor | None = None

    def differentiable(self) -> tuple[Tensor | None, ...]:
        return self.h, self.weight, self.bias, self.x, self.kernel, self.table, self.norm_term


@dataclass(frozen=True)
class _Wanted:
    token: bool
    top_weight: bool
    entropy: bool
    tile: int | None
    keep: int


@dataclass
class _Kept:
    """Tiles of the forward pass, by (first row, first token): exp(logits - shift) and the shift of each row.

    The backward pass takes them out and overwrites them; a second backward pass makes every tile again.
    """

    budget: int
    tiles: dict[tuple[int, int], tuple[Tensor, Tensor]]

    def room(self, start: int, low: int, shape: tuple[int, int], like: Tensor) -> Tensor | None:
        """Memory for one more tile, or None when the budget is spent."""
        size = shape[0] * shape[1] * like.element_size()
        if size > self.budget:
            return None
        self.budget -= size
        return torch.empty(shape, dtype=like.dtype, device=like.device)


class _TileLogits:
    """Makes the logits of one tile in a given buffer; what all tiles share is made once."""

    def __init__(self, inputs: _Inputs) -> None:
        self.inputs = inputs
        self.scaled = None if inputs.x is None or inputs.kernel is None else inputs.x * inputs.kernel[:, None]
        self.norms = None if inputs.norm_term is None else inputs.table.square().sum(-1)

    def fill(self, out: Tensor, rows: slice, tokens: slice) -> Tensor:
        parts = self.inputs
        if parts.bias is None:
            torch.mm(parts.h[rows], parts.weight[tokens].T, out=out)
        else:
            torch.addmm(parts.bias[tokens], parts.h[rows], parts.weight[tokens].T, out=out)
        if parts.scores is not None and parts.kernel is not None:
            out.addcmul_(parts.scores[rows, tokens], parts.kernel[rows, None])
        elif self.scaled is not None:
            with exact_products():
                out.addmm_(self.scaled[rows], parts.table[tokens].T)
        if self.norms is not None and parts.norm_term is not None:
            out.addr_(parts.norm_term[rows], self.norms[tokens], alpha=-1)
        return out


Outputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _forward(inputs: _Inputs, wanted: _Wanted, kept: _Kept | None) -> Outputs:
    """One pass over rows and vocabulary. Call without autograd."""
    table, targets = inputs.table, inputs.targets
    num, vocabulary = inputs.h.shape[0], table.shape[0]
    row_step, tile_step = _tiling(num, vocabulary, wanted.tile, table.device)
    with torch.no_grad(), _no_autocast(table):
        make = _TileLogits(inputs)
        mu = table.new_empty(num, table.shape[1])
        log_normaliser = table.new_empty(num)
        token = torch.empty(num, dtype=torch.long, device=table.device) if wanted.token else None
        top_weight = table.new_empty(num) if wanted.top_weight else None
        entropy = table.new_empty(num) if wanted.entropy else None
        target_logit = None if targets is None else table.new_empty(num)
        buffer: Tensor | None = None
        for start in range(0, num, row_step):
            rows = slice(start, min(start + row_step, num))
            height = rows.stop - rows.start
            mean = mu[rows]
            peak = total = surprise = best = None
            for low in range(0, vocabulary, tile_step):
                tokens = slice(low, min(low + tile_step, vocabulary))
                width = tokens.stop - tokens.start
                tile = None if kept is None else kept.room(start, low, (height, width), table)
                held = tile is not None
                if tile is None:
                    if buffer is None:
                        buffer = table.new_empty(min(row_step, num) * min(tile_step, vocabulary))
                    tile = buffer[: height * width].view(height, width)
                make.fill(tile, rows, tokens)
                if target_logit is not None and targets is not None:
                    place = targets[rows] - low
                    inside = (place >= 0) & (place < width)
                    value = tile.gather(1, place.clamp(0, width - 1)[:, None])[:, 0]
                    target_logit[rows] = value if low == 0 else torch.where(inside, value, target_logit[rows])
                if token is None:
                    summit = tile.amax(1)
                else:
                    summit, index = tile.max(1)
                    index += low
                    best = index if peak is None else torch.where(summit > peak, index, best)
                shift = summit if peak is None else torch.maximum(peak, summit)
                tile.sub_(shift[:, None])
                log_parts = tile.clone() if entropy is not None else None
                tile.exp_()
                mass = tile.sum(1)
                if log_parts is not None:
                    # exp of a large negative number is 0 and its product with that number stays 0, never nan.
                    log_parts = log_parts.mul_(tile).sum(1)
                if peak is None:
                    total, surprise = mass, log_parts
                    torch.mm(tile, table[tokens], out=mean)
                else:
                    drop = peak - shift
                    factor = drop.exp()
                    if log_parts is not None:
                        # sum p log p with respect to the new maximum: every p shrinks by factor.
                        surprise = surprise.add_(drop * total).mul_(factor).add_(log_parts)
                    total = total.mul_(factor).add_(mass)
                    mean.mul_(factor[:, None]).addmm_(tile, table[tokens])
                peak = shift
                if held:
                    kept.tiles[start, low] = (tile, shift)
            mean.div_(total[:, None])
            log_total = total.log()
            log_normaliser[rows] = peak + log_total
            if token is not None:
                token[rows] = best
            if top_weight is not None:
                top_weight[rows] = total.reciprocal()
            if entropy is not None:
                entropy[rows] = log_total - surprise / total
        cross_entropy = None if target_logit is None else log_normaliser - target_logit
    return mu, log_normaliser, token, top_weight, entropy, cross_entropy


class _Weigh(torch.autograd.Function):
    """d logits_j = w_j (g . e_j - g . mu + g_normaliser + g_ce) - g_ce [j = target], then the chain rule."""

    @staticmethod
    def forward(
        ctx: Any,
        wanted: _Wanted,
        scores: Tensor | None,
        targets: Tensor | None,
        *differentiable: Tensor | None,
    ) -> Outputs:
        inputs = _Inputs(*differentiable, scores=scores, targets=targets)  # type: ignore[arg-type]
        kept = _Kept(wanted.keep, {})
        outputs = _forward(inputs, wanted, kept)
        ctx.wanted, ctx.kept = wanted, kept
        ctx.save_for_backward(scores, targets, outputs[0], outputs[1], *differentiable)
        ctx.mark_non_differentiable(*(out for out in outputs[2:5] if out is not None))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g_mu: Tensor | None, g_normaliser: Tensor | None, *grads: Tensor | None) -> Any:
        g_cross = grads[3]
        scores, targets, mu, log_normaliser, *differentiable = ctx.saved_tensors
        inputs = _Inputs(*differentiable, scores=scores, targets=targets)
        needs = _Inputs(*ctx.needs_input_grad[3:])
        with _no_autocast(mu):
            given = _backward(
                inputs, needs, ctx.wanted, ctx.kept, mu, log_normaliser, g_mu, g_normaliser, g_cross
            )
        return None, None, None, *given


def _backward(
    inputs: _Inputs,
    needs: _Inputs,
    wanted: _Wanted,
    kept: _Kept,
    mu: Tensor,
    log_normaliser: Tensor,
    g_mu: Tensor | None,
    g_normaliser: Tensor | None,
    g_cross: Tensor | None,
) -> list[Tensor | None]:
    """Gradients in the order of `_Inputs.differentiable`."""
    table, targets = inputs.table, inputs.targets
    num, vocabulary = inputs.h.shape[0], table.shape[0]
    row_step, tile_step = _tiling(num, vocabulary, wanted.tile, table.device)
    make = _TileLogits(inputs)
    offset = mu.new_zeros(num)
    if g_mu is not None:
        offset -= torch.linalg.vecdot(g_mu, mu)
    for part in (g_normaliser, g_cross):
        if part is not None:
            offset += part
    through_kernel = needs.x or needs.kernel
    d_h = torch.empty_like(inputs.h) if needs.h else None
    d_weight = torch.empty_like(inputs.weight) if needs.weight else None
    d_bias = None if inputs.bias is None or not needs.bias else torch.zeros_like(inputs.bias)
    d_scaled = torch.empty_like(inputs.x) if through_kernel else None
    d_table = torch.zeros_like(table) if needs.table else None
    d_norm = torch.zeros_like(offset) if needs.norm_term else None
    spare: Tensor | None = None
    buffer: Tensor | None = None
    for start in range(0, num, row_step):
        rows = slice(start, min(start + row_step, num))
        height = rows.stop - rows.start
        for low in range(0, vocabulary, tile_step):
            tokens = slice(low, min(low + tile_step, vocabulary))
            width = tokens.stop - tokens.start
            if (start, low) in kept.tiles:
                w, shift = kept.tiles.pop((start, low))
                w.mul_((shift - log_normaliser[rows]).exp_()[:, None])
            else:
                if buffer is None:
                    buffer = table.new_empty(min(row_step, num) * min(tile_step, vocabulary))
                w = make.fill(buffer[: height * width].view(height, width), rows, tokens)
                w.sub_(log_normaliser[rows, None]).exp_()
            if g_mu is None:
                change = w.mul_(offset[rows, None])
            else:
                if d_table is not None:
                    d_table[tokens].addmm_(w.T, g_mu[rows])
                if spare is None:
                    spare = table.new_empty(min(row_step, num) * min(tile_step, vocabulary))
                change = spare[: height * width].view(height, width)
                torch.mm(g_mu[rows], table[tokens].T, out=change)
                change.add_(offset[rows, None]).mul_(w)
            if g_cross is not None and targets is not None:
                place = targets[rows] - low
                inside = (place >= 0) & (place < width)
                change.scatter_add_(
                    1, place.clamp(0, width - 1)[:, None], torch.where(inside, -g_cross[rows], 0.0)[:, None]
                )
            if d_h is not None:
                d_h[rows].addmm_(change, inputs.weight[tokens], beta=float(low > 0))
            if d_weight is not None:
                d_weight[tokens].addmm_(change.T, inputs.h[rows], beta=float(start > 0))
            if d_bias is not None:
                d_bias[tokens] += change.sum(0)
            if d_scaled is not None:
                d_scaled[rows].addmm_(change, table[tokens], beta=float(low > 0))
            if d_table is not None and make.scaled is not None:
                d_table[tokens].addmm_(change.T, make.scaled[rows])
            if make.norms is not None and inputs.norm_term is not None:
                if d_norm is not None:
                    d_norm[rows] -= change @ make.norms[tokens]
                if d_table is not None:
                    d_table[tokens].addcmul_(
                        table[tokens], (inputs.norm_term[rows] @ change)[:, None], value=-2
                    )
    d_kernel = d_x = None
    if d_scaled is not None:
        if needs.kernel:
            d_kernel = torch.linalg.vecdot(d_scaled, inputs.x)
        if needs.x and inputs.kernel is not None:
            d_x = d_scaled.mul_(inputs.kernel[:, None])
    return [d_h, d_weight, d_bias, d_x, d_kernel, d_table, d_norm]


def _arithmetic(table: Tensor) -> torch.dtype:
    return torch.promote_types(table.dtype, torch.float32)


def _no_autocast(like: Tensor) -> Any:
    return torch.autocast(device_type=like.device.type, enabled=False)


def _tiling(num: int, vocabulary: int, tile: int | None, device: torch.device) -> tuple[int, int]:
    """Rows and tokens of a tile: one tile when everything is small."""
    standard, cells = (CPU_TILE, CPU_CELLS) if device.type == "cpu" else (DEVICE_TILE, DEVICE_CELLS)
    tokens = min(vocabulary, standard if tile is None else tile)
    return max(1, min(num, cells // tokens)), tokens
