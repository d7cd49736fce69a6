"""Gen. PPL over training tokens, blocks against autoregressive: the table and compute.png of this page, from its records.

Each curve is a straight line of log Gen. PPL over entropy through the four temperatures 0.95, 0.9, 0.85 and 0.8, read at
the entropy of 128 real blocks; errors are of 1000 bootstraps over noises, which all temperatures share.

    python docs/results/sotu-small/compute.py
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot

HERE = Path(__file__).resolve().parent
TEMPERATURES = (0.95, 0.9, 0.85, 0.8)
ENTROPY = 3.892
TOKENS_PER_STEP = 32 * 64
BLOCKS = {1450: "blocks-1450", 3800: "blocks-3800", 5800: "temperature"}
AR = {1450: "ar-1450", 3800: "ar-3800", 5800: "../comparison-sotu"}


def points(folder: str, pattern: str) -> list[dict[str, np.ndarray]]:
    """The samples of each temperature: nats, scored tokens and entropy."""
    found = {}
    for path in sorted((HERE / folder / "records").glob(pattern)):
        record = json.loads(path.read_text(encoding="utf-8"))
        temperature = record["sampling"].get("base_temperature", record["sampling"].get("temperature"))
        if temperature in TEMPERATURES:
            found[temperature] = {name: np.array(values, dtype=float) for name, values in record["per_sample"].items()}
    assert len(found) == len(TEMPERATURES), (folder, sorted(found))
    return list(found.values())


def read(samples: list[dict[str, np.ndarray]]) -> tuple[float, float]:
    """log Gen. PPL at ENTROPY and its standard error."""

    def value(picks: np.ndarray) -> float:
        entropy = [each["entropy"][picks].mean() for each in samples]
        log_ppl = [each["nll"][picks].sum() / each["tokens"][picks].sum() for each in samples]
        slope, offset = np.polyfit(entropy, log_ppl, 1)
        return float(slope * ENTROPY + offset)

    count = len(samples[0]["nll"])
    random = np.random.default_rng(0)
    draws = [value(random.integers(0, count, count)) for _ in range(1000)]
    return value(np.arange(count)), float(np.std(draws, ddof=1))


def main() -> None:
    curves = {
        "blocks, words": {steps: read(points(folder, "*base_temperature*.json")) for steps, folder in BLOCKS.items()},
        "autoregressive": {steps: read(points(folder, "ar-nfe64-*.json")) for steps, folder in AR.items()},
    }
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    tokens = [steps * TOKENS_PER_STEP / 1e6 for steps in BLOCKS]
    for (label, curve), marker in zip(curves.items(), "oD", strict=True):
        values = np.exp([each[0] for each in curve.values()])
        errors = values * np.array([each[1] for each in curve.values()])
        left.errorbar(tokens, values, errors, marker=marker, capsize=3, label=label)
    left.axhline(100, color="grey", linestyle=":", label="real text")
    left.set(xscale="log", yscale="log", ylabel=f"Gen. PPL at entropy {ENTROPY}")
    left.set_yticks([100, 200, 400, 800], ["100", "200", "400", "800"])
    left.legend(loc="center left")
    blocks, ar = curves.values()
    ratios = [math.exp(blocks[steps][0] - ar[steps][0]) for steps in BLOCKS]
    errors = [ratio * math.hypot(blocks[s][1], ar[s][1]) for ratio, s in zip(ratios, BLOCKS, strict=True)]
    right.errorbar(tokens, ratios, errors, marker="o", capsize=3, color="black")
    right.axhline(1, color="grey", linestyle=":")
    right.set(xscale="log", ylabel="ratio to the autoregressive model", ylim=(0.8, 2.1))
    for panel in (left, right):
        panel.set_xlabel("training tokens (millions)")
        panel.minorticks_off()
        panel.set_xticks(tokens, [f"{value:.1f}" for value in tokens])
        panel.grid(alpha=0.3)
    figure.savefig(HERE / "compute.png", dpi=100)
    print("| training | tokens | blocks, `words` | autoregressive | ratio |\n|---|---|---|---|---|")
    for steps, million, ratio, error in zip(BLOCKS, tokens, ratios, errors, strict=True):
        shown = [f"{math.exp(v):.0f} ± {math.exp(v) * e:.0f}" for v, e in (blocks[steps], ar[steps])]
        print(f"| {steps} steps | {million:.1f} million | {shown[0]} | {shown[1]} | {ratio:.2f} ± {error:.2f} |")


if __name__ == "__main__":
    main()
