"""How figures of experiments look: one style, legible at the size of a page, PNG and SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only; no window system needed

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

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
COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#e0a030", "#7b4fa3", "#5f6b73", "#00a0a0", "#b05f3c")


@contextmanager
def style() -> Iterator[None]:
    """Everything drawn inside looks alike; other figures of the process are left as they are."""
    with pyplot.rc_context(STYLE):
        yield


def count_axis(axes: Axes, counts: Sequence[int]) -> None:
    """A logarithmic axis with a tick at each of a few whole numbers."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(counts), [str(count) for count in counts])
    axes.xaxis.set_minor_locator(NullLocator())


def panels(number: int, *, width: float = 4.7, height: float = 3.7, columns: int = 3) -> tuple[Figure, list[Axes]]:
    """A row (or rows) of panels."""
    columns = min(number, columns)
    rows = -(-number // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained"
    )
    flat = list(axes.flat)
    for spare in flat[number:]:
        spare.set_visible(False)
    return figure, flat[:number]


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """PNG and SVG under one name."""
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    figure.savefig(paths[0])
    figure.savefig(paths[1], metadata={"Date": None})
    pyplot.close(figure)
    return paths


def label_axes(axes: Axes, x: str, y: str, title: str = "") -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if title:
        axes.set_title(title)


def trade_off(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    *,
    label: str,
    colour: str,
    marker: str = "o",
    line: str = "-",
    errors: Sequence[tuple[float, float]] | None = None,
) -> None:
    """A curve of (entropy, Gen. PPL) points in the order of the control, with bars of one standard error."""
    entropy = [point[0] for point in points]
    gen_ppl = [point[1] for point in points]
    if errors is None:
        axes.plot(entropy, gen_ppl, marker=marker, linestyle=line, color=colour, label=label, linewidth=1.2)
        return
    axes.errorbar(
        entropy,
        gen_ppl,
        xerr=[error[0] for error in errors],
        yerr=[error[1] for error in errors],
        marker=marker,
        linestyle=line,
        color=colour,
        label=label,
        linewidth=1.2,
        elinewidth=0.8,
        capsize=2,
    )


def plain_logarithm(axes: Axes) -> None:
    """A logarithmic vertical axis with plain numbers; a linear one where all values are alike."""
    low, high = axes.get_ylim()
    if high / low > 300:
        return
    subs = (1.0, 2.0, 5.0) if high / low > 8 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)
    if high / low < 1.6:
        axes.set_yscale("linear")
        return
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
