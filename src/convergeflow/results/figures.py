"""How figures look: one style, legible at the size of a page, PNG and SVG; the same figure gives the same file."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from numpy.typing import NDArray

matplotlib.use("Agg")  # files only; no window system needed

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from convergeflow import files
from convergeflow.evaluation.frontier import Frontier, FrontierPoint, undominated

STYLE: dict[str, Any] = {
    "figure.dpi": 100,
    "savefig.dpi": 130,
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.markersize": 4.5,
    "svg.hashsalt": "convergeflow",  # the same figure gives the same file
}
COLOURS = (
    *("#1b6ca8", "#d1495b", "#2e8b57", "#e0a030", "#7b4fa3", "#5f6b73"),
    *("#00a0a0", "#b05f3c", "#8c8c00", "#e377c2", "#ff5a00", "#6fbf4a"),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "x", "+")
CROWDED = 4
"""More curves than this are drawn without labels at their points."""


@contextmanager
def style() -> Iterator[None]:
    """Everything drawn inside looks alike; other figures of the process are left as they are."""
    with pyplot.rc_context(STYLE):
        yield


# --- parts of figures ---


def panels(number: int, *, width: float = 4.7, height: float = 3.7, columns: int = 3) -> tuple[Figure, list[Axes]]:
    """A row (or rows) of panels."""
    columns = min(number, columns)
    rows = -(-number // columns)
    size = (width * columns, height * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    flat = list(axes.flat)
    for spare in flat[number:]:
        spare.set_visible(False)
    return figure, flat[:number]


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """PNG and SVG under one name."""
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    with style():  # resolution and the names inside an SVG are chosen here
        for path in paths:
            drawn = io.BytesIO()  # an SVG is written in thousands of pieces: the disk sees one
            about = {"Date": None} if path.suffix == ".svg" else {}
            figure.savefig(drawn, format=path.suffix[1:], metadata=about)
            with files.replacing(path) as draft:
                draft.write_bytes(drawn.getvalue())
    pyplot.close(figure)
    return paths


def label_axes(axes: Axes, x: str, y: str, title: str = "") -> None:
    """Name both axes and the panel."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if title:
        axes.set_title(title)


def count_axis(axes: Axes, counts: Sequence[int]) -> None:
    """A logarithmic axis with a tick at each of a few whole numbers."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(counts), [str(count) for count in counts])
    axes.xaxis.set_minor_locator(NullLocator())


def trade_off(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    *,
    label: str,
    colour: str,
    marker: str = "o",
    line: str = "-",
    errors: Sequence[tuple[float | None, float | None]] | None = None,
    **more: Any,
) -> None:
    """A curve of (entropy, Gen. PPL) points in the order of the control, with bars of one standard error."""
    bars: dict[str, Any] = {}
    if errors is not None:
        bars = {"xerr": [_bar(x) for x, _ in errors], "yerr": [_bar(y) for _, y in errors]}
    axes.errorbar(
        [point[0] for point in points],
        [point[1] for point in points],
        marker=marker,
        linestyle=line,
        color=colour,
        label=label,
        **{"linewidth": 1.2, "elinewidth": 0.8, "capsize": 2, **bars, **more},
    )


def _bar(se: float | None) -> float:
    return 0.0 if se is None or not math.isfinite(se) else se


def logarithmic(axes: Axes) -> None:
    """A logarithmic vertical axis with plain numbers; a linear one where all values are alike."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high / low < 1.6:
        axes.set_yscale("linear")
    elif high / low <= 300:
        subs = (1.0, 2.0, 5.0) if high / low > 8 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)
        axes.yaxis.set_major_locator(LogLocator(subs=subs))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
        axes.yaxis.set_minor_locator(NullLocator())


# --- the frontier ---


def frontier_figure(frontier: Frontier) -> Figure:
    """Gen. PPL against entropy with bars of one standard error, the data's point and its entropy as a line.

    Points off the frontier are pale and not joined. With many curves the points' own labels are left out, the legend
    stands beside the panel, and the panel keeps to the frontiers.
    """
    crowded = len(frontier.curves) > CROWDED
    with style():
        figure, (axes,) = panels(1, width=11.0 if crowded else 8.2, height=5.4)
        for index, (label, points) in enumerate(frontier.curves.items()):
            colour = COLOURS[index % len(COLOURS)]
            marker = MARKERS[(index + index // len(COLOURS)) % len(MARKERS)]
            _draw_curve(axes, points, label, colour, marker)
            for point in [] if crowded else points:
                if math.isfinite(point.gen_ppl):
                    _label(axes, f"{point.value}", point.entropy, point.gen_ppl, colour, below=index % 2 == 1)
            _draw_crossing(axes, frontier, label, colour)
            _draw_claim(axes, frontier, label, colour)
        _draw_data(axes, frontier)
        logarithmic(axes)
        about = "pale: off the frontier" if crowded else f"numbers: {frontier.control}"
        label_axes(
            axes,
            "unigram entropy of a sample (nats; higher: more varied)",
            f"Gen. PPL, {frontier.scorer}, {frontier.protocol} (log scale; lower: more likely)",
        )
        axes.set_title(f"{frontier.title}\n{about}; bars: one standard error", loc="left")
        axes.margins(x=0.08, y=0.14)
        if crowded:
            _keep_to_frontiers(axes, frontier)
            axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
        else:
            axes.legend(loc="best")
    return figure


def _draw_curve(axes: Axes, points: Sequence[FrontierPoint], label: str, colour: str, marker: str) -> None:
    on = undominated(points)
    off = [point for point in points if math.isfinite(point.gen_ppl) and point not in on]
    axes.plot([p.entropy for p in off], [p.gen_ppl for p in off], marker, color=colour, alpha=0.3)
    pairs = [(point.entropy, point.gen_ppl) for point in on]
    errors = [(point.entropy_se, point.gen_ppl_se) for point in on]
    trade_off(axes, pairs, label=label, colour=colour, marker=marker, errors=errors)


def _draw_crossing(axes: Axes, frontier: Frontier, label: str, colour: str) -> None:
    """A hollow diamond: the value at the data's entropy with its 95 % interval."""
    crossing = frontier.crossing(label)
    if crossing.gen_ppl is None or crossing.interval_95 is None:
        return
    low, high = crossing.interval_95
    axes.errorbar(
        [frontier.real["entropy"]],
        [crossing.gen_ppl],
        yerr=[[max(crossing.gen_ppl - low, 0)], [max(high - crossing.gen_ppl, 0)]],
        marker="d",
        markersize=8,
        markerfacecolor="white",
        markeredgecolor=colour,
        ecolor=colour,
        elinewidth=1.6,
        linestyle="none",
        zorder=5,
    )


def _draw_claim(axes: Axes, frontier: Frontier, label: str, colour: str) -> None:
    """A hollow circle: what a paper says of this system, if the frontier's facts have `claims`."""
    claim = (frontier.facts.get("claims") or {}).get(label) or {}
    if claim.get("entropy") is not None:
        ring: dict[str, Any] = {"marker": "o", "markersize": 9, "markerfacecolor": "none", "linestyle": "none"}
        here = ([claim["entropy"]], [claim["gen_ppl"]])
        axes.plot(*here, label=f"{label}, claimed", markeredgecolor=colour, zorder=5, **ring)


def _draw_data(axes: Axes, frontier: Frontier) -> None:
    real = frontier.real
    if real.get("entropy") is not None:
        axes.axvline(real["entropy"], color="black", linewidth=0.9, linestyle="--", alpha=0.6)
        label = "real text (dashed: its entropy; ◇: a curve there, 95 %)"
        at, errors = (real["entropy"], real["gen_ppl"]), (real.get("entropy_se"), real.get("gen_ppl_se"))
        star: dict[str, Any] = {"marker": "*", "markersize": 13, "line": "none", "zorder": 6}
        trade_off(axes, [at], label=label, colour="black", errors=[errors], **star)
    if frontier.floor is not None:
        label = "exp of the data's true entropy per token"
        axes.axhline(frontier.floor, color="black", linewidth=0.9, linestyle=":", alpha=0.6, label=label)


def _keep_to_frontiers(axes: Axes, frontier: Frontier) -> None:
    """Limit the axes to the frontiers: samples that guidance broke lie orders of magnitude above them."""
    kept = [point for points in frontier.curves.values() for point in undominated(points)]
    real = frontier.real.get("gen_ppl")
    values = [point.gen_ppl for point in kept] + ([real] if real else [])
    entropies = [point.entropy for point in kept] + ([frontier.real["entropy"]] if real else [])
    claims = [claim for claim in (frontier.facts.get("claims") or {}).values() if claim["entropy"] is not None]
    values += [claim["gen_ppl"] for claim in claims]
    entropies += [claim["entropy"] for claim in claims]
    if values:
        axes.set_ylim(0.7 * min(values), 1.5 * max(values))
        margin = 0.2 * (max(entropies) - min(entropies)) + 0.01
        axes.set_xlim(min(entropies) - margin, max(entropies) + margin)


def _label(axes: Axes, text: str, x: float, y: float, colour: str, *, below: bool) -> None:
    axes.annotate(
        text,
        (x, y),
        xytext=(7, -12 if below else 6),
        textcoords="offset points",
        color=colour,
        fontsize=9,
        bbox={"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.7},
        zorder=4,
    )


# --- a flow converging ---


def draw_distances(axes: Axes, log_snr: Any, bands: Mapping[str, Any]) -> None:
    """The paper's convergence figure: bands (low, high) of the `nearest` and the `second` distance along the flow."""
    for name, label, colour in (("nearest", "nearest embedding", COLOURS[0]), ("second", "second nearest", COLOURS[1])):
        low, high = (np.asarray(end) for end in bands[name])
        axes.fill_between(log_snr, low, high, color=colour, alpha=0.22, linewidth=0)
        axes.plot(log_snr, 0.5 * (low + high), color=colour, label=label, linewidth=1.8)
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    distance = r"normalised distance $\|x-\alpha e_j\|/(\sigma\sqrt{d})$"
    label_axes(axes, "log-SNR of the state", distance, "Distance to token embeddings (1st-99th percentile)")
    axes.legend()


def trace_figure(arrays: Mapping[str, NDArray[Any]], path: str | Path) -> None:
    """How far every position is from embeddings, and how sure the first sample is of it, at every step.

    `arrays` are those of a trace: log_snr [steps]; nearest, second and weight [steps, samples, positions].
    """
    with style(), pyplot.rc_context({"axes.grid": False}):
        figure, (left, right) = panels(2, width=5.5, height=4.2)
        steps = len(arrays["log_snr"])
        flat = {name: arrays[name].reshape(steps, -1) for name in ("nearest", "second")}
        draw_distances(
            left, arrays["log_snr"], {name: np.nanpercentile(values, [1, 99], axis=1) for name, values in flat.items()}
        )
        weights = np.nan_to_num(arrays["weight"][:, 0, :], nan=1.0)
        shown = {"aspect": "auto", "origin": "upper", "cmap": "viridis", "interpolation": "nearest"}
        image = right.imshow(weights, vmin=0, vmax=1, **shown)  # type: ignore[arg-type]
        title = "Largest weight at each position (first sample)"
        label_axes(right, "position in the sequence", "solver step", title)
        figure.colorbar(image, ax=right, label="largest weight")
        figure.savefig(path)
        pyplot.close(figure)
