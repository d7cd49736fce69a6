"""Noise in, tokens out: the trajectories that settings ask for, carried to their ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from convergeflow.device import state_dtype_of
from convergeflow.errors import UserError
from convergeflow.model.fused import SHARED_SCORES_BYTES, Weighted
from convergeflow.randomness import RowDraws, derive_seed
from convergeflow.sampling.blocks import Piece, block_after_block
from convergeflow.sampling.cohort import Cohort, Observer
from convergeflow.sampling.decoding import Decoded
from convergeflow.sampling.driver import Driver
from convergeflow.sampling.events import End, Flow
from convergeflow.sampling.freezing import Freezing, Settled
from convergeflow.sampling.kernel import kernel_trajectory
from convergeflow.sampling.plan import Plan
from convergeflow.sampling.settings import Settings
from convergeflow.sampling.trajectory import NEVER, trajectory
from convergeflow.sampling.wrappers import Clamp, Known, Predictor, tempered


@dataclass(frozen=True)
class Endpoint:
    """The end of a batch of samples."""

    end: End
    calls: Tensor
    """Network calls of each sample, counted."""
    plan: Plan
    logits: Tensor | None = None

    @property
    def x(self) -> Tensor:
        """The state where tokens were read off."""
        return self.end.x

    @property
    def final(self) -> Weighted:
        return self.end.weights

    @property
    def decoded(self) -> Decoded:
        return self.end.decoded


def cohort(
    predictor: Predictor,
    settings: Settings,
    noise: Tensor,
    *,
    clamp: Clamp | None = None,
    observe: Observer | None = None,
    pieces: Sequence[Piece] | None = None,
    window: int = 0,
) -> Cohort:
    """The trajectories of a batch of noise [B, L, d]; with `pieces` they go block after block behind `window` tokens.

    With freezing every row is a trajectory of its own; otherwise all rows are one.
    """
    noise = noise.to(state_dtype_of(noise.device))
    batch, length = noise.shape[:2]
    clamp = None if clamp is None else clamp.resolved(batch, length, predictor.table)
    everything = torch.arange(batch, device=noise.device)
    rows = [everything] if settings.freeze is None else list(everything.split(1))

    def flow(index: Tensor) -> Flow:
        known = None if clamp is None else clamp[index]
        if pieces is None:
            return _flow(settings, noise[index], predictor, known)

        def piece(part: Piece, behind: Predictor, x: Tensor, known: Clamp | None) -> Flow:
            return _flow(part.settings, x, behind, known)

        return block_after_block(piece, pieces, noise[index], predictor, known, window)

    return Cohort([flow(index) for index in rows], rows, observe, watched=settings.freeze is not None)


def _flow(settings: Settings, noise: Tensor, predictor: Predictor, clamp: Clamp | None) -> Flow:
    """The trajectory of rows under settings, with every wrapper that they ask for."""
    plan = settings.plan(predictor.schedule)
    predictor = tempered(predictor, settings.temperature, settings.base_temperature)
    x, stop = noise.clone(), NEVER
    if settings.freeze is not None:
        stop = Freezing(settings.freeze, predictor.table, x.shape[1])
        predictor = Settled(predictor, (stop,))
    if clamp is not None:
        predictor = Known(predictor, clamp, noise)
        x = predictor.state(x, plan[0].at)
    flow = kernel_trajectory(plan, x, predictor) if plan.solver.kernel else trajectory(plan, x, predictor, stop)
    return flow if clamp is None else _with_known(flow, clamp)


def _with_known(flow: Flow, clamp: Clamp) -> Flow:
    end = yield from flow
    return End(end.x, end.weights, end.decoded.changed(clamp.put), end.logits)


def integrate(
    predictor: Predictor, settings: Settings, noise: Tensor, *, want_logits: bool = False, **how: Any
) -> Endpoint:
    """Carry a batch of noise [B, L, d] along the flow and read off tokens; `how` as in `cohort`."""
    if want_logits and settings.freeze is not None:
        raise UserError("the final logits need every sequence at the last grid point: drop `freeze` or `logits`")
    driver, batch = Driver(), cohort(predictor, settings, noise, **how)
    driver.add(batch)
    driver.run()
    end = batch.end()
    pieces = how.get("pieces")
    plan = (pieces[0].settings if pieces else settings).plan(predictor.schedule)
    with torch.no_grad():
        return Endpoint(end, batch.calls, plan, end.logits() if want_logits else None)


def initial_noise(seeds: Sequence[int], length: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The starting state of each seed, [B, L, d]."""
    draws = RowDraws([derive_seed(seed, "sample") for seed in seeds])
    return draws.normal(length, width, dtype=torch.float64).to(device=device, dtype=dtype)


def batches(num: int, size: int) -> list[slice]:
    """Micro-batches of equal size, the last one smaller if it must be."""
    return [slice(start, min(start + size, num)) for start in range(0, num, size)]


def default_batch(length: int, vocabulary: int) -> int:
    """A micro-batch whose shared scores fit their budget."""
    return max(1, min(64, SHARED_SCORES_BYTES // (4 * length * vocabulary) or 1, math.ceil(65536 / length)))
