"""How the vocabulary head is fast on an accelerator: wide tiles in half precision, made by Triton or by plain torch.

    logits_j = <h, W_j> + b_j + kernel <x, e_j>,  w = softmax(logits),  mu = sum_j w_j e_j

`fused.py` says what is asked and has the tiles of a CPU. Here a tile is all rows x some thousand tokens. Its makers
(`Tiles`) leave exp(logit - peak) in the format of the mean's operands and keep the peaks; mean and gradients are matrix
products of the library with float32 sums, rescaled by the peaks. `device.py` says which operand has which format.
Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from convergeflow.device import Memory, Precision, current_device, has_triton, memory_of, precision_of, runs_triton
from convergeflow.model.fused import Asked, Kept, Operands, Outputs, aligned_empty, arithmetic, exact_products, within

TILE_BYTES = 256 << 20
"""Of one tile: the matrix products are long enough, and memory stays a fraction of the logits'."""
LEAST_TOKENS = 1024
"""A tile is at least so wide; more rows than fit beside it are cut into blocks."""
SPLITS = 3
"""Half-precision numbers that hold a float32."""


class Tile(NamedTuple):
    """The operands of some rows x some tokens."""

    h: Tensor
    weight: Tensor
    bias: Tensor | None
    scaled: Tensor | None
    table: Tensor
    scores: Tensor | None
    kernel: Tensor | None
    targets: Tensor | None


@dataclass(frozen=True)
class Prepared:
    """The operands in the formats of the precision table; `scaled` is kernel * x."""

    h: Tensor
    weight: Tensor
    bias: Tensor | None
    scaled: Tensor | None
    table: Tensor
    mean_table: Tensor
    scores: Tensor | None
    kernel: Tensor | None
    targets: Tensor | None
    sums: torch.dtype

    @classmethod
    def of(cls, operands: Operands, precision: Precision) -> Prepared:
        x, kernel, exact = operands.x, operands.kernel, arithmetic(operands.table)
        scaled = None if x is None or kernel is None else x * kernel[:, None]
        return cls(
            h=operands.h.to(precision.base).contiguous(),
            weight=operands.weight.to(precision.base).contiguous(),
            bias=operands.bias,
            scaled=None if scaled is None else scaled.to(precision.kernel).contiguous(),
            table=operands.table.to(precision.kernel).contiguous(),
            mean_table=operands.table.to(precision.mean).contiguous(),
            scores=None if operands.scores is None else operands.scores.to(exact),
            kernel=None if kernel is None else kernel.contiguous(),
            targets=None if operands.targets is None else operands.targets.contiguous(),
            sums=exact,
        )

    def tile(self, rows: slice, tokens: slice) -> Tile:
        return Tile(
            self.h[rows],
            self.weight[tokens],
            None if self.bias is None else self.bias[tokens],
            None if self.scaled is None else self.scaled[rows],
            self.table[tokens],
            None if self.scores is None else self.scores[rows, tokens],
            None if self.kernel is None else self.kernel[rows],
            None if self.targets is None else self.targets[rows],
        )


@dataclass
class Running:
    """What is known of a block of rows so far; `factor` brings earlier sums to the present peak."""

    wants: Asked
    peak: Tensor
    total: Tensor
    token: Tensor
    surprise: Tensor
    """Sum of p log p for p = exp(logit - peak), at most 0."""
    target_logit: Tensor
    factor: Tensor

    @classmethod
    def start(cls, num: int, like: Tensor, wants: Asked) -> Running:
        zeros = like.new_zeros(4, num)
        token = torch.zeros(num, dtype=torch.long, device=like.device)
        return cls(wants, like.new_full((num,), -torch.inf), zeros[0], token, zeros[1], zeros[2], zeros[3])


class Tiles(Protocol):
    """Makes tiles; `out` and `share` are in the format of the mean's operands."""

    cell_bytes: int
    """Working memory per cell beside the tile itself."""

    def weights(self, out: Tensor, rows: slice, tokens: slice, running: Running) -> None:
        """Leave exp(logit - peak) in `out` and bring `running` up to date."""

    def shares(self, out: Tensor, rows: slice, tokens: slice, log_normaliser: Tensor) -> None:
        """Leave the weights in `out`, once the sum over all tokens is known."""

    def change(
        self,
        share: Tensor,
        rows: slice,
        tokens: slice,
        pull: Tensor | None,
        lift: Tensor,
        factor: Tensor,
        cross: Tensor | None,
    ) -> Tensor:
        """share * factor * (pull . e_j + lift) - cross [j = target], in place of the share if need be."""


MakeTiles = Callable[[Prepared], Tiles]


class TorchTiles:
    """Plain torch: one product for all logits of a tile, then passes over them."""

    cell_bytes = 12

    def __init__(self, operands: Prepared) -> None:
        self.operands = operands
        left = [operands.h]
        if operands.scaled is not None and operands.scores is None:
            left += left_parts(operands.scaled, operands.h.dtype)
        self.left = torch.cat(left, 1) if len(left) > 1 else left[0]

    def weights(self, out: Tensor, rows: slice, tokens: slice, running: Running) -> None:
        logits = self._logits(rows, tokens)
        if self.operands.targets is not None:
            place, inside = within(self.operands.targets[rows], tokens)
            running.target_logit += torch.where(inside, logits.gather(1, place)[:, 0], 0.0)
        summit, index = logits.max(1)
        running.token = torch.where(summit > running.peak, index + tokens.start, running.token)
        peak = torch.maximum(running.peak, summit)
        drop = torch.where(running.peak.isinf(), 0.0, running.peak - peak)
        running.factor = torch.where(running.peak.isinf(), 0.0, drop.exp())
        logits -= peak[:, None]
        if running.wants.entropy:
            parts = logits.exp().mul_(logits).nan_to_num_(0.0)
            running.surprise = (running.surprise + drop * running.total) * running.factor + parts.sum(1)
        torch.exp(logits, out=logits)
        running.total = running.total * running.factor + logits.sum(1)
        running.peak = peak
        out.copy_(logits)

    def shares(self, out: Tensor, rows: slice, tokens: slice, log_normaliser: Tensor) -> None:
        out.copy_(self._logits(rows, tokens).sub_(log_normaliser[:, None]).exp_())

    def change(
        self,
        share: Tensor,
        rows: slice,
        tokens: slice,
        pull: Tensor | None,
        lift: Tensor,
        factor: Tensor,
        cross: Tensor | None,
    ) -> Tensor:
        if pull is None:
            change = lift[:, None].expand(share.shape).clone()
        else:
            change = product(pull, self.operands.mean_table[tokens].T, lift.dtype).add_(lift[:, None])
        change.mul_(factor[:, None]).mul_(share)
        if cross is not None and self.operands.targets is not None:
            place, inside = within(self.operands.targets[rows], tokens)
            change.scatter_add_(1, place, torch.where(inside, -cross, 0.0)[:, None])
        return share.copy_(change)

    def _logits(self, rows: slice, tokens: slice) -> Tensor:
        _, weight, bias, scaled, table, scores, kernel, _ = self.operands.tile(rows, tokens)
        right = [weight]
        if scaled is not None and scores is None:
            right += right_parts(table, weight.dtype)
        together = torch.cat(right, 1) if len(right) > 1 else weight
        out = product(self.left[rows], together.T, self.operands.sums)
        if scores is not None and kernel is not None:
            out.addcmul_(scores, kernel[:, None])
        return out if bias is None else out.add_(bias)


def left_parts(a: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The left operands of products whose sum is <a, b>, in a given format; `right_parts` are the right ones.

    A float32 is the sum of three numbers in half precision. Of their nine products the three that float32 would round
    away are left out.
    """
    if a.dtype == dtype:
        return [a]
    high, middle, low = _split(a, dtype)
    return [high, high, high, middle, middle, low]


def right_parts(b: Tensor, dtype: torch.dtype) -> list[Tensor]:
    if b.dtype == dtype:
        return [b]
    high, middle, low = _split(b, dtype)
    return [high, middle, low, high, middle, high]


def _split(a: Tensor, dtype: torch.dtype) -> list[Tensor]:
    parts = []
    for _ in range(SPLITS):
        parts.append(a.to(dtype))
        a = a - parts[-1].to(a.dtype)
    return parts


def product(a: Tensor, b: Tensor, sums: torch.dtype) -> Tensor:
    """a b, summed and returned in a given format."""
    return accumulate(a.new_empty(a.shape[0], b.shape[1], dtype=sums), a, b, fresh=True)


def accumulate(out: Tensor, a: Tensor, b: Tensor, *, fresh: bool) -> Tensor:
    """out + a b, or a b alone, in `out`; operands in half precision are summed in the format of `out`."""
    beta = 0 if fresh else 1
    if a.dtype == out.dtype:
        with exact_products():
            return out.addmm_(a, b, beta=beta)
    if not (runs_triton(out.device) and _has_float32_sums()):
        return out.addmm_(a.to(out.dtype), b.to(out.dtype), beta=beta)
    if fresh:
        return torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)
    if _adds_to_float32():
        return torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)
    return out.add_(torch.ops.aten.mm.dtype(a, b, out.dtype))


@cache
def _has_float32_sums() -> bool:
    """Whether this torch can return the float32 sums of a product of half-precision operands (2.8 and newer)."""
    return "dtype_out" in torch.ops.aten.mm.overloads()


@cache
def _adds_to_float32() -> bool:
    """Whether it can add them to a float32 tensor: 2.8 and 2.9 want one in half precision (pytorch#167931)."""
    return torch.__version__ >= "2.10"  # compared as versions


class Accelerated:
    """The head on one device: forward and backward, in tiles of one kind."""

    def __init__(self, make: MakeTiles, precision: Precision, memory: Memory) -> None:
        self.make, self.precision, self.memory = make, precision, memory

    def forward(self, operands: Operands, plan: Asked, keep: bool) -> tuple[Outputs, Kept | None]:
        """One pass over rows and vocabulary; with `keep`, tiles that fit stay for the backward pass."""
        table, num = operands.table, len(operands.h)
        with torch.no_grad(), current_device(table.device):
            prepared = Prepared.of(operands, self.precision)
            tiles = self.make(prepared)
            kept = Kept(self.memory.spare if plan.keep is None else plan.keep) if keep else None
            mu, done = table.new_empty(num, table.shape[1]), []
            for rows in self._rows(num, tiles):
                running = Running.start(rows.stop - rows.start, mu, plan)
                for tokens in self._tokens(rows, len(table), tiles, plan):
                    room = None if kept is None else kept.room(rows, tokens, prepared.mean_table)
                    out = _empty(rows, tokens, prepared.mean_table) if room is None else room
                    tiles.weights(out, rows, tokens, running)
                    if tokens.start:
                        mu[rows].mul_(running.factor[:, None])
                    accumulate(mu[rows], out, prepared.mean_table[tokens], fresh=tokens.start == 0)
                    if room is not None and kept is not None:
                        kept.tiles[rows.start, tokens.start] = (room, running.peak.clone())
                mu[rows].div_(running.total[:, None])
                done.append(_closed(running, operands.targets is not None))
        columns = (None if column[0] is None else torch.cat(column) for column in zip(*done, strict=True))  # type: ignore[arg-type]
        return Outputs(mu, *columns), kept  # type: ignore[arg-type]

    def backward(
        self, operands: Operands, plan: Asked, kept: Kept, outputs: Outputs, gradients: Outputs, needs: Operands
    ) -> list[Tensor | None]:
        """The gradients of the operands, in their order."""
        with current_device(operands.table.device):
            prepared = Prepared.of(operands, self.precision)
            tiles, wanted = self.make(prepared), _Gradients(operands, prepared, needs)
            pull, lift = _pulls(outputs, gradients, self.precision)
            for rows in self._rows(len(operands.h), tiles):
                g = None if pull is None else pull[rows]
                cross = None if gradients.cross_entropy is None else gradients.cross_entropy[rows].contiguous()
                for tokens in self._tokens(rows, len(operands.table), tiles, plan):
                    log_normaliser = outputs.log_normaliser[rows]
                    held = kept.tiles.pop((rows.start, tokens.start), None)
                    if held is None:
                        share = _empty(rows, tokens, prepared.mean_table)
                        tiles.shares(share, rows, tokens, log_normaliser)
                        factor = torch.ones_like(log_normaliser)
                    else:
                        share, peak = held
                        factor = (peak - log_normaliser).exp_()
                    if g is not None:
                        wanted.add_mean(share, tokens, g, factor)
                    wanted.add(tiles.change(share, rows, tokens, g, lift[rows], factor, cross), rows, tokens)
            return wanted.given()

    def scores(self, x: Tensor, table: Tensor) -> Tensor:
        """<x, e_j> of rows x [N, d], [N, V], as precise as the kernel term."""
        with torch.no_grad(), current_device(table.device):
            if self.make is not TorchTiles:
                from convergeflow.model import triton_head

                return triton_head.scores(x, table)
            left = torch.cat(left_parts(x, self.precision.base), 1)
            right = torch.cat(right_parts(table, self.precision.base), 1)
            return product(left, right.T, table.dtype)

    def _rows(self, num: int, tiles: Tiles) -> list[slice]:
        height = max(1, min(num, self._cells(tiles) // LEAST_TOKENS))
        # Where every position is decided there are no rows: the answers are empty then.
        return [slice(low, min(low + height, num)) for low in range(0, num, height)] or [slice(0, 0)]

    def _tokens(self, rows: slice, vocabulary: int, tiles: Tiles, plan: Asked) -> list[slice]:
        if rows.stop == rows.start:
            return []
        width = self._cells(tiles) // (rows.stop - rows.start) // LEAST_TOKENS * LEAST_TOKENS
        width = max(1, min(vocabulary, max(width, LEAST_TOKENS) if plan.tile is None else plan.tile))
        return [slice(low, min(low + width, vocabulary)) for low in range(0, vocabulary, width)]

    def _cells(self, tiles: Tiles) -> int:
        return min(TILE_BYTES, self.memory.total // 64) // (self.precision.mean.itemsize + tiles.cell_bytes)


def accelerated(table: Tensor) -> Accelerated:
    """The head for a table's device and format: Triton's tiles where they run, else those of plain torch."""
    precision = precision_of(table.device, table.dtype)
    half = precision.base.itemsize == 2 and precision.mean.itemsize == 2
    make: MakeTiles = TorchTiles
    if half and runs_triton(table.device) and has_triton():
        from convergeflow.model.triton_head import TritonTiles

        make = TritonTiles
    return Accelerated(make, precision, memory_of(table.device))


@dataclass
class _Gradients:
    """The sums that the tiles add to, one for every operand that asked."""

    operands: Operands
    prepared: Prepared
    needs: Operands
    sums: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        operands, needs = self.operands, self.needs
        for name in ("h", "weight", "bias", "table"):
            if getattr(needs, name) and getattr(operands, name) is not None:
                self.sums[name] = torch.zeros_like(getattr(operands, name))
        if operands.x is not None and (needs.x or needs.kernel):
            self.sums["scaled"] = torch.zeros_like(operands.x)

    def add_mean(self, share: Tensor, tokens: slice, pull: Tensor, factor: Tensor) -> None:
        """The part of the table's gradient that comes from mu = sum_j w_j e_j."""
        if "table" in self.sums:
            scaled = (pull.to(factor.dtype) * factor[:, None]).to(share.dtype)
            accumulate(self.sums["table"][tokens], share.T, scaled, fresh=False)

    def add(self, change: Tensor, rows: slice, tokens: slice) -> None:
        """What a change of the logits means for the operands."""
        prepared, dtype = self.prepared, change.dtype
        if "h" in self.sums:
            accumulate(self.sums["h"][rows], change, prepared.weight[tokens].to(dtype), fresh=False)
        if "weight" in self.sums:
            accumulate(self.sums["weight"][tokens], change.T, prepared.h[rows].to(dtype), fresh=False)
        if "bias" in self.sums:
            self.sums["bias"][tokens] += change.sum(0, dtype=self.sums["bias"].dtype)
        if "scaled" in self.sums:
            accumulate(self.sums["scaled"][rows], change, prepared.mean_table[tokens], fresh=False)
        if "table" in self.sums and prepared.scaled is not None:
            accumulate(self.sums["table"][tokens], change.T, prepared.scaled[rows].to(dtype), fresh=False)

    def given(self) -> list[Tensor | None]:
        x, kernel, scaled = self.operands.x, self.operands.kernel, self.sums.get("scaled")
        d_x = d_kernel = None
        if scaled is not None and x is not None and kernel is not None:
            d_kernel = (scaled * x).sum(1) if self.needs.kernel else None
            d_x = scaled.mul_(kernel[:, None]) if self.needs.x else None
        h, weight, bias, table = (self.sums.get(name) for name in ("h", "weight", "bias", "table"))
        return [h, weight, bias, d_x, d_kernel, table, None, None]


def _pulls(outputs: Outputs, gradients: Outputs, precision: Precision) -> tuple[Tensor | None, Tensor]:
    """The gradient of mu in the format of the products, and what is added to its products with the rows."""
    lift = torch.zeros_like(outputs.log_normaliser)
    pull = None if gradients.mu is None else gradients.mu.to(precision.mean).contiguous()
    if pull is not None:
        # Of the rounded gradient, as its products with the rounded rows are: the sum over all tokens then vanishes.
        lift -= (pull.to(lift.dtype) * outputs.mu).sum(1)
    for part in (gradients.log_normaliser, gradients.cross_entropy):
        if part is not None:
            lift += part
    return pull, lift


def _closed(running: Running, has_targets: bool) -> tuple[Tensor | None, ...]:
    """Log normaliser, token, top weight, entropy and cross-entropy of finished rows, as far as they were asked for."""
    wants, log_total = running.wants, running.total.log()
    log_normaliser = running.peak + log_total
    return (
        log_normaliser,
        running.token if wants.token else None,
        running.total.reciprocal() if wants.top_weight else None,
        log_total - running.surprise / running.total if wants.entropy else None,
        log_normaliser - running.target_logit if has_targets else None,
    )


def _empty(rows: slice, tokens: slice, like: Tensor) -> Tensor:
    return aligned_empty(rows.stop - rows.start, tokens.stop - tokens.start, like)
