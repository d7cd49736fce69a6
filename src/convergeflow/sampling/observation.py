"""Watching a flow converge: traces for files and figures, and text crystallising in the terminal.

Observers are called by the sampler after the prediction at every grid point and cost no network calls.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from convergeflow.flow.convergence import percentile_band
from convergeflow.sampling.cohort import Step


@dataclass
class Trace:
    """Per step and position: token, normalised distances to the two nearest embeddings, largest weight."""

    t: list[float] = field(default_factory=list)
    log_snr: list[float] = field(default_factory=list)
    _batches: list[list[dict[str, list[Tensor]]]] = field(default_factory=list)
    """The blocks of each micro-batch; where the flow carries the whole sequence there is one."""

    def __call__(self, step: Step) -> None:
        """Take down one step; a step 0 begins the next block, and that of a first block the next micro-batch."""
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
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        arrays = self.arrays()
        np.savez_compressed(folder / "trace.npz", allow_pickle=False, **arrays)
        with open(folder / "trace.csv", "w", newline="", encoding="utf-8") as file:
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
        draw_trace(arrays, folder / "trace.png")
        return folder


def _padded(steps: list[Tensor], count: int) -> list[Tensor]:
    """A batch that finished early has fewer steps than the first one."""
    missing = count - len(steps)
    if missing <= 0:
        return steps[:count]
    filler = steps[-1] if not steps[-1].is_floating_point() else torch.full_like(steps[-1], float("nan"))
    return steps + [filler] * missing


def draw_trace(arrays: dict[str, np.ndarray[Any, Any]], path: str | Path) -> None:
    """The paper's convergence figure, and how sure the first sample is of every position at every step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    x = arrays["log_snr"]
    for name, colour, label in (("nearest", "#1b6ca8", "nearest embedding"), ("second", "#d1495b", "second nearest")):
        flat = arrays[name].reshape(len(x), -1)
        low, high = np.nanpercentile(flat, [1, 99], axis=1)
        left.fill_between(x, low, high, color=colour, alpha=0.22, linewidth=0)
        left.plot(x, 0.5 * (low + high), color=colour, label=label, linewidth=1.8)
    left.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    left.set_xlabel("log-SNR of the state")
    left.set_ylabel(r"normalised distance $\|x-\alpha e_j\|/(\sigma\sqrt{d})$")
    left.set_title("Distance to token embeddings (1st-99th percentile)", fontsize=10)
    left.legend(frameon=False)
    weights = np.nan_to_num(arrays["weight"][:, 0, :], nan=1.0)
    image = right.imshow(
        weights, aspect="auto", origin="upper", cmap="viridis", vmin=0, vmax=1, interpolation="nearest"
    )
    right.set_xlabel("position in the sequence")
    right.set_ylabel("solver step")
    right.set_title("Largest weight at each position (first sample)", fontsize=10)
    figure.colorbar(image, ax=right, label="largest weight")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


class LiveText:
    """Text crystallising in the terminal: sure tokens bright, unsure ones dim; use as a context manager."""

    def __init__(self, tokenizer: Any, console: Any, samples: int = 3) -> None:
        from rich.live import Live

        self.tokenizer, self.samples = tokenizer, samples
        self._names = tokenizer.tokens() if tokenizer is not None else None
        self._live = Live(console=console, refresh_per_second=12, transient=True)

    def __enter__(self) -> LiveText:
        self._live.__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        self._live.__exit__(*problem)

    def __call__(self, step: Step) -> None:
        self._live.update(self.render(step))

    def render(self, step: Step) -> Any:
        """The present tokens of the first samples."""
        from rich.panel import Panel
        from rich.text import Text

        token = step.last.token
        if token is None:
            token = step.distances().token
        weight = torch.ones(token.shape) if step.last.top_weight is None else step.last.top_weight.cpu()
        if step.before is not None:
            token = torch.cat([step.before, token], 1)
            weight = torch.cat([torch.ones(step.before.shape), weight], 1)
        text = Text()
        for row in range(min(self.samples, len(token))):
            for ident, sure in zip(token[row].tolist(), weight[row].tolist(), strict=True):
                style = "bold green" if sure > 0.99 else "green" if sure > 0.8 else "yellow" if sure > 0.4 else "dim"
                text.append(self._name(ident) + " ", style=style)
            text.append("\n\n")
        title = f"step {step.index + 1}/{step.num_steps}   t = {step.t:.3f}   log-SNR = {float(-step.at.gamma[0]):.2f}"
        return Panel(text, title=title)

    def _name(self, ident: int) -> str:
        if self._names is None:
            return str(ident)
        return self._names[ident].replace("\u0120", "").replace("\u010a", "\u23ce")


def both(*observers: Any) -> Any:
    """One observer that calls several."""

    def observe(step: Step) -> None:
        for observer in observers:
            observer(step)

    return observe
