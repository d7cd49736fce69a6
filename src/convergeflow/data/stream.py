"""Which sequences a training step sees: a pure function of (seed, step), so a stopped run goes on without any state.

Every epoch is a permutation of all sequences, made by a small block cipher instead of a shuffled list: it costs no
memory, and it is the same numbers on every machine and library version.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from convergeflow.randomness import derive_seed

_ROUNDS = 6


def rows(seed: int, step: int, batch: int, num_blocks: int, *, rank: int = 0, world: int = 1) -> NDArray[np.int64]:
    """Indices of the sequences of step `step` (counted from 0), [batch / world].

    `batch` is the global batch; rank r of `world` gets the r-th contiguous part of it. Every sequence is seen once an
    epoch; a batch may run over the border of two epochs.
    """
    if num_blocks < 1 or batch < 1 or step < 0:
        raise ValueError(f"rows needs blocks, a batch and a step: got {num_blocks}, {batch}, {step}")
    if batch % world or not 0 <= rank < world:
        raise ValueError(f"a batch of {batch} cannot be shared by {world} processes (rank {rank})")
    share = batch // world
    first = step * batch + rank * share
    places = np.arange(first, first + share, dtype=np.int64)
    epochs, inside = np.divmod(places, num_blocks)
    result = np.empty(share, dtype=np.int64)
    for epoch in np.unique(epochs):
        mine = epochs == epoch
        result[mine] = permute(inside[mine], num_blocks, derive_seed(seed, "epoch", int(epoch)))
    return result


def permute(places: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Where each place goes under the permutation of range(size) named by `key`."""
    # A Feistel network permutes 0 .. 4^half - 1; places that land outside range(size) are sent on until they are back
    # inside, which keeps it a permutation and takes fewer than four rounds on average.
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    keys = [np.uint64(derive_seed(key, "round", number)) for number in range(_ROUNDS)]
    state = places.astype(np.uint64)
    outside = np.ones(len(state), dtype=bool)
    while outside.any():
        left, right = state[outside] >> np.uint64(half), state[outside] & mask
        for round_key in keys:
            left, right = right, left ^ (mix(right + round_key) & mask)
        state[outside] = (left << np.uint64(half)) | right
        outside = state >= np.uint64(size)
    return state.astype(np.int64)


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A 64-bit hash (the finaliser of splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
