"""A flow written down: tokens, distances and weights at every step, as arrays, a table and a picture.

A `Trace` is an observer: the sampler calls it after the prediction at every grid point, at no cost in network calls.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from convergeflow import files
from convergeflow.sampling.cohort import Step


@dataclass(frozen=True)
class Band:
    """The 1st and 99th percentile of a statistic and their midpoint, as the paper draws it."""

    low: float
    middle: float
    high: float


def percentile_band(values: Tensor, low: float = 0.01, high: float = 0.99) -> Band:
    """The band over all positions."""
    flat = values.detach().to(device="cpu", dtype=torch.float64).flatten().numpy()
    first, last = (float(value) for value in np.quantile(flat, [low, high]))
    return Band(first, 0.5 * (first + last), last)


@dataclass
class Trace:
    """Per step and position: token, normalised distances to the two nearest embeddings, largest weight."""

    t: list[float] = field(default_factory=list)
    log_snr: list[float] = field(default_factory=list)
    _batches: list[list[dict[str, list[Tensor]]]] = field(default_factory=list)
    """The blocks of each micro-batch; there is one block where the flow carries the whole sequence."""

    def __call__(self, step: Step) -> None:
        """Note one step. Step 0 begins the next block, and step 0 of a first block also the next micro-batch."""
        if step.index == 0:
            if step.block == 0:
                self._batches.append([])
            self._batches[-1].append({"token": [], "nearest": [], "second": [], "weight": []})
        if len(self._batches) == 1 and step.block == 0:  # the first block has the most steps
            self.t.append(step.t)
            self.log_snr.append(float(-step.at.gamma[0]))
        distances = step.distances()
        batch = self._batches[-1][-1]
        token = distances.token if step.last.token is None else step.last.token
        weight = torch.full_like(distances.distance, float("nan"))
        if step.last.top_weight is not None:
            weight = step.last.top_weight.to(distances.distance)
        second = distances.second_distance
        assert second is not None
        for name, value in (("token", token), ("nearest", distances.distance), ("second", second), ("weight", weight)):
            batch[name].append(self._whole(name, value.cpu(), step, batch))

    @staticmethod
    def _whole(name: str, value: Tensor, step: Step, batch: dict[str, list[Tensor]]) -> Tensor:
        """All rows of the batch: finished sequences keep their last tokens and have no further distances."""
        if not batch[name] or len(batch[name][0]) == len(value):
            return value
        whole = batch[name][-1].clone()
        if name != "token":
            whole.fill_(float("nan"))
        whole[step.rows.cpu()] = value
        return whole

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """t and log_snr [steps]; token, nearest, second, weight [steps, samples, positions]."""
        stacked = {
            name: torch.cat(
                [
                    torch.cat([torch.stack(_padded(block[name], len(self.t))) for block in batch], dim=2)
                    for batch in self._batches
                ],
                dim=1,
            ).numpy()
            for name in ("token", "nearest", "second", "weight")
        }
        return {"t": np.array(self.t), "log_snr": np.array(self.log_snr), **stacked}

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
                row = [i, f"{t:.6f}", f"{arrays['log_snr'][i]:.4f}"]
                for name in ("nearest", "second", "weight"):
                    values = arrays[name][i][np.isfinite(arrays[name][i])]
                    band = percentile_band(torch.from_numpy(values)) if len(values) else None
                    row += ["", "", ""] if band is None else [f"{v:.5f}" for v in (band.low, band.middle, band.high)]
                writer.writerow(row)
        with files.replacing(folder / "trace.png") as draft:
            trace_figure(arrays, draft)
        return folder


def _padded(steps: list[Tensor], count: int) -> list[Tensor]:
    """A batch that finished early has fewer steps than the first one."""
    missing = count - len(steps)
    if missing <= 0:
        return steps[:count]
    filler = steps[-1] if not steps[-1].is_floating_point() else torch.full_like(steps[-1], float("nan"))
    return steps + [filler] * missing
