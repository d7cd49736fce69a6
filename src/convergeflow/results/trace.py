"""A flow written down: frames as arrays, a table and a picture."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from convergeflow import files
from convergeflow.errors import UserError
from convergeflow.results.frames import Array, Frame, Frames


@dataclass(frozen=True)
class Band:
    """The 1st and 99th percentile of a statistic and their midpoint, as the paper draws it."""

    low: float
    middle: float
    high: float


def percentile_band(values: Tensor) -> Band:
    """The band over all positions."""
    flat = values.detach().to(device="cpu", dtype=torch.float64).flatten().numpy()
    first, last = (float(value) for value in np.quantile(flat, [0.01, 0.99]))
    return Band(first, 0.5 * (first + last), last)


class Trace(Frames):
    """Per step and position: token, normalised distances to the two nearest embeddings, weights and their entropy."""

    @property
    def _first_block(self) -> list[Frame]:
        """The frames that set the steps: those of the first block, which has the most, in the first micro-batch."""
        count = next((n for n, frame in enumerate(self.frames) if n and frame.step == 0), len(self.frames))
        return self.frames[:count]

    @property
    def t(self) -> list[float]:
        return [frame.t for frame in self._first_block]

    @property
    def log_snr(self) -> list[float]:
        return [frame.log_snr for frame in self._first_block]

    def arrays(self) -> dict[str, Array]:
        """t and log_snr [steps]; token, nearest, second, weight, entropy and the leaders [steps, samples, positions].

        Finished sequences keep their last tokens and have no further distances. A direct predictor has no weights.
        """
        if not self.frames:
            raise UserError("nothing was traced yet: give the trace to `generate` as `observe`")
        first = min(frame.start for frame in self.frames)
        positions = max(frame.start + frame.token.shape[1] for frame in self.frames) - first
        shape = (len(self._first_block), 1 + max(max(frame.rows) for frame in self.frames), positions)
        leaders = 0 if self.frames[0].top_token is None else self.frames[0].top_token.shape[2]
        found: dict[str, Array] = {
            "token": np.full(shape, -1, dtype=np.int64),
            "top_token": np.full((*shape, leaders), -1, dtype=np.int64),
            "top_weight": np.full((*shape, leaders), np.nan),
            **{name: np.full(shape, np.nan) for name in ("nearest", "second", "entropy")},
        }
        for frame in self.frames:
            if frame.step < shape[0]:
                span = slice(frame.start - first, frame.start - first + frame.token.shape[1])
                for name, whole in found.items():
                    if (values := getattr(frame, name)) is not None:
                        whole[frame.step, frame.rows, span] = values
        tokens = found["token"]
        for step in range(1, shape[0]):
            tokens[step] = np.where(tokens[step] < 0, tokens[step - 1], tokens[step])
        weight = found["top_weight"][..., 0] if leaders else np.full(shape, np.nan)
        return {"t": np.array(self.t), "log_snr": np.array(self.log_snr), **found, "weight": weight}

    def save(self, folder: str | Path) -> Path:
        """trace.npz with everything, trace.csv with percentiles per step, and trace.png."""
        from convergeflow.results.figures import trace_figure

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        arrays = self.arrays()
        with files.replacing(folder / "trace.npz") as draft:
            np.savez_compressed(draft, allow_pickle=False, **arrays)
        with files.replacing(folder / "trace.csv") as draft, open(draft, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            columns = ["step", "t", "log_snr"]
            for name in ("nearest", "second", "weight"):
                columns += [f"{name}_p01", f"{name}_middle", f"{name}_p99"]
            writer.writerow(columns)
            for i, t in enumerate(arrays["t"]):
                row: list[Any] = [i, f"{t:.6f}", f"{arrays['log_snr'][i]:.4f}"]
                for name in ("nearest", "second", "weight"):
                    values = arrays[name][i][np.isfinite(arrays[name][i])]
                    band = percentile_band(torch.from_numpy(values)) if len(values) else None
                    row += ["", "", ""] if band is None else [f"{v:.5f}" for v in (band.low, band.middle, band.high)]
                writer.writerow(row)
        with files.replacing(folder / "trace.png") as draft:
            trace_figure(arrays, draft)
        return folder
