"""How results look: one plotting style, the frontier figure, and pages that need no other file to be read."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only; no window system needed

from matplotlib import pyplot, ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from convergeflow.evaluation.frontier import HOW, Frontier, undominated
from convergeflow.evaluation.record import number

STYLE: dict[str, Any] = {
    "figure.dpi": 100,
    "savefig.dpi": 144,
    "font.size": 10.5,
    "axes.titlesize": 11.5,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.markersize": 5.5,
    "svg.hashsalt": "convergeflow",  # the same figure gives the same file
}
COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#e0a030", "#7b4fa3", "#5f6b73", "#00a0a0", "#b05f3c")
CROWDED = 4
"""More curves than this are drawn without labels at their points."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")


@contextmanager
def style() -> Iterator[None]:
    """Everything drawn inside looks alike; other figures of the process are left as they are."""
    with pyplot.rc_context(STYLE):
        yield


def frontier_figure(frontier: Frontier) -> Figure:
    """Gen. PPL against entropy with bars of one standard error, the data's point and its entropy as a line.

    Points off the frontier are pale and not joined. With many curves the points' own labels are left out, the legend
    stands beside the panel, and the panel keeps to the frontiers.
    """
    crowded = len(frontier.curves) > CROWDED
    with style():
        figure, axes = pyplot.subplots(figsize=(11.0 if crowded else 8.2, 5.4), layout="constrained")
        for index, curve in enumerate(frontier.curves):
            finite = [point for point in curve.points if math.isfinite(point.gen_ppl)]
            points = undominated(finite)
            colour = COLOURS[index % len(COLOURS)]
            marker = MARKERS[(index + index // len(COLOURS)) % len(MARKERS)]
            off = [point for point in finite if point not in points]
            axes.plot([p.entropy for p in off], [p.gen_ppl for p in off], marker, color=colour, alpha=0.3)
            axes.errorbar(
                [point.entropy for point in points],
                [point.gen_ppl for point in points],
                xerr=[_bar(point.entropy_se) for point in points],
                yerr=[_bar(point.gen_ppl_se) for point in points],
                color=colour,
                marker=marker,
                linewidth=1.3,
                elinewidth=0.9,
                capsize=2,
                label=curve.label,
            )
            for point in [] if crowded else finite:
                _label(axes, f"{point.value}", point.entropy, point.gen_ppl, colour, below=index % 2 == 1)
            crossing = frontier.crossing(curve)
            if crossing.gen_ppl is not None and crossing.low is not None and crossing.high is not None:
                # A hollow diamond: the value at the data's entropy with its 95 % interval.
                axes.errorbar(
                    [frontier.real["entropy"]],
                    [crossing.gen_ppl],
                    yerr=[[max(crossing.gen_ppl - crossing.low, 0)], [max(crossing.high - crossing.gen_ppl, 0)]],
                    marker="d",
                    markersize=8,
                    markerfacecolor="white",
                    markeredgecolor=colour,
                    ecolor=colour,
                    elinewidth=1.6,
                    linestyle="none",
                    zorder=5,
                )
        _data(axes, frontier)
        axes.set_yscale("log")
        _ticks(axes)
        axes.set_xlabel("unigram entropy of a sample (nats; higher: more varied)")
        axes.set_ylabel(f"Gen. PPL, {frontier.scorer}, {frontier.protocol} (log scale; lower: more likely)")
        about = "pale: off the frontier" if crowded else f"numbers: {frontier.control}"
        axes.set_title(f"{frontier.title}\n{about}; bars: one standard error", loc="left")
        axes.margins(x=0.08, y=0.14)
        if crowded:
            _keep_to_frontiers(axes, frontier)
            axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
        else:
            axes.legend(loc="best")
    return figure


def _keep_to_frontiers(axes: Axes, frontier: Frontier) -> None:
    """Samples that guidance broke lie orders of magnitude above: they must not press the others together."""
    kept = [point for curve in frontier.curves for point in undominated(curve.points)]
    real = frontier.real.get("gen_ppl")
    values = [point.gen_ppl for point in kept] + ([real] if real else [])
    entropies = [point.entropy for point in kept] + ([frontier.real["entropy"]] if real else [])
    if values:
        axes.set_ylim(0.7 * min(values), 1.5 * max(values))
        margin = 0.2 * (max(entropies) - min(entropies)) + 0.01
        axes.set_xlim(min(entropies) - margin, max(entropies) + margin)


def _data(axes: Axes, frontier: Frontier) -> None:
    real = frontier.real
    if real.get("entropy") is not None:
        axes.axvline(real["entropy"], color="black", linewidth=0.9, linestyle="--", alpha=0.6)
        axes.errorbar(
            [real["entropy"]],
            [real["gen_ppl"]],
            xerr=[_bar(real.get("entropy_se"))],
            yerr=[_bar(real.get("gen_ppl_se"))],
            color="black",
            marker="*",
            markersize=13,
            linestyle="none",
            capsize=2,
            label="real text (dashed: its entropy; ◇: a curve there, 95 %)",
            zorder=6,
        )
    if frontier.floor is not None:
        label = "exp of the data's true entropy per token"
        axes.axhline(frontier.floor, color="black", linewidth=0.9, linestyle=":", alpha=0.6, label=label)


def _bar(se: float | None) -> float:
    return 0.0 if se is None or not math.isfinite(se) else se


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


def _ticks(axes: Axes) -> None:
    """Plain numbers on a logarithmic axis, enough of them on a short one."""
    low, high = axes.get_ylim()
    decades = math.log10(high / low)
    subs = (1.0, 2.0, 5.0) if decades > 0.8 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=subs, numticks=12))
    if decades < 0.25:
        axes.yaxis.set_major_locator(ticker.MaxNLocator(6))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:.4g}"))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())


def save_figure(figure: Figure, folder: Path, name: str) -> list[Path]:
    """PNG and SVG under one name."""
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    figure.savefig(paths[0])
    figure.savefig(paths[1], metadata={"Date": None})
    pyplot.close(figure)
    return paths


def figure_svg(figure: Figure) -> str:
    """The figure as an SVG element for a page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
 body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1d2429; }}
 h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.15rem; margin-top: 2rem; }}
 svg {{ width: 100%; height: auto; }}
 .scroll {{ overflow-x: auto; }}
 table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
 th, td {{ padding: .3rem .8rem .3rem 0; text-align: left; border-bottom: 1px solid #dde3e7; white-space: nowrap; }}
 th {{ font-weight: 600; }}
 code, pre {{ font: 13px/1.45 ui-monospace, monospace; background: #f3f5f6; padding: .1rem .3rem; }}
 pre {{ padding: .8rem; overflow-x: auto; }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def page(title: str, body: str) -> str:
    """A whole page; `body` is HTML."""
    return PAGE.format(title=html.escape(title), body=body)


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """An HTML table of texts and numbers."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    lines = "".join(
        "<tr>" + "".join(f"<td>{html.escape('-' if cell is None else str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def frontier_page(frontier: Frontier, metrics: Sequence[tuple[str, Any, dict[str, Any]]]) -> str:
    """The report of a sweep: figure, value at the data's entropy, points, and the metrics that a low Gen. PPL can hide.

    `metrics` holds (curve, value, table of `metrics.measure`) of each point.
    """
    svg = figure_svg(figure := frontier_figure(frontier))
    pyplot.close(figure)
    crossings = "".join(
        f"<li><b>{html.escape(curve.label)}</b>: {html.escape(frontier.crossing(curve).says)}</li>"
        for curve in frontier.curves
    )
    real = frontier.real
    rows = [
        [
            curve.label,
            point.value,
            number(point.gen_ppl, point.gen_ppl_se),
            number(point.entropy, point.entropy_se),
            point.nfe,
            point.n,
            None if point.valid is None else f"{point.valid:.3f}",
        ]
        for curve in frontier.curves
        for point in curve.points
    ]
    if real:
        rows.append(
            [
                "real text",
                "",
                number(real.get("gen_ppl"), real.get("gen_ppl_se")),
                number(real.get("entropy"), real.get("entropy_se")),
                "",
                real.get("n"),
                real.get("valid"),
            ]
        )
    body = [
        f"<p>{_facts(frontier)}</p>",
        svg,
        f"<h2>At the data's entropy</h2><ul>{crossings}</ul><p>How: {html.escape(HOW)}.</p>",
        "<h2>Points</h2>",
        table(["curve", frontier.control, "Gen. PPL", "entropy (nats)", "NFE", "n", "valid"], rows),
        _metric_table(frontier, metrics),
        "<h2>Made with</h2>",
        f"<pre>{html.escape(str(frontier.facts.get('command') or '-'))}</pre>",
        f"<p>{html.escape(', '.join(f'{k} {v}' for k, v in (frontier.facts.get('versions') or {}).items()))}</p>",
    ]
    return page(frontier.title, "\n".join(part for part in body if part))


def _facts(frontier: Frontier) -> str:
    model, corpus = (frontier.facts.get(key) or {} for key in ("model", "corpus"))
    text = (
        f"Model {model.get('name', '-')} (weights {model.get('weights', '-')}), corpus {corpus.get('name', '-')} "
        f"(fingerprint {corpus.get('fingerprint', '-')}), {frontier.facts.get('length')} tokens, "
        f"{frontier.facts.get('n')} samples per point, scorer {frontier.scorer}, protocol {frontier.protocol}. "
        "All errors are standard errors over samples."
    )
    return html.escape(text)


def _metric_table(frontier: Frontier, metrics: Sequence[tuple[str, Any, dict[str, Any]]]) -> str:
    names = list(dict.fromkeys(name for _, _, found in metrics for name in found if name != "entropy"))
    if not names:
        return ""
    rows = [[label, value, *(_cell(found.get(name)) for name in names)] for label, value, found in metrics]
    first = metrics[0][2]
    rows.append(["real text", "", *(_cell(first.get(name), "real") for name in names)])
    return "<h2>What a low Gen. PPL can hide</h2>" + table(["curve", frontier.control, *names], rows)


def _cell(row: dict[str, Any] | None, which: str = "value") -> str:
    if row is None:
        return "-"
    return number(row.get(which), row.get("se" if which == "value" else "real_se"))
