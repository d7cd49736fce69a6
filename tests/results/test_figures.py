"""Figures are files: whole, alike, and the same for the same numbers."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
from matplotlib import pyplot, rcParams

from convergeflow.results import figures, pages
from convergeflow.studies.systems import SYSTEMS


def trace() -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    rng = np.random.default_rng(0)
    shape = (5, 2, 7)
    arrays = {name: rng.uniform(size=shape) for name in ("nearest", "second", "weight")}
    arrays["weight"][-1] = np.nan  # a position that was settled before has no weight
    return {"log_snr": np.linspace(-3, 9, 5), **arrays}


def test_a_trace_is_drawn_and_leaves_other_figures_alone(tmp_path: Path) -> None:
    before = dict(rcParams)
    for name in ("one.png", "two.png"):
        figures.trace_figure(trace(), tmp_path / name)
    assert dict(rcParams) == before and not pyplot.get_fignums()
    one, two = ((tmp_path / name).read_bytes() for name in ("one.png", "two.png"))
    assert one == two and one.startswith(b"\x89PNG")


def test_panels_are_as_many_as_asked_and_saved_twice(tmp_path: Path) -> None:
    with figures.style():
        figure, axes = figures.panels(4, columns=3)
        assert len(axes) == 4 and sum(panel.get_visible() for panel in figure.axes) == 4
        figures.trade_off(axes[0], [(3.0, 20.0), (3.2, 30.0)], label="a", colour="k", errors=[(0.1, None), (0.1, 2.0)])
        figures.trade_off(axes[1], [(3.0, 20.0)], label="b", colour="k")
        figures.logarithmic(axes[0])
        figures.count_axis(axes[2], [8, 16])
    saved = figures.save(figure, tmp_path / "new", "name")
    assert [path.name for path in saved] == ["name.png", "name.svg"] and all(path.is_file() for path in saved)


def test_tables_escape_what_they_show() -> None:
    assert pages.markdown_table(["a|b"], [[None], [True], [0.123456]]) == [
        "| a\\|b |",
        "|---|",
        "|  |",
        "| yes |",
        "| 0.1235 |",
    ]
    assert pages.markdown_table(["a"], [[None], [3], [0.5]])[1] == "|---:|"


def test_a_page_shows_html_as_text_and_holds_its_pictures(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"picture")
    text = ["# A <b>", "", "<script>x</script>", "", "![a](a.png)", "", *pages.markdown_table(["<a>"], [["x|<b>"]])]
    shown = pages.page("\n".join(text), tmp_path)
    assert "<title>A &lt;b&gt;</title>" in shown and "<script" not in shown and "<b>" not in shown
    assert "<td>x|&lt;b&gt;</td>" in shown and 'src="data:image/png;base64,cGljdHVyZQ=="' in shown


def _lab(colour: str) -> tuple[float, float, float]:
    """CIE L*a*b* of an sRGB colour, in which equal distances look about equally different."""
    shares = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)
    x, y, z = (
        0.4124 * r + 0.3576 * g + 0.1805 * b,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        0.0193 * r + 0.1192 * g + 0.9505 * b,
    )
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x / 0.9505, y, z / 1.089))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_every_system_of_a_comparison_has_a_colour_and_a_marker_of_its_own() -> None:
    """Two pairs of systems once shared a colour. A difference of 2.3 is just seen; here it is 25 or more."""
    assert len(SYSTEMS) <= len(figures.COLOURS) == len(set(figures.MARKERS))
    for one, other in itertools.combinations(figures.COLOURS, 2):
        assert math.dist(_lab(one), _lab(other)) > 25, (one, other)
