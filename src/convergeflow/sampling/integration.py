"""Noise in, tokens out: the trajectories that settings ask for, carried to their ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from convergeflow.device import onto, widest
from convergeflow.model.fused import scores_room
from convergeflow.randomness import RowDraws, derive_seed
from convergeflow.sampling.blocks import Piece, block_after_block
from convergeflow.sampling.cohort import Cohort, Observer
from convergeflow.sampling.driver import Driver
from convergeflow.sampling.events import End, Flow
from convergeflow.sampling.freezing import Freezing, Settled
from convergeflow.sampling.kernel import kernel_trajectory
from convergeflow.sampling.settings import Settings
from convergeflow.sampling.trajectory import NEVER, trajectory
from convergeflow.sampling.wrappers import Clamp, Known, Predictor, Tempered, Wrapped


@dataclass(frozen=True)
class Endpoint(End):
    """The end of a batch of samples."""

    calls: Tensor
    """Network calls of each sample, counted."""


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
    noise = widest(noise)
    batch, length = noise.shape[:2]
    pieces = pieces or [Piece(0, length, settings)]
    table = predictor.table
    known = None if clamp is None else clamp.resolved(batch, length, len(table), table.device)
    everything = torch.arange(batch)
    rows = [everything] if settings.freeze is None else list(everything.split(1))
    flows = [
        block_after_block(
            flow_of, pieces, noise[index], Wrapped(predictor), None if known is None else known[index], window
        )
        for index in rows
    ]
    return Cohort(flows, rows, observe, watched=settings.freeze is not None)


def flow_of(settings: Settings, noise: Tensor, predictor: Wrapped, clamp: Clamp | None = None) -> Flow:
    """The trajectory of rows under settings, with every change that they ask for."""
    plan = settings.plan(predictor.schedule)
    x, stop = noise.clone(), NEVER
    if (settings.temperature, settings.base_temperature) != (1.0, 1.0):
        predictor = predictor.around(Tempered(settings.temperature, settings.base_temperature))
    if settings.freeze is not None:
        stop = Freezing(settings.freeze, predictor.table, x.shape[1])
        predictor = predictor.around(Settled((stop,)))
    if clamp is not None:
        known = Known(clamp, noise, predictor.table)
        x, predictor = known.state(x, plan[0].at), predictor.around(known)
    return kernel_trajectory(plan, x, predictor) if plan.solver.kernel else trajectory(plan, x, predictor, stop)


def integrate(predictor: Predictor, settings: Settings, noise: Tensor, **how: Any) -> Endpoint:
    """Carry a batch of noise [B, L, d] along the flow and read off tokens; `how` as in `cohort`."""
    driver, batch = Driver(), cohort(predictor, settings, noise, **how)
    driver.add(batch)
    driver.run()
    return Endpoint(**vars(batch.end()), calls=batch.calls)


def initial_noise(seeds: Sequence[int], length: int, width: int, device: torch.device) -> Tensor:
    """The starting state of each seed, [B, L, d], in the format of the sampler's state."""
    draws = RowDraws([derive_seed(seed, "sample") for seed in seeds])
    return onto(draws.normal(length, width, dtype=torch.float64), device)


def batches(num: int, size: int) -> list[slice]:
    """Micro-batches of equal size, the last one smaller if it must be."""
    return [slice(start, min(start + size, num)) for start in range(0, num, size)]


def default_batch(length: int, vocabulary: int, device: torch.device, copies: int = 1) -> int:
    """A micro-batch of which `copies` of float32 numbers over positions x tokens fit in the memory that is free."""
    return max(1, min(64, scores_room(device) // (4 * copies * length * vocabulary), math.ceil(65536 / length)))
