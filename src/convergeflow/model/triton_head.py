"""The tiles of the vocabulary head as Triton kernels: logits, online softmax, change of the logits; nothing else.

    logits_j = <h, W_j> + b_j + kernel <x, e_j>

A program makes the logits of some rows x some tokens in registers: the kernel term with float32 accuracy on tensor
cores (tf32x3), or from scores that the caller has; the base logits from operands in half precision, summed in float32.
It leaves exp(logit - reference) in the operands' format, where the reference is the larger of the row's peak before
this tile and its own part's. The parts of a tile are then merged row by row, and the few rows of a part whose peak rose
later are scaled down. `accelerated.py` multiplies the result by the table with the library's own matrix product.

The same source runs under Triton's interpreter on a CPU (float16 and float32 only: its bfloat16 products are wrong).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from convergeflow.model.accelerated import Prepared, Running

NO_KERNEL, KERNEL_PRODUCTS, KERNEL_SCORES = 0, 1, 2
"""Where the kernel term comes from."""


@dataclass(frozen=True)
class Blocks:
    """What one program works on, and how it is spread over threads."""

    rows: int
    tokens: int
    depth: int
    """Columns of half-precision operands per step of a product."""
    kernel_depth: int
    """Columns of float32 operands per step."""
    warps: int
    stages: int


WITH_PRODUCTS = Blocks(rows=128, tokens=64, depth=64, kernel_depth=16, warps=8, stages=4)
"""Where the kernel term is a product: splitting its operands takes registers, and arithmetic outweighs reading."""
WITHOUT_PRODUCTS = Blocks(rows=128, tokens=128, depth=64, kernel_depth=16, warps=8, stages=3)
"""Half-precision products only: a wider block reads its operands less often. Twice as wide, registers would spill."""


@triton.jit
def _add_products(acc, a, b, rows, columns, width, stride_a, stride_b, EVEN: tl.constexpr, DEPTH: tl.constexpr):
    """acc + a[rows] . b[columns]^T; float32 operands are split so that nothing of them is lost."""
    inner = tl.arange(0, DEPTH)
    left = a + (rows[:, None] * stride_a + inner[None, :])
    right = b + (columns[None, :] * stride_b + inner[:, None])
    for start in range(0, width, DEPTH):
        if EVEN:
            p, q = tl.load(left), tl.load(right)
        else:
            p = tl.load(left, mask=inner[None, :] < width - start, other=0.0)
            q = tl.load(right, mask=inner[:, None] < width - start, other=0.0)
        acc = tl.dot(p, q, acc, input_precision="tf32x3")
        left += DEPTH
        right += DEPTH
    return acc


@triton.jit
def _place(num, width, ROWS: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr):
    """The first row of this program and its part of the tokens; programs that run together share operands."""
    program = tl.program_id(0)
    row_blocks, token_blocks = tl.cdiv(num, ROWS), tl.cdiv(width, TOKENS)
    group = program // (GROUP * token_blocks)
    height = tl.minimum(row_blocks - group * GROUP, GROUP)
    inside = program % (GROUP * token_blocks)
    m, n = group * GROUP + inside % height, inside // height
    return m * ROWS, n


@triton.jit
def _corner(base, first_row, part, stride, TOKENS: tl.constexpr):
    """Where a part of a tile begins; from here 32 bits reach every cell, which spares registers."""
    return base + first_row.to(tl.int64) * stride + part * TOKENS


@triton.jit
def weights_kernel(
    out,  # [num, width] in the operands' format
    h,
    weight,
    bias,
    scaled,  # kernel * x, float32
    table,
    scores,  # <x, e_j>, float32
    kernel,
    peak,  # of each row: before this tile, or log sum exp where FINAL
    targets,
    target_logit,
    part_peak,  # [parts, num]
    part_total,
    part_best,
    part_surprise,
    num,
    width,  # tokens of this tile
    first,  # the tile's first token
    hidden,
    dimension,
    stride_out,
    stride_scores,
    FINAL: tl.constexpr,
    BIAS: tl.constexpr,
    KERNEL: tl.constexpr,
    TARGETS: tl.constexpr,
    TOKEN: tl.constexpr,
    ENTROPY: tl.constexpr,
    EVEN_HIDDEN: tl.constexpr,
    EVEN_DIMENSION: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    KERNEL_DEPTH: tl.constexpr,
):
    """exp(logit - reference) of a tile, and what each part of it says about its rows."""
    first_row, part = _place(num, width, ROWS, TOKENS, 16)
    inner_row, inner_column = tl.arange(0, ROWS), tl.arange(0, TOKENS)
    rows, columns = first_row + inner_row, part * TOKENS + inner_column
    # Rows and columns beyond the edge repeat the last one: the products' loads need no mask.
    row, column = tl.minimum(rows, num - 1), tl.minimum(columns, width - 1)
    real_row, real_column = rows < num, columns < width
    real = real_row[:, None] & real_column[None, :]
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    if KERNEL == 1:
        acc = _add_products(
            acc, scaled, table, row, column, dimension, dimension, dimension, EVEN_DIMENSION, KERNEL_DEPTH
        )
    acc = _add_products(acc, h, weight, row, column, hidden, hidden, hidden, EVEN_HIDDEN, DEPTH)
    if KERNEL == 2:
        cells = _corner(scores, first_row, part, stride_scores, TOKENS)
        shared = tl.load(cells + (inner_row[:, None] * stride_scores + inner_column[None, :]), mask=real, other=0.0)
        acc += shared * tl.load(kernel + row)[:, None]
    if BIAS:
        acc += tl.load(bias + column)[None, :]
    acc = tl.where(real_column[None, :], acc, -float("inf"))
    reference = tl.load(peak + row)
    if not FINAL:
        at = part.to(tl.int64) * num + rows
        if TARGETS:
            target = tl.load(targets + row) - first
            found = tl.sum(tl.where(columns[None, :] == target[:, None], acc, 0.0), 1)
            here = (target >= part * TOKENS) & (target < tl.minimum(part * TOKENS + TOKENS, width))
            tl.store(target_logit + rows, found, mask=real_row & here)
        if TOKEN:
            top, best = tl.max(acc, 1, return_indices=True, return_indices_tie_break_left=True)
            tl.store(part_best + at, best + part * TOKENS + first, mask=real_row)
        else:
            top = tl.max(acc, 1)
        reference = tl.maximum(reference, top)
        tl.store(part_peak + at, reference, mask=real_row)
    acc -= reference[:, None]
    p = tl.exp(acc)
    if not FINAL:
        tl.store(part_total + at, tl.sum(p, 1), mask=real_row)
        if ENTROPY:
            # p log p is 0 where p is: there the logarithm may be minus infinity.
            tl.store(part_surprise + at, tl.sum(p * tl.where(p > 0.0, acc, 0.0), 1), mask=real_row)
    cells = _corner(out, first_row, part, stride_out, TOKENS)
    tl.store(cells + (inner_row[:, None] * stride_out + inner_column[None, :]), p.to(out.dtype.element_ty), mask=real)


@triton.jit
def merge_kernel(
    peak,
    total,
    best,
    surprise,
    factor,
    part_peak,
    part_total,
    part_best,
    part_surprise,
    num,
    parts,
    TOKEN: tl.constexpr,
    ENTROPY: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Peak, sum, arg-max and sum of p log p of each row with a tile's parts taken in; `factor` rescales what was."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = rows < num
    before = tl.load(peak + rows, mask=real, other=0.0)
    now = before
    if TOKEN:
        choice = tl.load(best + rows, mask=real, other=0)
    at = rows.to(tl.int64)
    for _ in range(parts):
        reference = tl.load(part_peak + at, mask=real, other=0.0)
        if TOKEN:  # only a larger one: the lowest id among equals stays
            choice = tl.where(reference > now, tl.load(part_best + at, mask=real, other=0), choice)
        now = tl.maximum(now, reference)
        at += num
    drop = tl.where(before == -float("inf"), 0.0, before - now)
    scale = tl.where(before == -float("inf"), 0.0, tl.exp(drop))
    mass = tl.load(total + rows, mask=real, other=0.0)
    if ENTROPY:  # every p seen so far shrinks by the factor, and its logarithm by the drop
        sum_plogp = (tl.load(surprise + rows, mask=real, other=0.0) + drop * mass) * scale
    mass *= scale
    at = rows.to(tl.int64)
    for _ in range(parts):
        fall = tl.load(part_peak + at, mask=real, other=0.0) - now
        some = tl.load(part_total + at, mask=real, other=0.0)
        shrink = tl.exp(fall)
        if ENTROPY:
            sum_plogp += (tl.load(part_surprise + at, mask=real, other=0.0) + fall * some) * shrink
        mass += some * shrink
        at += num
    tl.store(peak + rows, now, mask=real)
    tl.store(total + rows, mass, mask=real)
    tl.store(factor + rows, scale, mask=real)
    if TOKEN:
        tl.store(best + rows, choice, mask=real)
    if ENTROPY:
        tl.store(surprise + rows, sum_plogp, mask=real)


@triton.jit
def rescale_kernel(out, peak, part_peak, num, width, stride_out, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """Bring a part of a tile from its own reference to the peak of its rows; rows that need none are not touched."""
    first_row, part = _place(num, width, ROWS, TOKENS, 16)
    inner_row, inner_column = tl.arange(0, ROWS), tl.arange(0, TOKENS)
    rows, columns = first_row + inner_row, part * TOKENS + inner_column
    row = tl.minimum(rows, num - 1)
    fall = tl.load(part_peak + part.to(tl.int64) * num + row) - tl.load(peak + row)
    moved = (rows < num) & (fall != 0.0)
    if tl.max(moved.to(tl.int32), 0) > 0:
        corner = _corner(out, first_row, part, stride_out, TOKENS)
        cells = corner + (inner_row[:, None] * stride_out + inner_column[None, :])
        real = moved[:, None] & (columns < width)[None, :]
        p = tl.load(cells, mask=real, other=0.0).to(tl.float32) * tl.exp(fall)[:, None]
        tl.store(cells, p.to(out.dtype.element_ty), mask=real)


@triton.jit
def scores_kernel(
    out,  # [num, width], float32
    x,
    table,
    num,
    width,
    dimension,
    stride_out,
    EVEN_DIMENSION: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    KERNEL_DEPTH: tl.constexpr,
):
    """<x, e_j> with float32 accuracy."""
    first_row, part = _place(num, width, ROWS, TOKENS, 16)
    inner_row, inner_column = tl.arange(0, ROWS), tl.arange(0, TOKENS)
    rows, columns = first_row + inner_row, part * TOKENS + inner_column
    row, column = tl.minimum(rows, num - 1), tl.minimum(columns, width - 1)
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    acc = _add_products(acc, x, table, row, column, dimension, dimension, dimension, EVEN_DIMENSION, KERNEL_DEPTH)
    corner = _corner(out, first_row, part, stride_out, TOKENS)
    cells = corner + (inner_row[:, None] * stride_out + inner_column[None, :])
    tl.store(cells, acc, mask=(rows < num)[:, None] & (columns < width)[None, :])


@triton.jit
def change_kernel(
    share,  # [num, width]: the weights up to `factor` in, the change of the logits out
    pull,
    table,  # in the format of pull
    lift,
    factor,
    targets,
    cross,
    num,
    width,
    first,
    dimension,
    stride_share,
    PULL: tl.constexpr,
    CROSS: tl.constexpr,
    EVEN_DIMENSION: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """w_j (g . e_j + lift) - cross [j = target], in place of the weights."""
    first_row, part = _place(num, width, ROWS, TOKENS, 16)
    inner_row, inner_column = tl.arange(0, ROWS), tl.arange(0, TOKENS)
    rows, columns = first_row + inner_row, part * TOKENS + inner_column
    row, column = tl.minimum(rows, num - 1), tl.minimum(columns, width - 1)
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    if PULL:
        acc = _add_products(acc, pull, table, row, column, dimension, dimension, dimension, EVEN_DIMENSION, DEPTH)
    acc = (acc + tl.load(lift + row)[:, None]) * tl.load(factor + row)[:, None]
    corner = _corner(share, first_row, part, stride_share, TOKENS)
    cells = corner + (inner_row[:, None] * stride_share + inner_column[None, :])
    real = (rows < num)[:, None] & (columns < width)[None, :]
    acc *= tl.load(cells, mask=real, other=0.0).to(tl.float32)
    if CROSS:
        target = tl.load(targets + row) - first
        acc -= tl.where(columns[None, :] == target[:, None], tl.load(cross + row)[:, None], 0.0)
    tl.store(cells, acc.to(share.dtype.element_ty), mask=real)


class TritonTiles:
    """The tiles of one set of rows; see `accelerated.Tiles`."""

    cell_bytes = 0
    """Nothing per cell beside the tile itself."""

    def __init__(self, operands: Prepared, blocks: Blocks | None = None) -> None:
        self.operands = operands
        products = operands.scaled is not None and operands.scores is None
        self.kernel = KERNEL_SCORES if operands.scores is not None else KERNEL_PRODUCTS if products else NO_KERNEL
        self.blocks = blocks or (WITH_PRODUCTS if products else WITHOUT_PRODUCTS)
        self.wide = blocks or WITHOUT_PRODUCTS

    def weights(self, out: Tensor, rows: slice, tokens: slice, running: Running) -> None:
        """exp(logit - peak) of a tile, with `running` brought up to date."""
        num, width = out.shape
        parts = triton.cdiv(width, self.blocks.tokens)
        part = {name: running.total.new_empty(parts, num) for name in ("peak", "total", "surprise")}
        best = running.token.new_empty(parts, num)
        self._fill(out, rows, tokens, running.peak, running, part, best)
        token, entropy = running.wants.token, running.wants.entropy
        merge_kernel[(triton.cdiv(num, 64),)](
            running.peak,
            running.total,
            running.token,
            running.surprise,
            running.factor,
            part["peak"],
            part["total"],
            best,
            part["surprise"],
            num,
            parts,
            TOKEN=token,
            ENTROPY=entropy,
            ROWS=64,
        )
        rescale_kernel[self._grid(num, width, self.blocks)](
            out,
            running.peak,
            part["peak"],
            num,
            width,
            out.stride(0),
            ROWS=self.blocks.rows,
            TOKENS=self.blocks.tokens,
            num_warps=self.blocks.warps,
        )

    def shares(self, out: Tensor, rows: slice, tokens: slice, log_normaliser: Tensor) -> None:
        """The weights of a tile, once the sum over all tokens is known."""
        self._fill(out, rows, tokens, log_normaliser, None, {}, None)

    def change(
        self, share: Tensor, rows: slice, tokens: slice, pull: Tensor | None, lift: Tensor, factor: Tensor, cross: Any
    ) -> Tensor:
        """The change of a tile's logits, in place of its weights."""
        num, width = share.shape
        table, targets = self.operands.mean_table[tokens], self.operands.targets
        change_kernel[self._grid(num, width, self.wide)](
            share,
            table if pull is None else pull,
            table,
            lift,
            factor,
            lift if targets is None else targets[rows],
            lift if cross is None else cross,
            num,
            width,
            tokens.start,
            table.shape[1],
            share.stride(0),
            PULL=pull is not None,
            CROSS=cross is not None,
            EVEN_DIMENSION=table.shape[1] % self.wide.depth == 0,
            ROWS=self.wide.rows,
            TOKENS=self.wide.tokens,
            DEPTH=self.wide.depth,
            num_warps=self.wide.warps,
            num_stages=self.wide.stages,
        )
        return share

    def _fill(
        self,
        out: Tensor,
        rows: slice,
        tokens: slice,
        peak: Tensor,
        running: Running | None,
        part: dict[str, Tensor],
        best: Tensor | None,
    ) -> None:
        h, weight, bias, scaled, table, scores, kernel, targets = self.operands.tile(rows, tokens)
        num, width = out.shape
        blocks, unused = self.blocks, peak
        final = running is None
        weights_kernel[self._grid(num, width, blocks)](
            out,
            h,
            weight,
            unused if bias is None else bias,
            unused if scaled is None else scaled,
            table,
            unused if scores is None else scores,
            unused if kernel is None else kernel,
            peak,
            unused if targets is None else targets,
            unused if running is None else running.target_logit,
            part.get("peak", unused),
            part.get("total", unused),
            unused if best is None else best,
            part.get("surprise", unused),
            num,
            width,
            tokens.start,
            h.shape[1],
            table.shape[1],
            out.stride(0),
            0 if scores is None else scores.stride(0),
            FINAL=final,
            BIAS=bias is not None,
            KERNEL=self.kernel,
            TARGETS=targets is not None and not final,
            TOKEN=running is not None and running.wants.token,
            ENTROPY=running is not None and running.wants.entropy,
            EVEN_HIDDEN=h.shape[1] % blocks.depth == 0,
            EVEN_DIMENSION=table.shape[1] % blocks.kernel_depth == 0,
            ROWS=blocks.rows,
            TOKENS=blocks.tokens,
            DEPTH=blocks.depth,
            KERNEL_DEPTH=blocks.kernel_depth,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )

    @staticmethod
    def _grid(num: int, width: int, blocks: Blocks) -> tuple[int]:
        return (triton.cdiv(num, blocks.rows) * triton.cdiv(width, blocks.tokens),)


def scores(x: Tensor, table: Tensor, blocks: Blocks = WITH_PRODUCTS) -> Tensor:
    """<x, e_j> of rows x [N, d], [N, V], with float32 accuracy."""
    num, vocabulary = len(x), len(table)
    out = torch.empty(num, -(-vocabulary // 16) * 16, dtype=torch.float32, device=x.device)[:, :vocabulary]
    if num == 0:
        return out
    scores_kernel[TritonTiles._grid(num, vocabulary, blocks)](
        out,
        x.contiguous(),
        table.contiguous(),
        num,
        vocabulary,
        table.shape[1],
        out.stride(0),
        EVEN_DIMENSION=table.shape[1] % blocks.kernel_depth == 0,
        ROWS=blocks.rows,
        TOKENS=blocks.tokens,
        KERNEL_DEPTH=blocks.kernel_depth,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    return out
